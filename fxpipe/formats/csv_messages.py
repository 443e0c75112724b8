"""The messages of a CSV file: whether its sends and receives fit its actions, a stage graph and each other.

    0F0,0F1,0SEND_F1,0SEND_F0      rank 0 sends micro-batch 1 first,
    1RECV_F0,1F0,1RECV_F1,1F1      and rank 1 waits for micro-batch 0: refused

A cell names the stage at its own end alone. Which edge it is of follows from the order: the k-th send of an action
is along the k-th edge of its stage to another rank, as ``lower`` has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import EdgeLike
from fxpipe.schedules.lower import Message, Send
from fxpipe.schedules.schedule import Schedule

COMPUTE = frozenset(op.value for op in Op)
MESSAGES = frozenset(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])

_MOST_WAYS = 100_000  # in which equal cells may be told apart; what has more is not followed further
_MOST_STEPS = 2_000_000  # of following them, over a line: some seconds


class Token(NamedTuple):
    """``1RECV_F3``: a stage, an op, and a micro-batch where the op has one; a group's first, and how many it has."""

    stage: int
    op: str
    microbatch: int | None
    size: int = 1

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_send(self) -> bool:
        return self.op.startswith("SEND")

    @property
    def actions(self) -> list[Action]:
        """Those that can make what is sent, or need what is received, of this one micro-batch: a gradient may be of a B
        or an I."""
        ops = (Op.F,) if self.op.endswith("F") else (Op.B, Op.I)
        return [Action(self.stage, op, self.microbatch or 0) for op in ops]


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
    def covered(self) -> Iterator[Action]:
        """The same, micro-batch by micro-batch."""
        return (Action(a.stage, a.op, microbatch) for a in self.actions for microbatch in a.microbatches)

    @property
    def message(self) -> Token | None:
        """The send or receive that it is; none stands in an overlap."""
        return self.tokens[0] if self.tokens[0].op in MESSAGES else None


Lines = Sequence[Sequence[Cell]]


def ends_of(message: Message, edge: EdgeLike) -> tuple[Token, Token]:
    """Along edge 0-1: ``0SEND_F3``, ``1RECV_F3`` of the value, ``1SEND_B3``, ``0RECV_B3`` of its gradient.

    Each names the stage at its own end.
    """
    here, there = (edge.source, edge.target) if message.op is Op.F else (edge.target, edge.source)
    kind, microbatch = message.op.value, message.microbatch
    return Token(here, f"SEND_{kind}", microbatch), Token(there, f"RECV_{kind}", microbatch)


class _Matching(NamedTuple):
    """The messages that follow from a table's rows and edges, with their two ends, and a file's cells for them."""

    ends: dict[Message, tuple[Token, Token]]
    wanted: dict[Token, list[Message]]
    cells: dict[Token, list[Cell]]

    @staticmethod
    def of(lines: Lines, schedule: Schedule) -> _Matching:
        made = dict.fromkeys(step.message for row in schedule.instructions for step in row if isinstance(step, Send))
        ends = {message: ends_of(message, schedule.links[message.edge]) for message in made}
        wanted: dict[Token, list[Message]] = {}
        for end in (0, 1):
            for message, tokens in ends.items():
                wanted.setdefault(tokens[end], []).append(message)
        cells: dict[Token, list[Cell]] = {}
        for cell in chain.from_iterable(lines):
            if cell.message:
                cells.setdefault(cell.message, []).append(cell)
        return _Matching(ends, wanted, cells)

    def surplus(self, token: Token) -> list[Cell]:
        """The cells that no edge has a message for."""
        return self.cells.get(token, [])[len(self.wanted.get(token, ())) :]

    def missing(self, token: Token) -> list[Message]:
        """The messages that the file has no cell for."""
        return self.wanted.get(token, [])[len(self.cells.get(token, ())) :]


def faults(lines: Lines, schedule: Schedule, assumed: bool) -> Iterator[str]:
    """What is wrong with the cells of a file that are no actions; the first is to be told, others may follow from it.

    ``assumed``: nobody has told the edges, and they are a chain's. A file that does not fit it is of another graph,
    and has but to have as many receives as sends.
    """
    yield from _homeless(lines, schedule)
    if not any(cell.message for line in lines for cell in line):
        return
    yield from _misplaced(lines)
    matching = _Matching.of(lines, schedule)
    odd = {t for t in (*matching.wanted, *matching.cells) if matching.surplus(t) or matching.missing(t)}
    if assumed and odd:
        uneven = _uneven(matching.cells)
        if uneven is None:
            return
        if len({token.is_send for token in odd}) == 2:  # neither the sends are a chain's nor the receives
            yield uneven
    added = "; no edges are given, so the stages are taken for a chain" * assumed
    yield from (fault + added for fault in _unpartnered(lines, matching, schedule))
    yield from (fault + added for fault in _crossed(lines, matching))


def _homeless(lines: Lines, schedule: Schedule) -> Iterator[str]:
    """What is sent, received or done to parameters, and of no stage of its rank or no micro-batch of the table."""
    placement, last = schedule.placement, schedule.microbatches - 1
    for rank, line in enumerate(lines):
        for cell, (stage, op, microbatch, _) in ((one, token) for one in line for token in one.tokens):
            if op in COMPUTE:
                continue
            if stage >= len(placement):
                yield f"{cell} is of stage {stage}, but the last with an action is {len(placement) - 1}"
            elif microbatch is not None and microbatch > last:
                yield f"{cell} is of micro-batch {microbatch}, but the last with an action is {last}"
            elif placement[stage] != rank:
                yield (
                    f"{cell} stands on rank {rank}, but stage {stage} is on rank {placement[stage]}; a send names the "
                    "stage that sends, a receive the one that receives"
                )


def _misplaced(lines: Lines) -> Iterator[str]:
    """Sends in front of the action that makes them, and receives behind the one that needs them."""
    for line in lines:
        places = {action: place for place, cell in reversed([*enumerate(line)]) for action in cell.covered}
        for place, cell in enumerate(line):
            if cell.message is None:
                continue
            actions, sends = cell.message.actions, cell.message.is_send
            first = min(filter(places.__contains__, actions), key=places.__getitem__, default=None)
            if first is None:
                does = "make what it sends" if sends else "need it"
                yield f"{cell}, but its line has no {' or '.join(map(str, actions))} to {does}"
            elif sends and place < places[first]:
                yield f"{cell} stands in front of {first}, which makes what it sends; write it behind"
            elif not sends and place > places[first]:
                yield f"{cell} stands behind {first}, which needs it; write it in front"


def _uneven(cells: dict[Token, list[Cell]]) -> str | None:
    """A micro-batch that has more sends than receives, or fewer, whatever the stage graph."""
    counts = Counter((token.op, token.microbatch) for token, found in cells.items() for _ in found)
    for token, found in cells.items():
        sent, received = (counts[f"{end}{token.op[4:]}", token.microbatch] for end in ("SEND", "RECV"))
        if (sent > received) if token.is_send else (received > sent):
            return (
                f"{found[0]}: micro-batch {token.microbatch} has {sent} cells SEND{token.op[4:]}, but {received} cells "
                f"RECV{token.op[4:]}; give edges to be told which has no other end"
            )
    return None


def _unpartnered(lines: Lines, matching: _Matching, schedule: Schedule) -> Iterator[str]:
    """Sends that nobody receives, and receives that nobody sends."""
    for cell, token in sorted((cell, one) for one in matching.cells for cell in matching.surplus(one)):
        taken = ", ".join(str(schedule.links[message.edge]) for message in matching.wanted.get(token, ()))
        yield f"{_alone(cell, token)}: " + (f"only edge {taken} carries it" if taken else "no edge carries it")
    for token, message in ((one, message) for one in matching.wanted for message in matching.missing(one)):
        send, receive = matching.ends[message]
        other, rank = (receive, message.sender) if token.is_send else (send, message.receiver)
        if matching.missing(other):
            maker = next(cell for line in lines for cell in line if not {*send.actions}.isdisjoint(cell.covered))
            yield f"{maker} has neither a {send} nor a {receive} for edge {schedule.links[message.edge]}"
        else:
            yield f"{_alone(matching.cells[other][-1], other)}: rank {rank} has no {token} for it"


def _alone(cell: Cell, token: Token) -> str:
    return f"{cell} is {'received' if token.is_send else 'sent'} by nobody"


# --- the order of messages between two ranks ---


def _crossed(lines: Lines, matching: _Matching) -> Iterator[str]:
    """Receives of what does not arrive next. From one rank to another, messages arrive in the order of their sends."""
    queues: dict[int, dict[int, list[tuple[Token, Cell]]]] = {}  # receiver → sender → receives, each with its send
    left = {token: iter(messages) for token, messages in matching.wanted.items()}
    for cell in chain.from_iterable(lines):
        if cell.message and cell.message.is_send:
            message = next(left[cell.message])
            queue = queues.setdefault(message.receiver, {}).setdefault(message.sender, [])
            queue.append((matching.ends[message][1], cell))
    for receiver in sorted(queues):
        yield from _crossed_on(lines[receiver], queues[receiver])


def _crossed_on(line: Sequence[Cell], queues: dict[int, list[tuple[Token, Cell]]]) -> Iterator[str]:
    """Plays a line: each receive takes what is next in the queue of a sender.

    Which of equal cells, ``4RECV_F0,4RECV_F0``, is whose, a file does not tell. All ways are followed, and a receive is
    refused where none goes on. A way is what is left of each queue, as a number; equal rests have equal ones.
    """
    numbers: dict[tuple[Token, int], int] = {}  # a receive and the number of what is behind it → the number of both
    senders: dict[int, tuple[int, Cell]] = {}  # number → who has it left, and sends what next
    whole = []
    for sender, queue in queues.items():
        number = 0  # nothing
        for receive, sent in reversed(queue):
            number = numbers.setdefault((receive, number), 1 + len(numbers))
            senders.setdefault(number, (sender, sent))
        whole.append(number)
    rests = {number: rest for rest, number in numbers.items()}
    ways, left = {tuple(sorted(whole))}, _MOST_STEPS
    for cell in line:
        if cell.message is None or cell.message.is_send:
            continue
        further = {
            tuple(sorted((*way[:place], rests[number][1], *way[place + 1 :])))
            for way in ways
            for place, number in enumerate(way)
            if number and rests[number][0] == cell.message
        }
        if not further:
            number = next(number for number in max(ways) if cell.message in _receives(number, rests))
            rank, sent = senders[number]
            yield (
                f"{cell}, but rank {rank} sends {sent.text!r} (line {sent.line}, cell {sent.column}) first, and its "
                f"messages arrive in the order in which it sends them; write {rests[number][0]} in front, or exchange "
                "the sends"
            )
        left -= len(ways) * len(whole)
        if not 0 < len(further) <= _MOST_WAYS or left < 0:
            return
        ways = further


def _receives(number: int, rests: dict[int, tuple[Token, int]]) -> Iterator[Token]:
    while number:
        receive, number = rests[number]
        yield receive
