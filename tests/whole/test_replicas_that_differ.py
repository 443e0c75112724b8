"""Replicas whose calls differ: in what they use, in weights, in how many micro-batches, in what a loss is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.harness import assert_same, gradients_of, replica_of
from tests.pool import Pool
from tests.replicas import (
    PAIR,
    SQUARE,
    Kinds,
    Layout,
    Parts,
    assert_parts,
    assert_walk,
    compiled_alone,
    every_zero,
    linear,
    parts,
    random_moves,
    refusals,
    walk,
)
from tests.strict_transport import run_strict
from tests.thinned import every, pairwise
from tests.two_ranks import Two
from tests.whole.gathered import OverReplicas, batch, model

COUNT = 4  # parameters that data may use; the column behind theirs is a micro-batch's weight


class Choosing(nn.Module):
    """Uses the parameters that the data names; the memory of the last is in another order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes: list[tuple[int, ...]] = [(3,), (20,), (), (2, 5)]
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors[3] = tensors[3].t().contiguous().t()
        self.chosen = nn.ParameterList(map(nn.Parameter, tensors))
        self.always = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0] * self.always
        for place, parameter in enumerate(self.chosen):
            if bool(x[:, 1 + place].any()):
                count = parameter.numel()
                y = y + parameter.flatten() @ torch.linspace(0.5, 2, count) * x[:, 0] * x[:, 1 + place]
        return y


class Again(nn.Module):
    """Uses them once more, those that the data names from the other end."""

    def __init__(self, first: Choosing) -> None:
        super().__init__()
        self.own = Choosing()
        self.own.chosen, self.own.always = nn.ParameterList(first.chosen), first.always

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value, uses, weight = x.split([1, COUNT, 1], 1)
        return y + self.own(torch.cat([value, uses.flip(1), weight], 1))


def choice(value: float, uses: Sequence[bool], weight: float) -> Tensor:
    """A micro-batch of one row."""
    return torch.tensor([[value, *map(float, uses), weight]])


def weight_of(x: Tensor) -> float:
    return float(x[0, 1 + COUNT])


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum() / 10


def sum_of(y: Tensor) -> fxpipe.Sum:
    return fxpipe.Sum(loss_of(y), 3.0)


def choosing_stages(total: bool, tied: bool) -> fxpipe.StageGraph:
    """``tied``: two stages share the parameters."""
    first, loss = Choosing(), sum_of if total else loss_of
    stages: dict[str, Any] = {"module": first, "loss": loss}
    edges, inputs = [("module", "loss")], {"module": ["x"]}
    if tied:
        stages = {"module": first, "again": Again(first), "loss": loss}
        edges, inputs = [("module", "again"), ("again", "loss")], {"module": ["x"], "again": ["x"]}
    return fxpipe.StageGraph.from_callables(stages, edges, inputs)


def of_the_model(found: Parts) -> Parts:
    return {name.removeprefix("again.own.").removeprefix("module."): pieces for name, pieces in found.items()}


@pytest.mark.parametrize(
    ("zero", "total", "pipe", "seed"), pairwise([0, 1, 2], [False, True], [1, 2], every(5, range(10))), ids=str
)
def test_any_walk_of_calls_in_which_replicas_use_different_parameters_and_weights_of_zero(
    zero: int, total: bool, pipe: int, seed: int
) -> None:
    draw = random.Random(f"{zero} {total} {pipe} {seed}")
    replicas, per_node = draw.choice([(2, None), (4, 2), *([(2, 1), (3, None)] if pipe == 1 else [])])
    rows, tied = draw.choice([1, 2]), pipe == 2 or draw.random() < 0.3
    layout = Layout((("pipe", pipe), ("data", replicas)), per_node, zero, draw.choice(["node", "data"]))
    policy = fxpipe.Zero(layout.zero, layout.scope, bucket_mb=draw.choice([1e-6, 1e-4, 25.0]))  # type: ignore[arg-type]
    options = {**layout.options, "microbatches": rows, "zero": policy}

    def row() -> Tensor:
        uses = [draw.random() < 0.4 for _ in range(COUNT)]
        return choice(draw.choice([1.0, 2.0, 3.0]), uses, draw.choice([0.0, 1.0, 1.0, 2.0]))

    def batches() -> list[Tensor]:
        return [torch.cat([row() for _ in range(rows)]) for _ in range(replicas)]

    kinds = ["call", "call", "later", "later", "clear", "clear to zero", "drop", "zero"]
    moves = random_moves(draw, kinds, batches, [f"chosen.{place}" for place in range(COUNT)])
    everybody, nobody = (choice(1.0, [used] * COUNT, 1.0).expand(rows, -1) for used in (True, False))
    for what in ("drop", "zero"):  # where nobody uses a parameter, its gradient must be from earlier
        moves += [("call", [everybody] * replicas), (what, "chosen.1"), ("call", [nobody] * replicas)]

    def body(rank: int) -> list[Parts]:
        graph = choosing_stages(total, tied)
        placement = {stage.name: 0 if stage.name == "module" else pipe - 1 for stage in graph}
        step = fxpipe.compile(graph, layout.topology, placement=placement, loss_weight=weight_of, **options)
        return list(map(of_the_model, walk(step, moves, layout.topology.coordinate(rank)["data"])))

    def accumulate(batches: Sequence[Tensor]) -> None:
        """Row by row."""
        rows = [row for batch in batches for row in batch.split(1) if weight_of(row)]
        for row in rows:
            share = 1 / (3.0 * len(rows)) if total else weight_of(row) / sum(weight_of(row) for row in rows)
            y = model(row)
            (loss_of(Again(model)(row, y) if tied else y) * share).backward()

    model = Choosing()
    assert_walk(run_strict(body, layout.topology.world_size, seed), layout, model, moves, accumulate)


@every_zero
def test_an_optimizers_step_behind_an_unsummed_call_is_told_or_refused(
    zero: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole parameters drift apart, as in DDP; of parts each rank would step its own by its own gradients."""

    def body(rank: int) -> str:
        step = compiled_alone(linear(), PAIR, microbatches=1, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step.set_requires_gradient_sync(False)
        step(torch.full((2, 4), rank + 1.0))
        try:
            optimizer.step()
        except fxpipe.RunError as error:
            return str(error)
        optimizer.zero_grad()
        optimizer.step()  # nothing is left that was not summed
        return ""

    told = run_strict(body, 2)
    fact = "optimizer.step() comes behind a call with set_requires_gradient_sync(False)"
    assert [fact in each for each in told] == [zero > 0] * 2
    assert (fact in capsys.readouterr().err) == (zero == 0)


class Parallel(nn.Module):
    """Three stages side by side, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sides = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (stage_boundary(side(x * (place + 1))) for place, side in enumerate(self.sides))
        return self.last((a * b + c).tanh()).square().mean()


def of_replica(replica: int, count: int) -> list[Tensor]:
    """Its micro-batches, one row each."""
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(replica)).split(1))


BESIDE = {"sides.0": 0, "sides.1": 0, "sides.2": 0, "last": 1}


def stepped_unevenly(counts: Sequence[int], rank: int, zero: int) -> Parts:
    topology = SQUARE
    step = fxpipe.compile(
        Parallel(),
        topology,
        microbatches=2,
        schedule="interleaved_1f1b",
        placement=BESIDE,
        zero=fxpipe.Zero(zero, bucket_mb=1e-6),
    )
    replica = replica_of(topology)
    step.step_microbatches([((x,), {}) for x in of_replica(replica, counts[replica])])
    return parts(step)


@pytest.mark.parametrize(("zero", "counts"), [(0, (1, 2)), (1, (3, 1))])
def test_replicas_may_have_different_numbers_of_micro_batches(zero: int, counts: tuple[int, int]) -> None:
    """Stages that run side by side on a rank end in another order then: replicas must start their sums in one."""
    model = Parallel()
    for replica, count in enumerate(counts):
        for x in of_replica(replica, count):
            (model(x) / sum(counts)).backward()
    assert_parts(
        run_strict(lambda rank: stepped_unevenly(counts, rank, zero), 4), gradients_of(model.named_parameters())
    )


def test_replicas_must_have_as_many_micro_batches_where_each_is_summed() -> None:
    for text in refusals(lambda rank: stepped_unevenly((1, 2), rank, 2), 4):
        assert "in the order of the table, but the replicas run tables of their own" in text


def test_a_mean_and_a_sum_for_kinds_of_batch_or_for_replicas_are_refused_on_all_ranks() -> None:
    def body(rank: int) -> None:
        step = fxpipe.compile(Kinds(), SQUARE, microbatches=2)
        step(torch.ones(4, 4))
        step(torch.ones(4, 4), total=True)

    def at_once(rank: int) -> None:
        fxpipe.compile(Kinds(), SQUARE, microbatches=2)(torch.ones(4, 4), total=replica_of(SQUARE) == 0)

    for text in refusals(body, 4):
        assert "the loss is a fxpipe.Sum in one step and a mean in another" in text
    assert all(text.startswith("RunError: ") and "fxpipe.Sum" in text for text in refusals(at_once, 4))


def test_losses_that_come_with_different_metrics_are_refused_on_all_ranks() -> None:
    metrics = ("accuracy", "largest")

    def body(rank: int) -> None:
        fxpipe.compile(Kinds(), SQUARE, microbatches=2)(torch.ones(4, 4), metric=metrics[replica_of(SQUARE)])

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert all(repr(metric) in text for metric in metrics)
        assert "different metrics" in text


WRONG = {
    "unexpected keyword argument 'y'": {"x": torch.ones(4, 4), "y": 0},
    "the model's output depends on inputs alone": {"x": None},
    "loss_weight returned": {"x": torch.full((4, 4), -1.0)},
}
"""A part of what the refusal says → the batch."""


def refused(call: Any, *args: Any, **given: Any) -> str:
    with pytest.raises(fxpipe.FxpipeError) as caught:
        call(*args, **given)
    return str(caught.value)


def around_refusals(topology: fxpipe.Topology, zero: int) -> tuple[list[str], list[Tensor]]:
    """What this rank says to each wrong batch of replica 1, and the losses of two steps around them."""
    options: dict[str, Any] = {"microbatches": 2, "loss_weight": torch.sum, "zero": zero}
    torch.manual_seed(0)
    run, replica = fxpipe.compile(Two(), topology, **options), replica_of(topology)
    optimizer, own = run.optimizer(torch.optim.SGD, lr=0.1), torch.full((4, 4), replica + 1.0)
    losses = [run(own)]
    said = [
        refused(call, **wrong if replica else {"x": own}) for call in (run, run.evaluate) for wrong in WRONG.values()
    ]
    optimizer.step()
    optimizer.zero_grad()
    return said, [*losses, run(own)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("topology", [PAIR, SQUARE], ids=["data 2", "pipe 2, data 2"])
def test_a_batch_that_one_replica_refuses_ends_no_pipeline(topology: fxpipe.Topology, zero: int, pool: Pool) -> None:
    torch.manual_seed(0)
    plain, wanted = Two(), list[Tensor]()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        wanted.append((plain(torch.ones(4, 4)) + 2 * plain(torch.full((4, 4), 2.0))) / 3)
        wanted[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (said, losses) in enumerate(pool.run(around_refusals, topology, zero, ranks=topology.world_size)):
        for fact, text in zip([*WRONG, *WRONG], said, strict=True):
            names = text.startswith(f"rank {rank + 1} (data 1) refuses its batch, and no rank runs this call: ")
            assert (fact in text, names) == (True, topology.coordinate(rank)["data"] == 0), text
        for found, loss in zip(losses, wanted, strict=True):
            assert_same(found, loss.detach(), "loss", 1e-6)


def test_nor_where_rows_of_all_replicas_are_gathered() -> None:
    def body(rank: int) -> tuple[str, bool]:
        run = fxpipe.compile(model(OverReplicas), PAIR, microbatches=2)
        first = run(*batch(4, rank))
        return refused(run, *batch(4 - 3 * rank)), torch.equal(first, run(*batch(4, rank)))

    for text, is_same in run_strict(body, 2):
        assert ("cannot be cut into 2 micro-batches" in text, is_same) == (True, True)


class LookedUp(nn.Module):
    """Renormalises the rows that are looked up, or all rows."""

    def __init__(self, max_norm: float | None, way: str = "module") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.way = nn.Embedding(8, 4, max_norm=max_norm), nn.Linear(4, 8), way

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "module":
            return self.head(self.table(ids))
        if self.way == "function":
            return self.head(nn.functional.embedding(ids, self.table.weight, max_norm=0.5))
        with torch.no_grad():
            self.table.weight.renorm_(2, 0, 0.5)
        return self.head(nn.functional.embedding(ids, self.table.weight))


IDS = torch.arange(16) % 8
BY_ROWS: dict[str, Any] = {"microbatches": 2, "loss_fn": nn.functional.cross_entropy}


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_parameter_that_each_replica_would_write_by_its_own_rows_is_refused(zero: int, tracer: Any) -> None:
    given: dict[str, Any] = {"example_args": [IDS], "example_kwargs": {"target": IDS}, "tracer": tracer, "zero": zero}
    for way in ("module", "function"):
        with pytest.raises(fxpipe.PartitionError, match=r"writes table\.weight by the rows of its batch"):
            fxpipe.preview(LookedUp(0.5, way), PAIR, **given, **BY_ROWS)
    fxpipe.preview(LookedUp(None, "all rows"), PAIR, **given, **BY_ROWS)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_renormalising_behind_the_step_is_as_max_norm_in_plain_pytorch(zero: int) -> None:
    def body(rank: int) -> Tensor:
        model, ids = LookedUp(None), IDS.chunk(2)[rank]
        model.table.weight.data.renorm_(2, 0, 0.5)
        step = fxpipe.compile(model, PAIR, zero=zero, **BY_ROWS)
        optimizer = step.optimizer(torch.optim.SGD, lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            step(ids, target=ids)
            optimizer.step()
            with torch.no_grad():
                step.module.get_parameter("table.weight").renorm_(2, 0, 0.5)
        return step.state_dict(full=True)["table.weight"]

    plain = LookedUp(0.5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(IDS), IDS).backward()
        optimizer.step()
    plain(IDS)
    for table in run_strict(body, 2):
        torch.testing.assert_close(table, plain.table.weight.detach())
