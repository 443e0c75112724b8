"""What is bound is what is printed: a step calls each action of the table, in its order, and every message once."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fxpipe
from fxpipe.run.actions.actions import BackwardAction, Bound, ForwardAction, LeftOut, bind
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, Kind
from fxpipe.schedules.lower import Compute, Receive, Reduce, Release, Send
from tests.strict_transport import run_strict

MICROBATCHES = 4


class Chain(nn.Module):
    def __init__(self, gather: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](fxpipe.stage_boundary(x))
        return self.layers[2](fxpipe.stage_boundary(x, gather=self.gather)).square().mean()


@pytest.fixture
def bound_to(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """What is bound, in order; of whichever rank."""
    found: list[Bound] = []

    def recording(*args: Any) -> Bound:
        found.append(bind(*args))
        return found[-1]

    monkeypatch.setattr(fxpipe.run.step.step, "bind", recording)
    return found


def compiled(gather: Any = None, **options: Any) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    return fxpipe.compile(Chain(gather), fxpipe.Topology([("pipe", 3)]), microbatches=MICROBATCHES, **options)


def kinds_of(bound: Bound) -> Counter[type]:
    return Counter(type(call) for one, call in bound.calls if isinstance(one, Compute))


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "halves": {"schedule": "zb_h1"},
    "recomputed": {"recompute": True},
    "gathered": {"gather": "batch"},
}


def actions_called(forward_backward: fxpipe.ForwardBackward, monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """By the calls themselves, in one step."""
    called: list[Action] = []
    run = Bound.run

    def watched(bound: Bound, *args: Any) -> Any:
        called.extend(call.action for _, call in bound.calls if hasattr(call, "action"))
        return run(bound, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Bound, "run", watched)
        forward_backward(torch.randn(8, 4))
    return called


@pytest.mark.parametrize("case", CASES)
def test_the_calls_of_a_step_are_the_actions_of_the_table(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward_backward = compiled(**CASES[case])
    called = actions_called(forward_backward, monkeypatch)
    rows = forward_backward.schedule.rows
    assert Counter(called) == Counter(action for row in rows for action in row)
    for row in rows:
        assert [action for action in called if action in row] == list(row)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_bound_to_its_row_and_to_each_of_its_messages(case: str, bound_to: list[Bound]) -> None:
    run_strict(lambda rank: compiled(**CASES[case])(torch.ones(8, 4)), 3)
    assert len(bound_to) == 3
    for bound in bound_to:
        plan, rank = bound.kind.plan, bound.executors[0].rank
        instructions = plan.instructions[rank]
        assert [one for one, _ in bound.calls] == [one for one in instructions if not isinstance(one, Reduce)]
        posted = [port._message for port in bound.receives]  # type: ignore[union-attr]
        assert posted == [one.message for one in instructions if isinstance(one, Receive)]
        computed = [call.action for one, call in bound.calls if isinstance(one, Compute)]  # type: ignore[attr-defined]
        assert computed == list(plan.schedule.rows[rank])


def weight(x: Tensor) -> float:
    return float(x.any())


def without(place: int) -> Tensor:
    """A batch in which one micro-batch has no weight."""
    batch = torch.ones(8, 4)
    batch[2 * place : 2 * place + 2] = 0
    return batch


def test_what_has_no_weight_is_bound_without_its_messages_and_left_out(bound_to: list[Bound]) -> None:
    run_strict(lambda rank: compiled(loss_weight=weight)(without(1)), 3)
    for bound in bound_to:
        left_out = [call.action for _, call in bound.calls if isinstance(call, LeftOut)]
        assert left_out == [Action(bound.executors[0].rank, Kind.B, 1)]
        messages = [one.message for one, _ in bound.calls if isinstance(one, Receive | Send | Release)]
        assert not any(message.direction is BACKWARD and message.microbatch == 1 for message in messages)


def test_a_plan_is_bound_once_and_evaluation_is_bound_without_backwards(bound_to: list[Bound]) -> None:
    forward_backward = compiled()
    for rows in (8, 12, 8):
        forward_backward(torch.ones(rows, 4))
    forward_backward.evaluate(torch.ones(8, 4))
    bound, evaluated = bound_to
    assert bound.kind.training
    assert kinds_of(evaluated) == {ForwardAction: 3 * MICROBATCHES}
    assert kinds_of(bound)[BackwardAction] == 3 * MICROBATCHES


def test_what_is_not_met_for_long_is_let_go_of(bound_to: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxpipe.run.step.step, "MOST_BOUND", 2)
    forward_backward = compiled(loss_weight=weight)
    wanted = [forward_backward(without(place)) for place in (0, 1, 2, 2)]
    assert len(bound_to) == 3
    assert [forward_backward(without(place)) for place in (0, 1, 2, 2)] == wanted
    assert len(bound_to) == 6


@pytest.mark.parametrize("evaluates", [False, True])
def test_nothing_of_a_step_is_kept_for_the_next(evaluates: bool) -> None:
    forward_backward = compiled(recompute=True)
    batch = torch.ones(8, 4)
    memory = StorageWeakRef(batch.untyped_storage())
    (forward_backward.evaluate if evaluates else forward_backward)(batch)
    del batch
    gc.collect()
    assert memory.expired()
