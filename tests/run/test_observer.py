"""Observers: what they see of the actions of a step is what plain PyTorch computes, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.distributed.observer import StepObserver
from fxpipe.graph.stage_graph import Stage
from fxpipe.schedules.action import Action

PARTS, WIDTH = 2, 4


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x), name="b")).square().mean()


class Noting(StepObserver):
    """Notes all calls, with copies of the values."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.values: dict[tuple[str, str], list[Tensor]] = {}

    def on_wait(self, action: Action) -> None:
        self.calls.append(("wait", str(action)))

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        self.note("start", action, arrived)

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        self.note("end", action, made)

    def on_step(self, part: str) -> None:
        self.calls.append(("step", part))

    def note(self, what: str, action: Action, values: Sequence[Any]) -> None:
        self.calls.append((what, str(action)))
        self.values[what, str(action)] = [value.detach().clone() for value in values if isinstance(value, Tensor)]


class Silent(StepObserver):
    """Defines one method; no other is called."""

    def on_step(self, part: str) -> None:
        pass


def trained(*observers: StepObserver) -> dict[str, Tensor | None]:
    forward_backward = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2)]), microbatches=PARTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_backward._steps.watch, "begin", lambda shares, order: list(observers))
        forward_backward(torch.arange(4.0 * WIDTH).view(4, WIDTH))
    return {name: parameter.grad for name, parameter in forward_backward.named_parameters()}


def test_an_observer_sees_the_values_and_gradients_of_plain_pytorch() -> None:
    noting, plain = Noting(), Two()
    found = trained(Silent(), noting)
    for number, part in enumerate(torch.arange(4.0 * WIDTH).view(4, WIDTH).chunk(PARTS)):
        h = plain.a(part)
        h.retain_grad()
        loss = plain.b(h).square().mean()
        (loss / PARTS).backward()
        (made,), (arrived,) = noting.values["end", f"0F{number}"], noting.values["start", f"0B{number}"]
        assert torch.equal(made, h)
        assert torch.equal(arrived, h.grad)
        assert torch.equal(noting.values["end", f"1F{number}"][0], loss)
    assert all(torch.equal(found[name], parameter.grad) for name, parameter in plain.named_parameters())


def test_each_action_waits_starts_and_ends_within_the_part_of_the_step_that_runs_them() -> None:
    noting = Noting()
    trained(noting)
    calls = noting.calls
    actions = [action for what, action in calls if what == "end"]
    assert sorted(actions) == sorted(f"{stage}{kind}{number}" for stage in "01" for kind in "FB" for number in "01")
    begin, end = calls.index(("step", "preparing")) + 1, calls.index(("step", "actions"))
    assert calls[begin:end] == [(what, action) for action in actions for what in ("wait", "start", "end")]
    assert calls[-1] == ("step", "rest")


def test_the_first_observer_sees_the_work_of_the_others() -> None:
    """So a stopwatch, which is the first, times it."""
    order: list[tuple[str, str]] = []

    class Named(StepObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
            order.append(("start", self.name))

        def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
            order.append(("end", self.name))

    trained(Named("first"), Named("second"))
    assert order[:4] == [("start", "first"), ("start", "second"), ("end", "second"), ("end", "first")]


def test_a_step_without_observers_computes_the_same() -> None:
    without, watched = trained(), trained(copy.copy(Noting()))
    assert all(torch.equal(without[name], watched[name]) for name in without)
