"""The picture of a timeline: to scale, coloured, numbered and named. Its whole text is in test_golden's files."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.kinds import KINDS, Kind
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.show import svg_picture
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
    alone = Schedule(((Action(0, Kind.F, 0),), ()), (), (0, 1), (False, False), 1)
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


# --- colours: told apart, readable, and equally light in each hue ---


def test_many_stages_have_colours_of_their_own() -> None:
    fills = {svg_picture.fill(stage, kind) for stage in range(128) for kind in KINDS.values()}
    assert len(fills) == 128 * len(KINDS)
    assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills)


def luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2 define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("kind", list(KINDS.values()))
def test_numbers_can_be_read_on_every_colour(kind: Kind) -> None:
    """4.5 is what the guidelines ask of text."""
    for stage in range(80):
        for colour in (svg_picture.fill(stage, kind), svg_picture.stripes(stage, kind)):
            assert colour is None or contrast(svg_picture.ink(kind), colour) >= 4.5


def test_a_tone_is_about_as_light_in_each_hue_and_unlike_the_other_tones() -> None:
    """So that F and B are told apart without seeing colours at all."""
    lightest_backward = max(luminance(svg_picture.fill(stage, Kind.B)) for stage in range(80))
    darkest_forward = min(luminance(svg_picture.fill(stage, Kind.F)) for stage in range(80))
    assert darkest_forward > 2 * lightest_backward


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


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
