"""Lower: rows of actions → each rank's instructions, with its sends and receives put in.

A message is one value of one micro-batch on its way from a stage to another on a different rank: an activation after
a forward, or a gradient, the other way, after a backward. Messages from one rank to another travel in the order in
which the sender makes them; both ends know it, for it follows from the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fxpipe.action import Action, Op


class EdgeLike(Protocol):
    """What lowering needs to know of a value that passes between stages."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


@dataclass(frozen=True)
class Message:
    """Value ``edge`` (an index into the stage graph's edges) of a micro-batch; its gradient where ``op`` is B."""

    edge: int
    op: Op
    microbatch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        kind = "value" if self.op is Op.F else "gradient"
        return f"{kind} {self.edge} of micro-batch {self.microbatch} from rank {self.sender} to rank {self.receiver}"


@dataclass(frozen=True)
class Receive:
    """Post the receive; do not wait for it."""

    message: Message


@dataclass(frozen=True)
class Compute:
    """Wait for what the action needs, then compute it."""

    action: Action


@dataclass(frozen=True)
class Send:
    """Start the send; do not wait for it."""

    message: Message


@dataclass(frozen=True)
class Release:
    """The receiver is known to have this message: free its buffer. Waiting for the send returns at once here."""

    message: Message


Instruction = Receive | Compute | Send | Release
Rows = Sequence[Sequence[Action]]


def lower(
    rows: Rows,
    edges: Sequence[EdgeLike],
    placement: Sequence[int],
    backward: Sequence[bool],
) -> tuple[tuple[Instruction, ...], ...]:
    """Each rank's instructions.

    ``placement``: the rank of each stage. ``backward``: whether each stage has one. A receive is posted one action
    ahead of the action that needs it, or earlier: never later than a receive behind it in the sender's order, since
    messages between two ranks arrive in that order.
    """
    sent = [_sends(row, edges, placement, backward) for row in rows]
    sent_at = {message: place for groups in sent for place, group in enumerate(groups) for message in group}
    used_at = {message: _use_of(message, rows[message.receiver], edges) for message in sent_at}
    arriving: list[list[Message]] = [[] for _ in rows]
    leaving: list[list[Message]] = [[] for _ in rows]
    for message in sent_at:
        arriving[message.receiver].append(message)
        leaving[message.sender].append(message)
    lowered = []
    for rank, row in enumerate(rows):
        posts = _posts(arriving[rank], used_at, len(row))
        releases = _releases(leaving[rank], arriving[rank], sent_at, used_at)
        instructions: list[Instruction] = []
        for place, action in enumerate(row):
            instructions += [Receive(message) for message in posts.get(place, ())]
            instructions.append(Compute(action))
            instructions += [Release(message) for message in releases.get(place, ())]
            instructions += [Send(message) for message in sent[rank][place]]
        instructions += [Receive(message) for message in posts.get(len(row), ())]
        lowered.append(tuple(instructions))
    return tuple(lowered)


def _sends(
    row: Sequence[Action], edges: Sequence[EdgeLike], placement: Sequence[int], backward: Sequence[bool]
) -> list[list[Message]]:
    """The messages that each action of a row makes, in order."""
    groups = []
    for action in row:
        made = []
        for index, edge in enumerate(edges):
            here, there = placement[edge.source], placement[edge.target]
            if here == there:
                continue
            if action.op is Op.F and edge.source == action.stage:
                made.append(Message(index, Op.F, action.microbatch, here, there))
            elif action.op in (Op.B, Op.I) and edge.target == action.stage and backward[edge.source]:
                made.append(Message(index, Op.B, action.microbatch, there, here))
        groups.append(made)
    return groups


def user_of(message: Message, edges: Sequence[EdgeLike]) -> tuple[int, int, bool]:
    """(stage, micro-batch, whether it is a forward) of the action that needs a message."""
    edge = edges[message.edge]
    forward = message.op is Op.F
    return (edge.target if forward else edge.source), message.microbatch, forward


def _use_of(message: Message, row: Sequence[Action], edges: Sequence[EdgeLike]) -> int:
    """The place in the receiver's row of the first action that needs a message; its end where none does."""
    stage, microbatch, forward = user_of(message, edges)
    for place, action in enumerate(row):
        if (action.stage, action.microbatch, action.op is Op.F) == (stage, microbatch, forward):
            return place
    return len(row)


def _posts(arriving: Sequence[Message], used_at: Mapping[Message, int], end: int) -> dict[int, list[Message]]:
    """Place in the row → receives to post before it: an action ahead, and in each sender's own order."""
    posts: dict[int, list[Message]] = {}
    for sender in sorted({message.sender for message in arriving}):
        latest, placed = end, []
        for message in reversed([m for m in arriving if m.sender == sender]):
            latest = min(latest, max(used_at[message] - 1, 0))
            placed.append((latest, message))
        for place, message in reversed(placed):
            posts.setdefault(place, []).append(message)
    return posts


def _releases(
    leaving: Sequence[Message],
    arriving: Sequence[Message],
    sent_at: Mapping[Message, int],
    used_at: Mapping[Message, int],
) -> dict[int, list[Message]]:
    """Place in the row → sends that are over once its action has run.

    Whoever got a message that the peer sent after it used ours knows that ours has arrived.
    """
    releases: dict[int, list[Message]] = {}
    for message in leaving:
        answers = [
            used_at[answer]
            for answer in arriving
            if answer.sender == message.receiver
            and sent_at[answer] >= used_at[message]
            and used_at[answer] > sent_at[message]
        ]
        if answers:
            releases.setdefault(min(answers), []).append(message)
    return releases


def pairs(instructions: Sequence[Sequence[Instruction]]) -> tuple[tuple[int, int], ...]:
    """The directed pairs of ranks between which messages travel, sorted."""
    sends = (step.message for row in instructions for step in row if isinstance(step, Send))
    return tuple(sorted({(message.sender, message.receiver) for message in sends}))


def needs(action: Action, edges: Sequence[EdgeLike], backward: Sequence[bool]) -> list[Action]:
    """The actions that must have run before this one."""
    stage, microbatch = action.stage, action.microbatch
    if action.op is Op.F:
        sources = dict.fromkeys(edge.source for edge in edges if edge.target == stage)
        return [Action(source, Op.F, microbatch) for source in sources]
    if action.op is Op.W:
        return [Action(stage, Op.I, microbatch)]
    targets = dict.fromkeys(edge.target for edge in edges if edge.source == stage and backward[edge.target])
    return [Action(stage, Op.F, microbatch)] + [Action(target, action.op, microbatch) for target in targets]


def forward_only(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The instructions without everything that belongs to backward."""

    def op(step: Instruction) -> Op:
        return step.action.op if isinstance(step, Compute) else step.message.op

    return tuple(step for step in instructions if op(step) is Op.F)
