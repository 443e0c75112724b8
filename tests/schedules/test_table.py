"""The printed table: aligned, its columns are steps, it reads back as the rows that are executed, and fits."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise, product

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import Costs, build
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.lower import Compute
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.table import grid, table
from tests.graphs import FAMILIES, WORKED, Bare, bare, chain, random_bare, whole_table
from tests.thinned import every, seeds
from tests.work import steps


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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_printed_table_reads_back_as_the_rows_that_are_executed(name: str) -> None:
    for seed in seeds(40):
        schedule = random_bare(seed, frozen=seed % 2 == 0).build(name, 1 + seed % 12)
        cells = read(whole_table(schedule)).cells
        rows = tuple(tuple(Action.parse(cell) for cell in row if cell) for row in cells)
        executed = tuple(
            tuple(step.action for step in row if isinstance(step, Compute)) for row in schedule.instructions
        )
        assert rows == executed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_column_is_a_step_and_nothing_could_stand_further_left(name: str) -> None:
    for seed in seeds(40):
        graph = random_bare(seed)
        cells = read(whole_table(graph.build(name, 4))).cells
        step = {Action.parse(cell): place for row in cells for place, cell in enumerate(row) if cell}
        gradient = Kind.I if any(action.kind is Kind.I for action in step) else Kind.B
        for row in cells:
            actions = [Action.parse(cell) for cell in row if cell]
            for place, action in enumerate(actions):
                inputs = {
                    Kind.F: [Action(source, Kind.F, action.microbatch) for source in graph.sources(action.stage)],
                    gradient: [
                        Action(action.stage, Kind.F, action.microbatch),
                        *(Action(target, gradient, action.microbatch) for target in graph.targets(action.stage)),
                    ],
                    Kind.W: [Action(action.stage, Kind.I, action.microbatch)],
                }
                before = [*inputs[action.kind], *actions[:place][-1:]]
                assert step[action] == max((step[other] + 1 for other in before), default=0)


def test_stages_without_names_are_numbers() -> None:
    assert read(str(build("1f1b", chain(3), 2, placement=[0, 0, 1]))).stages == ["0, 1", "2"]
    bare = Schedule(build("1f1b", chain(2), 1).rows, ((0, 1),), (0, 1), (True, True), 1)
    assert read(str(bare)).stages == ["0", "1"]


def test_peaks_are_told_of_stages_that_are_differentiated() -> None:
    frozen = build("1f1b", chain(2), 2, backward=[False, True], names=["encoder", "head"])
    assert read(str(frozen)).figures[-1] == "peak in flight: head 1"
    nothing = build("1f1b", chain(2), 2, backward=[False, False])
    assert read(str(nothing)).figures[-1] == "peak in flight: nothing is differentiated"


def test_marked_cells_stand_in_brackets_and_the_table_stays_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    schedule = build("1f1b", chain(3), 12)
    marked, plain = read(grid(schedule, [Action(1, Kind.F, 10), Action(2, Kind.B, 0)])), read(grid(schedule))
    assert sorted(cell for row in marked.cells for cell in row if "[" in cell) == ["[1F10]", "[2B0]"]
    assert [[cell.strip("[]") for cell in row] for row in marked.cells] == plain.cells


def test_a_table_that_halts_is_printed_too_and_says_so() -> None:
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    printed = read(str(Schedule(parsed, ((0, 1),), (0, 1), (True, True), 2)))
    assert [[cell for cell in row if cell] for row in printed.cells] == rows
    assert printed.figures[-1] == "the table deadlocks at 0B0, 1F1; verify() says why"


def test_a_rank_without_actions_has_an_empty_row() -> None:
    schedule = Schedule(((Action(0, Kind.F, 0),), ()), (), (0, 1), (False, False), 1)
    assert read(str(schedule)).cells == [["0F0"], [""]]


# --- figures ---


def figures(timeline: Timeline) -> list[str]:
    return read(whole_table(timeline)).figures[1:]


def test_a_timeline_prints_the_table_of_its_schedule_and_its_own_figures() -> None:
    schedule = build("1f1b", WORKED, 8)
    assert str(schedule.simulate()) == table(schedule, schedule.planned) == str(schedule)
    other = schedule.simulate(comm=1)
    assert str(other) == table(schedule, lambda: other) != str(schedule)
    assert str(other).splitlines()[:7] == str(schedule).splitlines()[:7]


@pytest.mark.parametrize(
    ("name", "costs", "line"),
    [
        # m = 2 on a chain of 2: three times F + B, of which two are busy
        ("1f1b", {}, "bubble 33.3%, makespan 9 F (lower bound 9 F) at B = 2 F"),
        ("1f1b", {"backward": 1.5}, "bubble 33.3%, makespan 7.5 F (lower bound 7.5 F) at B = 1.5 F"),
        (
            "1f1b",
            {"forward": 10, "backward": 20},
            "bubble 33.3%, makespan 90 (lower bound 90) in the costs' unit",
        ),
        ("1f1b", {"forward": [1, 1.5]}, "bubble 35.0%, makespan 10 (lower bound 10) in the costs' unit"),
        # 1 and 2 before it, 2 · (1 + 4) of its own
        ("1f1b", {"backward": [2, 4]}, "bubble 38.5%, makespan 13 F (lower bound 13 F)"),
        ("1f1b", {"comm": 0.5}, "bubble 40.0%, makespan 10 F (lower bound 10 F) at B = 2 F, a hop = 0.5 F"),
        ("zb_h1", {}, "bubble 14.3%, makespan 7 F (lower bound 7 F) at B = 2 F"),
        ("zb_h1", {"weight": 0.5}, "bubble 25.0%, makespan 8 F (lower bound 7.5 F) at B = 2 F, W = 0.5 F"),
        ("1f1b", {"weight": 0.5}, "bubble 33.3%, makespan 9 F (lower bound 9 F) at B = 2 F"),
    ],
    ids=str,
)
def test_figures_are_in_the_unit_of_the_costs_and_f_is_named_where_it_is_1(
    name: str, costs: dict[str, float], line: str
) -> None:
    assert figures(build(name, chain(2), 2).simulate(**costs))[0] == line


def test_a_plan_at_costs_in_seconds_says_so_and_where_they_are_from() -> None:
    costs = dataclasses.replace(Costs.of(2, 0.0005, 0.001), source="costs by shapes on h100")
    timeline = build("1f1b", chain(2), 2).simulate(costs)  # three times F + B
    assert figures(timeline)[0] == "bubble 33.3%, 4.5 ms planned (lower bound 4.5 ms), costs by shapes on h100"
    assert repr(timeline).endswith("planned: bubble 33.3%, makespan 4.5 ms (lower bound 4.5 ms)>")


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        (1, "measured: bubble 33.3%, makespan 9 s (lower bound 9 s)"),
        (0.0001234, "measured: bubble 33.3%, makespan 1.11 ms (lower bound 1.11 ms)"),
        (137.1, "measured: bubble 33.3%, makespan 1234 s (lower bound 1234 s)"),
        (0.11101, "measured: bubble 33.3%, makespan 999 ms (lower bound 999 ms)"),
    ],
)
def test_what_was_measured_says_so_and_is_in_seconds(scale: float, line: str) -> None:
    planned = build("1f1b", chain(2), 2).simulate(forward=scale, backward=2 * scale)
    assert figures(dataclasses.replace(planned, measured=True))[0] == line


def test_bytes_are_told_per_rank_where_they_are_known() -> None:
    schedule = build("1f1b", chain(4), 8)
    timeline = schedule.simulate(activation_bytes=[300 * 2**20, 5 * 2**30, 512, 1000])
    assert figures(timeline)[1:] == [
        "peak in flight: 0 4, 1 3, 2 2, 3 1",
        "activations at most: rank 0 1.2 GiB, rank 1 15.0 GiB, rank 2 1.0 KiB, rank 3 1000 B",
    ]
    assert len(figures(schedule.simulate())) == 2


# --- folded to the terminal ---


@dataclasses.dataclass(frozen=True)
class Folded:
    """A folded table read back. ``columns``: header and cells, those of all blocks in order."""

    columns: list[tuple[str, ...]]
    heads: list[list[tuple[str, ...]]]
    notes: list[str]
    lines: list[str]
    """Those of the grid."""


def unfold(text: str) -> Folded:
    """Reads a folded table, block by block, by the rules of dashes."""
    lines = text.splitlines()
    grid_ends = max(place for place, line in enumerate(lines) if re.match(r"\d+ ", line)) + 1
    columns, heads = [], []
    for block in "\n".join(lines[:grid_ends]).split("\n\n"):
        header, rule, *rows = block.splitlines()
        spans = [match.span() for match in re.finditer("-+", rule)]
        found = [tuple(line[a:b].strip() for line in (header, *rows)) for a, b in spans]
        heads.append(found[:2])
        columns += found[2:]
    notes = [line for line in lines[grid_ends:] if line.startswith("⋯")]
    return Folded(columns, heads, notes, lines[:grid_ends])


NOTE = re.compile(
    r"⋯ steps? (\d+)(?:–(\d+))? repeat steps? (\d+)(?:–(\d+))? (\d+) times, "
    r"for the next (?:(\d+) micro-batches|micro-batch) each time"
)


def left_out(note: str) -> dict[int, tuple[int, int]]:
    """Step that was left out → the step that it repeats, and by how many micro-batches later it does."""
    match = NOTE.fullmatch(note)
    assert match, note
    first, last, start, stop, times, shift = (int(group) if group else None for group in match.groups())
    assert first is not None
    assert start is not None
    assert times is not None
    last, stop, shift = last or first, stop or start, shift or 1
    period = stop - start + 1
    assert stop + 1 == first
    assert last - first + 1 == period * times
    return {
        step: (start + (step - first) % period, shift * (1 + (step - first) // period))
        for step in range(first, last + 1)
    }


def shifted(column: tuple[str, ...], by: int) -> tuple[str, ...]:
    """The cells of a column for micro-batches further on."""
    actions = [Action.parse(cell) if cell else None for cell in column[1:]]
    return tuple("" if a is None else str(a._replace(microbatch=a.microbatch + by)) for a in actions)


LONG: dict[str, tuple[Bare, int]] = {
    "chain of 2": (bare(chain(2), 2), 100),
    "chain of 8": (bare(chain(8), 8), 50),
    "worked example": (bare(WORKED, 5), 30),
    "8 stages on 2 ranks in turns": (bare(chain(8), 8, (0, 1) * 4), 24),
    "6 stages on 3 ranks in turns": (bare(chain(6), 6, (0, 1, 2) * 2), 48),
    "one rank": (bare(chain(3), 3, (0, 0, 0)), 40),
    "frozen tower": (bare(WORKED, 5, frozen=frozenset([2, 3])), 40),
    **{f"random {seed}": (random_bare(seed, frozen=seed % 2 == 1), 12 + 3 * seed) for seed in range(6)},
}


@pytest.mark.parametrize(("kind", "name", "width"), every(11, list(product(LONG, FAMILIES, [44, 80, 120, 300]))))
def test_what_is_shown_and_what_is_left_out_are_the_whole_table(
    kind: str, name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, m = LONG[kind]
    monkeypatch.setenv("COLUMNS", str(width))
    schedule = graph.build(name, m)
    whole = list(zip(*read(whole_table(schedule)).cells, strict=True))
    folded = unfold(str(schedule))
    assert max(map(len, folded.lines)) <= width
    omitted = [left_out(note) for note in folded.notes]
    place = 0
    gaps = iter(omitted)
    for column in folded.columns:
        if column[0] == "⋯":
            assert set(column) == {"⋯"}
            gap = next(gaps)
            assert min(gap) == place
            place = max(gap) + 1
        else:
            assert column == (str(place), *whole[place])
            place += 1
    assert place == len(whole)
    for step, (origin, by) in {step: how for gap in omitted for step, how in gap.items()}.items():
        assert whole[step] == shifted(("", *whole[origin]), by)
    assert all(head == folded.heads[0] for head in folded.heads)
    assert [column[0] for column in folded.heads[0]] == ["rank", "stages"]


@pytest.mark.parametrize(
    ("name", "graph", "notes"),
    [
        # from when the last rank's backwards reach the first one, until that has no forward left
        ("1f1b", bare(chain(4), 4), ["steps 9–198 repeat steps 7–8 95 times, for the next micro-batch each time"]),
        ("1f1b", bare(WORKED, 5), ["steps 7–198 repeat steps 5–6 96 times, for the next micro-batch each time"]),
        # forwards, then backwards, in each of which all four ranks are busy
        (
            "gpipe",
            bare(chain(4), 4),
            [
                "steps 4–99 repeat step 3 96 times, for the next micro-batch each time",
                "steps 107–202 repeat step 106 96 times, for the next micro-batch each time",
            ],
        ),
        # three actions a micro-batch; the last rank is three weight gradients behind, and then all catch up
        ("zb_h1", bare(chain(4), 4), ["steps 12–296 repeat steps 9–11 95 times, for the next micro-batch each time"]),
        # groups of p = 2, with v = 2 stages a rank: 8 steps each
        (
            "interleaved_1f1b",
            bare(chain(4), 4, (0, 1, 0, 1)),
            ["steps 12–395 repeat steps 4–11 48 times, for the next 2 micro-batches each time"],
        ),
    ],
    ids=["1f1b on a chain", "1f1b on the worked example", "gpipe", "zb_h1", "interleaved_1f1b"],
)
def test_the_steady_state_is_folded_and_warm_up_and_drain_are_not(name: str, graph: Bare, notes: list[str]) -> None:
    assert [note.removeprefix("⋯ ") for note in unfold(str(graph.build(name, 100))).notes] == notes


FOLDED = """\
rank    stages    0    1    2    3    4    ⋯    199    200    201
------  --------  ---  ---  ---  ---  ---  ---  -----  -----  -----
0       0         0F0  0F1       0B0  0F2  ⋯    0B98          0B99
1       1              1F0  1B0  1F1  1B1  ⋯    1F99   1B99
⋯ steps 5–198 repeat steps 3–4 97 times, for the next micro-batch each time
1f1b: 2 stages on 2 ranks, 100 micro-batches
bubble 1.0%, makespan 303 F (lower bound 303 F) at B = 2 F
peak in flight: 0 2, 1 1"""

CLOSER = """\
rank stages 0   1   2   3   4   ⋯ 199  200  201
---- ------ --- --- --- --- --- - ---- ---- ----
0    0      0F0 0F1     0B0 0F2 ⋯ 0B98      0B99
1    1          1F0 1B0 1F1 1B1 ⋯ 1F99 1B99"""

IN_BLOCKS = """\
rank stages 0   1   2   3   4   ⋯
---- ------ --- --- --- --- --- -
0    0      0F0 0F1     0B0 0F2 ⋯
1    1          1F0 1B0 1F1 1B1 ⋯

rank stages 199  200  201
---- ------ ---- ---- ----
0    0      0B98      0B99
1    1      1F99 1B99"""


@pytest.mark.parametrize(("width", "picture"), [(80, FOLDED), (60, CLOSER), (36, IN_BLOCKS)])
def test_a_long_table_by_hand(width: int, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(build("1f1b", chain(2), 100)).startswith(picture)


def test_a_table_that_fits_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build("1f1b", chain(3), 4)
    whole = whole_table(schedule)
    wide = max(map(len, whole.splitlines()[:-3]))
    monkeypatch.setenv("COLUMNS", str(wide))
    assert str(schedule) == whole
    monkeypatch.setenv("COLUMNS", str(wide - 1))
    assert str(schedule) != whole
    assert whole_table(schedule) == whole


def test_long_stage_names_are_cut_short_where_the_table_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["encoder." * 10, "decoder." * 10, "loss"]
    schedule = build("1f1b", chain(3), 40, names=names)
    assert f"0: {names[0]}" in whole_table(schedule)
    monkeypatch.setenv("COLUMNS", "90")
    folded = unfold(str(schedule))
    assert max(map(len, folded.lines)) <= 90
    assert folded.heads[0][1] == (
        "stages",
        "0: encoder.encoder.encoder.en…",
        "1: decoder.decoder.decoder.de…",
        "2: loss",
    )


def test_no_terminal_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "5")
    assert len(unfold(str(build("1f1b", chain(2), 3))).columns) == 8  # a block each


# --- marked cells of a long table ---


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        (["2F50"], {"2F50", "3B49", "0B47"}),  # and what the other ranks do about then
        (["0F0", "0B199"], {"0F0", "0B199", "1F0", "1B199"}),
    ],
    ids=lambda value: " ".join(sorted(value)),
)
def test_of_a_long_table_the_neighbourhood_of_the_marked_cells_is_shown(
    marked: list[str], wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    schedule = build("1f1b", chain(4), 200)
    whole = list(zip(*read(whole_table(schedule)).cells, strict=True))
    near = unfold(grid(schedule, list(map(Action.parse, marked))))
    assert max(map(len, near.lines)) <= 100
    cells = {cell for column in near.columns for cell in column[1:]}
    assert {cell.strip("[]") for cell in cells if cell.startswith("[")} == set(marked)
    assert wanted <= {cell.strip("[]") for cell in cells}
    shown = [int(header) for header, *_ in near.columns if header != "⋯"]
    for header, *column in near.columns:
        if header == "⋯":
            assert set(column) == {"⋯"}
        else:
            assert tuple(cell.strip("[]") for cell in column) == whole[int(header)]
    assert shown == sorted(shown)
    cuts = [shown[0] > 0, shown[-1] < len(whole) - 1]
    assert [near.columns[0][0] == "⋯", near.columns[-1][0] == "⋯"] == cuts
    inside = sum(second > first + 1 for first, second in pairwise(shown))
    assert sum(header == "⋯" for header, *_ in near.columns) == inside + sum(cuts)


def test_all_cells_are_shown_where_they_fit_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    drawn = unfold(grid(build("1f1b", chain(3), 12), [Action(0, Kind.B, 0)]))
    assert [column[0] for column in drawn.columns] == [str(step) for step in range(28)]


def test_an_error_of_a_large_table_is_short() -> None:
    schedule = build("1f1b", chain(16), 64)
    rows = [list(row) for row in schedule.rows]
    rows[10].remove(Action(10, Kind.F, 50))
    with pytest.raises(ScheduleError, match="stage 10 needs 10F50 10B50") as error:
        dataclasses.replace(schedule, rows=tuple(map(tuple, rows))).verify()
    assert "[10B50]" in str(error.value)
    assert len(str(error.value)) < 3000


def test_a_long_grid_in_which_nothing_is_marked_is_folded() -> None:
    schedule = build("1f1b", chain(4), 200)
    assert unfold(grid(schedule)) == unfold(str(schedule))
    assert unfold(grid(schedule, [Action(9, Kind.F, 0)])) == unfold(str(schedule))  # which is not in it


# --- growth ---


def test_printing_takes_as_many_times_the_work_as_there_are_more_micro_batches_or_stages() -> None:
    few, more_microbatches = build("1f1b", chain(8), 32), build("1f1b", chain(8), 128)
    assert steps(str, more_microbatches) <= 4.5 * steps(str, few)
    few, more_stages = build("1f1b", chain(4), 64), build("1f1b", chain(16), 64)
    assert steps(str, more_stages) <= 6 * steps(str, few)  # a longer warm-up adds columns
