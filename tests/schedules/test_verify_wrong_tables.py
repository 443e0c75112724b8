"""Wrong tables of many kinds, as a file that somebody edited: each is refused, and the cell is named and marked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import KINDS, Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, JOINED, RECOMPUTED, chain, examples, joined, random_bare, values_of
from tests.schedules.network import network

Edges = tuple[tuple[int, int], ...]

GOOD = """
    0F0, 0F1,    , 0B0,    , 0B1
       , 1F0, 1B0, 1F1, 1B1,
"""
SPLIT = """
    0F0, 0F1, 0I0, 0W0, 0I1, 0W1
    1F0, 1I0, 1W0, 1F1, 1I1, 1W1
"""
THREE = """
    0F0, 0F1, 0B0, 0B1
    1F0, 1F1, 1B0, 1B1
    2F0, 2B0, 2F1, 2B1
"""


@dataclass(frozen=True)
class Wrong:
    table: str
    fact: str
    """What the error says in its first line."""
    marked: str
    """The cells in brackets."""
    edges: Edges | None = None


TABLES = {
    "a forward is missing": Wrong(
        GOOD.replace("1F1", ""),
        "stage 1 needs 1F1 1B1, or 1F1 1I1 1W1 on rank 1; the table has 1B1",
        "1B1",
    ),
    "a micro-batch is left out everywhere": Wrong(
        """
        0F0, 0F2, 0B0, 0B2
        1F0, 1B0, 1F2, 1B2
        """,
        "stage 0 needs 0F1 0B1, or 0F1 0I1 0W1 on rank 0; the table has none of them",
        "0B2",
    ),
    "a stage has two homes": Wrong(
        """
        0F0, 0F1, 1B0, 1B1
        1F0, 1F1, 0B0, 0B1
        """,
        "1F0 stands on rank 1, but its stage is on rank 0",
        "1F0",
    ),
    "three ranks wait in a circle": Wrong(
        """
        0F0, 0B0, 0F1, 0B1
        1F0, 1F1, 1B0, 1B1
        2F0, 2B0, 2F1, 2B1
        """,
        "rank 0 waits at 0B0 for 1B0 on rank 1; rank 1 waits at 1F1 for 0F1 on rank 0; rank 2 waits at 2F1 for 1F1",
        "0B0 1F1 2F1",
    ),
    "two branches wait for each other through their join": Wrong(
        """
        0F1, 0B1, 0F0, 0B0
        1F0, 1B0, 1F1, 1B1
        2F0, 2B0, 2F1, 2B1
        """,
        "rank 0 waits at 0B1 for 2B1 on rank 2; rank 1 waits at 1B0 for 2B0 on rank 2; rank 2 waits at 2F0 for 0F0",
        "0B1 1B0 2F0",
        ((0, 2), (1, 2)),
    ),
    "the stages of one rank stand the wrong way round": Wrong(
        """
        2F0, 0F0, 2B0, 0B0
        1F0, 1B0
        """,
        "rank 0 waits at 2F0 for 1F0 on rank 1; rank 1 waits at 1F0 for 0F0 on rank 0",
        "1F0 2F0",
    ),
    "a backward stands before its forward": Wrong(
        GOOD.replace("1F1, 1B1", "1B1, 1F1"),
        "rank 0 waits at 0B1 for 1B1 on rank 1; rank 1 waits at 1B1 for 1F1 on rank 1",
        "0B1 1B1",
    ),
    "a weight gradient stands before its input gradient": Wrong(
        SPLIT.replace("0I0, 0W0", "0W0, 0I0"),
        "rank 0 waits at 0W0 for 0I0 on rank 0",
        "0W0",
    ),
    "a whole backward stands before the half that it waits for": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1F1, 1W0, 1I0, 1B1
        """,
        "rank 0 waits at 0B0 for 1I0 on rank 1; rank 1 waits at 1W0 for 1I0 on rank 1",
        "0B0 1W0",
    ),
    "a backward stands whole and in halves": Wrong(
        SPLIT.replace("1I1, 1W1", "1I1, 1B1, 1W1"),
        "stage 1 needs 1F1 1B1, or 1F1 1I1 1W1 on rank 1; the table has 1F1 1B1 1I1 1W1",
        "1B1 1F1 1I1 1W1",
    ),
    "edges in a circle": Wrong(
        GOOD,
        "rank 0 waits at 0F0 for 1F0 on rank 1; rank 1 waits at 1F0 for 0F0 on rank 0",
        "0F0 1F0",
        ((0, 1), (1, 0)),
    ),
    "an edge from a stage to itself": Wrong(GOOD, "rank 0 waits at 0F0 for 0F0 on rank 0", "0F0 1F0", ((0, 0), (0, 1))),
    "edges against the order of the table": Wrong(
        THREE,
        "rank 1 waits at 1F1 for 2F1 on rank 2; rank 2 waits at 2B0 for 1B0 on rank 1",
        "0B0 1F1 2B0",
        ((0, 2), (2, 1)),
    ),
}


def read(table: str, folder: Path, edges: Edges | None = None) -> Schedule:
    path = folder / "mine.csv"
    path.write_text("\n".join(line.strip(" ") for line in table.strip("\n").splitlines()).rstrip())
    return Schedule.from_csv(path, edges)


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        schedule.verify()
    return str(error.value)


def in_brackets(message: str) -> str:
    """The marked cells of the grid below the first line."""
    return " ".join(sorted(re.findall(r"\[([\w-]+)\]", message.split("\n", 1)[1])))


@pytest.mark.parametrize("table", [GOOD, SPLIT, THREE])
def test_the_tables_that_the_wrong_ones_are_made_of_are_right(table: str, tmp_path: Path) -> None:
    read(table, tmp_path).verify()


@pytest.mark.parametrize("wrong", TABLES.values(), ids=TABLES.keys())
def test_a_wrong_table_is_refused_with_the_cell_in_words_and_in_brackets(wrong: Wrong, tmp_path: Path) -> None:
    schedule = read(wrong.table, tmp_path, wrong.edges)
    message = refusal(schedule)
    assert wrong.fact in message.splitlines()[0]
    assert in_brackets(message) == wrong.marked
    cells = re.findall(r"\d+[FBIW]\d+", message.split("\n", 1)[1])
    assert sorted(cells) == sorted(str(action) for row in schedule.rows for action in row)


@pytest.mark.parametrize(
    ("changes", "fact", "marked"),
    [
        ({"backward": (False, True)}, "stage 0 has no backward, and needs 0F0 on rank 0; the table has 0F0 0B0", "0B0"),
        ({"microbatches": 3}, "stage 0 needs 0F2 0B2", "0B1"),
        ({"placement": (1, 1)}, "0F0 stands on rank 0, but its stage is on rank 1", "0F0"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_the_rest_are_refused(
    changes: dict[str, object], fact: str, marked: str, tmp_path: Path
) -> None:
    message = refusal(replace(read(GOOD, tmp_path), **changes))  # type: ignore[arg-type]
    assert fact in message.splitlines()[0]
    assert marked in in_brackets(message).split()


# --- any one cell of a right table taken away, doubled or moved ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cell_taken_away_doubled_or_moved_is_named(name: str) -> None:
    for schedule in examples(name):
        for rank, row in enumerate(schedule.rows):
            other = (rank + 1) % len(schedule.rows)
            for place, action in enumerate(row):
                left = (*row[:place], *row[place + 1 :])
                missing = refusal(with_row(schedule, rank, left))
                assert str(action) in missing.splitlines()[0]
                twice = refusal(with_row(schedule, rank, (*row[:place], action, *row[place:])))
                assert twice.startswith(f"{action} stands 2 times")
                assert in_brackets(twice) == f"{action} {action}"
                moved = with_row(schedule, other, (*schedule.rows[other], action))
                elsewhere = refusal(with_row(moved, rank, left))
                assert elsewhere.startswith(f"{action} stands on rank {other}, but its stage is on rank {rank}")
                assert in_brackets(elsewhere) == str(action)
                if action.kind is not Kind.F:
                    early = refusal(with_row(schedule, rank, (action, *left)))
                    assert f"rank {rank} waits at {action} for" in early.splitlines()[0]
                    assert str(action) in in_brackets(early).split()


def with_row(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> Schedule:
    return replace(schedule, rows=(*schedule.rows[:rank], row, *schedule.rows[rank + 1 :]))


# --- groups, and forwards that are run again ---

WRONG_GROUPS = {
    "a gradient before the whole group is there": (
        JOINED.replace("1F2 1F3 1B0", "1F2 1B0 1F3"),
        ("rank 1 waits at 1B0 for 4B0-3 on rank 4", "rank 4 waits at 4F0-3 for 1F3 on rank 1"),
    ),
    "groups of two sizes": (
        JOINED.replace("4B0-3", "4B0-1 4B2-3"),
        ("4F0-3 is no group of stage 4, which runs in groups of 2",),
    ),
    "a micro-batch alone beside groups": (JOINED.replace("4B0-3", "4B0"), ("4B0 is no group", "groups of 4")),
    "half of a group's backward": (
        RECOMPUTED.replace(" 4W2-3", ""),
        ("stage 4 needs 4F2-3 4B2-3, or 4F2-3 4I2-3 4W2-3 on rank 4; the table has 4F2-3 4I2-3",),
    ),
    "an R in front of its forward": (
        RECOMPUTED.replace("1F0 1F1 1F2 1F3 1R0", "1R0 1F0 1F1 1F2 1F3"),
        ("rank 1 waits at 1R0 for 1F0",),
    ),
}


@pytest.mark.parametrize(("rows", "facts"), WRONG_GROUPS.values(), ids=WRONG_GROUPS.keys())
def test_a_table_with_wrong_groups_is_refused(rows: str, facts: tuple[str, ...]) -> None:
    schedule = replace(joined(JOINED), rows=joined(rows).rows)
    message = refusal(schedule)
    for fact in facts:
        assert fact in message.splitlines()[0]
    assert in_brackets(message)


@pytest.mark.parametrize(
    ("rows", "fact"),
    [
        ("0F0 0F1 0F2 0B0 0B1 0B2\n1F0-1 1B0-1", "stage 1 needs 1F2-3 1B2-3"),  # of three
        ("0F0-1 0B0-1\n1F0 1F1 1B0 1B1", "stage 0 runs in groups of 2 micro-batches and feeds stage 1"),
        ("0F0-1 0F2-3 0B0-1 0B2-3\n1F0-3 1B0-3", "which runs in groups of 4; they need the same groups"),
    ],
)
def test_groups_divide_the_micro_batches_and_what_is_behind_them_has_the_same(rows: str, fact: str) -> None:
    assert fact in refusal(joined(rows, chain(2)))


def test_a_stage_that_gets_no_gradient_is_refused(tmp_path: Path) -> None:
    schedule = replace(read("0F0, 0B0\n1F0", tmp_path), backward=(True, False))
    assert "0B0 gets no gradient: stage 0 feeds 1, which has no backward" in refusal(schedule)


# --- tables disturbed at random ---


def disturbed(schedule: Schedule, draw: random.Random, cell: Callable[[], Action]) -> Schedule:
    """The table with up to three places changed: an action taken out, put in, or put in place of another."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw.randint(0, 3)):
        row = draw.choice(rows)
        place = draw.randint(0, len(row))
        row[place : place + draw.randint(0, 1)] = [cell() for _ in range(draw.randint(0, 1))]
    return replace(schedule, rows=tuple(map(tuple, rows)))


def test_whatever_is_wrong_with_a_table_is_a_schedule_error_and_it_can_still_be_printed() -> None:
    draw = random.Random(0)
    passed = 0
    for seed in range(200):
        graph = random_bare(seed, most=4, frozen=seed % 3 == 0)
        grouped = seed % 4 == 0
        schedule = joined(draw.choice([JOINED, RECOMPUTED])) if grouped else graph.build("1f1b", 1 + seed % 3)
        most = len(schedule.placement) - 1, schedule.microbatches - 1
        sizes = [1, 1, 2, 3, 4] if grouped else [1]

        def cell(most: tuple[int, int] = most, sizes: list[int] = sizes) -> Action:
            stage, microbatch = (draw.randint(0, one) for one in most)
            count = min(draw.choice(sizes), most[1] + 1 - microbatch)
            return Action(stage, draw.choice(list(KINDS.values())), microbatch, count)

        changed = disturbed(schedule, draw, cell)
        assert str(changed).count("\n") > len(schedule.rows)
        if changed.rows == schedule.rows:
            changed.verify()
            passed += 1
        else:
            try:
                changed.verify()
            except ScheduleError:
                continue
            assert network(changed, values_of(changed.edges, seed)).ends(0)
    assert passed > 30
