"""Lower: rows of actions → each rank's instructions, with its sends, receives and reductions put in.

A message is one value of one micro-batch on its way from a stage to another on a different rank: an activation after
a forward, once for all stages there that use it, or a gradient, the other way, after a backward, one from each.
Messages from one rank to another travel in the order in which the sender makes them; both ends know it, for it follows
from the rows.

What the stage that makes a value makes of it at once is one message, its gradient too: a gathered stage is sent one
for each micro-batch of its group, and sends as many gradients back. From one gathered stage to another there is one
for each group, numbered by its first micro-batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from types import MappingProxyType
from typing import NamedTuple

from fxpipe.graph.ranks import Placement, RankOf, ranks_of, replicated
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import EdgeLike, Groups, group_of, groups_of


class Message(NamedTuple):
    """Value ``edge`` (an index into the stage graph's edges) of a micro-batch; its gradient where ``op`` is B.

    A value that a gathered stage makes is of its whole group, and ``microbatch`` is the first of it.
    """

    edge: int
    op: Op
    microbatch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        kind = "value" if self.op is Op.F else "gradient"
        return f"{kind} {self.edge} of micro-batch {self.microbatch} from rank {self.sender} to rank {self.receiver}"


Use = tuple[int, int, bool]
"""What needs a message: a stage, a micro-batch, or a group by its first one, and whether it is in forward."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive; do not wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Compute:
    """Wait for what the action needs, then compute it."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Start the send; do not wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """Free the buffer of a send. The receiver is known to have this message, so that waiting for it returns at once; in
    front of a forward that is held back it is waited for."""

    message: Message


@dataclass(frozen=True, slots=True)
class Reduce:
    """Wait until the gradients of the parameters that stages on each of these ranks use are summed. Behind all actions.

    Sums over replicas need none: they run beside the row, on groups of their own, and replicas run equal rows.
    """

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"reduction over ranks {', '.join(map(str, self.ranks))}"


Instruction = Receive | Compute | Send | Release | Reduce
Rows = Sequence[Sequence[Action]]


def lower(
    rows: Rows,
    edges: Sequence[EdgeLike],
    placement: Placement,
    backward: Sequence[bool],
    tied: Sequence[Sequence[int]] = (),
    ahead: Mapping[int, int] = MappingProxyType({}),
    values: Sequence[Hashable] | None = None,
    absent: Collection[tuple[int, int]] = (),
) -> tuple[tuple[Instruction, ...], ...]:
    """Each rank's instructions.

    ``placement``: the rank, or the ranks, of each stage. ``backward``: whether each stage has one. ``tied``: groups of
    stages that share a parameter. ``ahead``: as in the table's ``Dependencies``: before its next forward such a stage
    waits until what it made so many micro-batches ago is received. ``values``: what each edge carries, where several
    may carry one value: to a rank it is sent once, on the edge to the stage that is the first to use it there.
    ``absent``: (edge, micro-batch) of which there is no value, and no gradient.

    A receive is posted one action ahead of the action that needs it, or earlier: never later than a receive behind it
    in the sender's order, since messages between two ranks arrive in that order. So much memory is taken for what is on
    its way, and for small messages, which may be posted before their place, so much as ``exchange.BURST`` says for
    each sender. What does not deadlock by these places does not by earlier ones.
    """
    sizes = groups_of(rows)
    rank_of = RankOf.of(placement, sizes)
    sent = _sends(rows, edges, rank_of, backward, sizes)
    if sharing := alike(edges, rank_of, values):
        sent = _once(sent, sharing, rows, edges, sizes)
    if absent:
        sent = [[[one for one in group if (one.edge, one.microbatch) not in absent] for group in row] for row in sent]
    sent_at = {message: place for groups in sent for place, group in enumerate(groups) for message in group}
    used_at = _uses(sent_at, rows, edges, sizes)
    arriving: list[dict[int, list[Message]]] = [{} for _ in rows]  # of each rank, by sender
    leaving: list[dict[int, list[Message]]] = [{} for _ in rows]  # by receiver
    for message in sorted(sent_at, key=lambda message: (message.sender, message.receiver)):
        arriving[message.receiver].setdefault(message.sender, []).append(message)
        leaving[message.sender].setdefault(message.receiver, []).append(message)
    groups = holders(placement, backward, tied)
    lowered = []
    for rank, row in enumerate(rows):
        posts = _posts(arriving[rank], used_at, edges, sizes, len(row))
        releases = _releases(leaving[rank], arriving[rank], sent_at, used_at)
        waits = _waits(sent[rank], row, edges, ahead, releases)
        instructions: list[Instruction] = []
        for place, action in enumerate(row):
            instructions += [Receive(message) for message in posts.get(place, ())]
            instructions += [Release(message) for message in waits.get(place, ())]
            instructions.append(Compute(action))
            instructions += [Release(message) for message in releases.get(place, ())]
            instructions += [Send(message) for message in sent[rank][place]]
        instructions += [Receive(message) for message in posts.get(len(row), ())]
        instructions += [Reduce(ranks) for ranks in groups if rank in ranks and len(ranks) > 1]
        lowered.append(tuple(instructions))
    return tuple(lowered)


def holders(placement: Placement, backward: Sequence[bool], tied: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks over which gradients are summed at the end, sorted: those of stages that share a parameter, and those
    of a stage that is on several. Each rank comes to its own in this order, or ranks would wait in a circle."""
    several = [[stage] for stage in replicated(placement) if backward[stage]]
    groups = ({rank for stage in stages for rank in ranks_of(placement[stage])} for stages in [*tied, *several])
    return sorted({tuple(sorted(ranks)) for ranks in groups})


def _sends(
    rows: Rows, edges: Sequence[EdgeLike], rank_of: RankOf, backward: Sequence[bool], groups: Groups
) -> list[list[Sequence[Message]]]:
    """Rank and place → the messages that the action there makes, in order."""
    makes: dict[tuple[int, Op], list[tuple[int, Op]]] = {}  # (stage, op) → the values and gradients that it makes
    for index, edge in enumerate(edges):
        makes.setdefault((edge.source, Op.F), []).append((index, Op.F))
        if backward[edge.source]:
            for op in (Op.B, Op.I):
                makes.setdefault((edge.target, op), []).append((index, Op.B))
    sizes = [groups.get(edge.source, 1) for edge in edges]

    def made(action: Action) -> Iterator[Message]:
        for index, op in makes.get((action.stage, action.op), ()):
            edge = edges[index]
            for microbatch in (action.microbatch,) if action.count == 1 else action.microbatches[:: sizes[index]]:
                ends = rank_of(edge.source, microbatch), rank_of(edge.target, microbatch)
                if ends[0] != ends[1]:
                    yield Message(index, op, microbatch, *(ends if op is Op.F else reversed(ends)))

    return [[tuple(made(action)) for action in row] for row in rows]


Sharing = Callable[[int, int], Sequence[int]]
"""(edge, micro-batch) → the edges whose value comes in its message, itself included, in order."""


def alike(edges: Sequence[EdgeLike], rank_of: RankOf, values: Sequence[Hashable] | None) -> Sharing | None:
    """Which edges carry one value to one other rank. None where no value is on several edges."""
    found: dict[Hashable, list[int]] = {}
    for index, (edge, value) in enumerate(zip(edges, values, strict=True) if values is not None else ()):
        found.setdefault((edge.source, value), []).append(index)
    same = {index: group for group in found.values() if len(group) > 1 for index in group}

    def sharing(index: int, microbatch: int) -> Sequence[int]:
        there = rank_of(edges[index].target, microbatch)
        if index not in same or rank_of(edges[index].source, microbatch) == there:
            return (index,)
        return [other for other in same[index] if rank_of(edges[other].target, microbatch) == there]

    return sharing if same else None


def _once(
    sent: Sequence[Sequence[Sequence[Message]]],
    sharing: Sharing,
    rows: Rows,
    edges: Sequence[EdgeLike],
    groups: Groups,
) -> list[list[Sequence[Message]]]:
    """The messages without those of a value that comes with another one."""
    place = {use_of(action): place for row in rows for place, action in reversed(list(enumerate(row)))}

    def is_first(message: Message) -> bool:
        shared = sharing(message.edge, message.microbatch) if message.op is Op.F else ()
        if len(shared) < 2:
            return True
        used = {place.get(user_of(message._replace(edge=e), edges, groups), math.inf): e for e in shared}
        return used[min(used)] == message.edge

    return [[tuple(filter(is_first, messages)) if messages else messages for messages in row] for row in sent]


def user_of(message: Message, edges: Sequence[EdgeLike], groups: Groups = MappingProxyType({})) -> Use:
    """The use of the action that needs a message. ``groups``: those of the table."""
    edge = edges[message.edge]
    if message.op is Op.F:
        return edge.target, group_of(groups, edge.target, message.microbatch), True
    return edge.source, message.microbatch, False


def use_of(action: Action) -> Use | None:
    """What an action uses messages as. An R has its inputs, a W what the I left."""
    if action.op is Op.R or action.op is Op.W:
        return None
    return action.stage, action.microbatch, action.op is Op.F


def _uses(messages: Iterable[Message], rows: Rows, edges: Sequence[EdgeLike], groups: Groups) -> dict[Message, int]:
    """Message → the place in its receiver's row of the first action that needs it; the row's end where none does."""
    places: list[dict[Use | None, int]] = [{} for _ in rows]
    for rank, row in enumerate(rows):
        for place, action in enumerate(row):
            places[rank].setdefault(use_of(action), place)
    return {
        message: places[message.receiver].get(user_of(message, edges, groups), len(rows[message.receiver]))
        for message in messages
    }


def _posts(
    arriving: Mapping[int, Sequence[Message]],
    used_at: Mapping[Message, int],
    edges: Sequence[EdgeLike],
    groups: Groups,
    end: int,
) -> dict[int, list[Message]]:
    """Place in the row → receives to post before it: an action ahead, and in each sender's own order.

    Those of a group are made one after another: the last is posted an action ahead, the one before it two.
    """
    posts: dict[int, list[Message]] = {}
    for messages in arriving.values():
        latest, placed = end, []
        for message in reversed(messages):
            ahead, edge = 1, edges[message.edge]
            if groups and message.op is Op.F:  # and as many as come behind it in the group that it is used in
                used = groups.get(edge.target, 1)
                ahead += used - groups.get(edge.source, 1) - message.microbatch % used
            latest = min(latest, max(used_at[message] - ahead, 0))
            placed.append((latest, message))
        for place, message in reversed(placed):
            posts.setdefault(place, []).append(message)
    return posts


def _releases(
    leaving: Mapping[int, Sequence[Message]],
    arriving: Mapping[int, Sequence[Message]],
    sent_at: Mapping[Message, int],
    used_at: Mapping[Message, int],
) -> dict[int, list[Message]]:
    """Place in the row → sends that are over once its action has run.

    Whoever got a message that the peer sent after it used ours knows that ours has arrived.
    """
    releases: dict[int, list[Message]] = {}
    for peer, messages in leaving.items():
        answers = arriving.get(peer, [])
        made = [sent_at[answer] for answer in answers]  # at these places of the peer's row, in order
        soonest = list(accumulate((used_at[answer] for answer in reversed(answers)), min))[::-1]
        for message in messages:
            first = bisect_left(made, used_at[message])  # the answers from here on were made after ours was used
            if first < len(answers):
                releases.setdefault(soonest[first], []).append(message)
    return releases


def _waits(
    leaving: Sequence[Sequence[Message]],
    row: Sequence[Action],
    edges: Sequence[EdgeLike],
    ahead: Mapping[int, int],
    releases: dict[int, list[Message]],
) -> dict[int, list[Message]]:
    """Place in the row → sends that its action waits for, so as not to run too far ahead. A message is released once:
    of ``releases`` those stay that stand before it."""
    forwards = {(action.stage, action.microbatch): place for place, action in enumerate(row) if action.op is Op.F}
    released = {message: place for place, messages in releases.items() for message in messages}
    waits: dict[int, list[Message]] = {}
    for message in chain(*leaving):
        source = edges[message.edge].source
        if message.op is not Op.F or source not in ahead:
            continue
        place = forwards.get((source, message.microbatch + ahead[source]))
        if place is None or released.get(message, len(row)) < place:
            continue
        waits.setdefault(place, []).append(message)
        if message in released:
            releases[released[message]].remove(message)
    return waits


def pairs(instructions: Sequence[Sequence[Instruction]]) -> tuple[tuple[int, int], ...]:
    """The directed pairs of ranks between which messages travel, sorted."""
    sends = (step.message for row in instructions for step in row if isinstance(step, Send))
    return tuple(sorted({(message.sender, message.receiver) for message in sends}))


def is_forward(instruction: Instruction) -> bool:
    """Whether an instruction has a part in a forward-only run, where no gradient shows that a send was received."""
    if isinstance(instruction, Compute):
        return instruction.action.op is Op.F
    return isinstance(instruction, Receive | Send) and instruction.message.op is Op.F
