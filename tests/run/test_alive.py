"""What is alive after a step does not grow with their number."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests import device
from tests.harness import engine_of
from tests.replicas import PAIR
from tests.two_ranks import TWO

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


def grown(topology: fxpipe.Topology, zero: int, folder: Path) -> dict[str, int]:
    """Call → how many more tensors live behind eight of them than behind four, with Python's collector off."""
    options: dict[str, Any] = {"boundaries": ["1"], "loss_fn": lambda y: y.square().mean(), "zero": zero}
    one = fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), topology, microbatches=2, **options)
    optimizer, x, steps = one.optimizer(torch.optim.AdamW, lr=1e-3), torch.ones(8, 4), itertools.count()

    def step() -> None:
        optimizer.zero_grad()
        one(x)
        optimizer.step()

    def refused() -> None:
        with pytest.raises(fxpipe.RunError), torch.no_grad():
            one(x)

    calls = {"step": step, "save": lambda: fxpipe.save(folder, one, optimizer, step=next(steps), keep=1)}
    calls |= {how: partial(one.evaluate, x, outputs=how) for how in ("all", "loss")}
    calls |= {"refused": refused} if topology.data_size == 1 else {}  # a refusal ends all replicas
    more = {}
    gc.disable()
    try:
        for name, call in calls.items():
            for _ in range(4):  # what is made once
                call()
            before = living_tensors()
            for _ in range(4):
                call()
            more[name] = living_tensors() - before
    finally:
        gc.enable()
    return more


def living_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("engine", "topology", "zero"), [("local", TWO, 0), ("distributed", TWO, 0), ("distributed", PAIR, 3)]
)
def test_no_call_leaves_a_tensor_to_pythons_collector(
    engine: str, topology: fxpipe.Topology, zero: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    for more in run(2, grown, topology, zero, tmp_path):
        assert max(more.values()) < 4, more  # one that each call left would be 4; messages may be under way
