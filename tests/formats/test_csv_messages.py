"""Messages of CSV files: those of a line that are not its rank's in the lowered table."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, examples
from tests.thinned import every

Edges = tuple[tuple[int, int], ...]

MESSAGES = """0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"""


def read(table: str, folder: Path, edges: Edges | None = ((0, 1),)) -> Schedule:
    (folder / "mine.csv").write_text(table)
    return Schedule.from_csv(folder / "mine.csv", edges)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("0SEND_F0,", "", "line 1 lacks 0SEND_F0, which with edges (0, 1) rank 0 has"),
        ("1RECV_F1,", "", "line 2 lacks 1RECV_F1, which with edges (0, 1) rank 1 has"),
        ("0SEND_F0,", "0SEND_F0,0SEND_F0,", "line 1, cell 3: '0SEND_F0', but with edges (0, 1) rank 0 has no 0SEND_F0"),
        ("0RECV_B0", "0RECV_B1", "line 1, cell 7: '0RECV_B1', but"),
        ("1F1,1B1", "1F1,1SEND_F1,1B1", "line 2, cell 7: '1SEND_F1', but"),
        ("1RECV_F0", "0RECV_F0", "line 2, cell 1: '0RECV_F0', but"),
        ("1SEND_B0", "9SEND_B0", "line 2, cell 4: '9SEND_B0', but"),
        ("0SEND_F0", "0SEND_F7", "line 1, cell 2: '0SEND_F7', but"),
    ],
)
def test_a_line_that_differs_from_the_lowered_table_is_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    edited = MESSAGES.replace(old, new, 1)
    assert edited != MESSAGES
    with pytest.raises(ScheduleError) as error:
        read(edited, tmp_path)
    assert f"mine.csv, {told}" in str(error.value)
    read(edited, tmp_path, None)  # of some other graph


@pytest.mark.parametrize("name", every(2, FAMILIES))
def test_messages_out_of_turn_are_lowered_anew_from_the_actions(name: str, tmp_path: Path) -> None:
    """Who runs the table sends in the order of its actions, whatever the order in the file was."""
    for schedule in examples(name):
        schedule.to_csv(tmp_path / "right.csv", communication=True)
        lines = [line.split(",") for line in (tmp_path / "right.csv").read_text().splitlines()]
        turned = [sorted(line, key=lambda cell: "_" not in cell) for line in lines]
        again = read("\n".join(map(",".join, turned)), tmp_path, schedule.edges)
        assert again.instructions == schedule.instructions
        again.verify()


@pytest.mark.parametrize("edges", [(), ((1, 0),), ((0, 1), (0, 1))])
def test_edges_that_the_messages_do_not_fit_are_refused(edges: Edges, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"line [12].* mend edges="):
        read(MESSAGES, tmp_path, edges)


def test_edges_may_be_an_iterator(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0SEND_F0\n1F0\n2RECV_F0,2F0")
    schedule = Schedule.from_csv(tmp_path / "mine.csv", iter([(0, 2)]))
    assert schedule.edges == ((0, 2),)
