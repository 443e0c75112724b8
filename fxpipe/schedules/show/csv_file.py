"""CSV files of schedules, in the cells that torch.distributed.pipelining reads and writes.

    0F0,0F1,,0B0,,0B1              a line per rank, a cell per step; an empty cell is an idle step
    ,1F0,1B0,1F1,1B1,

With communication, the lines also have cells for sends and receives; each cell names the stage of its own rank:

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1

A group of micro-batches, ``4F0-3``, and a recomputed forward, ``2R0``, are fxpipe's own cells: torch has none for them,
and does not read a file with such cells.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import TypeVar

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, as_placement
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable, StrPath
from fxpipe.schedules.dependency import Link, in_steps
from fxpipe.schedules.given import check_given, nested
from fxpipe.schedules.kinds import BACKWARD, FORWARD
from fxpipe.schedules.lower import Compute, Message, Receive, Send
from fxpipe.schedules.verify import check, prove
from fxpipe.small_file import read_small, write_whole

_MOST = 2**26  # bytes; a file of a million actions with their messages is smaller
_MESSAGE = re.compile(r"[0-9]+(SEND|RECV)_[FB][0-9]+")
_PARAMETERS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
Read = TypeVar("Read", bound=ActionTable)


# --- reading ---


def read(kind: type[Read], path: StrPath, edges: Iterable[tuple[int, int]] | None = None) -> Read:
    """Returns a table of the class ``kind``: see ``Schedule.from_csv``. ScheduleError, too, if the file has no action,
    omits a stage number, or is not UTF-8; OSError if it is a device or a pipe."""
    name = os.fspath(path)
    rows: list[tuple[Action, ...]] = []
    messages: list[Counter[str]] = []  # of each rank
    for number, line in enumerate(_lines(path), start=1):
        cells = [(column, cell.strip()) for column, cell in enumerate(line, start=1) if cell.strip()]
        messages.append(Counter(cell for _, cell in cells if _MESSAGE.fullmatch(cell)))
        try:
            rows.append(tuple(action for column, cell in cells for action in _actions(cell, column)))
        except ScheduleError as error:
            raise ScheduleError(f"{name}, line {number}, {error}") from None
    if not any(rows):
        raise ScheduleError(f"{name} holds no action; write a line per rank, as in 0F0,0F1,,0B0,,0B1")
    placement = _placement(rows, name)
    links: Iterable[tuple[int, int]] = itertools.pairwise(range(len(placement)))
    if edges is not None:
        check_given(edges=(links := nested(edges)))
    # The file does not say which stages have a backward, or how many micro-batches there are: the cells show both.
    differentiated = {action.stage for row in rows for action in row if action.kind.part_of is BACKWARD}
    schedule = kind(
        rows=tuple(rows),
        edges=tuple(links),
        placement=placement,
        backward=tuple(stage in differentiated for stage in range(len(placement))),
        microbatches=max(action.microbatches.stop for row in rows for action in row),
        name=Path(path).stem,
    )
    if edges is not None and any(messages):
        _check_messages(name, messages, schedule)
    return schedule


def _lines(path: StrPath) -> list[list[str]]:
    """Returns the cells of each rank. Empty lines at the end are no ranks."""
    try:
        text = read_small(path, _MOST).decode("utf-8-sig")
        return list(csv.reader(text.rstrip().splitlines(), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{os.fspath(path)} is no CSV file in UTF-8: {error}") from None


def _actions(cell: str, column: int) -> list[Action]:
    """The actions of a cell: none for a message, which is lowered anew, and none for a cell about parameters."""
    if _MESSAGE.fullmatch(cell) or _PARAMETERS.fullmatch(cell):
        return []
    overlap = _OVERLAP.fullmatch(cell)
    try:
        return list(map(Action.parse, overlap[1].split(";") if overlap else [cell]))
    except ScheduleError as error:
        raise ScheduleError(f"cell {column}: {error}") from None


def _placement(rows: Sequence[Sequence[Action]], name: str) -> Placement:
    """A stage is on the rank that has most of its actions, so that ``verify`` names a cell on a wrong rank. A stage is
    on r ranks, in turns, if each micro-batch is on a single rank, and every r-th on the same rank."""
    cells_of: dict[int, list[tuple[int, int]]] = {}  # stage → (micro-batch, or group, and rank) of its actions
    for rank, row in enumerate(rows):
        for action in row:
            cells_of.setdefault(action.stage, []).append((action.microbatch // action.count, rank))
    missing = next(stage for stage in itertools.count() if stage not in cells_of)
    if missing < len(cells_of):
        raise ScheduleError(f"{name} has no action of stage {missing}; stages count from 0, without a gap")
    places: list[int | tuple[int, ...]] = []
    for _, cells in sorted(cells_of.items()):
        counts = Counter(rank for _, rank in cells)
        turns = {number % len(counts): rank for number, rank in cells}
        # Ranks that take turns show a pattern: micro-batch i is on rank turns[i mod r], for every i.
        regular = all(turns[number % len(counts)] == rank for number, rank in cells)
        if regular and len(turns) == len(counts):
            places.append(tuple(turns[turn] for turn in range(len(counts))))
        else:
            places.append(counts.most_common(1)[0][0])
    return as_placement(places)


def _check_messages(name: str, messages: Sequence[Counter[str]], schedule: ActionTable) -> None:
    for rank, (present, row) in enumerate(zip(messages, schedule.instructions, strict=True)):
        steps = (step for step in row if isinstance(step, Send | Receive))
        wanted = Counter(_cell(step, schedule.links[step.message.edge]) for step in steps)
        if present != wanted:
            extra, lacking = (" ".join(some.elements()) or "none" for some in (present - wanted, wanted - present))
            raise ScheduleError(
                f"{name}, line {rank + 1}: with edges={schedule.edges} rank {rank} sends and receives other messages; "
                f"too many: {extra}; missing: {lacking}; mend the line, or edges="
            )


# --- writing ---


def write(schedule: ActionTable, path: StrPath, communication: bool = False) -> None:
    """See ``Schedule.to_csv``."""
    if communication:
        rows = _with_messages(schedule)
    else:
        steps = in_steps(schedule.rows, schedule.dependencies)
        rows = [["" if action is None else str(action) for action in row] for row in steps]
    text = StringIO()
    # A rank without actions is a line of one empty cell, `""`: an empty line could come from an editor.
    csv.writer(text, lineterminator="\n").writerows(row or [""] for row in rows)
    write_whole(path, text.getvalue())


def _with_messages(schedule: ActionTable) -> list[list[str]]:
    """Returns the instructions in an order that one process could run: a receive comes after its message was sent.

    A reader of the file may wait for each receive, as torch's runtime does, and would deadlock if a receive came before
    the actions that lead to its send.
    """
    rows: list[list[str]] = [[] for _ in schedule.rows]
    begun: set[Message] = set()  # messages whose send or receive has run
    check(schedule)
    for rank, step in prove(schedule, schedule.instructions, schedule.links):
        if isinstance(step, Compute):
            rows[rank].append(str(step.action))
        elif isinstance(step, Send | Receive):
            # The receive is written when the second of the two ends has run: then the message has arrived.
            message, edge = step.message, schedule.links[step.message.edge]
            if isinstance(step, Send):
                rows[rank].append(_cell(step, edge))
            if message in begun:
                rows[message.receiver].append(_cell(Receive(message), edge))
            begun.add(message)
    return rows


def _cell(step: Send | Receive, edge: Link) -> str:
    """The cell, on edge 0-1: ``0SEND_F3``, ``1RECV_F3`` for the value, ``1SEND_B3``, ``0RECV_B3`` for its gradient."""
    message = step.message
    sends, is_value = isinstance(step, Send), message.direction is FORWARD
    stage = edge.source if sends == is_value else edge.target
    return f"{stage}{'SEND' if sends else 'RECV'}_{message.direction.value}{message.microbatch}"
