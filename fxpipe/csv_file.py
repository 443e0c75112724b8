"""CSV files of schedules, in the cells that torch.distributed.pipelining reads and writes.

    0F0,0F1,,0B0,,0B1              a line per rank, a cell per step; an empty cell is a step in which it idles
    ,1F0,1B0,1F1,1B1,

With communication, cells of sends and receives stand among them; each names the stage of its own rank:

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.action import Action, Op
from fxpipe.dependency import in_steps
from fxpipe.errors import ScheduleError
from fxpipe.lower import Compute, Message, Receive, Send
from fxpipe.verify import execution_order

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule

StrPath = str | os.PathLike[str]

_COMPUTE = frozenset(op.value for op in Op)
_MESSAGES = frozenset(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])
_PARAMETERS = frozenset(["UNSHARD", "RESHARD", "REDUCE_GRAD"])
_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_FORMS = "write <stage><F, B, I or W><micro-batch>, as in 0F3, with commas between cells and nothing where a rank idles"


@dataclass(frozen=True)
class Table:
    """What follows from a file: the rows, the rank of each stage, whether each has a backward, and how many
    micro-batches."""

    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    backward: tuple[bool, ...]
    microbatches: int


class _Part(NamedTuple):
    """``1RECV_F3``: a stage, an op, and a micro-batch where the op has one."""

    stage: int
    op: str
    microbatch: int | None


class _Cell(NamedTuple):
    """A cell that is not empty, and where it stands: line and cell count from 1."""

    line: int
    column: int
    text: str
    parts: tuple[_Part, ...]

    @property
    def actions(self) -> Iterator[Action]:
        """The actions among its parts, in order."""
        return (Action(p.stage, Op(p.op), p.microbatch or 0) for p in self.parts if p.op in _COMPUTE)


# --- reading ---


def read(path: StrPath) -> Table:
    """The table in a file, compute-only or with communication. What is wrong with the table itself, verify says.

    ScheduleError, with line, cell (both count from 1) and its text, where something is no cell, is of a stage or
    micro-batch that does not exist, or is a message on another rank's line; and where the file holds no action,
    leaves a stage number out, or is not UTF-8. OSError where it cannot be read.
    """
    name = os.fspath(path)
    cells = [[_parsed(name, *cell) for cell in line] for line in _lines(name, Path(path).read_bytes())]
    rows = tuple(tuple(action for cell in line for action in cell.actions) for line in cells)
    if not any(rows):
        raise ScheduleError(f"{name} holds no action; write a line per rank, as in 0F0,0F1,,0B0,,0B1")
    _check_stages(name, cells)
    placement = _placement(rows)
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    for rank, line in enumerate(cells):
        for cell in line:
            _check_message(name, cell, rank, placement, microbatches)
    split = {action.stage for row in rows for action in row if action.op is not Op.F}
    return Table(rows, placement, tuple(stage in split for stage in range(len(placement))), microbatches)


def _lines(name: str, content: bytes) -> Iterator[list[tuple[int, int, str]]]:
    """Each rank's cells that are not empty, as (line, column, text). Empty lines at the end are no ranks."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"{name} is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}; save it as CSV in UTF-8"
        ) from None
    reader = csv.reader(io.StringIO(text.rstrip(), newline=""), strict=True)
    try:
        for cells in reader:
            stripped = enumerate(map(str.strip, cells), start=1)
            yield [(reader.line_num, column, cell) for column, cell in stripped if cell]
    except csv.Error as error:
        raise ScheduleError(f"{name}, line {reader.line_num}: {error}; {_FORMS}") from None


def _parsed(name: str, line: int, column: int, text: str) -> _Cell:
    overlap = _OVERLAP.fullmatch(text)
    parts = [_part(part.strip(), overlap is not None) for part in (overlap[1].split(";") if overlap else [text])]
    found = tuple(part for part in parts if part is not None)
    if len(found) != len(parts):
        raise ScheduleError(f"{_where(name, line, column, text)} is no cell; {_remedy(text)}")
    return _Cell(line, column, text, found)


def _part(text: str, overlapped: bool = False) -> _Part | None:
    match = _CELL.fullmatch(text)
    if match is None:
        return None
    stage, op, microbatch = match.groups()
    if microbatch is None:
        return _Part(int(stage), op, None) if op in _PARAMETERS and not overlapped else None
    known = _COMPUTE if overlapped else _COMPUTE | _MESSAGES
    return _Part(int(stage), op, int(microbatch)) if op in known else None


def _remedy(text: str) -> str:
    """What to write instead of what is no cell."""
    several = [part for part in re.split(r"[\s;|]+", text) if part]
    if len(several) > 1 and all(map(_part, several)):
        return f"an action has a cell of its own: write {','.join(several)}"
    if _part(text.upper()) is not None:
        return f"write {text.upper()}"
    if _part(f"{text}0") is not None:
        return f"its micro-batch is missing, as in {text}0"
    return _FORMS


def _check_stages(name: str, cells: Sequence[Sequence[_Cell]]) -> None:
    """Stages count from 0, without a gap."""
    first: dict[int, _Cell] = {}
    for cell in itertools.chain.from_iterable(cells):
        for action in cell.actions:
            first.setdefault(action.stage, cell)
    missing = next(stage for stage in itertools.count() if stage not in first)
    if missing < len(first):
        line, column, text, _ = first[min(stage for stage in first if stage > missing)]
        raise ScheduleError(
            f"{_where(name, line, column, text)}, but there is no action of stage {missing} in the file; stages "
            "count from 0, without a gap"
        )


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """A stage is on the rank that has most of its actions: one cell on a wrong rank is then what verify names."""
    counts: dict[int, Counter[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            counts.setdefault(action.stage, Counter())[rank] += 1
    return tuple(counts[stage].most_common(1)[0][0] for stage in range(len(counts)))


def _check_message(name: str, cell: _Cell, rank: int, placement: Sequence[int], microbatches: int) -> None:
    """A send, a receive or what is done to parameters is of a stage of this rank, and of a micro-batch that exists."""
    for stage, op, microbatch in cell.parts:
        if op in _COMPUTE:
            continue
        where = _where(name, cell.line, cell.column, cell.text)
        if stage >= len(placement):
            raise ScheduleError(f"{where} is of stage {stage}, but the last with an action is {len(placement) - 1}")
        if microbatch is not None and microbatch >= microbatches:
            raise ScheduleError(
                f"{where} is of micro-batch {microbatch}, but the last with an action is {microbatches - 1}"
            )
        if placement[stage] != rank:
            raise ScheduleError(
                f"{where} stands on rank {rank}, but stage {stage} is on rank {placement[stage]}; a send names the "
                "stage that sends, a receive the one that receives"
            )


def _where(name: str, line: int, column: int, text: str) -> str:
    return f"{name}, line {line}, cell {column}: {text!r}"


# --- writing ---


def write(schedule: Schedule, path: StrPath, communication: bool = False) -> None:
    """Writes a schedule, aligned by step, or with its messages. OSError where the file cannot be written."""
    rows = _with_messages(schedule) if communication else _by_step(schedule)
    with open(path, "w", newline="", encoding="utf-8") as file:
        # A line of one empty cell stands for a rank without actions, as `""`: an empty line could be an editor's.
        csv.writer(file, lineterminator="\n").writerows(row or [""] for row in rows)


def _by_step(schedule: Schedule) -> list[list[str]]:
    steps = in_steps(schedule.rows, schedule.dependencies)
    return [["" if action is None else str(action) for action in row] for row in steps]


def _with_messages(schedule: Schedule) -> list[list[str]]:
    """The instructions in an order in which one process could run them, a receive where its message is there.

    fxpipe posts receives an action ahead and does not wait for them. Who reads such a file may wait (torch's runtime
    issues them so, one behind another), and would come to a halt if a receive stood before what it waits for.
    """
    rows: list[list[str]] = [[] for _ in schedule.rows]
    begun: set[Message] = set()  # at one end
    for rank, step in execution_order(schedule.instructions, schedule.links, schedule.backward):
        if isinstance(step, Compute):
            rows[rank].append(str(step.action))
        elif isinstance(step, Send | Receive):
            message = step.message
            if isinstance(step, Send):
                rows[rank].append(_cell(schedule, message, "SEND"))
            if message in begun:
                rows[message.receiver].append(_cell(schedule, message, "RECV"))
            begun.add(message)
    return rows


def _cell(schedule: Schedule, message: Message, what: str) -> str:
    """Along edge 0-1: ``0SEND_F3``, ``1RECV_F3`` of the value, ``1SEND_B3``, ``0RECV_B3`` of its gradient.

    Each names the stage at its own end.
    """
    edge = schedule.links[message.edge]
    down = message.op is Op.F
    stage = edge.source if down == (what == "SEND") else edge.target
    return f"{stage}{what}_{message.op.value}{message.microbatch}"


def edges_or_chain(edges: Iterable[tuple[int, int]] | None, stages: int) -> tuple[tuple[int, int], ...]:
    """The stage graph of a file, which tells none: the edges that are given, or a chain."""
    if edges is None:
        return tuple(itertools.pairwise(range(stages)))
    return tuple((int(source), int(target)) for source, target in edges)
