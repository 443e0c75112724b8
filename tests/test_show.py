"""The printed table: aligned, its columns are steps, and it reads back as the rows that are executed."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fxpipe.action import Action, Op
from fxpipe.lower import Compute
from fxpipe.schedule import Schedule
from fxpipe.schedules import SCHEDULES, build
from fxpipe.show import grid
from tests.graphs import WORKED, chain, random_bare

NAMES = ("image 0", "image 1", "text", "text.1", "loss")


@dataclasses.dataclass(frozen=True)
class Printed:
    """A table read back from its text. ``cells``: rank → step → cell, empty where the rank idles."""

    headers: list[str]
    stages: list[str]
    cells: list[list[str]]
    figures: list[str]


def read(text: str) -> Printed:
    """Reads a table by the columns that its rule of dashes draws."""
    header, rule, *lines = text.splitlines()
    spans = [match.span() for match in re.finditer("-+", rule)]
    table = [[line[a:b].strip() for a, b in spans] for line in [header, *lines] if re.match(r" *(rank|\d+ )", line)]
    for line in lines[: len(table) - 1]:
        outside = "".join(letter for place, letter in enumerate(line) if not any(a <= place < b for a, b in spans))
        assert not outside.strip(), f"not aligned with its header: {line!r}"
    return Printed(
        headers=table[0],
        stages=[row[1] for row in table[1:]],
        cells=[row[2:] for row in table[1:]],
        figures=lines[len(table) - 1 :],
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_printed_table_reads_back_as_the_rows_that_are_executed(name: str) -> None:
    for seed in range(40):
        schedule = random_bare(seed, frozen=seed % 2 == 0).build(name, 1 + seed % 12)
        cells = read(str(schedule)).cells
        rows = tuple(tuple(Action.parse(cell) for cell in row if cell) for row in cells)
        executed = tuple(
            tuple(step.action for step in row if isinstance(step, Compute)) for row in schedule.instructions
        )
        assert rows == executed


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_column_is_a_step_and_nothing_could_stand_further_left(name: str) -> None:
    for seed in range(40):
        graph = random_bare(seed)
        cells = read(str(graph.build(name, 4))).cells
        step = {Action.parse(cell): place for row in cells for place, cell in enumerate(row) if cell}
        for row in cells:
            actions = [Action.parse(cell) for cell in row if cell]
            for place, action in enumerate(actions):
                own = [Action(action.stage, Op.F, action.microbatch)] if action.op is Op.B else []
                others = graph.sources(action.stage) if action.op is Op.F else graph.targets(action.stage)
                before = [*own, *(Action(o, action.op, action.microbatch) for o in others), *actions[:place][-1:]]
                assert step[action] == max((step[other] + 1 for other in before), default=0)


def test_rows_are_ranks_with_the_names_of_their_stages_and_columns_are_numbered() -> None:
    schedule = build("1f1b", WORKED, 3, placement=[0, 1, 0, 1, 2], names=NAMES)
    table = read(str(schedule))
    assert table.headers == ["rank", "stages", *map(str, range(len(table.cells[0])))]
    assert table.stages == ["0: image 0, 2: text", "1: image 1, 3: text.1", "4: loss"]


def test_stages_without_names_are_numbers() -> None:
    assert read(str(build("1f1b", chain(3), 2, placement=[0, 0, 1]))).stages == ["0, 1", "2"]
    bare = Schedule(build("1f1b", chain(2), 1).rows, ((0, 1),), (0, 1), (True, True), 1)
    assert read(str(bare)).stages == ["0", "1"]


def test_the_last_lines_give_bubble_makespan_and_peaks() -> None:
    """Of the worked example at m = 8 the design says: 30, and 3, 2, 3, 2, 1; so 24 of 30 are busy."""
    assert read(str(build("1f1b", WORKED, 8, names=NAMES))).figures == [
        "1f1b: 5 stages on 5 ranks, 8 micro-batches",
        "bubble 20.0%, makespan 30 F (lower bound 30 F) at B = 2 F",
        "peak in flight: image 0 3, image 1 2, text 3, text.1 2, loss 1",
    ]


def test_peaks_are_told_of_stages_that_are_differentiated() -> None:
    frozen = build("1f1b", chain(2), 2, backward=[False, True], names=["encoder", "head"])
    assert read(str(frozen)).figures[-1] == "peak in flight: head 1"
    nothing = build("1f1b", chain(2), 2, backward=[False, False])
    assert read(str(nothing)).figures[-1] == "peak in flight: nothing is differentiated"


def test_marked_cells_stand_in_brackets_and_the_table_stays_aligned() -> None:
    schedule = build("1f1b", chain(3), 12)
    cells = read(grid(schedule, [Action(1, Op.F, 10), Action(2, Op.B, 0)])).cells
    assert sorted(cell for row in cells for cell in row if "[" in cell) == ["[1F10]", "[2B0]"]


def test_a_table_that_halts_is_printed_too_and_says_so() -> None:
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    table = read(str(Schedule(parsed, ((0, 1),), (0, 1), (True, True), 2)))
    assert [[cell for cell in row if cell] for row in table.cells] == rows
    assert table.figures[-1] == "the table comes to a halt at 0B0, 1F1; verify() says why"


def test_a_rank_without_actions_has_an_empty_row() -> None:
    schedule = Schedule(((Action(0, Op.F, 0),), ()), (), (0, 1), (False, False), 1)
    assert read(str(schedule)).cells == [["0F0"], [""]]
