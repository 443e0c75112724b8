"""Opaque regions whose parameters are sharded: zero=3 on a data axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.harness import accumulate, assert_same, cut, replica_of
from tests.models import WIDTH, Case, linear, vectors
from tests.pool import Pool


class Chooses(nn.Module):
    """Which layers it uses depends on values, and is not the same on all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gain = linear(), linear(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kept = x[[place for place, row in enumerate(x) if row.sum().item() > -3]]
        return self.second(kept) * self.gain if kept.sum().item() > 0 else self.first(kept)


class Sharded(nn.Module):
    """A region; a method that uses a parameter of the model and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.used, self.head = linear(), Chooses(), linear(), linear()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def scaled(self, x: Tensor) -> Tensor:
        return self.used(x) if x.mean().item() > 0.02 else x * self.scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.scaled(self.region(self.before(x)))).square().mean() + y.mean()


CASE = Case(Sharded, vectors, rows=9, microbatches=3)
RULES: Any = {"region": "whole", "scaled": "whole", "reg[i]on": "before", "head": "before"}
STEPS = 3


def batch_of(step: int, replica: int) -> dict[str, Tensor]:
    """More rows in the last step, for which it is captured anew."""
    batch = CASE.batch(7 * step + replica, rows=CASE.rows + 3 * (step == STEPS - 1))
    return {**batch, "x": batch["x"] + (1 - 2 * replica)}


def trained(tracer: str, recompute: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    topology = Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(
        CASE.model(),
        topology,
        zero=3,
        microbatches=CASE.microbatches,
        boundaries=RULES,
        tracer=tracer,
        recompute=recompute,
        placement={"before": 0, "region": 1, "head": 0},
        example_kwargs=batch_of(0, 0),
    )
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward(**batch_of(step, replica_of(topology))))
        optimizer.step()
    return losses, forward_backward.state_dict(full=True)


def wanted() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Plain PyTorch, on the micro-batches of both replicas."""
    model = CASE.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [part for replica in range(2) for part in cut(batch_of(step, replica), CASE.microbatches)]
        losses.append(accumulate(lambda place, part: model(**part), parts)[0])
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize(("tracer", "recompute"), [("export", False), ("symbolic", True)])
def test_its_parameters_are_gathered_and_reduced_whatever_branches_replicas_take(
    pool: Pool, tracer: str, recompute: bool
) -> None:
    """What a replica has not used counts as zeros; how often a collective runs goes by the table alone."""
    losses, state = wanted()
    for mine, kept in pool.run(trained, tracer, recompute, ranks=4):
        for got, loss in zip(mine, losses, strict=True):
            assert_same(got, loss, "loss", 1e-6)
        for name, tensor in state.items():
            assert_same(kept[name], tensor, name, 1e-5)
