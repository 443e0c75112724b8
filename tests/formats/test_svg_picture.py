"""The picture of a timeline: to scale, told apart, numbered and named."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fxpipe.formats.html_page import html
from fxpipe.formats.svg_picture import svg, text_width, ticks, truncated
from fxpipe.schedules import build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Reduction, Schedule, Timeline
from tests.formats.test_html_page import actions_of
from tests.graphs import FAMILIES, RECOMPUTED, WORKED, bare, chain, joined, random_timelines

NAMES = ("image 0", "image 1", "text 0", "text 1", "loss")
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
    """A picture read back. ``cells``: action → where it is; ``rows``: the tracks; ``numbers``: action → text in it."""

    root: ElementTree.Element
    cells: dict[Action, Box]
    rows: list[Box]
    texts: list[str]
    numbers: dict[Action, str]


def read(picture: str) -> Drawn:
    root = ElementTree.fromstring(picture)
    cells: dict[Action, Box] = {}
    numbers: dict[Action, str] = {}
    pending: list[Action] = []
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "cells":
            pending = []
            for rect in group:
                action = Action.parse(rect.attrib["data-action"])
                assert action not in cells, f"{action} is drawn twice"
                cells[action] = Box.of(rect, group.attrib["fill"])
                pending.append(action)
        elif group.get("text-anchor") == "middle":
            for text in group:
                x, y = float(text.attrib["x"]), float(text.attrib["y"])
                (inside,) = (action for action in pending if cells[action].holds(x, y))
                numbers[inside] = text.text or ""
    rows = [Box.of(rect, "") for rect in root.iter(f"{SVG}rect") if rect.get("class") == "track"]
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    return Drawn(root, cells, [row for row in rows if row.width > 100], texts, numbers)


def without(timeline: Timeline, gone: set[Action]) -> Timeline:
    """The timeline of a step in which these actions never ran."""
    spans = {action: span for action, span in timeline.spans.items() if action not in gone}
    return dataclasses.replace(timeline, spans=spans)


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
            if end:
                assert cell.x == pytest.approx(row.x + start / end * row.width, abs=0.011)
                assert cell.width == pytest.approx((stop - start) / end * row.width, abs=0.011)


def test_each_row_is_labelled_with_its_rank_and_stages() -> None:
    drawn = read(svg(build("1f1b", WORKED, 3, placement=[0, 1, 0, 1, 2], names=NAMES).simulate()))
    labels = [text for text in drawn.texts if text.startswith("rank") or text[3:] in NAMES]
    assert labels == [
        *("rank 0", "0: image 0", "2: text 0"),
        *("rank 1", "1: image 1", "3: text 1"),
        *("rank 2", "4: loss"),
    ]


@pytest.mark.parametrize("ranks", [1, 17])
def test_any_number_of_ranks_can_be_drawn(ranks: int) -> None:
    drawn = read(svg(build("1f1b", chain(ranks), 3, stages=ranks).simulate()))
    assert len(drawn.rows) == ranks
    assert [text for text in drawn.texts if text.startswith("rank ")] == [f"rank {rank}" for rank in range(ranks)]
    height = float(drawn.root.attrib["height"])
    assert all(row.y + row.height < height for row in drawn.rows)
    assert all(above.y + above.height < below.y for above, below in itertools.pairwise(drawn.rows))


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
    assert actions_of(html(empty)) == {}
    alone = Schedule(((Action(0, Op.F, 0),), ()), (), (0, 1), (False, False), 1)
    assert len(read(svg(alone.simulate())).rows) == 2


def test_an_action_that_did_not_run_has_no_cell() -> None:
    whole = build("1f1b", WORKED, 4).simulate()
    gone = {action for action in whole.spans if action.op is Op.B and action.microbatch == 3}
    partial = without(whole, gone)
    assert set(read(svg(partial)).cells) == set(whole.spans) - gone
    assert set(actions_of(html(partial))) == {str(action) for action in set(whole.spans) - gone}


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


def test_names_are_escaped_and_the_long_ones_cut() -> None:
    names = ['<&">', "]]>'", "a very long name " * 20, "M" * 60]
    timeline = build("1f1b", chain(4), 2, names=names).simulate()
    drawn = read(svg(timeline))
    assert '0: <&">' in drawn.texts
    assert "1: ]]>'" in drawn.texts
    cut = [text for text in drawn.texts if text.endswith("…")]
    assert [text[:6] for text in cut] == ["2: a v", "3: MMM"]
    assert all(len(text) < 40 for text in cut)
    svg(timeline).encode()
    html(timeline).encode()


def test_control_characters_of_a_name_are_escaped_wherever_it_is_drawn() -> None:
    """XML has none: a picture with one could not be opened."""
    timeline = build("1f1b", chain(2), 2, names=["\x1b[31m", "\0\ufffe"]).simulate()
    named = dataclasses.replace(timeline, schedule=dataclasses.replace(timeline.schedule, name="\x07"))
    drawn = read(svg(named))
    assert {r"0: \x1b[31m", r"1: \x00\ufffe"} <= set(drawn.texts)
    for text in (svg(named), html(named), named.schedule._repr_html_(), str(named)):
        assert not {"\x1b", "\0", "\x07", "\ufffe"} & set(text)


def test_the_axis_counts_in_forwards_or_in_nothing_or_in_measured_time() -> None:
    schedule = build("1f1b", WORKED, 8)
    drawn = read(svg(schedule.simulate()))
    assert "time in F" in drawn.texts
    marks = {text.text: float(text.attrib["x"]) for text in drawn.root.findall(f"{SVG}text[@text-anchor='middle']")}
    row = drawn.rows[0]
    assert marks == {str(time): pytest.approx(row.x + time / 30 * row.width, abs=0.01) for time in range(0, 31, 5)}
    assert "time" in read(svg(schedule.simulate(forward=2))).texts
    milliseconds = dataclasses.replace(schedule.simulate(forward=0.001, backward=0.002), measured=True)
    texts = read(svg(milliseconds)).texts
    assert "time in ms" in texts
    assert "30" in texts  # 30 F of 1 ms
    seconds = dataclasses.replace(schedule.simulate(forward=1, backward=2), measured=True)
    assert "time in s" in read(svg(seconds)).texts


def test_the_headline_tells_the_figures() -> None:
    """Of the worked example at m = 8 the design says 30, which is its lower bound; 24 of 30 are busy."""
    schedule = build("1f1b", WORKED, 8, names=NAMES)
    texts = read(svg(schedule.simulate())).texts
    assert "1f1b: 5 stages on 5 ranks, 8 micro-batches, planned" in texts
    assert "bubble 20.0%, makespan 30 F (lower bound 30 F)" in texts
    measured = dataclasses.replace(schedule.simulate(forward=0.001, backward=0.002), measured=True)
    texts = read(svg(measured)).texts
    assert "1f1b: 5 stages on 5 ranks, 8 micro-batches, measured" in texts
    assert "bubble 20.0%, makespan 30 ms (lower bound 30 ms)" in texts
    assert texts.count("20.0%") == 5  # and each rank's own
    one = build("1f1b", [], 1, stages=1).simulate()
    assert "1f1b: 1 stage on 1 rank, 1 micro-batch, planned" in read(svg(one)).texts


# --- colours ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_and_op_has_one_fill_and_no_other_has_it(name: str) -> None:
    cells = read(svg(build(name, chain(6), 5).simulate())).cells
    fills = {((action.stage, action.op), cell.fill) for action, cell in cells.items()}
    assert len(fills) == len({key for key, _ in fills}) == len({fill for _, fill in fills})


def test_the_legend_names_the_ops_that_occur() -> None:
    whole = read(svg(build("1f1b", chain(3), 4).simulate())).texts
    assert {"F: forward", "B: backward", "bubble", "critical path"} <= set(whole)
    assert not {"I: input gradients", "reduction"} & set(whole)
    halves = read(svg(build("zb_h1", chain(3), 4).simulate())).texts
    assert {"F: forward", "I: input gradients", "W: weight gradients"} <= set(halves)


def test_the_critical_path_is_outlined() -> None:
    timeline = build("1f1b", chain(2), 2).simulate()
    drawn = read(svg(timeline))
    (path,) = (path for path in drawn.root.iter(f"{SVG}path") if path.get("class") == "critical")
    corners = [tuple(map(float, corner)) for corner in re.findall(r"M([\d.]+) ([\d.]+)", path.attrib["d"])]
    # 0F0 1F0 1B0 1F1 1B1 0B1: each waits for the one before, and the last one ends the step.
    on_it = [Action.parse(text) for text in "0F0 1F0 1B0 1F1 1B1 0B1".split()]
    assert len(corners) == len(on_it)
    for action, (x, y) in zip(on_it, corners, strict=True):
        assert drawn.cells[action].holds(x, y)


# --- text and files ---


def test_a_timeline_and_a_schedule_write_their_pictures(tmp_path: Path) -> None:
    schedule = build("1f1b", WORKED, 4, names=["é", *NAMES[1:]])
    costs = Costs.of(5, forward=2, backward=3, comm=1)
    for timeline, directory in ((schedule.simulate(), "default"), (schedule.simulate(costs), "given")):
        place = tmp_path / directory
        place.mkdir()
        timeline.to_svg(place / "a.svg")
        timeline.to_html(str(place / "a.html"))
        assert (place / "a.svg").read_text(encoding="utf-8") == svg(timeline)
        assert (place / "a.html").read_text(encoding="utf-8") == html(timeline)
    schedule.to_svg(tmp_path / "b.svg")
    schedule.to_html(tmp_path / "b.html", costs)
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "default" / "a.svg").read_bytes()
    assert (tmp_path / "b.html").read_bytes() == (tmp_path / "given" / "a.html").read_bytes()


def test_outlines_of_cells_that_are_too_narrow_for_one_each_become_one() -> None:
    """One stage on one rank is busy from start to end, and all of it critical."""
    drawn = read(svg(build("1f1b", [], 1200).simulate()))
    (path,) = (path for path in drawn.root.iter(f"{SVG}path") if path.get("class") == "critical")
    assert path.get("d", "").count("M") == 1
    (row,) = drawn.rows
    assert float(path.get("d", "").split("h")[1].split("v")[0]) == pytest.approx(row.width, abs=2)


# --- reductions ---


REDUCTIONS = (
    Reduction(0, 'bucket 0 <&">, 1.0 MB', 3.0, 5.0),
    Reduction(0, "bucket 1, 25.0 MB", 4.0, 11.0),
    Reduction(1, "bucket 0, 1.0 MB", 2.0, 2.5),
)


def bars(picture: str) -> list[tuple[Box, str]]:
    """What is drawn of reductions, beside the legend, and what it tells."""
    root = ElementTree.fromstring(picture)
    found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "reduction"]
    return [(Box.of(rect, rect.attrib["fill"]), rect[0].text or "") for rect in found if len(rect)]


@pytest.mark.parametrize("ranks", [2, 20])
def test_reductions_are_thin_bars_beneath_their_ranks_row_to_scale(ranks: int) -> None:
    """The makespan is 9 for 2 ranks; what ends at 11 is drawn all the same, and the row ends at the makespan."""
    timeline = build("1f1b", chain(ranks), 2, stages=ranks).simulate(forward=1, backward=2)
    timeline = dataclasses.replace(timeline, reductions=REDUCTIONS)
    picture = svg(timeline)
    drawn, found = read(picture), bars(picture)
    end = max(timeline.makespan, 11.0)
    width = drawn.rows[0].width * end / timeline.makespan
    assert [told for _, told in found] == [
        'bucket 0 <&">, 1.0 MB, rank 0: 3 to 5 F, takes 2 F',
        "bucket 1, 25.0 MB, rank 0: 4 to 11 F, takes 7 F",
        "bucket 0, 1.0 MB, rank 1: 2 to 2.5 F, takes 0.5 F",
    ]
    for (bar, _), reduction in zip(found, REDUCTIONS, strict=True):
        row, below = (
            drawn.rows[reduction.rank : reduction.rank + 2] if ranks > 2 else (drawn.rows[reduction.rank], None)
        )
        assert bar.x == pytest.approx(row.x + reduction.start / end * width, abs=0.05)
        assert bar.x + bar.width == pytest.approx(row.x + reduction.end / end * width, abs=0.05)
        assert row.y + row.height < bar.y
        assert below is None or bar.y + bar.height < below.y
        assert bar.y + bar.height < float(drawn.root.attrib["height"])
    (first, _), (second, _), _ = found
    assert first.y + first.height < second.y  # under way at once
    assert "reduction" in drawn.texts
    for action, (start, stop) in timeline.spans.items():
        cell = drawn.cells[action]
        assert cell.x == pytest.approx(drawn.rows[0].x + start / end * width, abs=0.05)
        assert cell.width == pytest.approx((stop - start) / end * width, abs=0.05)
    assert "takes 7 F</title>" in html(timeline)


def test_a_group_is_one_cell_with_its_first_and_last_micro_batch() -> None:
    drawn = read(svg(joined(RECOMPUTED).simulate()))
    assert Action(4, Op.F, 0, 2) in drawn.cells
    assert {"0-1", "2-3", "R: forward again"} <= set(drawn.texts)


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
