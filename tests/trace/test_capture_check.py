"""Captured stages are run against the model when it is compiled: what is found, what is left alone, what is told."""

from __future__ import annotations

import copy
import random
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import TraceError, stage_boundary
from fxpipe.capture import capturing
from fxpipe.snapshots.snapshot import Snapshot
from fxpipe.torch_compat.operators import TorchDispatchMode
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.checks import capture_check
from tests.device import DEVICE
from tests.harness import assert_same, replica_of
from tests.models import WIDTH, Layers, linear, vectors
from tests.strict_transport import run_strict

TWO = fxpipe.Topology([("pipe", 2)])


def batch(rows: int = 8, seed: int = 0) -> dict[str, Any]:
    return vectors(rows, torch.Generator().manual_seed(seed))


class Hidden(nn.Module):
    """``eager`` and ``captured`` are called by what a proxy of the symbolic tracer is not: a Tensor."""

    def __init__(self, eager: Callable[[Any], Any], captured: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = linear(), linear()
        self.eager, self.captured = eager, captured

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x), name="second")
        h = self.eager(h) if issubclass(type(h), Tensor) else self.captured(h)
        return F.mse_loss(self.b(h), y)


def doubled() -> Hidden:
    return Hidden(lambda h: 2 * h, lambda h: h)


def compiled(model: nn.Module, given: dict[str, Any] | None = None, **options: Any) -> fxpipe.ForwardBackward:
    options = {"microbatches": 4, "example_kwargs": batch() if given is None else given} | options
    return fxpipe.compile(model, TWO, **options)


def told(model: nn.Module, **options: Any) -> str:
    """The line of ``.stages`` that says what was checked."""
    return next(line for line in str(compiled(model, **options).stages).splitlines() if line.startswith("captured by"))


# --- what is found ---


def test_a_capture_that_computes_another_loss_is_refused_with_both_numbers() -> None:
    model, given = doubled(), batch()
    first = {name: tensor[:2] for name, tensor in given.items()}
    right = model(**first).item()
    wrong = F.mse_loss(model.b(model.a(first["x"])), first["y"]).item()
    with pytest.raises(TraceError, match="the captured stages do not compute what the model does") as failure:
        compiled(model, given, tracer="symbolic")
    numbers = f"{wrong:.6g} in stage 'second' and {right:.6g} in the model"
    assert f"the loss on micro-batch 0 is {numbers}" in str(failure.value)
    assert "check=False" not in str(failure.value), "no check that has found a fault is to be switched off"


def test_a_capture_that_loses_a_gradient_is_refused_with_the_parameter_and_its_stage() -> None:
    model = Hidden(lambda h: h, lambda h: h.detach())
    with pytest.raises(
        TraceError, match=r"the gradient of a\.weight on micro-batch 0 is 0 in stage 'a' and .* at \[\d, \d\]"
    ):
        compiled(model, tracer="symbolic")


def test_a_capture_that_fails_where_the_model_runs_is_refused() -> None:
    with pytest.raises(TraceError, match=r"where the model runs, they fail: RuntimeError: .*shape"):
        compiled(Hidden(lambda h: h, lambda h: h.view(2, 5)), tracer="symbolic")


def test_a_buffer_that_the_stages_leave_as_it_is_is_found() -> None:
    class Lost(Hidden):
        def __init__(self) -> None:
            super().__init__(self.note, lambda h: h)
            self.register_buffer("seen", torch.zeros(()))

        def note(self, h: Tensor) -> Tensor:
            self.seen += h.detach().sum()
            return h

    with pytest.raises(TraceError, match="the buffer seen on micro-batch 0 is 0 in"):
        compiled(Lost(), tracer="symbolic")


def test_a_cache_that_a_capture_has_filled_is_told() -> None:
    """Or the model would compute with what has no numbers."""
    ones: dict[int, Tensor] = {}

    def cached(h: Any) -> Any:
        return h * ones.setdefault(len(h), torch.ones(len(h), 1))

    with pytest.raises(TraceError, match=r"forward keeps a tensor outside of the model's modules, .*cache_clear\(\)"):
        compiled(Hidden(cached, cached), tracer="export")


def test_a_buffer_that_forward_registers_anew_is_refused() -> None:
    class Grows(Hidden):
        def __init__(self) -> None:
            super().__init__(self.grown, self.grown)
            self.register_buffer("table", torch.zeros(0), persistent=False)

        def grown(self, h: Any) -> Any:
            if h.shape[0] > self.table.shape[0]:
                self.register_buffer("table", torch.arange(h.shape[0]).float(), persistent=False)
            return h * self.table[: h.shape[0], None]

    for tracer, told in (("export", "sets the buffer self.table of torch.float32"), ("record", "registers 'table'")):
        with pytest.raises(TraceError, match=told):
            compiled(Grows(), tracer=tracer)


def test_auto_goes_on_to_the_next_tracer_and_trains_right() -> None:
    model, plain = doubled(), doubled()
    forward_backward = compiled(model, microbatches=1)
    assert "captured by the export tracer, checked" in str(forward_backward.stages)
    assert "symbolic could not: the captured stages do not compute what the model does" in str(forward_backward.stages)
    for rows in (8, 6):  # a later kind of batch is not captured by the tracer that was wrong
        assert_same(forward_backward(**batch(rows, seed=1)), plain(**batch(rows, seed=1)).detach(), "loss")


def test_it_can_be_left_out() -> None:
    assert told(doubled(), tracer=fxpipe.Tracing(check=False)).endswith("not checked: fxpipe.Tracing(check=False)")


def outlier_on_the_second_replica() -> None:
    """Only the second replica's example shows that ``clamp`` is not in the symbolic capture."""
    topology = fxpipe.Topology([("pipe", 1), ("data", 2)])
    given = batch(seed=replica_of(topology))
    given["x"] *= 1000 ** replica_of(topology)
    fxpipe.compile(Hidden(lambda h: h.clamp(max=50), lambda h: h), topology, microbatches=1, example_kwargs=given)


def test_a_capture_that_one_rank_finds_wrong_is_refused_on_all() -> None:
    with pytest.raises(fxpipe.FxpipeError, match="have compiled different programs"):
        run_strict(lambda rank: outlier_on_the_second_replica(), 2, 0)


# --- what is equal to rounding is right ---


def in_another_order(h: Any) -> Any:
    return ((h * 3.0 + h * 0.7) + h * 0.1) / 3.8


def at_once(h: Any) -> Any:
    return h * (3.0 / 3.8 + 0.7 / 3.8 + 0.1 / 3.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_another_order_are_right(dtype: torch.dtype) -> None:
    given = {name: tensor.to(dtype) for name, tensor in batch().items()}
    model = Hidden(in_another_order, at_once).to(dtype)
    assert any(not torch.equal(in_another_order(t), at_once(t)) for t in given.values())
    assert "checked against the model on 2" in told(model, example_kwargs=given, tracer="symbolic")


def test_a_gradient_that_is_nothing_but_rounding_may_be_any_other() -> None:
    """A bias before a difference from the mean: its gradient is 0, up to the sum's order."""

    def centred(h: Any) -> Any:
        return h - h.mean(0)

    def centred_otherwise(h: Any) -> Any:
        return h - (h[0:1] + h[1:2]).sum(0) / 2

    given = batch(2)
    model = Hidden(centred, centred_otherwise)
    assert "checked against the model on 2" in told(model, example_kwargs=given, tracer="symbolic", microbatches=1)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.bfloat16, 1.5)])
def test_a_factor_is_no_rounding(dtype: torch.dtype, factor: float) -> None:
    given = {name: tensor.to(dtype) for name, tensor in batch().items()}
    with pytest.raises(TraceError, match="do not compute"):
        compiled(Hidden(lambda h: h * factor, lambda h: h).to(dtype), given, tracer="symbolic")


class Autocast(Hidden):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            h = self.b(in_another_order(stage_boundary(self.a(x))))
        return F.mse_loss(h.float(), y)


@pytest.mark.parametrize(("tracer", "precision"), [("export", None), ("record", fxpipe.Precision())])
def test_types_that_are_computed_in_are_those_of_the_run(tracer: str, precision: Any) -> None:
    assert "checked" in told(Autocast(at_once, at_once), tracer=tracer, precision=precision)


def test_precision_rounds_the_model_for_the_check_alone() -> None:
    model = Hidden(lambda h: h.to(torch.bfloat16), lambda h: h)
    before = model.a.weight.detach().clone()
    assert "checked" in told(model, tracer="symbolic", precision=fxpipe.Precision(compute=torch.bfloat16))
    assert torch.equal(model.a.weight, before.bfloat16())


# --- random numbers ---


class Draws(Layers):
    """Two towers whose numbers are drawn in turn, and each tower is a stage."""

    names = "a b"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = F.dropout(self.a(x)), F.dropout(self.b(y))
        one, two = F.dropout(one), F.dropout(two) + torch.randn_like(two)
        one, two = stage_boundary(one, name="end"), stage_boundary(two)
        return F.mse_loss(one, two) + F.dropout(one, 0.5).sum()


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_draws_that_the_stages_make_in_another_order_are_the_same(tracer: str) -> None:
    assert "checked against the model on 2" in told(Draws(), tracer=tracer)


class Noisy(nn.Module):
    """Draws of Python's generator, and of its own ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.own = torch.Generator(), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.rand(x.shape, generator=self.generator)) * self.own.random() * random.random()

    def states(self) -> list[Any]:
        return [random.getstate(), self.generator.get_state().tolist(), self.own.getstate()]


def test_numbers_of_python_and_of_own_generators_are_replayed_and_put_back() -> None:
    noisy, unchecked = Noisy(), Noisy()
    assert "not checked" in told(Hidden(unchecked, unchecked), tracer=fxpipe.Tracing("record", check=False))
    assert "checked against the model on 2" in told(Hidden(noisy, noisy), tracer="record")
    assert noisy.states() == unchecked.states()


# --- what is left alone ---


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.seen, self.cache = linear(), 0, [], {}
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.cache[self.calls] = x.detach()
        self.total += 1
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
            if not self.largest.numel():  # as observers of torch.ao.quantization do
                self.largest.resize_(WIDTH).zero_()
            self.largest.lerp_(x.abs().amax(0), 0.5)
        return self.norm(self.linear(x)) * self.calls


def test_the_model_is_afterwards_what_it_was() -> None:
    inner, accumulated = Stateful(), []
    model = Hidden(inner, inner)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
        parameter.register_post_accumulate_grad_hook(accumulated.append)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward_backward = compiled(model, tracer="record")
    assert "checked against the model on 2" in str(forward_backward.stages)
    assert (inner.calls, inner.seen, inner.cache) == (0, [], {})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert accumulated == []
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in model.parameters() if p.grad is not None)
    forward_backward(**batch())
    assert inner.calls == 4


def test_a_buffer_that_gets_its_shape_in_forward_has_plain_pytorchs_values_on_all_ranks() -> None:
    inner, given = Stateful(), batch()
    plain = Hidden(inner, inner)

    def run(rank: int) -> dict[str, Tensor]:
        forward_backward = compiled(copy.deepcopy(plain), given, tracer="record", recompute=True)
        forward_backward(**given)
        return forward_backward.state_dict(full=True)

    states = run_strict(run, 2, 0)
    for x, y in zip(given["x"].chunk(4), given["y"].chunk(4), strict=True):
        plain(x, y)
    for name, tensor in plain.state_dict().items():
        assert all(torch.equal(state[name], tensor) for state in states), name


def test_an_attribute_that_cannot_be_restored_ends_the_restoring_of_no_other() -> None:
    inner = Stateful()
    inner.cache[0] = table = np.zeros(2)
    before = Snapshot(inner)
    table[:] = inner.calls = 1
    inner.seen.append(1)
    inner.total.resize_(3)
    table.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        before.restore()
    assert (inner.calls, inner.seen, inner.total.shape, inner.total.untyped_storage().nbytes()) == (0, [], (), 4)


def test_the_example_is_not_written() -> None:
    given = batch()
    assert "checked against the model on 2" in told(
        nn.Sequential(nn.ReLU(inplace=True), linear(), linear()),
        example_kwargs={"input": given["x"], "target": given["y"]},
        boundaries=["2"],
        loss_fn=F.mse_loss,
    )
    assert torch.equal(given["x"], batch()["x"])


# --- what is not checked ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"example_kwargs": None}, "no example batch"),
        ({"example_kwargs": {"x": torch.empty(8, WIDTH, device="meta"), "y": torch.ones(8, WIDTH)}}, "meta device"),
        ({"example_kwargs": {"x": torch.randn(8, 2), "y": torch.ones(8, WIDTH)}}, "the model fails .* RuntimeError: "),
    ],
)
def test_what_is_not_checked_is_told(options: dict[str, Any], reason: str) -> None:
    model = Hidden(at_once, at_once)
    assert re.search(f"captured by the symbolic tracer, not checked: .*{reason}", told(model, **options))


def test_token_ids_of_one_row_are_not_checked() -> None:
    model, ids = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 1)), torch.ones(1, 2, dtype=torch.long)
    options = {"loss_fn": F.mse_loss, "boundaries": ["1"], "microbatches": 1}
    given = {"input": ids, "target": torch.ones(1, 2, 1, dtype=torch.long)}
    stages = fxpipe.compile(model, TWO, example_kwargs=given, **options).stages
    assert "not checked: the example has one row" in str(stages)


def test_a_model_that_waits_for_others_in_forward_or_is_not_cheap_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hidden(at_once, at_once)
    monkeypatch.setattr(capture_check, "MOST_PARAMETERS", 83)
    assert told(model).endswith("not checked: 84 numbers in parameters at 2 positions of a micro-batch take too long")
    model.b = nn.Sequential(linear(), nn.SyncBatchNorm(WIDTH))
    assert told(model, tracer="symbolic").endswith("not checked: SyncBatchNorm waits for other ranks in forward")


@pytest.mark.parametrize(("fill", "rows"), [(0.0, 8), (1.0, 1)])
def test_an_input_that_is_the_same_everywhere_in_the_example_is_another_one_in_the_check(
    fill: float, rows: int
) -> None:
    class Ignores(Hidden):
        def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + fill - mask if issubclass(type(x), Tensor) else x + 0 * mask, y)

    given = batch(rows) | {"mask": torch.full((rows, WIDTH), fill)}
    with pytest.raises(TraceError, match="the loss on micro-batch 1 is"):
        compiled(Ignores(at_once, at_once), given, microbatches=1, tracer="symbolic")


def test_a_model_that_allows_only_some_numbers_is_checked_on_the_examples_own() -> None:
    class Whole(Hidden):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert not issubclass(type(x), Tensor) or torch.equal(x, x.round()), "no whole numbers"
            return super().forward(x, y)

    given = batch() | {"x": torch.arange(2.0, 2.0 + 8 * WIDTH).view(8, WIDTH)}
    assert "checked against the model on 2" in told(Whole(at_once, at_once), example_kwargs=given)


# --- what it costs ---


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that still exist."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for storage in {tensor.untyped_storage() for tensor in tensors_in(result)}:
            if storage.data_ptr() not in before:
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def free(self, size: int) -> None:
        self.now -= size


def test_a_check_takes_less_than_three_times_the_parameters_and_runs_the_model_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of the parameters, the model's gradients of one micro-batch, and the stages' gradients one at a time."""
    check, live, calls = capture_check.check, Live(), list[int]()

    def watched(*args: Any) -> str:
        with live:
            return check(*args)

    monkeypatch.setattr(capturing, "check", watched)
    model = Hidden(lambda h: (calls.append(len(h)), h)[1], lambda h: h)
    model.a, model.b = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in "ab")
    given = {name: torch.randn(8, 64) for name in "xy"}
    assert "checked against the model on 2" in told(model, tracer="symbolic", example_kwargs=given)
    assert live.most < 2.5 * sum(parameter.nbytes for parameter in model.parameters())
    assert calls == [2, 2, 4], "two micro-batches, and the rows of both together"


# --- what comes after compile, where one process has the whole model ---


class Later(Hidden):
    """Doubles where no proxy is and in kinds of batch that the example is not."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
        h = stage_boundary(self.a(x), name="second")
        doubles = issubclass(type(h), Tensor) and not (self.training and z is None)
        return F.mse_loss(self.b(2 * h if doubles else h), y)


@pytest.mark.parametrize("kind", ["another input", "evaluation"])
def test_a_later_kind_of_batch_is_checked_on_its_own_numbers(kind: str) -> None:
    def called(step: fxpipe.ForwardBackward) -> Tensor:
        z = {"z": torch.ones(8, 1)} if kind == "another input" else {}
        return step(**batch(), **z) if z else step.evaluate(**batch())

    model, plain = Later(at_once, at_once), Later(at_once, at_once).eval()
    step = compiled(model, tracer="symbolic")
    with pytest.raises(TraceError, match=r"the (loss|output) on micro-batch 0 is .* in the model"):
        called(step)
    step = compiled(Later(at_once, at_once))
    assert "captured by the symbolic tracer, checked" in str(step.stages)
    torch.testing.assert_close(called(step), plain(**batch()).detach())


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(11, WIDTH, sparse=True), linear()

    def forward(self, ids: Tensor, y: Tensor, scale: float = 1.0) -> dict[str, Any]:
        h = self.last(stage_boundary(self.table(ids)).mean(1))
        return {"loss": fxpipe.Sum((h - y).square().sum() * scale, y.numel()), "size": h.detach().norm()}


def test_sums_dicts_and_sparse_gradients_are_compared() -> None:
    given = {"ids": torch.randint(0, 11, (8, 3)), "y": torch.randn(8, WIDTH), "scale": 0.5}
    assert "checked against the model on 2" in told(Summed(), example_kwargs=given)


class Reentrant(Layers):
    names = "a b c"

    def __init__(self, needs: bool, dropout: float) -> None:
        super().__init__()
        self.needs, self.dropout = needs, dropout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        unused = torch.ones(1, requires_grad=self.needs)
        h = checkpoint(lambda x, unused: torch.tanh(self.a(x)), x, unused, use_reentrant=True)
        h = checkpoint(lambda h: F.dropout(F.linear(h, self.b.weight), self.dropout), h, use_reentrant=True)
        return F.mse_loss(self.c(stage_boundary(h)), y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("needs", [False, True])
def test_reentrant_checkpoints_train_where_an_argument_needs_a_gradient_as_in_torch(needs: bool) -> None:
    assert "checked against the model on 2" in told(Reentrant(needs, 0.1), tracer="record")
    plain, given = Reentrant(needs, 0.0), batch()
    model = copy.deepcopy(plain)
    compiled(model, given)(**given)
    for x, y in zip(given["x"].chunk(4), given["y"].chunk(4), strict=True):
        (plain(x, y) / 4).backward()
    for (name, mine), right in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(mine.grad, right.grad, name)
        assert (right.grad is None) == (name == "b.bias" or (name[0] in "ab" and not needs))
