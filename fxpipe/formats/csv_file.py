"""CSV files of schedules, in the cells that torch.distributed.pipelining reads and writes.

    0F0,0F1,,0B0,,0B1              a line per rank, a cell per step; an empty cell is a step in which it idles
    ,1F0,1B0,1F1,1B1,

With communication, cells of sends and receives stand among them; each names the stage of its own rank:

    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1

A group of micro-batches, ``4F0-3``, and a forward that is run again, ``2R0``, are fxpipe's own: torch has no cells for
them, and does not read a file that has some.
"""

from __future__ import annotations

import csv
import errno
import io
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, as_placement
from fxpipe.schedules.action import OPS, Action, Op
from fxpipe.schedules.dependency import EdgeLike, in_steps
from fxpipe.schedules.given import check_given, nested
from fxpipe.schedules.lower import Compute, Message, Receive, Send
from fxpipe.schedules.schedule import Schedule, StrPath
from fxpipe.schedules.verify import execution_order
from fxpipe.small_file import read_small

_MOST = 2**26  # bytes; a million actions with their messages have less
_PARAMETERS = frozenset(["UNSHARD", "RESHARD", "REDUCE_GRAD"])
_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)(?:([0-9]{1,9})(?:-([0-9]{1,9}))?)?")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_FORMS = (
    f"write <stage><{OPS}><micro-batch>, as in 0F3, with commas between cells and nothing where a rank idles; of a "
    "group its first and last micro-batch, as in 4F0-3"
)


# --- reading ---


def read(path: StrPath, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
    """The schedule in a file, compute-only or with communication. What is wrong with the table itself, verify says.

    ``edges``: the stage graph. None: a chain; the file may be of another graph, so its messages are not compared.

    ScheduleError, with line, cell (both count from 1) and its text, where something is no cell, or where a line has
    other messages than the rank has in the lowered table; and where the file holds no action, leaves a stage number
    out, or is not UTF-8. OSError where it cannot be read.
    """
    name = os.fspath(path)
    lines = [[_parsed(Cell(name, *cell)) for cell in line] for line in _lines(name, _content(name))]
    rows = tuple(tuple(action for cell in line for action in cell.actions) for line in lines)
    if not any(rows):
        raise ScheduleError(f"{name} holds no action; write a line per rank, as in 0F0,0F1,,0B0,,0B1")
    _check_stages(lines)
    placement = _placement(rows)
    links: Iterable[tuple[int, int]] = itertools.pairwise(range(len(placement)))
    if edges is not None:
        check_given(edges=(links := nested(edges)))
    differentiated = {action.stage for row in rows for action in row if action.op is not Op.F}
    schedule = Schedule(
        rows=rows,
        edges=tuple(links),
        placement=placement,
        backward=tuple(stage in differentiated for stage in range(len(placement))),
        microbatches=max(action.microbatches.stop for row in rows for action in row),
        name=Path(path).stem,
    )
    if edges is not None and (fault := difference(lines, schedule)):
        raise ScheduleError(fault)
    return schedule


def _content(name: str) -> bytes:
    try:
        return read_small(name, _MOST, only_regular=False)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ScheduleError(f"{name} is no table: {error.strerror}") from error
        raise


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


def _parsed(cell: Cell) -> Cell:
    """The cell with its tokens."""
    overlap = _OVERLAP.fullmatch(cell.text)
    parts = overlap[1].split(";") if overlap else [cell.text]
    found = [_part(part.strip(), overlap is not None) for part in parts]
    known = tuple(part for part in found if part is not None)
    if len(known) != len(found):
        raise ScheduleError(f"{cell} is no cell; {_remedy(cell.text)}")
    return cell._replace(tokens=known)


def _part(text: str, overlapped: bool = False) -> Token | None:
    match = _CELL.fullmatch(text)
    if match is None:
        return None
    stage, op, microbatch, last = match.groups()
    if microbatch is None:
        return Token(int(stage), op, None) if op in _PARAMETERS and not overlapped else None
    if last is not None:
        is_group = op in COMPUTE and int(last) > int(microbatch)
        return Token(int(stage), op, int(microbatch), int(last) - int(microbatch) + 1) if is_group else None
    known = COMPUTE if overlapped else COMPUTE | MESSAGES
    return Token(int(stage), op, int(microbatch)) if op in known else None


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


def _check_stages(cells: Sequence[Sequence[Cell]]) -> None:
    """Stages count from 0, without a gap."""
    first: dict[int, Cell] = {}
    for cell in itertools.chain.from_iterable(cells):
        for action in cell.actions:
            first.setdefault(action.stage, cell)
    missing = next(stage for stage in itertools.count() if stage not in first)
    if missing < len(first):
        cell = first[min(stage for stage in first if stage > missing)]
        raise ScheduleError(
            f"{cell}, but there is no action of stage {missing} in the file; stages count from 0, without a gap"
        )


def _placement(rows: Sequence[Sequence[Action]]) -> Placement:
    """A stage is on the rank that has most of its actions: one cell on a wrong rank is then what verify names. It is on
    several where they take turns: where each micro-batch is on one rank, the same for every r-th."""
    counts: dict[int, Counter[int]] = {}
    found: dict[int, dict[int, set[int]]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            counts.setdefault(action.stage, Counter())[rank] += 1
            found.setdefault(action.stage, {}).setdefault(action.microbatch // action.count, set()).add(rank)
    return as_placement([_turns(found[s]) or counts[s].most_common(1)[0][0] for s in range(len(counts))])


def _turns(ranks: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """The ranks that take turns with a stage; none where they do not. ``ranks``: by micro-batch, or group."""
    count = len({rank for some in ranks.values() for rank in some})
    turns: dict[int, set[int]] = {}
    for number, some in ranks.items():
        turns.setdefault(number % count, set()).update(some)
    fits = len(turns) == count and all(len(some) == 1 for some in turns.values())
    return tuple(rank for turn in range(count) for rank in turns[turn]) if fits else ()


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
    issues them so, one behind another), and would deadlock if a receive stood before what it waits for.
    """
    rows: list[list[str]] = [[] for _ in schedule.rows]
    begun: set[Message] = set()  # at one end
    for rank, step in execution_order(schedule.instructions, schedule.links, schedule.backward):
        if isinstance(step, Compute):
            rows[rank].append(str(step.action))
        elif isinstance(step, Send | Receive):
            message, edge = step.message, schedule.links[step.message.edge]
            if isinstance(step, Send):
                rows[rank].append(str(token_of(step, edge)))
            if message in begun:
                rows[message.receiver].append(str(token_of(Receive(message), edge)))
            begun.add(message)
    return rows


COMPUTE = frozenset(op.value for op in Op)
MESSAGES = frozenset(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])


class Token(NamedTuple):
    """``1RECV_F3``: a stage, an op, and a micro-batch where the op has one; a group's first, and how many it has."""

    stage: int
    op: str
    microbatch: int | None
    size: int = 1

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell that is not empty, and where it stands: line and cell count from 1. An overlap has several tokens."""

    file: str
    line: int
    column: int
    text: str
    tokens: tuple[Token, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, cell {self.column}: {self.text!r}"

    @property
    def actions(self) -> Iterator[Action]:
        """The actions among its tokens, in order."""
        return (Action(t.stage, Op(t.op), t.microbatch or 0, t.size) for t in self.tokens if t.op in COMPUTE)

    @property
    def message(self) -> Token | None:
        """The send or receive that it is; none stands in an overlap."""
        return self.tokens[0] if self.tokens[0].op in MESSAGES else None


def difference(lines: Sequence[Sequence[Cell]], schedule: Schedule) -> str | None:
    """The first line whose messages are not its rank's in the lowered table, in words; None where there is none.

    A file without messages is one of actions alone.
    """
    if not any(cell.message for line in lines for cell in line):
        return None
    graph = f"with edges {', '.join(map(str, schedule.edges))}" if schedule.edges else "without edges"
    for rank, (line, row) in enumerate(zip(lines, schedule.instructions, strict=True)):
        steps = (step for step in row if isinstance(step, Send | Receive))
        left = Counter(token_of(step, schedule.links[step.message.edge]) for step in steps)
        for cell in line:
            if cell.message and not left[cell.message]:
                return f"{cell}, but {graph} rank {rank} has no {cell.message}, or fewer; take it out, or mend edges="
            if cell.message:
                left[cell.message] -= 1
        for token in +left:
            at = f"{line[0].file}, line {line[0].line}"
            return f"{at} lacks {token}, which {graph} rank {rank} has; put it in, or mend edges="
    return None


def token_of(step: Send | Receive, edge: EdgeLike) -> Token:
    """Along edge 0-1: ``0SEND_F3``, ``1RECV_F3`` of the value, ``1SEND_B3``, ``0RECV_B3`` of its gradient."""
    message = step.message
    sends, is_value = isinstance(step, Send), message.op is Op.F
    stage = edge.source if sends == is_value else edge.target
    return Token(stage, f"{'SEND' if sends else 'RECV'}_{message.op.value}", message.microbatch)
