"""The messages of a CSV file: whether its sends and receives fit its actions, a stage graph and each other.

    0F0,0F1,0SEND_F1,0SEND_F0      rank 0 sends micro-batch 1 first,
    1RECV_F0,1F0,1RECV_F1,1F1      and rank 1 waits for micro-batch 0: refused

A cell names the stage at its own end alone. Which edge it is of follows from the order: the k-th send of an action
is along the k-th edge of its stage to another rank, as ``lower`` has it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import EdgeLike, Link
from fxpipe.schedules.lower import Message, Send, lower

End = Literal["SEND", "RECV"]

COMPUTE = frozenset(op.value for op in Op)
MESSAGES = frozenset(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])


class Part(NamedTuple):
    """``1RECV_F3``: a stage, an op, and a micro-batch where the op has one."""

    stage: int
    op: str
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell that is not empty, and where it stands: line and cell count from 1. An overlap has several parts."""

    file: str
    line: int
    column: int
    text: str
    parts: tuple[Part, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, cell {self.column}: {self.text!r}"

    @property
    def actions(self) -> Iterator[Action]:
        """The actions among its parts, in order."""
        return (Action(p.stage, Op(p.op), p.microbatch or 0) for p in self.parts if p.op in COMPUTE)

    @property
    def message(self) -> Part | None:
        """The send or receive that it is; none stands in an overlap."""
        return self.parts[0] if self.parts[0].op in MESSAGES else None


Lines = Sequence[Sequence[Cell]]


def part_of(message: Message, edge: EdgeLike, end: End) -> Part:
    """Along edge 0-1: ``0SEND_F3``, ``1RECV_F3`` of the value, ``1SEND_B3``, ``0RECV_B3`` of its gradient.

    Each names the stage at its own end.
    """
    down = message.op is Op.F
    stage = edge.source if down == (end == "SEND") else edge.target
    return Part(stage, f"{end}_{message.op.value}", message.microbatch)


# --- a message and its action ---


def misplaced(lines: Lines) -> str | None:
    """What is wrong with a send in front of the action that makes it, or a receive behind the one that needs it."""
    for line in lines:
        places: dict[Action, int] = {}
        for place, cell in enumerate(line):
            for action in cell.actions:
                places.setdefault(action, place)
        for place, cell in enumerate(line):
            fault = _misplaced(cell, place, places) if cell.message else None
            if fault:
                return fault
    return None


def _actions(part: Part) -> list[Action]:
    """Those that can make what is sent, or need what is received: a gradient may be of a B or an I."""
    ops = (Op.F,) if part.op.endswith("F") else (Op.B, Op.I)
    return [Action(part.stage, op, part.microbatch or 0) for op in ops]


def _misplaced(cell: Cell, place: int, places: Mapping[Action, int]) -> str | None:
    actions = _actions(cell.parts[0])
    sends = cell.parts[0].op.startswith("SEND")
    action = min(filter(places.__contains__, actions), key=places.__getitem__, default=None)
    if action is None:
        does = "make what it sends" if sends else "need it"
        return f"{cell}, but its line has no {' or '.join(map(str, actions))} to {does}"
    if sends and place < places[action]:
        return f"{cell} stands in front of {action}, which makes what it sends; write it behind"
    if not sends and place > places[action]:
        return f"{cell} stands behind {action}, which needs it; write it in front"
    return None


# --- a message and its other end ---


@dataclass(frozen=True)
class _Side:
    """All sends, or all receives: those of the stage graph, and the cells of the file."""

    end: End
    wanted: Mapping[Part, Sequence[Message]]
    cells: Mapping[Part, Sequence[Cell]]

    @staticmethod
    def of(end: End, lines: Lines, messages: Iterable[Message], edges: Sequence[EdgeLike]) -> _Side:
        wanted: dict[Part, list[Message]] = {}
        for message in messages:
            wanted.setdefault(part_of(message, edges[message.edge], end), []).append(message)
        cells: dict[Part, list[Cell]] = {}
        for cell in (cell for line in lines for cell in line):
            if cell.message and cell.message.op.startswith(end):
                cells.setdefault(cell.message, []).append(cell)
        return _Side(end, wanted, cells)

    def surplus(self) -> Iterator[tuple[Part, Cell]]:
        """The cells that no edge has a message for."""
        for part, cells in self.cells.items():
            for cell in cells[len(self.wanted.get(part, ())) :]:
                yield part, cell

    def missing(self) -> Iterator[tuple[Part, Message]]:
        """The messages that the file has no cell for."""
        for part, messages in self.wanted.items():
            for message in messages[len(self.cells.get(part, ())) :]:
                yield part, message

    @property
    def fits(self) -> bool:
        return not any(self.surplus()) and not any(self.missing())

    @property
    def counts(self) -> Counter[tuple[str, int | None]]:
        """(F or B, micro-batch) → how many cells."""
        return Counter((part.op[-1], part.microbatch) for part, cells in self.cells.items() for _ in cells)


def mismatched(
    lines: Lines,
    rows: Sequence[Sequence[Action]],
    edges: Sequence[tuple[int, int]],
    placement: Sequence[int],
    backward: Sequence[bool],
    assumed: bool,
) -> str | None:
    """What is wrong with the sends and receives of a file along the edges of a stage graph.

    ``assumed``: nobody has told the edges, and they are a chain's. A file that does not fit it is of another graph,
    and has but to have as many receives as sends.
    """
    graph = [Link(*pair) for pair in edges]
    lowered = lower(rows, graph, placement, backward)
    messages = dict.fromkeys(step.message for row in lowered for step in row if isinstance(step, Send))
    sends, receives = (_Side.of(end, lines, messages, graph) for end in ("SEND", "RECV"))
    if assumed and not (sends.fits and receives.fits):
        if sends.counts == receives.counts:
            return None
        if not (sends.fits or receives.fits):
            return _unbalanced(sends, receives)
    fault = _unpartnered(lines, sends, receives, graph) or _crossed(lines, sends, graph)
    return f"{fault}; no edges are given, so the stages are taken for a chain" if fault and assumed else fault


def _unbalanced(sends: _Side, receives: _Side) -> str | None:
    """A micro-batch that has more sends than receives, or fewer, whatever the stage graph."""
    for kind, microbatch in sends.counts | receives.counts:
        sent, received = sends.counts[kind, microbatch], receives.counts[kind, microbatch]
        if sent != received:
            more = sends if sent > received else receives
            named = (cells[0] for part, cells in more.cells.items() if part[1:] == (f"{more.end}_{kind}", microbatch))
            return (
                f"{next(named)}: micro-batch {microbatch} has {sent} cells SEND_{kind}, but {received} cells "
                f"RECV_{kind}; give edges to be told which has no other end"
            )
    return None


def _unpartnered(lines: Lines, sends: _Side, receives: _Side, edges: Sequence[Link]) -> str | None:
    """The first send that nobody receives, or receive that nobody sends."""
    odd = [(cell, side.wanted.get(part, ())) for side in (sends, receives) for part, cell in side.surplus()]
    if odd:
        cell, others = min(odd, key=lambda item: item[0][1:3])
        taken = ", ".join(str(edges[message.edge]) for message in others)
        return f"{cell} is {_alone(cell)}: " + (f"only edge {taken} carries it" if taken else "no edge carries it")
    for side, other in ((sends, receives), (receives, sends)):
        for part, message in side.missing():
            far = part_of(message, edges[message.edge], other.end)
            cells = other.cells.get(far, ())
            rank = message.sender if side is sends else message.receiver
            if len(cells) < len(other.wanted[far]):
                return f"{_maker(lines, part)} has neither a {part} nor a {far} for edge {edges[message.edge]}"
            return f"{cells[-1]} is {_alone(cells[-1])}: rank {rank} has no {part} for it"
    return None


def _alone(cell: Cell) -> str:
    return "received by nobody" if "SEND" in cell.text else "sent by nobody"


def _maker(lines: Lines, send: Part) -> Cell:
    """The cell of the action that makes what is sent."""
    actions = set(_actions(send))
    return next(cell for line in lines for cell in line if not actions.isdisjoint(cell.actions))


# --- the order of messages between two ranks ---


class _Sent(NamedTuple):
    """A message at its sender: the rank, the cell, and the receive that it is for."""

    rank: int
    cell: Cell
    receive: Part


class _Span(NamedTuple):
    """The places on the receiving line, first and last, that leave room for the sender's other messages in order."""

    sent: _Sent
    before: _Sent | None
    soonest: int
    latest: int
    next_latest: int


def _crossed(lines: Lines, sends: _Side, edges: Sequence[EdgeLike]) -> str | None:
    """A receive of what does not arrive next. From one rank to another, messages arrive in the order of their sends."""
    queues: dict[int, dict[int, list[_Sent]]] = {}  # receiver → sender → its messages
    left = {part: iter(messages) for part, messages in sends.wanted.items()}
    for cell in (cell for line in lines for cell in line if cell.message in left):
        message = next(left[cell.parts[0]])
        sent = _Sent(message.sender, cell, part_of(message, edges[message.edge], "RECV"))
        queues.setdefault(message.receiver, {}).setdefault(message.sender, []).append(sent)
    faults = (_crossed_on(lines[receiver], queues[receiver].values()) for receiver in sorted(queues))
    return next(filter(None, faults), None)


def _crossed_on(line: Sequence[Cell], queues: Iterable[Sequence[_Sent]]) -> str | None:
    """Each sender's messages must find their receives in order, and all senders' together a cell each.

    Which of equal cells, ``4RECV_F0,4RECV_F0``, is whose, a file does not tell: it is refused only where none of the
    choices can be right.
    """
    places: dict[Part, list[int]] = {}
    for place, cell in enumerate(line):
        if cell.message:
            places.setdefault(cell.message, []).append(place)
    spans: dict[Part, list[_Span]] = {}
    for queue in queues:
        soonest = _soonest(queue, places)
        if len(soonest) < len(queue):
            stuck = queue[len(soonest)]
            return _out_of_turn(line[places[stuck.receive][-1]], queue[len(soonest) - 1])
        latest = [*_latest(queue, places, len(line)), len(line)]
        for sent, before, *span in zip(queue, (None, *queue), soonest, latest, latest[1:], strict=False):
            spans.setdefault(sent.receive, []).append(_Span(sent, before, *span))
    faults = (_unshared(line, places[receive], spans[receive]) for receive in spans)
    return next(filter(None, faults), None)


def _soonest(queue: Sequence[_Sent], places: Mapping[Part, Sequence[int]]) -> list[int]:
    """The first place for each message behind those before; it ends early at one that has none."""
    found: list[int] = []
    for sent in queue:
        options = places[sent.receive]
        index = bisect_right(options, found[-1]) if found else 0
        if index == len(options):
            break
        found.append(options[index])
    return found


def _latest(queue: Sequence[_Sent], places: Mapping[Part, Sequence[int]], end: int) -> list[int]:
    """The last place for each message in front of those behind."""
    found = []
    for sent in reversed(queue):
        options = places[sent.receive]
        end = options[bisect_left(options, end) - 1]
        found.append(end)
    return found[::-1]


def _unshared(line: Sequence[Cell], places: Iterable[int], spans: Iterable[_Span]) -> str | None:
    """Equal cells go, in order, each to the message that can wait the least."""
    left = list(spans)
    for place in places:
        able = [span for span in left if span.soonest <= place]
        if not able:
            return _out_of_turn(line[place], next(span.before for span in left if span.before))
        span = min(able, key=lambda span: span.latest)
        if span.latest < place:
            return _out_of_turn(line[span.next_latest], span.sent)
        left.remove(span)
    return None


def _out_of_turn(cell: Cell, first: _Sent) -> str:
    rank, sent, receive = first
    return (
        f"{cell}, but rank {rank} sends {sent.text!r} (line {sent.line}, cell {sent.column}) first, and its messages "
        f"arrive in the order in which it sends them; write {receive} in front, or exchange the sends"
    )
