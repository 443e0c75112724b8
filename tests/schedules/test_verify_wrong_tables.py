"""Wrong tables of many kinds, most as a file that somebody edited: each is refused, and the cell is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.lower import Instruction, Receive, Send
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import Machine
from tests.graphs import FAMILIES, chain, examples, random_bare

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
    "a forward is missing that another rank waits for": Wrong(
        """
        0F0, 0B0, 0B1
        1F0, 1B0, 1F1, 1B1
        """,
        "0F1 is missing; 0B1 on rank 0 waits for 0F1 on rank 0",
        "0B1",
    ),
    "a forward is missing at the last stage": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 1B1
        """,
        "1F1 is missing; 1B1 on rank 1 waits for 1F1 on rank 1",
        "1B1",
    ),
    "a backward is missing that another rank waits for": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 1F1
        """,
        "stage 1 needs 1B1, or 1I1 and 1W1; the table has neither; 0B1 on rank 0 waits for 1B1 on rank 1",
        "0B1",
    ),
    "a backward is missing that nobody waits for": Wrong(
        """
        0F0, 0F1, 0B0
        1F0, 1B0, 1F1, 1B1
        """,
        "stage 0 needs 0B1, or 0I1 and 0W1; the table has neither; it belongs on rank 0",
        "0F1",
    ),
    "a micro-batch is left out everywhere": Wrong(
        """
        0F0, 0F2, 0B0, 0B2
        1F0, 1B0, 1F2, 1B2
        """,
        "0F1 is missing; it belongs on rank 0",
        "0B2",
    ),
    "a row ends early": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0
        """,
        "1F1 is missing; it belongs on rank 1",
        "1B0",
    ),
    "an action stands twice": Wrong(
        """
        0F0, 0F1, 0F1, 0B0, 0B1
        1F0, 1B0, 1F1, 1B1
        """,
        "0F1 stands 2 times in the table",
        "0F1 0F1",
    ),
    "an action stands three times": Wrong(
        """
        0F0, 0F1, 0B0, 0B1, 0B1, 0B1
        1F0, 1B0, 1F1, 1B1
        """,
        "0B1 stands 3 times in the table",
        "0B1 0B1 0B1",
    ),
    "an action stands on two ranks": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 0B0, 1F1, 1B1
        """,
        "0B0 stands on rank 1, but its stage is on rank 0",
        "0B0 0B0",
    ),
    "an action stands on the wrong rank": Wrong(
        """
        0F0, 0F1, 1B1, 0B0, 0B1
        1F0, 1B0, 1F1
        """,
        "1B1 stands on rank 0, but its stage is on rank 1",
        "1B1",
    ),
    "a stage has two homes": Wrong(
        """
        0F0, 0F1, 1B0, 1B1
        1F0, 1F1, 0B0, 0B1
        """,
        "1F0 stands on rank 1, but its stage is on rank 0",
        "1F0",
    ),
    "two ranks wait for each other": Wrong(
        """
        0F0, 0B0, 0F1, 0B1
        1F0, 1F1, 1B0, 1B1
        """,
        "rank 0 waits at 0B0 for 1B0 on rank 1; rank 1 waits at 1F1 for 0F1 on rank 0",
        "0B0 1F1",
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
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 1B1, 1F1
        """,
        "rank 0 waits at 0B1 for 1B1 on rank 1; rank 1 waits at 1B1 for 1F1 on rank 1",
        "0B1 1B1",
    ),
    "a weight gradient stands before its input gradient": Wrong(
        SPLIT.replace("0I0, 0W0", "0W0, 0I0"),
        "rank 0 waits at 0W0 for 0I0 on rank 0",
        "0W0",
    ),
    "a weight gradient has no input gradient": Wrong(
        SPLIT.replace("1I1, 1W1", "1W1"),
        "stage 1 needs 1B1, or 1I1 and 1W1; the table has 1W1; 0I1 on rank 0 waits for 1B1 on rank 1",
        "0I1",
    ),
    "an input gradient has no weight gradient": Wrong(
        SPLIT.replace("0I0, 0W0", "0I0"),
        "stage 0 needs 0B0, or 0I0 and 0W0; the table has 0I0",
        "0I0",
    ),
    "a backward stands whole and in halves": Wrong(
        SPLIT.replace("1I1, 1W1", "1I1, 1B1, 1W1"),
        "stage 1 needs 1B1, or 1I1 and 1W1; the table has 1B1, 1I1, 1W1",
        "1B1 1I1 1W1",
    ),
    "a backward stands whole beside one half": Wrong(
        SPLIT.replace("1I1, 1W1", "1B1, 1W1"),
        "stage 1 needs 1B1, or 1I1 and 1W1; the table has 1B1, 1W1",
        "1B1 1W1",
    ),
    "a stage too many": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 2F0, 1F1, 1B1
        """,
        "2F1 is missing; it belongs on rank 1",
        "1B1",
    ),
    "a micro-batch that the others do not have": Wrong(
        """
        0F0, 0F1, 0B0, 0B1
        1F0, 1B0, 1F1, 1F2, 1B1
        """,
        "0F2 is missing; 1F2 on rank 1 waits for 0F2 on rank 0",
        "1F2",
    ),
    "a stage that has backwards for some micro-batches": Wrong(
        """
        0F0, 0F1, 0B1
        1F0, 1F1
        """,
        "stage 0 needs 0B0, or 0I0 and 0W0; the table has neither; it belongs on rank 0",
        "0F0",
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
    return " ".join(sorted(re.findall(r"\[(\w+)\]", message.split("\n", 1)[1])))


@pytest.mark.parametrize("table", [GOOD, SPLIT, THREE])
def test_the_tables_that_the_wrong_ones_are_made_of_are_right(table: str, tmp_path: Path) -> None:
    read(table, tmp_path).verify()


@pytest.mark.parametrize("wrong", TABLES.values(), ids=TABLES.keys())
def test_a_wrong_table_is_refused_with_the_cell_in_words_and_in_brackets(wrong: Wrong, tmp_path: Path) -> None:
    message = refusal(read(wrong.table, tmp_path, wrong.edges))
    assert wrong.fact in message.splitlines()[0]
    assert in_brackets(message) == wrong.marked


@pytest.mark.parametrize("wrong", TABLES.values(), ids=TABLES.keys())
def test_a_wrong_table_is_not_written_with_messages(wrong: Wrong, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError):
        read(wrong.table, tmp_path, wrong.edges).to_csv(tmp_path / "again.csv", communication=True)
    assert not (tmp_path / "again.csv").exists()


# --- what is wrong beside the rows ---


@pytest.mark.parametrize(
    ("changes", "fact", "marked"),
    [
        ({"backward": (False, True)}, "stage 0 has no backward, but 0B0 is in the table", "0B0"),
        ({"backward": (True, False)}, "stage 1 has no backward, but 1B0 is in the table", "1B0"),
        ({"microbatches": 1}, "0F1 is of a micro-batch outside of 0..0", "0F1"),
        ({"microbatches": 3}, "0F2 is missing; it belongs on rank 0", "0B1"),
        ({"placement": (1, 1)}, "0F0 stands on rank 0, but its stage is on rank 1", "0F0"),
        ({"placement": (0,), "backward": (True,), "edges": ()}, "1F0 is of a stage outside of 0..0", "1F0"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_the_rest_are_refused(
    changes: dict[str, object], fact: str, marked: str, tmp_path: Path
) -> None:
    message = refusal(replace(read(GOOD, tmp_path), **changes))  # type: ignore[arg-type]
    assert fact in message.splitlines()[0]
    assert in_brackets(message) == marked


# --- any one cell of a right table taken away, doubled or moved ---


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cell_taken_away_is_named(name: str) -> None:
    for schedule in examples(name):
        for rank, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                rows = with_row(schedule, rank, (*row[:place], *row[place + 1 :]))
                assert str(action) in refusal(replace(schedule, rows=rows)).splitlines()[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cell_written_twice_is_named_and_marked(name: str) -> None:
    for schedule in examples(name):
        for rank, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                rows = with_row(schedule, rank, (*row[:place], action, *row[place:]))
                message = refusal(replace(schedule, rows=rows))
                assert message.startswith(f"{action} stands 2 times")
                assert in_brackets(message) == f"{action} {action}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cell_on_another_rank_is_named_and_marked(name: str) -> None:
    for schedule in examples(name):
        for rank, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                other = (rank + 1) % len(schedule.rows)
                rows = list(with_row(schedule, rank, (*row[:place], *row[place + 1 :])))
                rows[other] = (*rows[other], action)
                message = refusal(replace(schedule, rows=tuple(rows)))
                assert message.startswith(f"{action} stands on rank {other}, but its stage is on rank {rank}")
                assert in_brackets(message) == str(action)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_backward_moved_to_the_front_of_its_row_is_marked(name: str) -> None:
    for schedule in examples(name):
        for rank, row in enumerate(schedule.rows):
            for place, action in enumerate(row):
                if action.op is not Op.F:
                    rows = with_row(schedule, rank, (action, *row[:place], *row[place + 1 :]))
                    message = refusal(replace(schedule, rows=rows))
                    assert f"rank {rank} waits at {action} for" in message.splitlines()[0]
                    assert str(action) in in_brackets(message).split()


def with_row(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> tuple[tuple[Action, ...], ...]:
    return (*schedule.rows[:rank], row, *schedule.rows[rank + 1 :])


# --- instructions that lowering would not make ---


def halted(schedule: Schedule, instructions: Sequence[Sequence[Instruction]]) -> tuple[list[str], str]:
    """The cells at which ranks wait, and why; or else the message that has one end."""
    machine = Machine(instructions, schedule.links, schedule.backward)
    for _ in machine.run():
        pass
    stuck = machine.stuck()
    cells = [str(action) for one in stuck for action in one.cells]
    return cells, "; ".join(one.reason for one in stuck) or str(machine.unmatched())


@pytest.mark.parametrize("name", FAMILIES)
def test_two_receives_of_one_sender_that_cross_are_a_halt(name: str) -> None:
    """Messages between two ranks arrive in the order in which they are sent, whatever their receives ask for."""
    crossed = 0
    for seed in range(20):
        schedule = random_bare(seed).build(name, 3)
        for rank, row in enumerate(schedule.instructions):
            places = [place for place, step in enumerate(row) if isinstance(step, Receive)]
            for first, second in pairwise(places):
                one, two = row[first], row[second]
                assert isinstance(one, Receive)
                assert isinstance(two, Receive)
                if one.message.sender == two.message.sender:
                    cells, reason = halted(schedule, exchanged(schedule, rank, first, second))
                    assert cells
                    assert f"rank {rank} waits" in reason
                    crossed += 1
    assert crossed > 50


def test_crossed_sends_name_both_messages_and_the_cell_that_waits() -> None:
    schedule = build("gpipe", chain(2), 2)
    row = schedule.instructions[0]
    first, second = (place for place, step in enumerate(row) if isinstance(step, Send))
    late = (*row[:first], *row[first + 1 : second + 1], row[first], *row[second + 1 :])
    cells, reason = halted(schedule, (late, schedule.instructions[1]))
    assert cells == ["0B0", "1F0"]
    assert "rank 1 waits at 1F0 for the value 0 of micro-batch 0 from rank 0 to rank 1" in reason
    assert "the value 0 of micro-batch 1 from rank 0 to rank 1 is sent where the value 0 of micro-batch 0" in reason


def test_a_receive_that_is_left_out_is_told_by_its_message() -> None:
    """The second one has somebody who waits: rank 0 does, to free the buffer that it sent from."""
    schedule = build("gpipe", chain(2), 1)
    told = [
        "gradient 0 of micro-batch 0 from rank 1 to rank 0",
        "rank 0 waits for the value 0 of micro-batch 0 from rank 0 to rank 1",
    ]
    for rank, reason in enumerate(told):
        row = schedule.instructions[rank]
        (place,) = (place for place, step in enumerate(row) if isinstance(step, Receive))
        changed = list(schedule.instructions)
        changed[rank] = (*row[:place], *row[place + 1 :])
        assert halted(schedule, changed) == ([], reason)


def test_a_send_that_is_left_out_is_a_halt_at_the_cell_that_needs_it() -> None:
    schedule = build("gpipe", chain(2), 1)
    row = schedule.instructions[1]
    cells, reason = halted(schedule, (schedule.instructions[0], tuple(s for s in row if not isinstance(s, Send))))
    assert cells == ["0B0"]
    assert "rank 0 waits at 0B0 for the gradient 0 of micro-batch 0 from rank 1 to rank 0" in reason


def exchanged(schedule: Schedule, rank: int, first: int, second: int) -> list[Sequence[Instruction]]:
    instructions: list[Sequence[Instruction]] = list(schedule.instructions)
    row = list(instructions[rank])
    row[first], row[second] = row[second], row[first]
    instructions[rank] = row
    return instructions
