"""What stages hold of micro-batches, counted, is what a table's simulation says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.schedules import with_costs
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import Kind
from tests.activations import Held, counted
from tests.graphs import FAMILIES, GATHERED
from tests.thinned import every, in_turn, pairwise

WIDTH, ROWS, MICROBATCHES = 32, 64, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Towers(nn.Module):
    """Two branches of two stages of several sizes, and a join."""

    def __init__(self, **gather: Any) -> None:
        super().__init__()
        self.gather = gather
        self.a1, self.a2, self.b1, self.b2 = Block(64), Block(128), Block(32), Block(96)
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = stage_boundary(self.a2(stage_boundary(self.a1(x), name="a2")), name="join", **self.gather)
        b = stage_boundary(self.b2(stage_boundary(self.b1(y), name="b2")), name="join", **self.gather)
        return F.mse_loss(self.join(a).tanh(), b)


class Chain(nn.Module):
    """Four stages of several sizes, or of one."""

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64 if alike else width) for width in (64, 128, 32, 96))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = stage_boundary(block(x))
        return F.mse_loss(self.blocks[-1](x).tanh(), y)


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in "xy"}


def step(model: nn.Module, rows: int, **options: Any) -> tuple[fxpipe.ForwardBackward, Held]:
    """The compiled model, and what was counted in its second step."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(model, **options)
    forward_backward(**(inputs := batch(rows)))
    with counted(forward_backward, inputs) as held:
        forward_backward(**inputs)
    assert not any(held.now.values()), "all is let go of when a step is over"
    return forward_backward, held


@cache
def costs_of_one(schedule: Any, group: int = 1, kind: type[nn.Module] = Towers, **model: Any) -> Costs:
    """What each stage holds of a micro-batch: with its graph, as its inputs alone, and between I and W.

    ``group``: for so many the join runs at once, and holds as much for each.
    """
    model |= {"gather": "batch"} if group > 1 else {}
    options = {"topo": Topology([("pipe", 5 if kind is Towers else 4)]), "schedule": schedule, "microbatches": group}
    forward_backward, held = step(kind(**model), ROWS // MICROBATCHES * group, **options)
    stages = forward_backward.stages
    inputs = [sum(stages.bytes_of[edge] for edge in stages.edges if edge.target == stage.index) for stage in stages]
    later = [held.behind.get(Action(stage.index, Kind.I, 0), 0) for stage in stages]
    whole = [
        max(bytes_ for action, bytes_ in held.behind.items() if action.stage == stage and action.kind is Kind.F) / group
        for stage in range(len(stages))
    ]
    assert all(whole)
    return Costs.of(len(stages), activation_bytes=whole, input_bytes=inputs, deferred_bytes=later)


def simulated(table: fxpipe.Schedule, costs: Costs) -> list[float]:
    """Each stage's most bytes."""
    recomputed = table.dependencies.recomputed
    now, most = ([0.0] * len(table.placement) for _ in range(2))
    for action in (action for row in table.rows for action in row):
        now[action.stage] += costs.held(action, (action.stage, action.microbatch) in recomputed)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return most


def assert_counted(forward_backward: fxpipe.ForwardBackward, held: Held, costs: Costs) -> None:
    """Within 5 %."""
    wanted = simulated(forward_backward.schedule, costs)
    assert [held.peak[stage] for stage in range(len(wanted))] == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(("schedule", "ranks", "recompute"), in_turn(FAMILIES, [5, 2], [False, False, True, True]))
def test_the_peak_of_each_stage_is_the_simulated_one(schedule: Any, ranks: int, recompute: bool) -> None:
    options = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    forward_backward, held = step(Towers(), ROWS, topo=Topology([("pipe", ranks)]), **options)
    assert_counted(forward_backward, held, costs_of_one(schedule))
    assert bool(forward_backward.schedule.dependencies.recomputed) == recompute


def test_so_it_is_where_greedy_puts_each_w_where_memory_allows() -> None:
    costs = costs_of_one("zb_h1", kind=Chain, alike=True)
    memory = 4 * max(costs.activation_bytes or ())
    schedule = with_costs("greedy", costs, memory=memory)
    forward_backward, held = step(
        Chain(alike=True), ROWS, topo=Topology([("pipe", 4)]), schedule=schedule, microbatches=MICROBATCHES
    )
    assert forward_backward.schedule.dependencies.halves
    assert_counted(forward_backward, held, costs)


def test_so_it_is_where_only_a_limit_was_given_and_the_bytes_are_told_from_shapes() -> None:
    """The batch itself, which is no activation, counts there."""
    counted_ones = costs_of_one("zb_h1", kind=Chain, alike=True)
    memory = 5 * max(counted_ones.activation_bytes or ())
    options = {
        "schedule": with_costs("greedy", memory=memory),
        "microbatches": MICROBATCHES,
        "example_kwargs": batch(ROWS),
    }
    topology = Topology([("pipe", 4)])
    forward_backward, held = step(Chain(alike=True), ROWS, topo=topology, **options)
    table, costs = forward_backward.schedule, forward_backward.schedule.costs
    assert table.dependencies.halves
    assert table.rows == fxpipe.preview(Chain(alike=True), topology, **options).schedule.rows
    assert costs is not None
    for name in ("activation_bytes", "input_bytes", "deferred_bytes"):
        assert getattr(costs, name)[1:3] == pytest.approx(getattr(counted_ones, name)[1:3], rel=0.05)
    assert max(held.peak.values()) <= 1.05 * memory
    forward_backward.record_timeline()
    forward_backward(**batch(ROWS))
    again = forward_backward.reschedule(memory=0.75 * memory)
    assert again.costs is not None
    assert again.costs.deferred_bytes == costs.deferred_bytes
    assert max(again.planned().peak_bytes or ()) <= 0.75 * memory < max(table.planned().peak_bytes or ())


@pytest.mark.parametrize(
    ("schedule", "group", "recompute"), every(4, pairwise([*GATHERED, "zb_h1"], [4, MICROBATCHES], [False, True]))
)
def test_so_it_is_where_a_stage_runs_once_for_a_group(schedule: Any, group: int, recompute: bool) -> None:
    options = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    model = Towers(gather="batch", group=group)
    forward_backward, held = step(model, ROWS, topo=Topology([("pipe", 5)]), **options)
    later = costs_of_one("zb_h1").deferred_bytes
    assert_counted(forward_backward, held, dataclasses.replace(costs_of_one("store_all", group), deferred_bytes=later))
    assert bool(forward_backward.schedule.dependencies.recomputed) == (recompute or schedule == "cached")


class Residual(nn.Module):
    """A block of a residual network, which writes in place what a batch norm returns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm_one(self.one(x)))
        y = self.norm_two(self.two(y))
        y += x
        return self.relu(y)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(stage_boundary(self.first(x))).square().mean()


def bytes_saved(run: Callable[[], Any], module: nn.Module) -> int:
    """What autograd keeps, without parameters and buffers; each memory once."""
    left_out = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in left_out)


@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
def test_what_is_written_in_place_takes_no_more_than_in_plain_pytorch(tracer: str) -> None:
    model, x = Residuals(), torch.randn(2, 4, 8, 8)
    wanted = bytes_saved(lambda: model(x), model)
    options = {"microbatches": 1, "tracer": tracer, "example_args": (x,)}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
    forward_backward(x)
    assert bytes_saved(lambda: forward_backward(x), model) == wanted
