"""Messages of CSV files: those that fit neither their actions, nor a stage graph, nor each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, examples
from tests.thinned import every

Edges = tuple[tuple[int, int], ...]

MESSAGES = """
    0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1
    1RECV_F0, 1F0, 1B0, 1SEND_B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1
"""


TWO_FEED_ONE_RANK = """
    0F0, 0SEND_F0, 0SEND_F0
    1F0, 1SEND_F0, 1SEND_F0
    4RECV_F0, 2RECV_F0, 4RECV_F0, 3RECV_F0, 2F0, 3F0, 4F0
"""


FEEDS: Edges = ((0, 4), (0, 2), (1, 4), (1, 3))
"""Ranks 0 and 1 both send to stage 4 first; then one of them to stage 2, the other to stage 3, all on rank 2."""


@dataclass(frozen=True)
class Exchange:
    """What is edited in a right file, and what the error says."""

    old: str
    new: str
    told: str
    table: str = MESSAGES
    edges: Edges = ((0, 1),)


ODD = {
    "crossed sends": Exchange(
        "0SEND_F0, 0F1, 0SEND_F1",
        "0F1, 0SEND_F1, 0SEND_F0",
        "line 2, cell 1: '1RECV_F0', but rank 0 sends '0SEND_F1' (line 1, cell 3) first",
    ),
    "crossed sends of gradients": Exchange(
        "1B0, 1SEND_B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1",
        "1B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1, 1SEND_B0",
        "line 1, cell 5: '0RECV_B0', but rank 1 sends '1SEND_B1' (line 2, cell 7) first",
    ),
    "crossed receives": Exchange(
        "1RECV_F0, 1F0, 1B0, 1SEND_B0, 1RECV_F1",
        "1RECV_F1, 1RECV_F0, 1F0, 1B0, 1SEND_B0",
        "line 2, cell 1: '1RECV_F1', but rank 0 sends '0SEND_F0' (line 1, cell 2) first",
    ),
    "a send in front of its action": Exchange(
        "0F1, 0SEND_F1", "0SEND_F1, 0F1", "line 1, cell 3: '0SEND_F1' stands in front of 0F1, which makes what it sends"
    ),
    "a send of a gradient in front of its action": Exchange(
        "1B0, 1SEND_B0", "1SEND_B0, 1B0", "line 2, cell 3: '1SEND_B0' stands in front of 1B0, which makes what it sends"
    ),
    "a receive behind its use": Exchange(
        "1RECV_F1, 1F1", "1F1, 1RECV_F1", "line 2, cell 6: '1RECV_F1' stands behind 1F1, which needs it"
    ),
    "a receive of a gradient behind its use": Exchange(
        "0RECV_B1, 0B1", "0B1, 0RECV_B1", "line 1, cell 8: '0RECV_B1' stands behind 0B1, which needs it"
    ),
    "a send of what nobody made": Exchange(
        "0F1, 0SEND_F1", "0SEND_F1", "line 1, cell 3: '0SEND_F1', but its line has no 0F1 to make what it sends"
    ),
    "a receive of what nobody needs": Exchange(
        "0RECV_B1, 0B1", "0RECV_B1", "line 1, cell 7: '0RECV_B1', but its line has no 0B1 or 0I1 to need it"
    ),
    "a send that nobody receives": Exchange(
        "1RECV_F1, ", "", "line 1, cell 4: '0SEND_F1' is received by nobody: rank 1 has no 1RECV_F1 for it"
    ),
    "a receive that nobody sends": Exchange(
        "1SEND_B0, ", "", "line 1, cell 5: '0RECV_B0' is sent by nobody: rank 1 has no 1SEND_B0 for it"
    ),
    "a send that stands twice": Exchange(
        "0SEND_F0, ",
        "0SEND_F0, 0SEND_F0, ",
        "line 1, cell 3: '0SEND_F0' is received by nobody: only edge 0-1 carries it",
    ),
    "a receive of another micro-batch": Exchange(
        "0RECV_B0, 0B0", "0RECV_B1, 0B0", "line 1, cell 7: '0RECV_B1' is sent by nobody: only edge 0-1 carries it"
    ),
    "a send of the last stage": Exchange(
        "1F1, 1B1", "1F1, 1SEND_F1, 1B1", "line 2, cell 7: '1SEND_F1' is received by nobody: no edge carries it"
    ),
    "one of two senders' messages out of turn": Exchange(
        "4RECV_F0, 2RECV_F0, 4RECV_F0, 3RECV_F0",
        "2RECV_F0, 4RECV_F0, 4RECV_F0, 3RECV_F0",
        "line 3, cell 1: '2RECV_F0', but rank 0 sends '0SEND_F0' (line 1, cell 2) first",
        TWO_FEED_ONE_RANK,
        FEEDS,
    ),
    "a receive that two senders would need": Exchange(
        "4RECV_F0, 2RECV_F0, 4RECV_F0, 3RECV_F0",
        "4RECV_F0, 2RECV_F0, 3RECV_F0, 4RECV_F0",
        "line 3, cell 3: '3RECV_F0', but rank 1 sends '1SEND_F0' (line 2, cell 2) first",
        TWO_FEED_ONE_RANK,
        FEEDS,
    ),
}


def read(table: str, folder: Path, edges: Edges | None = None) -> Schedule:
    path = folder / "mine.csv"
    path.write_text("\n".join(line.strip(" ") for line in table.strip("\n").splitlines()).rstrip())
    return Schedule.from_csv(path, edges)


def unread(table: str, folder: Path, edges: Edges | None) -> str:
    with pytest.raises(ScheduleError) as error:
        read(table, folder, edges)
    return str(error.value)


@pytest.mark.parametrize(
    ("table", "edges"), [(MESSAGES, None), (MESSAGES, ((0, 1),)), (TWO_FEED_ONE_RANK, None), (TWO_FEED_ONE_RANK, FEEDS)]
)
def test_the_files_that_the_odd_ones_are_made_of_are_right(table: str, edges: Edges | None, tmp_path: Path) -> None:
    read(table, tmp_path, edges).verify()


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_a_file_whose_messages_do_not_fit_is_refused_with_line_and_cell(odd: Exchange, tmp_path: Path) -> None:
    edited = odd.table.replace(odd.old, odd.new, 1)
    assert edited != odd.table
    assert f"mine.csv, {odd.told}" in unread(edited, tmp_path, odd.edges)


@pytest.mark.parametrize("odd", [odd for odd in ODD.values() if odd.table == MESSAGES], ids=lambda odd: odd.told[:30])
def test_so_is_a_chains_whose_edges_are_not_given(odd: Exchange, tmp_path: Path) -> None:
    assert odd.told in unread(odd.table.replace(odd.old, odd.new, 1), tmp_path, None)


def test_who_gave_no_edges_is_told_which_were_assumed(tmp_path: Path) -> None:
    odd = ODD["crossed sends"]
    edited = odd.table.replace(odd.old, odd.new)
    assert unread(edited, tmp_path, None).endswith("; no edges are given, so the stages are taken for a chain")
    assert "taken for a chain" not in unread(edited, tmp_path, odd.edges)


def test_without_edges_the_order_of_another_graphs_messages_is_not_checked_but_their_number_is(tmp_path: Path) -> None:
    odd = ODD["one of two senders' messages out of turn"]
    read(odd.table.replace(odd.old, odd.new), tmp_path)
    told = unread(odd.table.replace("2RECV_F0, ", ""), tmp_path, None)
    assert "line 1, cell 2: '0SEND_F0': micro-batch 0 has 4 cells SEND_F, but 3 cells RECV_F; give edges" in told


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        ((), "line 1, cell 2: '0SEND_F0' is received by nobody: no edge carries it"),
        (((1, 0),), "line 1, cell 2: '0SEND_F0' is received by nobody: no edge carries it"),
        (((0, 1), (0, 1)), "line 1, cell 1: '0F0' has neither a 0SEND_F0 nor a 1RECV_F0 for edge 0-1"),
    ],
)
def test_edges_that_the_messages_do_not_fit_are_refused(edges: Edges, told: str, tmp_path: Path) -> None:
    assert told in unread(MESSAGES, tmp_path, edges)


def test_edges_may_be_an_iterator(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0SEND_F0\n1F0\n2RECV_F0,2F0")
    schedule = Schedule.from_csv(tmp_path / "mine.csv", iter([(0, 2)]))
    assert schedule.edges == ((0, 2),)


@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_a_message_taken_away_doubled_or_beyond_its_action_is_refused(name: str, tmp_path: Path) -> None:
    for schedule in examples(name):
        schedule.to_csv(tmp_path / "right.csv", communication=True)
        lines = [line.split(",") for line in (tmp_path / "right.csv").read_text().splitlines()]
        for rank, line in enumerate(lines):
            for place, cell in enumerate(line):
                if "_" in cell:
                    others = [*line[:place], *line[place + 1 :]]
                    beyond = [cell, *others] if "SEND" in cell else [*others, cell]
                    for edited in (others, [*line[:place], cell, *line[place:]], beyond):
                        text = "\n".join(map(",".join, (*lines[:rank], edited, *lines[rank + 1 :])))
                        told = unread(text, tmp_path, schedule.edges)
                        assert cell in told


def test_a_crossing_behind_many_equal_cells_is_seen(tmp_path: Path) -> None:
    """14 senders, all of whose messages to stage 14 have the same cell: 3,432 ways to tell half of them apart."""
    senders = 14
    edges = [(one, target) for one in range(senders) for target in (senders, senders + 1 + one)]
    placement = [*range(senders), *[senders] * (senders + 1)]
    path, frozen = tmp_path / "table.csv", [False] * len(placement)
    build("gpipe", edges, 2, placement, backward=frozen).to_csv(path, communication=True)
    *lines, last = path.read_text().split()
    actions = [cell for cell in last.split(",") if cell and "RECV" not in cell]
    equal, others = ([[f"{stage}RECV_F{j}" for stage in stages] for j in (0, 1)] for stages in (
        [senders] * senders, range(senders + 1, 2 * senders + 1)
    ))  # fmt: skip

    def read(receives: list[str]) -> Schedule:
        path.write_text("\n".join([*lines, ",".join(receives + actions)]) + "\n")
        return Schedule.from_csv(path, edges)

    assert read([*equal[0], *others[0], *equal[1], *others[1]]).microbatches == 2
    with pytest.raises(ScheduleError, match=r"'15RECV_F1', but rank 0 sends '0SEND_F0' .* first"):
        read([*equal[0], others[1][0], *others[0], *equal[1], *others[1][1:]])
