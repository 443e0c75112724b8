"""What stages hold of micro-batches, counted, is what a table's simulation says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from tests.activations import Held, counted
from tests.graphs import FAMILIES, GATHERED
from tests.thinned import pairwise

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


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in "xy"}


def step(rows: int, gather: dict[str, Any] | None = None, **options: Any) -> tuple[fxpipe.ForwardBackward, Held]:
    """The compiled model, and what was counted in its second step."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Towers(**gather or {}), **options)
    forward_backward(**(inputs := batch(rows)))
    with counted(forward_backward, inputs) as held:
        forward_backward(**inputs)
    assert not any(held.now.values()), "all is let go of when a step is over"
    return forward_backward, held


@cache
def costs_of_one(schedule: Any, group: int = 1) -> Costs:
    """What each stage holds of a micro-batch: with its graph, as its inputs alone, and between I and W.

    ``group``: for so many the join runs at once, and holds as much for each.
    """
    gather = {"gather": "batch"} if group > 1 else {}
    options = {"topo": Topology([("pipe", 5)]), "schedule": schedule, "microbatches": group}
    forward_backward, held = step(ROWS // MICROBATCHES * group, gather, **options)
    stages = forward_backward.stages
    inputs = [sum(stages.bytes_of[edge] for edge in stages.edges if edge.target == stage.index) for stage in stages]
    later = [held.behind.get(Action(stage.index, Op.I, 0), 0) for stage in stages]
    whole = [
        max(bytes_ for action, bytes_ in held.behind.items() if action.stage == stage and action.op is Op.F) / group
        for stage in range(5)
    ]
    assert all(whole)
    return Costs.of(5, activation_bytes=whole, input_bytes=inputs, deferred_bytes=later)


def simulated(table: fxpipe.Schedule, costs: Costs) -> list[float]:
    """Each stage's most bytes."""
    recomputed = table.dependencies.recomputed
    now, most = [0.0] * 5, [0.0] * 5
    for action in (action for row in table.rows for action in row):
        now[action.stage] += costs.held(action, (action.stage, action.microbatch) in recomputed)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return most


@pytest.mark.parametrize(("schedule", "ranks", "recompute"), pairwise(FAMILIES, [5, 2], [False, True]))
def test_the_peak_of_each_stage_is_the_simulated_one(schedule: Any, ranks: int, recompute: bool) -> None:
    options = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    forward_backward, held = step(ROWS, topo=Topology([("pipe", ranks)]), **options)
    table = forward_backward.schedule
    wanted = simulated(table, costs_of_one(schedule))
    assert [held.peak[stage] for stage in range(5)] == pytest.approx(wanted, rel=0.05)
    assert bool(table.dependencies.recomputed) == recompute


@pytest.mark.parametrize(("schedule", "group", "recompute"), pairwise(GATHERED, [4, MICROBATCHES], [False, True]))
def test_so_it_is_where_a_stage_runs_once_for_a_group(schedule: Any, group: int, recompute: bool) -> None:
    options = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    gather = {"gather": "batch", "group": group}
    forward_backward, held = step(ROWS, gather, topo=Topology([("pipe", 5)]), **options)
    table = forward_backward.schedule
    wanted = simulated(table, costs_of_one("store_all", group))
    assert [held.peak[stage] for stage in range(5)] == pytest.approx(wanted, rel=0.05)
    assert bool(table.dependencies.recomputed) == (recompute or schedule == "cached")
