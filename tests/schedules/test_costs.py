"""Costs: one number or one per stage, and none that cannot be."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import KINDS, Kind
from tests.graphs import chain


@pytest.mark.parametrize("costs", [{"forward": [1]}, {"backward": [1, 2, 3]}, {"weight": []}], ids=str)
def test_costs_for_another_number_of_stages_are_refused(costs: dict[str, list[float]]) -> None:
    with pytest.raises(ScheduleError, match=r"\d costs for 2 stages; give one number, or one per stage"):
        build("1f1b", chain(2), 2).simulate(**costs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "fact"),
    [
        ({"forward": -1}, "forward is -1; a cost is a finite number, 0 or more"),
        ({"backward": [1, float("nan")]}, "backward is nan; a cost is a finite number, 0 or more"),
        ({"forward": float("inf")}, "forward is inf; a cost is a finite number"),
        ({"comm": -0.5}, "comm is -0.5; a cost is a finite number"),
        ({"comm": float("nan")}, "comm is nan; a cost is a finite number"),
        ({"weight": -1}, "weight is -1; a cost is a finite number"),
        ({"activation_bytes": [1, -2]}, "activation_bytes is -2; a cost is a finite number"),
        ({"forward": ["1", 2]}, "forward is '1'; a cost is a finite number"),
        ({"activation_bytes": [1]}, "activation_bytes has 1 costs for 2 stages; give one number, or one per stage"),
        ({"weight": 3}, "weight=3 of stage 0 is a part of backward=2, and exceeds it"),
        ({"backward": [4, 1], "weight": [4, 2]}, "weight=2 of stage 1 is a part of backward=1, and exceeds it"),
    ],
    ids=str,
)
def test_costs_that_cannot_be_are_refused_with_their_name_and_value(costs: dict[str, Any], fact: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        Costs.of(2, **costs)
    with pytest.raises(ScheduleError, match=re.escape(fact)):
        build("1f1b", chain(2), 2).simulate(**costs)


def test_what_an_action_holds_beside_its_stage_is_that_of_backwards_and_of_each_micro_batch() -> None:
    costs = dataclasses.replace(Costs.of(2), again_bytes=(3.0, 5.0))
    held = {kind: costs.beside(Action(1, kind, 0, 2)) for kind in KINDS.values()}
    assert {op for op, number in held.items() if number} == {Kind.B, Kind.I}
    assert held[Kind.B] == held[Kind.I] == 2 * 5
    assert Costs.of(2).beside(Action(1, Kind.B, 0)) == 0
