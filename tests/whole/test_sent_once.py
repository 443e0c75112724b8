"""Sent once: a value that several stages of a rank use crosses to it once, and gradients are what they were."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from fxpipe.plan.plan import values_of
from tests.harness import engine_of

WIDTH, ROWS, PARTS = 8, 16, 4
ENGINES = ["local", "strict 1", "distributed"]


class Forked(nn.Module):
    """``a`` feeds ``b``, ``c`` and ``d``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(torch.tanh(self.a(x)), name="b")
        g = fxpipe.stage_boundary(torch.tanh(self.b(h)), name="c")
        e = fxpipe.stage_boundary(self.c(g) * h, name="d")
        return (self.d(e) + h).square().sum(-1).mean()


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Forked()


def stepped(options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], int, Tensor | None]:
    """Losses of two steps and what their gradients sum to, the bytes that the second one sent, and an evaluation."""
    forward_backward = fxpipe.compile(model(), Topology([("pipe", 2)]), microbatches=PARTS, **options)
    losses = [forward_backward(batch(step)) for step in range(2)]
    sent = int(sum(row.bytes for row in forward_backward.traffic().select("send")))  # of the last call
    gradients = {name: p.grad.clone() for name, p in forward_backward.named_parameters() if p.grad is not None}
    return losses, gradients, sent, forward_backward.evaluate(batch(2))


PLACEMENT = {"a": 0, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_are_plain_pytorchs(engine: str, schedule: str, request: pytest.FixtureRequest) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    results = run(2, stepped, {"placement": PLACEMENT, "schedule": schedule})
    plain, losses = model(), []
    for step in range(2):
        total = torch.zeros(())
        for part in batch(step).chunk(PARTS):
            loss = plain(part) / PARTS
            loss.backward()
            total = total + loss.detach()
        losses.append(total)
    for found, gradients, *_ in results:
        assert all(map(torch.equal, found, losses))
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_a_step_sends_the_value_once_and_each_readers_gradient(request: pytest.FixtureRequest) -> None:
    """One value of ROWS x WIDTH floats to rank 1, of which three gradients come back: b's, c's and d's."""
    run = engine_of("distributed", lambda: request.getfixturevalue("pool"))
    (_, _, first, _), (_, _, second, _) = run(2, stepped, {"placement": PLACEMENT})
    value = 4 * ROWS * WIDTH
    assert (first, second) == (value, 3 * value)


def test_captures_of_their_own_share_no_value() -> None:
    """The values of one may bear the names of another's: equal names are then no equal values."""
    plan = fxpipe.preview(model(), Topology([("pipe", 2)]), microbatches=PARTS, placement=PLACEMENT).plan
    other = dataclasses.replace(plan.graph)
    assert values_of((plan.graph, plan.graph)) == [edge.value for edge in plan.graph.edges]
    assert values_of((plan.graph, other)) is None
