"""The picture of a timeline: to scale, coloured, numbered and named. Its whole text is in test_golden's files."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Reduction, Schedule, Timeline
from fxpipe.schedules.show.svg_picture import svg, text_width, ticks, truncated
from tests.graphs import FAMILIES, bare, chain, random_timelines

SVG = "{http://www.w3.org/2000/svg}"


@dataclasses.dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str

    @staticmethod
    def of(element: ElementTree.Element, fill: str) -> Box:
        x, y, width, height = (float(element.get(name, "nan")) for name in ("x", "y", "width", "height"))
        return Box(x, y, width, height, fill)

    def holds(self, x: float, y: float) -> bool:
        return self.x <= x <= self.x + self.width and self.y <= y <= self.y + self.height


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A picture read back: each action's cell, title and number, and the tracks of the rows."""

    root: ElementTree.Element
    cells: dict[Action, Box]
    titles: dict[Action, str]
    rows: list[Box]
    numbers: dict[Action, str]


def read(picture: str) -> Drawn:
    root = ElementTree.fromstring(picture)
    cells: dict[Action, Box] = {}
    titles: dict[Action, str] = {}
    numbers: dict[Action, str] = {}
    pending: list[Action] = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "cells":
            pending = []
            for rect in group:
                title = rect.findtext(f"{SVG}title", "")
                action = Action.parse(title.split()[0])
                assert action not in cells, f"{action} is drawn twice"
                cells[action], titles[action] = Box.of(rect, group.attrib["fill"]), title
                pending.append(action)
        elif group.get("text-anchor") == "middle":
            for text in group:
                x, y = float(text.attrib["x"]), float(text.attrib["y"])
                (inside,) = (action for action in pending if cells[action].holds(x, y))
                numbers[inside] = text.text or ""
    rows = [Box.of(rect, "") for rect in root.iter(f"{SVG}rect") if rect.get("class") == "track"]
    return Drawn(root, cells, titles, [row for row in rows if row.width > 100], numbers)


# --- geometry ---


@pytest.mark.parametrize("name", FAMILIES)
def test_each_action_has_one_cell_in_its_ranks_row_to_scale(name: str) -> None:
    for timeline in random_timelines(name):
        drawn = read(svg(timeline))
        assert set(drawn.cells) == set(timeline.spans)
        end = max((span.end for span in timeline.spans.values()), default=0.0)
        for action, (start, stop) in timeline.spans.items():
            cell, row = drawn.cells[action], drawn.rows[timeline.schedule.placement[action.stage]]
            assert (cell.y, cell.height) == (row.y, row.height)
            title = drawn.titles[action]
            assert title.startswith(f"{action} on rank {timeline.schedule.rank(action)}: ")
            found = re.search(r"; (\S+) to ([^\s,]+)( ms)?", title)
            assert found
            scale = 1000 if found[3] else 1
            assert [float(found[1]), float(found[2])] == pytest.approx([start * scale, stop * scale], rel=1e-3)
            if end:
                assert cell.x == pytest.approx(row.x + start / end * row.width, abs=0.011)
                assert cell.width == pytest.approx((stop - start) / end * row.width, abs=0.011)


@pytest.mark.parametrize("ranks", [2, 17])
def test_reductions_are_bars_between_the_rows_to_scale(ranks: int) -> None:
    """Of those that overlap each has a lane of its own. What ends after the last action is drawn all the same."""
    plan = build("1f1b", chain(ranks), 3, stages=ranks).simulate()
    last, late = ranks - 1, plan.makespan + 2
    times = [(0, 0.0, 5.0), (0, 4.0, late), (last, late - 1, late + 0.5)]
    timeline = dataclasses.replace(plan, reductions=tuple(Reduction(rank, "", *span) for rank, *span in times))
    drawn = read(svg(timeline))
    bars = [Box.of(rect, "") for rect in drawn.root.iter(f"{SVG}rect") if rect.get("class") == "reduction"]
    tops = [*(row.y for row in drawn.rows), float(drawn.root.attrib["height"])]
    assert len(drawn.rows) == ranks
    for (rank, start, end), bar in zip(times, bars, strict=False):  # the last one is the legend's
        row = drawn.rows[rank]
        assert row.y + row.height < bar.y < bar.y + bar.height < tops[rank + 1]
        assert bar.x == pytest.approx(row.x + start / plan.makespan * row.width, abs=0.05)
        assert bar.width == pytest.approx((end - start) / plan.makespan * row.width, abs=0.05)
    assert bars[0].y + bars[0].height < bars[1].y


@pytest.mark.parametrize("stages", [1, 9, 40])
def test_all_stages_of_a_rank_are_named_within_its_row(stages: int) -> None:
    drawn = read(svg(bare(chain(stages), stages, (0,) * stages).build("1f1b", 2).simulate()))
    named = {text.text: float(text.attrib["y"]) for text in drawn.root.iter(f"{SVG}text")}
    for stage in range(1, stages):  # 0 is also a number of the axis
        assert drawn.rows[0].y < named[str(stage)] <= drawn.rows[0].y + drawn.rows[0].height


def test_a_table_without_length_or_actions_can_be_drawn() -> None:
    nothing = build("1f1b", chain(2), 2).simulate(forward=0, backward=0)
    assert {cell.width for cell in read(svg(nothing)).cells.values()} == {0}
    empty = Timeline(Schedule(((), ()), (), (0, 1), (True, True), 1), {}, {}, Costs.of(2))
    assert len(read(svg(empty)).rows) == 2
    alone = Schedule(((Action(0, Op.F, 0),), ()), (), (0, 1), (False, False), 1)
    assert len(read(svg(alone.simulate())).rows) == 2


# --- numbers, names, axis ---


def test_the_micro_batch_stands_in_the_cells_where_it_fits() -> None:
    timeline = build("1f1b", chain(4), 12).simulate(forward=[1, 1, 0.2, 1])
    drawn = read(svg(timeline))
    assert all(text == str(action.microbatch) for action, text in drawn.numbers.items())
    for action, cell in drawn.cells.items():
        if cell.width >= 20:  # two digits of 11 pixels, whatever the font
            assert action in drawn.numbers
        elif cell.width < 12:
            assert action not in drawn.numbers
    assert {action.stage for action in drawn.cells if action not in drawn.numbers} == {2}


def test_a_long_table_keeps_a_sensible_width() -> None:
    timeline = build("1f1b", chain(8), 1500).simulate()
    drawn = read(svg(timeline))
    assert float(drawn.root.attrib["width"]) < 10000
    assert not drawn.numbers
    small = read(svg(build("1f1b", chain(2), 1).simulate()))
    assert 500 < float(small.root.attrib["width"]) < 1200


# --- colours ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_and_op_has_one_fill_and_no_other_has_it(name: str) -> None:
    cells = read(svg(build(name, chain(6), 5).simulate())).cells
    fills = {((action.stage, action.op), cell.fill) for action, cell in cells.items()}
    assert len(fills) == len({key for key, _ in fills}) == len({fill for _, fill in fills})


def test_outlines_of_cells_that_are_too_narrow_for_one_each_become_one() -> None:
    """One stage on one rank is busy from start to end, and all of it critical."""
    drawn = read(svg(build("1f1b", [], 1200).simulate()))
    (path,) = (path for path in drawn.root.iter(f"{SVG}path") if path.get("class") == "critical")
    assert path.get("d", "").count("M") == 1
    (row,) = drawn.rows
    assert float(path.get("d", "").split("h")[1].split("v")[0]) == pytest.approx(row.width, abs=2)


# --- texts that fit, ticks that are round ---


def test_a_truncated_text_fits() -> None:
    for text, room in (("abc", 100), ("a longer one, that is cut", 60), ("mmmmmmm", 30)):
        cut = truncated(text, room)
        assert text_width(cut) <= room
        assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


@pytest.mark.parametrize("most", [1, 3, 10, 12])
@pytest.mark.parametrize("end", [1e-7, 0.3, 1, 9.99, 10, 117, 12345.6])
def test_ticks_are_round_and_not_too_many(end: float, most: int) -> None:
    times = ticks(end, most)
    assert times[0] == 0
    assert times[-1] <= end * (1 + 1e-9)
    assert len(times) <= most + 1
    if len(times) > 1:
        digits = f"{times[1]:e}"
        assert re.match(r"[125]\.0+e", digits)
        assert times[-1] + times[1] > end  # and they reach as far as the rows do
    assert ticks(0, 5) == [0]
