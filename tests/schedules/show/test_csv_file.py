"""CSV files: tables drawn by hand, the way there and back, torch's other cells, and what is no table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import (
    FAMILIES,
    JOINED,
    RECOMPUTED,
    WORKED,
    Bare,
    bare,
    branches,
    chain,
    examples,
    joined,
    random_bare,
    whole_table,
)
from tests.thinned import in_turn, pairwise

GRAPHS: dict[str, Bare] = {
    "one stage": bare((), 1),
    "chain of 4": bare(chain(4), 4),
    "worked example": bare(WORKED, 5),
    "3 branches of 2": bare(branches(3, 2), 7),
    "skip over two stages": bare((*chain(4), (0, 3)), 4),
    "an edge given twice": bare(((0, 1), (0, 1)), 2),
    "two stages on the rank that one feeds": bare(((0, 1), (0, 2), (0, 1)), 3, (0, 1, 1)),
    "two ranks feed two stages on one": bare(((0, 3), (1, 3), (1, 2), (0, 2), (0, 3)), 4, (0, 1, 2, 2)),
    "stages that nothing connects": bare((), 3),
    "all on one rank": bare(WORKED, 5, (0, 0, 0, 0, 0)),
    "6 stages on 3 ranks in turns": bare(chain(6), 6, (0, 1, 2, 0, 1, 2)),
    "6 stages back and forth": bare(chain(6), 6, (0, 1, 2, 2, 1, 0)),
    "frozen first stage": bare(chain(3), 3, frozen=frozenset([0])),
    "frozen tower": bare(WORKED, 5, frozen=frozenset([2, 3])),
    "nothing to train": bare(chain(3), 3, frozen=frozenset([0, 1, 2])),
    **{f"random {seed}": random_bare(seed, frozen=seed % 2 == 1) for seed in range(4)},
}


def written(schedule: Schedule, folder: Path, communication: bool = False) -> str:
    path = folder / "table.csv"
    schedule.to_csv(path, communication)
    return path.read_bytes().decode()


def read(text: str | bytes, folder: Path, edges: tuple[tuple[int, int], ...] | None = None) -> Schedule:
    path = folder / "mine.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Schedule.from_csv(path, edges)


def rows_of(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


# --- drawn by hand ---


DRAWN: dict[str, tuple[str, str]] = {
    "compute alone is aligned by step": ("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", ""),
    "a message is a cell at both ends": (
        "0F0,,,0B0\n,1F0,1B0,\n",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    ),
    "the first half of a backward sends": (
        "0F0,,,0I0,0W0\n,1F0,1I0,1W0,\n",
        "0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0\n",
    ),
}


@pytest.mark.parametrize(("compute", "with_messages"), DRAWN.values(), ids=DRAWN.keys())
def test_a_table_drawn_by_hand_is_written_as_it_was(compute: str, with_messages: str, tmp_path: Path) -> None:
    schedule = read(compute, tmp_path)
    assert written(schedule, tmp_path) == compute
    assert not with_messages or written(schedule, tmp_path, communication=True) == with_messages


def test_a_table_that_halts_is_written_for_its_author_to_mend_but_not_with_messages(tmp_path: Path) -> None:
    schedule = read("0F0,0B0\n1B0,1F0", tmp_path)
    assert written(schedule, tmp_path) == "0F0,0B0\n1B0,1F0\n"
    with pytest.raises(ScheduleError, match="rank 1 waits at 1B0"):
        schedule.to_csv(tmp_path / "table.csv", communication=True)


@pytest.mark.parametrize(("kind", "name"), in_turn(list(GRAPHS), FAMILIES))
def test_a_cell_stands_in_the_column_where_the_printed_table_has_it(kind: str, name: str, tmp_path: Path) -> None:
    schedule = GRAPHS[kind].build(name, 4)
    head, _, *lines = whole_table(schedule).splitlines()[: len(schedule.rows) + 2]
    steps = [match.start() for match in re.finditer(r"\b\d+\b", head)]
    for row, line in zip(written(schedule, tmp_path).splitlines(), lines, strict=True):
        columns = {match.start(): match[0] for match in re.finditer(r"\b\d+[FBIW]\d+\b", line)}
        assert row.split(",") == [columns.get(step, "") for step in steps]


# --- there and back ---


@pytest.mark.parametrize(("communication", "kind", "name"), pairwise([False, True], list(GRAPHS), FAMILIES))
def test_what_was_written_is_read_back(name: str, kind: str, communication: bool, tmp_path: Path) -> None:
    graph = GRAPHS[kind]
    for m in (1, 5):
        schedule = graph.build(name, m)
        text = written(schedule, tmp_path, communication)
        again = read(text, tmp_path, graph.edges)
        assert again.rows == schedule.rows
        assert again.edges == schedule.edges
        assert again.placement == schedule.placement
        assert again.backward == schedule.backward
        assert again.microbatches == m
        again.verify()
        assert written(again, tmp_path, communication) == text
        assert read(text, tmp_path).rows == schedule.rows  # its messages are then of another graph


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_rank_without_actions_is_a_line(communication: bool, idle: int, tmp_path: Path) -> None:
    rows: list[Row] = [(Action(0, Kind.F, 0), Action(0, Kind.B, 0)), (Action(1, Kind.F, 0), Action(1, Kind.B, 0))]
    rows.insert(idle, ())
    placement = tuple(rank for rank in range(3) if rank != idle)
    schedule = Schedule(tuple(rows), ((0, 1),), placement, (True, True), 1)
    assert read(written(schedule, tmp_path, communication), tmp_path).rows == schedule.rows


def test_every_cell_of_a_file_with_messages_has_its_other_end(tmp_path: Path) -> None:
    for graph in GRAPHS.values():
        text = written(graph.build("zb_h1", 3), tmp_path, communication=True)
        cells = re.findall(r"(\d+)(SEND|RECV)_([FB])(\d+)", text)
        crossing = [(a, b) for a, b in graph.edges if graph.placement[a] != graph.placement[b]]
        wanted = []
        for a, b in crossing:
            for j in range(3):
                wanted += [(str(a), "SEND", "F", str(j)), (str(b), "RECV", "F", str(j))]
                if graph.backward[a]:
                    wanted += [(str(b), "SEND", "B", str(j)), (str(a), "RECV", "B", str(j))]
        assert sorted(cells) == sorted(wanted)


# --- what reading makes of a file ---


def test_edges_are_a_chain_unless_given(tmp_path: Path) -> None:
    text = "0F0,0B0\n1F0,1B0\n2F0,2B0"
    assert read(text, tmp_path).edges == ((0, 1), (1, 2))
    assert read(text, tmp_path, ((0, 2), (1, 2))).edges == ((0, 2), (1, 2))
    with pytest.raises(ScheduleError, match="edge 0-3 names a stage outside"):
        read(text, tmp_path, ((0, 3),))


def test_a_stage_with_no_b_i_or_w_has_no_backward(tmp_path: Path) -> None:
    schedule = read("0F0\n1F0,1B0\n2F0,2I0,2W0", tmp_path)
    assert schedule.backward == (False, True, True)
    schedule.verify()


def test_whole_and_split_backwards_may_be_mixed(tmp_path: Path) -> None:
    schedule = read("0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1B1,1W0", tmp_path)
    schedule.verify()
    assert schedule.microbatches == 2


def test_a_stage_is_on_the_rank_that_has_most_of_it_so_that_verify_names_the_stray_cell(tmp_path: Path) -> None:
    schedule = read("0F0,0F1,0B0,1B1,0B1\n1F0,1B0,1F1", tmp_path)
    assert schedule.placement == (0, 1)
    with pytest.raises(ScheduleError, match="1B1 stands on rank 0, but its stage is on rank 1"):
        schedule.verify()


PLAIN = "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        PLAIN.replace("\n", "\r\n").encode(),
        PLAIN.replace("\n", "\r").encode(),
        PLAIN.rstrip("\n").encode(),
        PLAIN.encode() + b"\n\n  \r\n",
        b" 0F0 , , , 0B0\n , 1F0 ,1B0 \t,\n",
        b'"0F0","","","0B0"\n"","1F0","1B0",""\n',
        b"00F0,,,0B00\n,1F0,01B0\n",
    ],
    ids="plain bom crlf cr no-newline empty-lines spaces quotes zeros".split(),
)
def test_how_an_editor_saved_it_does_not_matter(text: bytes, tmp_path: Path) -> None:
    assert rows_of(read(text, tmp_path)) == ["0F0 0B0", "1F0 1B0"]


def test_torchs_other_cells_are_dropped_and_overlaps_are_their_actions_in_order(tmp_path: Path) -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD"
    schedule = read(text, tmp_path)
    assert rows_of(schedule) == ["0F0 0B0", "1F0 1B0"]
    assert schedule.name == "mine"  # the file's
    schedule.verify()
    schedule = read("0F0,(0F1;0B0)OVERLAP_F_B,( 0I1 ; 0W1 )OVERLAP_F_B", tmp_path)
    assert rows_of(schedule) == ["0F0 0F1 0B0 0I1 0W1"]


# --- what is no table ---

NO_CELLS = "hello 1f0 1F1-0 [1F0] \u0662F0 1SEND_F0-1 1UNSHARD3 (1F0;1SEND_B0)OVERLAP_F_B ()OVERLAP_F_B".split()
NO_CELL = r"mine\.csv, line 2, cell 2: '.*' is no action; write <stage><F, R, B, I"
NO_ACTION = r"mine\.csv holds no action; write a line per rank, as in 0F0,0F1"
NO_TEXT = r"mine\.csv is no CSV file in UTF-8"
LEFT_OUT = r"mine\.csv has no action of stage {}; stages count from 0"
NO_TABLES: list[tuple[str | bytes, str]] = [
    *((f"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,{cell},1B0,1SEND_B0\n", NO_CELL) for cell in NO_CELLS),
    *((text, NO_ACTION) for text in ("", "\n\n", ",,\n,", "0UNSHARD", "\ufeff", "0SEND_F0")),
    *((text, NO_TEXT) for text in (b"\x89PNG\r\n\x1a\n\0\0", "0F0,0B0".encode("utf-16"), b'0F0,0B0\n"1F0,1B0')),
    ("0F0,0B0\n2F0,2B0", LEFT_OUT.format(1)),
    ("1F0\n2F0", LEFT_OUT.format(0)),
    ("0F0,999999999F0", LEFT_OUT.format(1)),
    ("0F0,0F999999999", "stage 0 has no backward, and needs 0F1"),
]


@pytest.mark.parametrize(("content", "told"), NO_TABLES)
def test_what_is_no_table_is_told_with_its_place_and_what_to_write(
    content: str | bytes, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ScheduleError, match=told):
        read(content, tmp_path).verify()


def test_a_file_that_does_not_end_or_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is no regular file: '/dev/zero'"):
        Schedule.from_csv("/dev/zero")
    with pytest.raises(FileNotFoundError):
        Schedule.from_csv(tmp_path / "none.csv")
    with pytest.raises(FileNotFoundError):
        build("gpipe", (), 1).to_csv(tmp_path / "none" / "table.csv")
    with pytest.raises(IsADirectoryError):
        Schedule.from_csv(tmp_path)


@pytest.mark.parametrize("form", ["to_csv", "to_svg", "to_html", "to_trace"])
def test_a_file_that_is_read_meanwhile_stays_whole(form: str, tmp_path: Path) -> None:
    """All ranks of a program write it, and read it."""
    path = tmp_path / "table"
    getattr(build("gpipe", (), 1), form)(path)
    wanted = path.read_text()
    with path.open() as reader:
        getattr(build("1f1b", chain(3), 3), form)(path)
        assert (reader.read(), [*tmp_path.iterdir()]) == (wanted, [path])
    assert path.read_text() != wanted


def test_a_link_and_a_device_are_written_in_their_place(tmp_path: Path) -> None:
    link, schedule = tmp_path / "link.csv", build("gpipe", (), 1)
    link.symlink_to("table.csv")
    schedule.to_csv(link)
    assert (tmp_path / "table.csv").read_text() == written(schedule, tmp_path)
    assert link.is_symlink()
    schedule.to_csv("/dev/null")
    assert not Path("/dev/null").is_file()


def test_what_a_schedule_shares_is_not_in_the_file(tmp_path: Path) -> None:
    """Reductions follow from the model: fxpipe.compile puts them in."""
    schedule = replace(build("1f1b", chain(2), 2), tied=((0, 1),))
    assert read(written(schedule, tmp_path, communication=True), tmp_path).tied == ()


@pytest.mark.parametrize("rows", [JOINED, RECOMPUTED])
@pytest.mark.parametrize("communication", [False, True], ids=["compute", "communication"])
def test_groups_and_forwards_run_again_are_read_back(rows: str, communication: bool, tmp_path: Path) -> None:
    schedule = joined(rows)
    again = read(written(schedule, tmp_path, communication), tmp_path, WORKED)
    assert (again.rows, again.microbatches, again.groups) == (schedule.rows, 4, schedule.groups)
    again.verify()


# --- messages of a line that are not its rank's in the lowered table ---

MESSAGES = """0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("0SEND_F0,", "", "line 1: .* rank 0 .*too many: none; missing: 0SEND_F0"),
        ("0RECV_B0", "0RECV_B1", "line 1: .*too many: 0RECV_B1; missing: 0RECV_B0"),
        ("1SEND_B0", "9SEND_B0", "line 2: .* rank 1 .*too many: 9SEND_B0; missing: 1SEND_B0"),
    ],
)
def test_a_line_that_differs_from_the_lowered_table_is_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    edited = MESSAGES.replace(old, new, 1)
    with pytest.raises(ScheduleError, match=rf"mine\.csv, {told}; mend the line, or edges="):
        read(edited, tmp_path, ((0, 1),))


def test_messages_out_of_turn_are_lowered_anew_from_the_actions(tmp_path: Path) -> None:
    """Who runs the table sends in the order of its actions, whatever the order in the file was."""
    for schedule in examples("zb_h1"):
        lines = [line.split(",") for line in written(schedule, tmp_path, communication=True).splitlines()]
        turned = [sorted(line, key=lambda cell: "_" not in cell) for line in lines]
        again = read("\n".join(map(",".join, turned)), tmp_path, schedule.edges)
        assert again.instructions == schedule.instructions


def test_edges_that_the_messages_do_not_fit_are_refused_and_may_be_an_iterator(tmp_path: Path) -> None:
    for edges in ((), ((1, 0),), ((0, 1), (0, 1))):
        with pytest.raises(ScheduleError, match=r"line [12].* mend the line, or edges="):
            read(MESSAGES, tmp_path, edges)
    (tmp_path / "mine.csv").write_text("0F0,0SEND_F0\n1F0\n2RECV_F0,2F0")
    assert Schedule.from_csv(tmp_path / "mine.csv", iter([(0, 2)])).edges == ((0, 2),)
