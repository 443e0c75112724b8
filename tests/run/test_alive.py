"""What is alive after a step does not grow with their number."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

import fxpipe
from tests import device

STEPS = 40


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = fxpipe.stage_boundary(self.norm(self.a(x))), fxpipe.stage_boundary(self.b(y))
        return (a - b).square().mean()


def objects() -> int:
    device.settle()  # a simulated one keeps what it reports
    gc.collect()
    return len(gc.get_objects())


def test_no_more_objects_are_alive_after_many_steps_than_after_a_few() -> None:
    one = fxpipe.compile(Towers(), fxpipe.Topology([("pipe", 3)]), microbatches=4, zero=1)
    optimizer = one.optimizer(torch.optim.AdamW, lr=1e-3)

    def steps(count: int) -> int:
        for _ in range(count):
            optimizer.zero_grad()
            one(torch.randn(8, 4), torch.randn(8, 4))
            optimizer.step()
        return objects()

    steps(10)  # whatever is made once: bound calls, optimizer state, the batches whose digests are compared
    before = steps(10)
    grown = steps(STEPS) - before
    assert grown < STEPS // 4, "one that each step left would be many; what earlier tests left may be freed meanwhile"
    one.close()
