"""What a cell of a notebook shows: well-formed HTML with the picture and the table that ``print`` shows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.show.html_page import MOST_CELLS
from tests.graphs import FAMILIES, WORKED, chain


def parts(shown: str) -> tuple[list[str], set[str]]:
    """The texts of the tables, and the actions that a picture has a cell for."""
    root = ElementTree.fromstring(f"<body>{shown}</body>")  # well-formed, and so nothing of it can leave its place
    tables = [part.text or "" for part in root.iter("pre")]
    return tables, {title.text.split()[0] for title in root.iter("{http://www.w3.org/2000/svg}title") if title.text}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_schedule_and_its_timeline_show_every_action_and_the_printed_table(name: str) -> None:
    schedule = build(name, WORKED, 4, names=["<image>", "b", "c", "d & e", "loss"])
    for shown in (schedule, schedule.planned()):
        tables, cells = parts(shown._repr_html_())
        assert tables == [str(shown)]
        assert cells == {str(action) for row in schedule.rows for action in row}


def test_a_table_that_comes_to_a_halt_shows_its_grid_and_the_reason() -> None:
    rows = (tuple(map(Action.parse, ["0B0", "0F0"])), tuple(map(Action.parse, ["1F0", "1B0"])))
    schedule = Schedule(rows, ((0, 1),), (0, 1), (True, True), 1)
    (table, reason), cells = parts(schedule._repr_html_())
    assert table == str(schedule)
    assert "0B0" in reason
    assert not cells


def test_a_table_of_many_cells_says_where_its_picture_is_had() -> None:
    schedule = build("gpipe", chain(2), MOST_CELLS // 4 + 1)
    (table, hint), cells = parts(schedule._repr_html_())
    assert table == str(schedule)
    assert "to_html" in hint
    assert not cells


@pytest.mark.parametrize("name", FAMILIES)
def test_repr_is_one_short_line(name: str) -> None:
    schedule = build(name, chain(4), 64)
    assert repr(schedule) == f"<Schedule {schedule.name}: 4 stages on 4 ranks, 64 micro-batches>"
    assert re.fullmatch(rf"<Timeline of {schedule.name}: [^\n]{{1,200}}>", repr(schedule.planned()))
