"""What stages hold of micro-batches, counted, is what a table's simulation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.schedules.costs import Costs
from tests.activations import counted
from tests.whole.test_schedules_run import RUNNABLE

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


def peaks(rows: int, **options: Any) -> tuple[fxpipe.ForwardBackward, list[int]]:
    """The compiled model, and each stage's most bytes in its second step."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Towers(), **options)
    forward_backward(**(inputs := batch(rows)))
    with counted(forward_backward, inputs) as held:
        forward_backward(**inputs)
    assert not any(held.now.values()), "all is let go of when a step is over"
    return forward_backward, [held.peak[stage.index] for stage in forward_backward.stages]


@pytest.fixture(scope="module")
def bytes_of_one() -> tuple[list[int], list[int]]:
    """What each stage holds of a micro-batch, with its graph and as its inputs alone."""
    rows = ROWS // MICROBATCHES
    forward_backward, whole = peaks(rows, topo=Topology([("pipe", 5)]), microbatches=1)
    stages = forward_backward.stages
    return whole, [sum(stages.bytes_of[edge] for edge in stages.edges if edge.target == s.index) for s in stages]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ranks", [5, 2])
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_the_peak_of_each_stage_is_the_simulated_one(
    schedule: Any, ranks: int, recompute: bool, bytes_of_one: tuple[list[int], list[int]]
) -> None:
    whole, inputs = bytes_of_one
    topology = Topology([("pipe", ranks)])
    forward_backward, measured = peaks(
        ROWS, topo=topology, microbatches=MICROBATCHES, schedule=schedule, recompute=recompute
    )
    table, costs = forward_backward.schedule, Costs.of(5, activation_bytes=whole, input_bytes=inputs)
    recomputed = table.dependencies.recomputed
    now, simulated = [0.0] * 5, [0.0] * 5
    for action in (action for row in table.rows for action in row):
        now[action.stage] += costs.held(action, (action.stage, action.microbatch) in recomputed)
        simulated[action.stage] = max(simulated[action.stage], now[action.stage])
    assert measured == pytest.approx(simulated, rel=0.05)
    assert bool(recomputed) == recompute
