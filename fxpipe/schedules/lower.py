"""Lower: rows of actions → each rank's instructions, with sends, receives and reductions inserted.

A message carries one value of one micro-batch from a stage to another on a different rank. An activation is sent after
a forward, once per receiving rank for all stages there that use it; a gradient is sent the other way after a backward,
one from each of these stages. Messages from one rank to another travel in the order in which the sender makes them;
both ends derive this order from the rows.

A message holds as much of a value as the stage makes in one action, and so does its gradient. A gathered stage receives
a message for each micro-batch of its group, and sends as many gradients back. Between two gathered stages each group
has one message, numbered by its first micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from types import MappingProxyType
from typing import NamedTuple

from fxpipe.graph.ranks import Placement, RankOf, ranks_of, replicated
from fxpipe.schedules.action import Action
from fxpipe.schedules.dependency import EdgeLike, Groups, group_of, groups_of
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Direction


class Message(NamedTuple):
    """Value ``edge`` (an index into the stage graph's edges) of a micro-batch, or, BACKWARD, the value's gradient.

    A gathered stage has one value for its whole group, and ``microbatch`` is the group's first micro-batch.
    """

    edge: int
    direction: Direction
    microbatch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        what = "value" if self.direction is FORWARD else "gradient"
        return f"{what} {self.edge} of micro-batch {self.microbatch} from rank {self.sender} to rank {self.receiver}"


Use = tuple[int, int, Direction]
"""The user of a message: a stage, a micro-batch or a group's first micro-batch, and what it uses."""


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive; do not wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Compute:
    """Wait for the messages that the action needs, then compute the action."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Start the send; do not wait for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """Free the buffer of a send. The receiver is known to have the message, so that a wait for the send returns at
    once; before a forward that is held back, the rank waits until the message is received."""

    message: Message


@dataclass(frozen=True, slots=True)
class Reduce:
    """Wait until the gradients of the parameters that stages on each of these ranks use are summed. After all actions.

    Sums over replicas need none: they overlap the row on groups of their own, and replicas run equal rows.
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
    """Returns each rank's instructions.

    ``tied``: groups of stages that share a parameter. ``ahead``: as in the table's ``Dependencies``. ``values``: the
    value that each edge carries, if several edges may carry the same value: a rank receives it once, on the edge to the
    stage that uses it first there. ``absent``: (edge, micro-batch) pairs without a value or a gradient.

    A receive is posted one action ahead of the action that needs it, or earlier: never later than a receive that
    follows it in the sender's order. Posted receives take memory for messages under way; ``exchange`` may post small
    ones earlier: a table that does not deadlock with these posting places does not deadlock with earlier ones.
    """
    lowering = Lowering(rows, edges, placement, backward, values, absent)
    groups = holders(placement, backward, tied)
    lowered = []
    for rank, row in enumerate(rows):
        posts, releases = lowering.posts[rank], lowering.releases(rank)
        waits = lowering.waits(rank, ahead, releases)
        instructions: list[Instruction] = []
        for cell, action in enumerate(row):
            # Receives come first: a peer's send, and all sends queued after it, block until the receive is posted.
            instructions += [Receive(message) for message in posts.get(cell, ())]
            instructions += [Release(message) for message in waits.get(cell, ())]
            instructions.append(Compute(action))
            instructions += [Release(message) for message in releases.get(cell, ())]
            instructions += [Send(message) for message in lowering.sent[rank][cell]]
        instructions += [Receive(message) for message in posts.get(len(row), ())]
        instructions += [Reduce(ranks) for ranks in groups if rank in ranks and len(ranks) > 1]
        lowered.append(tuple(instructions))
    return tuple(lowered)


def holders(placement: Placement, backward: Sequence[bool], tied: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The groups of ranks over which gradients are summed at the end: of stages that share a parameter, and of a stage
    on several ranks. Each rank enters its groups in this order, or ranks would deadlock."""
    several = [[stage] for stage in replicated(placement) if backward[stage]]
    groups = ({rank for stage in stages for rank in ranks_of(placement[stage])} for stages in [*tied, *several])
    return sorted({tuple(sorted(ranks)) for ranks in groups})


Sharing = Callable[[int, int], Sequence[int]]
"""(edge, micro-batch) → the edges whose value the edge's message carries, the edge included, in order."""


def sharing(edges: Sequence[EdgeLike], rank_of: RankOf, values: Sequence[Hashable] | None) -> Sharing:
    """``values``: as in ``lower``."""
    groups: dict[Hashable, list[int]] = {}
    for index, (edge, value) in enumerate(zip(edges, values or range(len(edges)), strict=True)):
        groups.setdefault((edge.source, value), []).append(index)
    same = {index: group for group in groups.values() for index in group}
    return partial(_shared, edges, rank_of, same)  # which pickles, as a table and its timelines do


def _shared(
    edges: Sequence[EdgeLike], rank_of: RankOf, same: Mapping[int, Sequence[int]], index: int, microbatch: int
) -> Sequence[int]:
    there = rank_of(edges[index].target, microbatch)
    if len(same[index]) == 1 or rank_of(edges[index].source, microbatch) == there:
        return (index,)
    return [other for other in same[index] if rank_of(edges[other].target, microbatch) == there]


class Lowering:
    """The messages of a table: which action sends each message, and which action needs the message first."""

    def __init__(
        self,
        rows: Rows,
        edges: Sequence[EdgeLike],
        placement: Placement,
        backward: Sequence[bool],
        values: Sequence[Hashable] | None,
        absent: Collection[tuple[int, int]] = (),
    ) -> None:
        self._rows, self._edges, self._groups = rows, edges, groups_of(rows)
        self._rank_of = RankOf.from_placement(placement, self._groups)
        self._shared, self._absent = sharing(edges, self._rank_of, values), absent
        # (stage, direction) → the edges whose values, or gradients, the stage makes
        self._makes: dict[tuple[int, Direction], list[int]] = {}
        for index, edge in enumerate(edges):
            self._makes.setdefault((edge.source, FORWARD), []).append(index)
            if backward[edge.source]:
                self._makes.setdefault((edge.target, BACKWARD), []).append(index)
        # (rank, use) → the place in the rank's row of the first action that is this use
        self._places: dict[tuple[int, Use | None], int] = {}
        for rank, row in enumerate(rows):
            for cell, action in enumerate(row):
                self._places.setdefault((rank, use_of(action)), cell)
        # rank and place → the messages that the action there makes, in order
        self.sent = [[tuple(self._made_by(action)) for action in row] for row in rows]
        self.sent_at = {each: cell for row in self.sent for cell, messages in enumerate(row) for each in messages}
        self.used_at = {message: self._first_use(message) for message in self.sent_at}
        # (sender, receiver) → the messages between them in the order in which the sender makes them
        self.queues: dict[tuple[int, int], list[Message]] = {}
        for message in sorted(self.sent_at, key=lambda message: (message.sender, message.receiver)):
            self.queues.setdefault((message.sender, message.receiver), []).append(message)
        # message → the place before which its receive is posted: an action ahead, and in its sender's order; and rank →
        # place → the messages whose receives are posted there
        self.posted_at: dict[Message, int] = {}
        self.posts: list[dict[int, list[Message]]] = [{} for _ in rows]
        self._receivers: list[list[int]] = [[] for _ in rows]  # rank → the ranks that it sends to
        computing = [_Computing(row) for row in rows]
        for (sender, rank), messages in self.queues.items():
            self._receivers[sender].append(rank)
            # From the last to the first: no receive may be posted after the receive of a later message of the sender.
            latest = len(rows[rank])
            for message in reversed(messages):
                latest = min(latest, computing[rank].ahead(self.used_at[message], self._posted_ahead(message)))
                self.posted_at[message] = latest
            for message in messages:
                self.posts[rank].setdefault(self.posted_at[message], []).append(message)

    def _made_by(self, action: Action) -> Iterator[Message]:
        """Yields the messages that an action makes; edges that carry a value to the same rank share a message."""
        if (direction := action.kind.messages) is None:
            return
        for index in self._makes.get((action.stage, direction), ()):
            edge = self._edges[index]
            # A gathered source makes one value for its whole group; any other source one value for each micro-batch.
            step = self._groups.get(edge.source, 1)
            for microbatch in (action.microbatch,) if action.count == 1 else action.microbatches[::step]:
                ends = self._rank_of(edge.source, microbatch), self._rank_of(edge.target, microbatch)
                if ends[0] == ends[1] or (index, microbatch) in self._absent:
                    continue
                message = Message(index, direction, microbatch, *(ends if direction is FORWARD else reversed(ends)))
                if direction is BACKWARD or self._is_first(message):
                    yield message

    def _is_first(self, message: Message) -> bool:
        """Whether a value travels on this edge: of the edges with the value to that rank, the edge used first."""
        shared = self._shared(message.edge, message.microbatch)
        if len(shared) == 1:
            return True
        return message.edge == min(reversed(shared), key=lambda edge: self._first_use(message._replace(edge=edge)))

    def _first_use(self, message: Message) -> int:
        """The place in the receiver's row of the first action that needs a message; the row's end if none does."""
        use = user_of(message, self._edges, self._groups)
        return self._places.get((message.receiver, use), len(self._rows[message.receiver]))

    def _posted_ahead(self, message: Message) -> int:
        """Returns how many actions ahead of its use a receive is posted: 1, without a group.

        A stage makes the micro-batches of a group one after another: 1 for the last, 2 for the one before, and so on.
        """
        edge = self._edges[message.edge]
        if not self._groups or message.direction is BACKWARD:
            return 1
        used = self._groups.get(edge.target, 1)
        return 1 + used - self._groups.get(edge.source, 1) - message.microbatch % used

    def releases(self, rank: int) -> dict[int, list[Message]]:
        """Returns a dict: place in the row → the sends that are known to be complete after the action there.

        A peer's message that was made after the peer used this rank's message proves that the latter arrived.
        """
        releases: dict[int, list[Message]] = {}
        for peer in self._receivers[rank]:
            messages, answers = self.queues[rank, peer], self.queues.get((peer, rank), [])
            cells = [self.sent_at[answer] for answer in answers]  # the answers' places in the peer's row, in order
            soonest = list(accumulate((self.used_at[answer] for answer in reversed(answers)), min))[::-1]
            for message in messages:
                first = bisect_left(cells, self.used_at[message])  # answers from this index on were made after the use
                if first < len(answers):
                    releases.setdefault(soonest[first], []).append(message)
        return releases

    def waits(
        self, rank: int, ahead: Mapping[int, int], releases: dict[int, list[Message]]
    ) -> dict[int, list[Message]]:
        """Returns a dict: place in the row → the sends that the action there waits for, so as not to run too far ahead.
        Each message is released once: ``releases`` keeps only releases that come earlier."""
        row = self._rows[rank]
        forwards = {
            (action.stage, action.microbatch): cell
            for cell, action in enumerate(row)
            if action.kind.messages is FORWARD
        }
        released = {message: cell for cell, messages in releases.items() for message in messages}
        waits: dict[int, list[Message]] = {}
        for message in chain(*self.sent[rank]):
            source = self._edges[message.edge].source
            if message.direction is BACKWARD or source not in ahead:
                continue
            cell = forwards.get((source, message.microbatch + ahead[source]))
            if cell is None or released.get(message, len(row)) < cell:
                continue
            waits.setdefault(cell, []).append(message)
            if message in released:
                releases[released[message]].remove(message)
        return waits


class _Computing:
    """The places of a row whose actions compute. An action that begins or awaits a copy takes no time, and hides no
    message."""

    def __init__(self, row: Sequence[Action]) -> None:
        self._places = [cell for cell, action in enumerate(row) if action.kind.lane is None]
        self._all = len(self._places) == len(row)

    def ahead(self, cell: int, actions: int) -> int:
        """Returns the place so many computing actions ahead of a place of the row; the first if there is none."""
        if self._all:
            return max(cell - actions, 0)
        return self._places[max(bisect_left(self._places, cell) - actions, 0)]


def user_of(message: Message, edges: Sequence[EdgeLike], groups: Groups = MappingProxyType({})) -> Use:
    """Returns the use of the action that needs a message."""
    edge = edges[message.edge]
    if message.direction is FORWARD:
        return edge.target, group_of(groups, edge.target, message.microbatch), FORWARD
    return edge.source, message.microbatch, BACKWARD


def use_of(action: Action) -> Use | None:
    """The use of an action that needs messages; None for an R, which has its inputs, and a W, which reads its I's."""
    direction = action.kind.messages
    return (action.stage, action.microbatch, direction) if direction else None


def pairs(instructions: Sequence[Sequence[Instruction]]) -> tuple[tuple[int, int], ...]:
    """Returns the directed pairs of ranks between which messages travel, sorted."""
    sends = (step.message for row in instructions for step in row if isinstance(step, Send))
    return tuple(sorted({(message.sender, message.receiver) for message in sends}))


def is_forward(instruction: Instruction) -> bool:
    """Whether an instruction belongs to a forward-only run, in which no gradient shows that a send was received."""
    if isinstance(instruction, Compute):
        return instruction.action.kind.part_of is FORWARD
    return isinstance(instruction, Receive | Send) and instruction.message.direction is FORWARD
