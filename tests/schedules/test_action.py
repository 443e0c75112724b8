"""Actions print and parse."""

from __future__ import annotations

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Kind


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, Kind.F, 0), "2F0"),
        (Action(0, Kind.B, 13), "0B13"),
        (Action(11, Kind.I, 7), "11I7"),
        (Action(3, Kind.W, 100), "3W100"),
        (Action(3, Kind.R, 1), "3R1"),
        (Action(4, Kind.F, 0, 4), "4F0-3"),
        (Action(4, Kind.B, 8, 8), "4B8-15"),
        (Action(4, Kind.B, 8, 1), "4B8"),
    ],
)
def test_an_action_prints_and_parses(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action
    assert Action.parse(f" {text}\n") == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2F",
        "2f0",
        "-1F0",
        "2F0 2F1",
        "٢F0",
        "4F-3",
        "4F3-3",
        "9" * 5000 + "F0",
    ],
)
def test_what_is_no_action_is_refused_with_the_text_and_an_example(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert repr(text)[:40] in str(error.value)
    assert "as in 2F0" in str(error.value)


def test_an_action_of_a_group_covers_its_micro_batches() -> None:
    assert list(Action(4, Kind.B, 8, 4).microbatches) == [8, 9, 10, 11]
    assert list(Action(4, Kind.B, 8).microbatches) == [8]
    assert Action(4, Kind.B, 8) == Action(4, Kind.B, 8, 1) != Action(4, Kind.B, 8, 4)
