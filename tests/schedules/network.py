"""A simulator of message passing, independent of ``verify``'s."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind
from fxpipe.schedules.lower import Compute, Instruction, Message, Reduce, Release, Send, lower
from fxpipe.schedules.schedule import Schedule
from tests.graphs import Value, gradient_of

GRADIENT = (Kind.B, Kind.I)
"""What makes the gradients of a stage's inputs."""


QueueOf = Callable[[Message], object]


def per_directed_pair(message: Message) -> object:
    return message.sender, message.receiver


def per_pair(message: Message) -> object:
    return frozenset((message.sender, message.receiver))


def per_kind(message: Message) -> object:
    return per_pair(message), message.direction


class Network:
    """Ranks that issue sends and receives to queues. Each rank works through its side of a queue in order of issue:
    a send and a receive are over when both stand at the head of their sides. Nothing blocks but a compute."""

    def __init__(
        self,
        instructions: Sequence[Sequence[Instruction]],
        edges: Sequence[Value],
        placement: Sequence[int | tuple[int, ...]],
        backward: Sequence[bool],
        queue_of: QueueOf = per_directed_pair,
    ) -> None:
        self.instructions, self.edges, self.placement = instructions, edges, placement
        self.backward, self.queue_of = backward, queue_of
        self.sides: dict[tuple[int, object], list[tuple[str, Message]]] = {}
        self.place = [0] * len(instructions)
        self.over: set[Message] = set()
        self.ran: set[Action] = set()
        computes = (step.action for row in instructions for step in row if isinstance(step, Compute))
        self.halved = {(action.stage, action.microbatch) for action in computes if action.kind is Kind.I}

    def ends(self, seed: int) -> bool:
        """Plays the ranks in an order drawn at random; whether all get to their end and nothing is left over."""
        draw = random.Random(seed)
        while True:
            able = [rank for rank in range(len(self.place)) if self.is_able(rank)]
            if not able:
                break
            self.step(draw.choice(able))
        done = all(place == len(row) for place, row in zip(self.place, self.instructions, strict=True))
        return done and not any(self.sides.values())

    def is_able(self, rank: int) -> bool:
        if self.place[rank] == len(self.instructions[rank]):
            return False
        step = self.instructions[rank][self.place[rank]]
        if isinstance(step, Reduce):
            return all(step in self.instructions[other][: self.place[other] + 1] for other in step.ranks)
        if isinstance(step, Release) and not self.backward[self.edges[step.message.edge].source]:
            return step.message in self.over  # in front of a forward that is held back
        return not isinstance(step, Compute) or (
            self.inputs(step.action) <= self.over and self.locals(step.action) <= self.ran
        )

    def step(self, rank: int) -> None:
        step = self.instructions[rank][self.place[rank]]
        self.place[rank] += 1
        if isinstance(step, Compute):
            self.ran.add(step.action)
        elif isinstance(step, Release):
            assert step.message in self.over, f"a release would have waited: {step.message}"
        elif not isinstance(step, Reduce):
            kind = "send" if isinstance(step, Send) else "receive"
            self.sides.setdefault((rank, self.queue_of(step.message)), []).append((kind, step.message))
            self.match(self.queue_of(step.message), step.message.sender, step.message.receiver)

    def match(self, queue: object, one: int, other: int) -> None:
        """Ends what stands at the heads of both sides of a queue, as long as one sends and the other receives."""
        first, second = (self.sides.setdefault((rank, queue), []) for rank in (one, other))
        while first and second and first[0][0] != second[0][0]:
            (_, sent), (_, posted) = first.pop(0), second.pop(0)
            assert sent == posted, f"{sent} lands in the buffer of {posted}"
            self.meet(sent)

    def meet(self, message: Message) -> None:
        self.over.add(message)

    def rank(self, stage: int, microbatch: int) -> int:
        place = self.placement[stage]
        return place if isinstance(place, int) else place[microbatch % len(place)]

    def inputs(self, action: Action) -> set[Message]:
        """The messages that an action needs, from the edges."""
        found = set()
        for index, (source, target, _) in enumerate(self.edges):
            here, there = self.rank(source, action.microbatch), self.rank(target, action.microbatch)
            if here != there and action.kind is Kind.F and target == action.stage:
                found.add(Message(index, FORWARD, action.microbatch, here, there))
            if here != there and action.kind in GRADIENT and source == action.stage and self.backward[target]:
                found.add(Message(index, BACKWARD, action.microbatch, there, here))
        return found

    def locals(self, action: Action) -> set[Action]:
        """The actions of the same rank that an action needs, from the edges."""
        stage, op, j, _ = action
        if op is Kind.W:
            return {Action(stage, Kind.I, j)}
        found = {Action(stage, Kind.F, j)} if op in GRADIENT else set()
        for source, target, _ in self.edges:
            if self.rank(source, j) == self.rank(target, j):
                if op is Kind.F and target == stage:
                    found.add(Action(source, Kind.F, j))
                if op in GRADIENT and source == stage and self.backward[target]:
                    found.add(gradient_of(target, j, self.halved))
        return found


class Clocked(Network):
    """The same with a clock at each rank: a transfer begins when both of its ends have been issued and the one before
    it between these two ranks is over, and takes ``comm``. ``times``: what each action takes. A stage's value goes once
    to each rank that needs it."""

    def __init__(self, schedule: Schedule, times: Callable[[Action], float], comm: float) -> None:
        edges = [Value(*edge, 0) for edge in schedule.edges]
        sources = [edge.source for edge in edges]
        rows, ahead = schedule.rows, schedule.dependencies.ahead
        lowered = lower(rows, edges, schedule.placement, schedule.backward, (), ahead, sources)
        super().__init__(lowered, edges, schedule.placement, schedule.backward)
        self.times, self.comm = times, comm
        self.now = [0.0] * len(rows)
        self.issued: dict[tuple[int, Message], float] = {}
        self.arrived: dict[Message, float] = {}
        self.spans: dict[Action, tuple[float, float]] = {}
        sent = [step.message for row in lowered for step in row if isinstance(step, Send)]
        self.carrier = {(sources[one.edge], *one[1:]): one for one in sent if one.direction is FORWARD}

    def inputs(self, action: Action) -> set[Message]:
        return {
            message if message.direction is BACKWARD else self.carrier[self.edges[message.edge].source, *message[1:]]
            for message in super().inputs(action)
        }

    def step(self, rank: int) -> None:
        step = self.instructions[rank][self.place[rank]]
        if isinstance(step, Compute):
            start = max([self.now[rank], *(self.arrived[message] for message in self.inputs(step.action))])
            self.now[rank] = start + self.times(step.action)
            self.spans[step.action] = start, self.now[rank]
        elif isinstance(step, Release):
            self.now[rank] = max(self.now[rank], self.arrived[step.message])
        elif not isinstance(step, Reduce):
            self.issued[rank, step.message] = self.now[rank]
        super().step(rank)

    def meet(self, message: Message) -> None:
        same = (one for one in self.arrived if one[3:] == message[3:])
        both = self.issued[message.sender, message], self.issued[message.receiver, message]
        self.arrived[message] = max([*both, *map(self.arrived.__getitem__, same)]) + self.comm
        super().meet(message)


def network(schedule: Schedule, values: Sequence[Value], queue_of: QueueOf = per_directed_pair) -> Network:
    lowered = lower(
        schedule.rows, values, schedule.placement, schedule.backward, schedule.tied, schedule.dependencies.ahead
    )
    return Network(lowered, values, schedule.placement, schedule.backward, queue_of)
