"""A tracer that this test adds, by one function and one row of ``TRACERS``, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe
import fxpipe.trace
from fxpipe import TraceError
from fxpipe.graph.program import Program
from fxpipe.trace import TRACERS, Request
from fxpipe.trace.symbolic.tracer import symbolic

TWO = fxpipe.Topology([("pipe", 2)])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(fxpipe.stage_boundary(self.below(x))).square().mean()


class Refused(Two):
    pass


def mine(request: Request) -> Program:
    if isinstance(request.module, Refused):
        raise TraceError("this model is not mine")
    return symbolic(request).replace(tracer="mine")


@pytest.fixture(autouse=True)
def a_tracer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxpipe.trace, "TRACERS", {"mine": mine, **TRACERS})


@pytest.mark.parametrize("tracer", ["mine", "auto"])
def test_it_captures_by_its_name_and_at_its_place_in_auto(tracer: str) -> None:
    model, x = Two(), torch.randn(4, 4)
    forward_backward = fxpipe.compile(model, TWO, microbatches=1, tracer=tracer)  # type: ignore[arg-type]
    loss = forward_backward(x)
    assert torch.equal(loss.detach(), model(x).detach())
    assert "captured by the mine tracer" in str(forward_backward.stages)


def test_auto_tries_the_next_tracer_when_it_refuses() -> None:
    forward_backward = fxpipe.compile(Refused(), TWO, microbatches=1)
    assert "captured by the symbolic tracer" in str(forward_backward.stages)
    assert "mine could not: this model is not mine" in str(forward_backward.stages)
