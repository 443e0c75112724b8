"""Simulate: costs → the time of each action."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from fxpipe.errors import ScheduleError
from fxpipe.no_gc import paused
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.action_times import ActionTimes, Copy, Span, awaits_copy
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, in_order
from fxpipe.schedules.kinds import BACKWARD, FORWARD, KINDS, OFFLOADS, Kind, Lane
from fxpipe.schedules.lower import Message
from fxpipe.schedules.verify import check_cells


@paused()
def simulate(schedule: ActionTable, costs: Costs, dependencies: Dependencies | None = None) -> ActionTimes:
    """Returns the times if every action runs as early as its row and its messages allow. ``dependencies``:
    None: the table's own. ScheduleError if the table deadlocks."""
    spans: dict[Action, Span] = {}
    since: dict[Action, float] = {}
    awaited: dict[Action, Action] = {}
    ready = [[0.0] for _ in schedule.rows]  # rank → when it is ready for the action at each place of its row
    dependencies = dependencies or schedule.dependencies
    # With neither, a message arrives as soon as it is made: no link need be modelled.
    links = _Links(schedule, costs.comm, dependencies.ahead, ready) if costs.comm or dependencies.ahead else None
    lanes = _Lanes(costs, dependencies)
    for rank, action, before in in_order(schedule.rows, dependencies):
        start = since[action] = ready[rank][-1]
        arrivals = [(spans[other].end, other) for other in before] if links is None else list(links.awaited(rank))
        arrivals += lanes.awaited(action, before)
        for arrival, cause in arrivals:
            if arrival > start:
                start, awaited[action] = arrival, cause
        end = start + costs.time(action)
        spans[action] = Span(start, end)
        lanes.begin(rank, action, end)
        ready[rank].append(end)
    rows = zip(schedule.rows, ready, strict=True)
    stuck = [str(row[len(times) - 1]) for row, times in rows if len(times) <= len(row)]
    if stuck:
        raise ScheduleError(f"the table deadlocks at {', '.join(stuck)}; verify() says why")
    return ActionTimes(schedule, spans, since, costs, awaited=awaited, copies=tuple(lanes.copies.values()))


class _Lanes:
    """The copies of activations to the host and back. A lane of a rank runs its copies in the order in which they
    begin."""

    def __init__(self, costs: Costs, dependencies: Dependencies) -> None:
        self._costs, self._leaving = costs, {kind: dependencies.leaving(kind) for kind in OFFLOADS}
        self._free: dict[tuple[int, Lane | None], float] = {}  # (rank, lane) → when the lane is free
        self.copies: dict[Action, Copy] = {}
        """The action whose end begins a copy, an F, an I or a P → the copy."""

    def begin(self, rank: int, action: Action, end: float) -> None:
        """Begins the copy that starts at an action's end, if any."""
        lane = action.kind.lane
        if (action.stage, action.microbatch) in self._leaving.get(action.kind, ()):
            lane = Lane.OUT
        elif lane is not Lane.BACK:
            return
        key = rank, lane if self._costs.duplex else None
        start = max(end, self._free.get(key, 0.0))
        self._free[key] = start + self._costs.copied(action)
        self.copies[action] = Copy(rank, lane, action, start, self._free[key])

    def awaited(self, action: Action, before: Iterable[Action]) -> Iterator[tuple[float, Action]]:
        """Yields the end of the copy that an action waits for, and the action that began the copy."""
        for other in before if self.copies else ():
            if other in self.copies and awaits_copy(action, other):
                yield self.copies[other].end, other


class _Links:
    """The arrival times of messages, by the model of ``verify``: a link from rank to rank carries one message at a
    time, in the sender's order, once it is made and its receive is posted. ``ready``: when each rank is ready for each
    place of its row, as far as the rank has come."""

    def __init__(self, schedule: ActionTable, comm: float, ahead: Mapping[int, int], ready: list[list[float]]) -> None:
        if "_messages" not in vars(schedule):  # they are made once for each table
            check_cells(schedule)
        messages = self._messages = schedule._messages
        self._rows, self._comm, self._ready = schedule.rows, comm, ready
        self._arrived: dict[Message, float] = {}
        self._free: dict[tuple[int, int], float] = {}  # link → when the link is free
        self._coming = {pair: iter(queue) for pair, queue in messages.queues.items()}
        # (rank, place) → the messages that the action waits for: inputs, and, if held back, sends that others receive
        self._awaited: dict[tuple[int, int], list[Message]] = {}
        for message, cell in messages.used_at.items():
            self._awaited.setdefault((message.receiver, cell), []).append(message)
        for rank in range(len(schedule.rows)) if ahead else ():
            for cell, sent in messages.waits(rank, ahead, {}).items():
                self._awaited.setdefault((rank, cell), []).extend(sent)

    def awaited(self, rank: int) -> Iterator[tuple[float, Action]]:
        """Yields, for each message that a rank's next action waits for, its arrival and the action that made it. For a
        message that another rank must receive, it yields the action after which that rank posts the receive."""
        for message in self._awaited.get((rank, len(self._ready[rank]) - 1), ()):
            owner, cell = message.sender, self._messages.sent_at[message]
            if owner == rank and self._messages.posted_at[message]:
                owner, cell = message.receiver, self._messages.posted_at[message] - 1
            yield self._arrival(message), self._rows[owner][cell]

    def _arrival(self, message: Message) -> float:
        pair = message.sender, message.receiver
        # Earlier messages on the link were made earlier, and their receives posted no later: both times are known.
        while message not in self._arrived:
            first = next(self._coming[pair])
            sent = self._ready[first.sender][self._messages.sent_at[first] + 1]
            posted = self._ready[first.receiver][self._messages.posted_at[first]]
            self._free[pair] = self._arrived[first] = max(sent, posted, self._free.get(pair, 0.0)) + self._comm
        return self._arrived[message]


def makespan(schedule: ActionTable, dependencies: Dependencies) -> float:
    """Returns the makespan at the table's costs, or at F = 1 and B = 2; infinite if the table deadlocks."""
    try:
        return simulate(schedule, schedule.costs or Costs.of(len(schedule.placement)), dependencies).makespan
    except ScheduleError:
        return math.inf


def least_makespan(schedule: ActionTable, costs: Costs) -> float:
    """Returns a lower bound of the makespan that ``simulate`` finds, much faster: every receive is posted in time, and
    no stage waits for its readers. Infinite if the table deadlocks."""
    backward, rank_of, rows, stages = schedule.backward, schedule.rank_of, schedule.rows, range(len(schedule.placement))
    time = {kind: kind.times(costs) for kind in KINDS.values()}
    # the arrival times of each value and gradient, per micro-batch, for the stage that makes it and its user
    makes: dict[Kind, list[list[tuple[list[float], int, int]]]] = {kind: [[] for _ in stages] for kind in time}
    needs: dict[Kind, list[list[list[float]]]] = {kind: [[] for _ in stages] for kind in time}
    for source, target in schedule.edges:
        ends = {FORWARD: (source, target)}
        if backward[source] and backward[target]:
            ends[BACKWARD] = target, source
        arrivals = {direction: [math.inf] * schedule.microbatches for direction in ends}
        for kind in time:
            if kind.messages in ends:
                maker, user = ends[kind.messages]
                makes[kind][maker].append((arrivals[kind.messages], user, schedule.groups[source]))
                needs[kind][user].append(arrivals[kind.messages])
    free, places, before = [0.0] * len(rows), [0] * len(rows), -1
    links = [[0.0] * len(rows) for _ in rows]  # [sender][receiver] → when the link is free
    # Runs each rank as far as possible, in rounds: the results of other ranks let a rank continue.
    while before < (before := sum(places)):
        for rank, row in enumerate(rows):
            now = free[rank]
            for cell in range(places[rank], len(row)):
                stage, kind, microbatch, count = row[cell]
                is_value = kind.messages is FORWARD
                last, start = microbatch + count - 1 if is_value else microbatch, now
                for times in needs[kind][stage]:
                    if times[last] > start:
                        start = times[last]
                if start == math.inf:
                    break
                length = costs.time(row[cell]) if costs.by_microbatch else time[kind][stage]
                free[rank] = now = start + length
                places[rank] = cell + 1
                sent: dict[tuple[int, int], float] = {}  # a value travels once to each rank
                for times, user, size in makes[kind][stage]:
                    for first in range(microbatch, microbatch + count, size):
                        there = rank_of(user, first)
                        if there != rank and not (is_value and (there, first) in sent):
                            links[rank][there] = max(now, links[rank][there]) + costs.comm
                            sent[there, first] = links[rank][there]
                        times[first : first + size] = [sent.get((there, first), now)] * size
    return max(free) if before == sum(map(len, rows)) else math.inf
