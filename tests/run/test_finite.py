"""A loss that is inf or nan is told of: once, with step, micro-batch and the stage that made it so."""

from __future__ import annotations

import math
import re
import threading
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.run.step.finite import Extremes
from tests.harness import engine_of, replica_of
from tests.pool import Pool
from tests.strict_transport import current_seat, run_strict
from tests.thinned import ALL, every

THREE = fxpipe.Topology([("pipe", 3)])
ENGINES = ["local", "strict 1", "distributed"]
ROWS = 8


class Chain(nn.Module):
    """Three stages. Each fills the rows with ``x[:, place] > 100`` with ``value``: the place is the stage's."""

    def __init__(self, value: float = math.nan) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.value = value

    def spoilt(self, h: Tensor, x: Tensor, place: int) -> Tensor:
        return h.masked_fill(x[:, place : place + 1] > 100, self.value)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.spoilt(self.a(x.clamp(max=1)), x, 0))
        h = fxpipe.stage_boundary(self.spoilt(self.b(h), x, 1))
        return self.spoilt(self.c(h), x, 2).square().mean()


def batch(*spoilt: tuple[int, int]) -> Tensor:
    """Rows, of which those of (row, stage) are spoilt by that stage."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    for row, stage in spoilt:
        x[row, stage] = 1000
    return x


_heard = threading.local()


def said(call: Callable[[], object]) -> list[str]:
    """What a call warns of, on this rank."""
    if current_seat() is not None:  # a thread, and what records warnings is the process's; pytest puts it back
        _heard.texts = []
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: _heard.texts.append(str(message))
        call()
        return list(_heard.texts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def trained(batches: list[Tensor], options: dict[str, Any], model: type[nn.Module] = Chain, *arguments: Any) -> Any:
    """What this rank says in each call, without an optimizer between them."""
    forward_backward = fxpipe.compile(model(*arguments), THREE, microbatches=4, **options)
    return [said(lambda x=x: forward_backward(x)) for x in batches]


@pytest.fixture(params=ENGINES if ALL else ENGINES[1:])  # one process does what each of several does
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    engine = engine_of(request.param, lambda: request.getfixturevalue("pool"))
    return lambda fn, *args: engine(3, fn, *args)


@pytest.mark.parametrize(
    ("spoilt", "microbatch", "of", "stage"),
    every(
        3,
        [
            ([(0, 0)], 0, "", "0 `a`"),
            ([(5, 1)], 2, "", "1 `b`"),
            ([(7, 2)], 3, "", "2 `c`"),
            ([(6, 0), (3, 2), (2, 1)], 1, " of 2", "1 `b`"),
        ],
    ),
)
@pytest.mark.parametrize("value", [math.nan, math.inf] if ALL else [math.nan])  # a number of its own finds both
def test_the_next_call_tells_step_micro_batch_and_stage_on_one_rank(
    run: Callable[..., list[Any]],
    value: float,
    spoilt: list[tuple[int, int]],
    microbatch: int,
    of: str,
    stage: str,
) -> None:
    batches = [batch(), batch(), batch(*spoilt), batch(), batch(*spoilt), batch()]
    ranks = run(trained, batches, {}, Chain, value)
    first, *others = ranks
    assert first[:3] == [[], [], []]
    assert first[4:] == [[], []], "it is told once"
    ((text,),) = first[3:4]
    assert re.match(rf"the loss of step 2 is (nan|inf): micro-batch {microbatch} is the first{of} whose loss", text)
    assert f"the output of stage {stage}" in text
    assert (f"on rank {stage[0]}" in text) == (len(ranks) > 1)
    assert others == [[[]] * 6] * (len(ranks) - 1)


class Masked(Chain):
    """−∞ in scores, which softmax takes away again."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        scores = fxpipe.stage_boundary(self.a(x)[:, None, :] + mask)
        return self.c(fxpipe.stage_boundary(self.b(scores.softmax(-1)))).square().mean()


class MaskSent(Chain):
    """A mask of −∞ from one stage to the next, beside what the next one spoils."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(ROWS // 4, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        h, mask = fxpipe.stage_boundary((self.a(x.clamp(max=1)), mask + x[:, :1, None].detach() * 0))
        h = fxpipe.stage_boundary(self.spoilt(self.b(h), x, 1))
        return self.c((h[:, None, :] + mask).softmax(-1)).square().mean()


def test_what_is_infinite_on_the_way_to_a_finite_loss_is_no_fault() -> None:
    assert trained([batch()] * 3, {}, Masked) == [[]] * 3


def test_a_mask_that_needs_no_gradient_is_not_taken_for_the_fault() -> None:
    _, second = trained([batch((5, 1)), batch()], {}, MaskSent)
    assert "micro-batch 2 is the first whose" in second[0]
    assert "stage 1 `b`" in second[0]


def test_a_sum_that_would_overflow_where_no_number_does_is_no_fault() -> None:
    extremes = Extremes([1.0] * 6, range(6))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        large = torch.full((64,), torch.finfo(dtype).max, dtype=dtype, requires_grad=True)
        extremes.add_outputs(0, 0, [large, -large, {"list": [large[:0], large.to(torch.complex64)[:0], 1, None]}])
    assert extremes.broken(0, 0) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_number_among_many_is_found(dtype: torch.dtype, value: float) -> None:
    for place in (0, 501, 999):
        numbers = torch.randn(1000).to(dtype)
        numbers[place] = value
        extremes = Extremes([1.0] * 6, range(6))
        extremes.add_outputs(3, 5, [numbers.view(10, 100).t().requires_grad_(), numbers])
        ((replica, microbatch, stage, is_loss, rank),) = extremes.broken(1, 2)
        assert (replica, microbatch, stage, is_loss, rank) == (1, 5, 3, False, 2)


class Own(Tensor):
    """A kind of tensor that may lack any operation."""


def test_what_cannot_be_compared_is_passed_over() -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    small = torch.ones(3).to(torch.float8_e4m3fn).requires_grad_()
    own = torch.full((3,), math.nan).as_subclass(Own).requires_grad_()
    extremes = Extremes([1.0] * 6, range(6))
    extremes.add_outputs(0, 0, [sparse, small, own])
    assert extremes.broken(0, 0) == []


# --- micro-batches without weight, and sums ---


def test_a_micro_batch_without_weight_may_be_nan() -> None:
    weigh = {"loss_weight": lambda x: float((x < 100).all())}
    assert trained([batch((2, 0), (3, 1))] * 3, weigh) == [[]] * 3


def test_nor_is_it_the_first_that_is_told() -> None:
    weigh = {"loss_weight": lambda x: float((x[:, 3] < 100).all())}
    _, second = trained([batch((0, 3), (0, 0), (5, 1)), batch()], weigh)
    assert "micro-batch 2 is the first whose" in second[0]
    assert "stage 1 `b`" in second[0]


class Summed(Chain):
    """Items of which some micro-batches have none; counts that are no number where there is a row to spoil them."""

    def forward(self, x: Tensor) -> Any:
        total = super().forward(x) * ROWS
        return fxpipe.Sum(total, torch.where(x[:, 3] > 100, math.nan, 1.0).sum())


def test_a_sum_whose_total_or_count_is_nan_is_told() -> None:
    _, second = trained([batch((5, 1)), batch()], {}, Summed)
    assert "micro-batch 2 is the first whose" in second[0]
    assert "stage 1 `b`" in second[0]
    _, second = trained([batch((5, 3)), batch()], {}, Summed)
    assert "the loss of step 0 is nan, though that of each of its micro-batches is finite" in second[0]


class InDict(Chain):
    def forward(self, x: Tensor) -> Any:
        return {"loss": super().forward(x), "metric": torch.tensor(math.nan)}


def test_of_a_dict_the_loss_alone_counts() -> None:
    first, second, third = trained([batch(), batch((0, 2)), batch()], {}, InDict)
    assert (first, second) == ([], [])
    assert "the loss of step 1 is nan: micro-batch 0" in third[0]


# --- the last step ---


def ended(way: str) -> list[list[str]]:
    forward_backward = fxpipe.compile(Chain(), THREE, microbatches=4)
    forward_backward(batch((5, 1)))
    flush = {"evaluate": lambda: forward_backward.evaluate(batch()), "state": lambda: forward_backward.state_dict(True)}
    return [said(flush[way]), said(flush[way]), said(lambda: forward_backward(batch()))]


@pytest.mark.parametrize("way", ["evaluate", "state"])
def test_the_last_step_is_told_of_where_ranks_meet_next(run: Callable[..., list[Any]], way: str) -> None:
    first, *others = run(ended, way)
    ((text,), *later) = first
    assert "the loss of step 0 is nan: micro-batch 2" in text
    assert "stage 1 `b`" in text
    assert later == [[], []]
    assert others == [[[], [], []]] * len(others)


# --- nonfinite="raise" ---


def raised(options: dict[str, Any]) -> Any:
    """The error in the call itself; then it goes on as if the call had not been."""
    checks = fxpipe.Checks(nonfinite="raise")
    forward_backward = fxpipe.compile(Chain(), THREE, microbatches=4, checks=checks, **options)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    losses = [float(forward_backward(batch()))]
    texts = []
    for spoilt in ((5, 1), (0, 2)):
        with pytest.raises(fxpipe.RunError) as error:
            forward_backward(batch(spoilt))
        texts.append(str(error.value))
    optimizer.zero_grad()
    losses.append(float(forward_backward(batch())))
    optimizer.step()
    losses.append(float(forward_backward(batch())))
    return losses, texts


@pytest.mark.parametrize("precision", every(2, [fxpipe.Precision(compute=torch.float32), None]), ids=str)
def test_every_rank_raises_in_the_call_and_can_go_on(run: Callable[..., list[Any]], precision: Any) -> None:
    for losses, texts in run(raised, {"precision": precision}):
        assert losses[0] == losses[1] > losses[2]
        assert texts[0].startswith("the loss of step 1 is nan: micro-batch 2 is the first whose loss")
        assert "stage 1 `b`" in texts[0]
        assert texts[1].startswith("the loss of step 2 is nan: micro-batch 0 is the first whose loss")
        assert "stage 2 `c`" in texts[1]
        assert "zero_grad()" in texts[0]


# --- Precision, whose optimizer leaves such a step of float16 out ---


def skipped(options: dict[str, Any]) -> Any:
    forward_backward = fxpipe.compile(Chain(), THREE, microbatches=4, precision=fxpipe.Precision(**options))
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    texts = []
    for x in (batch(), batch((5, 1)), batch(), batch((5, 1)), batch()):
        optimizer.zero_grad()
        texts.append((said(lambda x=x: forward_backward(x)), said(optimizer.step)))
    return texts, optimizer.skipped_steps


@pytest.mark.parametrize("types", every(2, [{"compute": torch.float16}, {"reduce": torch.float16}]), ids=str)
def test_a_step_that_an_optimizer_leaves_out_is_told_once_and_by_it(
    run: Callable[..., list[Any]], types: dict[str, torch.dtype]
) -> None:
    (texts, count), *others = run(skipped, types)
    assert count == 2
    (_, (text,)) = texts.pop(1)
    assert text.startswith("step 1 (from 0) was skipped on all ranks")
    assert "the loss of step 1 is nan: micro-batch 2" in text
    assert "stage 1 `b`" in text
    assert texts == [([], [])] * 4
    assert others == [([([], [])] * 5, 2)] * len(others)


def test_a_step_of_bfloat16_is_not_waited_for_and_the_next_call_tells_of_it(run: Callable[..., list[Any]]) -> None:
    (texts, count), *others = run(skipped, {})
    assert count == 0
    ((text,), by_optimizer) = texts.pop(2)  # the call behind the one whose loss is nan
    assert text.startswith("the loss of step 1 is nan: micro-batch 2")
    assert by_optimizer == []
    assert texts == [([], [])] * 4
    assert others == [([([], [])] * 5, 0)] * len(others)


# --- the data axis ---

SQUARE = fxpipe.Topology([("pipe", 2), ("data", 2)])


class Two(Chain):
    """Two stages."""

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.spoilt(self.a(x.clamp(max=1)), x, 0))
        return self.spoilt(self.b(h), x, 1).square().mean()


def on_replicas(options: dict[str, Any], flush: str) -> Any:
    """Replica 1's second step is spoilt."""
    replica = replica_of(SQUARE)
    options = {"checks": fxpipe.Checks(batches=False), **options}
    forward_backward = fxpipe.compile(Two(), SQUARE, microbatches=4, **options)
    texts = []
    for x in (batch(), batch((7, 0)) if replica else batch(), batch()):
        try:
            texts += said(lambda x=x: forward_backward(x))
        except fxpipe.RunError as error:
            texts.append(str(error))
        if flush == "state_dict on one" and replica == 0:
            texts += said(lambda: forward_backward.state_dict(full=True))
        if flush == "evaluate on all":
            texts += said(lambda: forward_backward.evaluate(batch()))
    return texts


@pytest.mark.parametrize(
    ("flush", "engine", "zero"),
    every(7, list(product(["", "evaluate on all", "state_dict on one"], ["strict 2", "distributed"], [0, 1, 2, 3]))),
)
def test_one_replicas_fault_is_told_once_and_names_it(
    request: pytest.FixtureRequest, engine: str, zero: int, flush: str
) -> None:
    if zero == 3 and (engine != "distributed" or flush == "state_dict on one"):
        pytest.skip("FSDP2 is torch.distributed's, and its state dict gathered from all replicas")
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    ranks = run(4, on_replicas, {"zero": zero}, flush)
    (text,) = [text for texts in ranks for text in texts]
    assert "the loss of step 1 is nan: micro-batch 3 of replica 1 is the first whose" in text
    assert "stage 0 `a`, on rank 1," in text


def on_a_tensor_group(asks: int) -> list[str]:
    """Both ranks do the same work; the one asks alone for the state dict, behind a step that is spoilt."""
    topology = fxpipe.Topology([("tensor", 2), ("pipe", 2)])
    forward_backward = fxpipe.compile(Two(), topology, microbatches=4)
    forward_backward(batch((5, 1)))
    place = topology.coordinate(current_seat().rank)["tensor"]
    asked = said(lambda: forward_backward.state_dict(full=True)) if place == asks else []
    return asked + said(lambda: forward_backward(batch()))


@pytest.mark.parametrize("asks", [0, 1])
def test_a_pipe_group_that_asks_alone_for_the_state_dict_waits_for_no_other(asks: int) -> None:
    ranks = run_strict(lambda rank: on_a_tensor_group(asks), 4)
    (text,) = [text for texts in ranks for text in texts]
    assert "the loss of step 0 is nan: micro-batch 2" in text


@pytest.mark.parametrize("engine", ["strict 3", "distributed"])
def test_one_replicas_fault_is_raised_on_all_ranks(request: pytest.FixtureRequest, engine: str) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    ranks = run(4, on_replicas, {"checks": fxpipe.Checks(batches=False, nonfinite="raise")}, "")
    assert len({text for (text,) in ranks}) == 1
    assert "micro-batch 3 of replica 1" in ranks[0][0]


def test_gradients_that_are_accumulated_first_are_looked_at_as_well(pool: Pool) -> None:
    ranks = pool.run(accumulated, ranks=4)
    (text,) = [text for texts in ranks for text in texts]
    assert "the loss of step 0 is nan: micro-batch 0 of replica 0 is the first whose" in text


def accumulated() -> list[str]:
    replica = replica_of(SQUARE)
    forward_backward = fxpipe.compile(Two(), SQUARE, microbatches=4)
    forward_backward.set_requires_gradient_sync(False)
    texts = said(lambda: forward_backward(batch() if replica else batch((0, 1))))
    forward_backward.set_requires_gradient_sync(True)
    return texts + said(lambda: forward_backward(batch()))
