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
from tests.graphs import FAMILIES
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

    def __init__(self) -> None:
        super().__init__()
        self.a1, self.a2, self.b1, self.b2 = Block(64), Block(128), Block(32), Block(96)
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = stage_boundary(self.a2(stage_boundary(self.a1(x), name="a2")), name="join")
        b = stage_boundary(self.b2(stage_boundary(self.b1(y), name="b2")), name="join")
        return F.mse_loss(self.join(a).tanh(), b)


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in "xy"}


def step(rows: int, **options: Any) -> tuple[fxpipe.ForwardBackward, Held]:
    """The compiled model, and what was counted in its second step."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Towers(), **options)
    forward_backward(**(inputs := batch(rows)))
    with counted(forward_backward, inputs) as held:
        forward_backward(**inputs)
    assert not any(held.now.values()), "all is let go of when a step is over"
    return forward_backward, held


@cache
def costs_of_one(schedule: Any) -> Costs:
    """What each stage holds of a micro-batch: with its graph, as its inputs alone, and between I and W."""
    forward_backward, held = step(ROWS // MICROBATCHES, topo=Topology([("pipe", 5)]), microbatches=1, schedule=schedule)
    stages = forward_backward.stages
    inputs = [sum(stages.bytes_of[edge] for edge in stages.edges if edge.target == stage.index) for stage in stages]
    later = [held.behind.get(Action(stage.index, Op.I, 0), 0) for stage in stages]
    whole = [held.peak[stage.index] for stage in stages]
    assert all(whole)
    return Costs.of(5, activation_bytes=whole, input_bytes=inputs, deferred_bytes=later)


@pytest.mark.parametrize(("schedule", "ranks", "recompute"), pairwise(FAMILIES, [5, 2], [False, True]))
def test_the_peak_of_each_stage_is_the_simulated_one(schedule: Any, ranks: int, recompute: bool) -> None:
    options = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    forward_backward, held = step(ROWS, topo=Topology([("pipe", ranks)]), **options)
    table, costs = forward_backward.schedule, costs_of_one(schedule)
    recomputed = table.dependencies.recomputed
    now, simulated = [0.0] * 5, [0.0] * 5
    for action in (action for row in table.rows for action in row):
        now[action.stage] += costs.held(action, (action.stage, action.microbatch) in recomputed)
        simulated[action.stage] = max(simulated[action.stage], now[action.stage])
    assert [held.peak[stage] for stage in range(5)] == pytest.approx(simulated, rel=0.05)
    assert bool(recomputed) == recompute
