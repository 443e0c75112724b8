"""Freezing: a step sums and gathers only the parameters that it trains, whatever was frozen or unfrozen before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.replicas import compiled_alone
from tests.strict_transport import run_strict

LAYERS, BYTES = 6, 4 * 16 * 16
TRAINED = ((1, 4), range(LAYERS), (0, 3), (5,), (1, 2, 3))
"""The layers that each step trains."""


class Unknown(torch.optim.SGD):
    """A class that is not known, so that a rank steps each parameter whole."""


class Decays(Unknown):
    """Its step changes parameters that have no gradient, too."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.9)


KINDS = (torch.optim.SGD, Unknown, Decays)
KNOWN, WHOLE, DECAYS = (partial(kind, lr=0.5, momentum=0.9, weight_decay=0.1) for kind in KINDS)
ONE_NODE, TWO_NODES, THREE = Topology([("data", 2)]), Topology([("data", 4)], 2), Topology([("data", 3)])
ON_WIRE = fxpipe.Precision(torch.float32, reduce=torch.bfloat16)


def optimizers_of(how: str, make: Callable[[Any], Any], parameters: Sequence[nn.Parameter]) -> list[Any]:
    """One optimizer of all parameters, one of two groups of which the second is added later, or two optimizers."""
    if how == "two":
        return [make(parameters[:3]), make(parameters[3:])]
    first = make(parameters[:3] if how == "added" else parameters)
    if how == "added":
        first.add_param_group({"params": parameters[3:], "lr": 0.01})
    return [first]


def train(model: nn.Module, how: str, make: Callable[[Any], Any], step: Callable[[int], object]) -> None:
    optimizers = optimizers_of(how, make, list(model.parameters()))
    for number, trained in enumerate(TRAINED):
        for layer, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(layer in trained)
        for optimizer in optimizers:
            optimizer.zero_grad()
        step(number)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("zero", "topology", "how", "make", "precision"),
    [
        (0, ONE_NODE, "one", KNOWN, None),
        (0, TWO_NODES, "two", KNOWN, ON_WIRE),
        (1, ONE_NODE, "added", KNOWN, None),
        (1, TWO_NODES, "one", KNOWN, ON_WIRE),
        (1, THREE, "one", WHOLE, None),
        (1, ONE_NODE, "one", DECAYS, None),
        (2, ONE_NODE, "two", KNOWN, ON_WIRE),
        (2, TWO_NODES, "one", WHOLE, None),
    ],
)
def test_a_step_moves_only_what_it_trains(zero: int, topology: Topology, how: str, make: Any, precision: Any) -> None:
    """Values are those of plain PyTorch."""
    replicas, shards = topology.size("data"), len(topology.shard_groups()[0])
    batches = [[torch.randn(6, 16) for _ in range(replicas)] for _ in TRAINED]

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))

    def body(rank: int) -> tuple[list[Tensor], list[tuple[float, float]]]:
        step, moved = compiled_alone(layers(), topology, zero=zero, precision=precision), []

        def call(number: int) -> None:
            if number:
                rows = [step.traffic().select(scope=scope) for scope in ("shard", "gather")]
                moved.append(tuple(sum(row.bytes for row in each) for each in rows))
            step(batches[number][rank])

        train(step.module, how, partial(step.optimizer, make), call)
        return list(step.state_dict(full=True).values()), moved

    plain, one_way = layers(), [BYTES * len(trained) * (shards - 1) / shards for trained in TRAINED]
    train(plain, how, make, lambda number: plain(torch.cat(batches[number])).square().mean().backward())
    tolerance = 1e-5 if precision is None else 2e-2
    factor = (1 if zero or topology is TWO_NODES else 2) / (1 if precision is None else 2)
    for values, moved in run_strict(body, replicas):
        for value, parameter in zip(values, plain.parameters(), strict=True):
            torch.testing.assert_close(value, parameter.detach(), rtol=tolerance, atol=tolerance)
        assert [summed for summed, _ in moved] == [factor * size for size in one_way[:-1]]
        assert zero == 0 or make is DECAYS or [gathered for _, gathered in moved] == one_way[:-1]
