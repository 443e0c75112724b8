"""Simulate: costs → the time of each action, a lower bound of every table's makespan, and what stages hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import rank_count, ranks_of
from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, in_order
from fxpipe.schedules.kinds import BACKWARD, FORWARD, KINDS, Held, Kind
from fxpipe.schedules.lower import Message
from fxpipe.schedules.no_gc import paused
from fxpipe.schedules.schedule import Schedule, Span, Timeline

if TYPE_CHECKING:
    from fxpipe.schedules.families.problem import Problem


@paused()
def simulate(schedule: Schedule, costs: Costs, dependencies: Dependencies | None = None) -> Timeline:
    """Returns the timeline in which every action runs as early as its row and its messages allow. ``dependencies``:
    None: the table's own. ScheduleError if the table deadlocks."""
    spans: dict[Action, Span] = {}
    since: dict[Action, float] = {}
    awaited: dict[Action, Action] = {}
    ready = [[0.0] for _ in schedule.rows]  # rank → when it is ready for the action at each place of its row
    dependencies = dependencies or schedule.dependencies
    # With neither, a message arrives as soon as it is made: no link need be modelled.
    links = _Links(schedule, costs.comm, dependencies.ahead, ready) if costs.comm or dependencies.ahead else None
    for rank, action, before in in_order(schedule.rows, dependencies):
        start = since[action] = ready[rank][-1]
        arrivals = [(spans[other].end, other) for other in before] if links is None else links.awaited(rank)
        for arrival, cause in arrivals:
            if arrival > start:
                start, awaited[action] = arrival, cause
        end = start + costs.time(action)
        spans[action] = Span(start, end)
        ready[rank].append(end)
    rows = zip(schedule.rows, ready, strict=True)
    stuck = [str(row[len(times) - 1]) for row, times in rows if len(times) <= len(row)]
    if stuck:
        raise ScheduleError(f"the table deadlocks at {', '.join(stuck)}; verify() says why")
    return Timeline(schedule, spans, since, costs, awaited=awaited)


class _Links:
    """The arrival times of messages, by the model of ``verify``: a link from rank to rank carries one message at a
    time, in the sender's order, once it is made and its receive is posted. ``ready``: when each rank is ready for each
    place of its row, as far as the rank has come."""

    def __init__(self, schedule: Schedule, comm: float, ahead: Mapping[int, int], ready: list[list[float]]) -> None:
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


def makespan(schedule: Schedule, dependencies: Dependencies) -> float:
    """Returns the makespan at the table's costs, or at F = 1 and B = 2; infinite if the table deadlocks."""
    try:
        return simulate(schedule, schedule.costs or Costs.of(len(schedule.placement)), dependencies).makespan
    except ScheduleError:
        return math.inf


def least_makespan(schedule: Schedule, costs: Costs) -> float:
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
                free[rank] = now = start + time[kind][stage]
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


def lower_bound(
    stages: Schedule | Problem, costs: Costs, groups: Sequence[int] | None, rows: Sequence[Sequence[Action]] = ()
) -> float:
    """Returns a lower bound of the makespan of all tables of a stage graph that split the same backwards in halves: max
    over ranks of [shortest head + max(m·Σ(F + B), m·Σ(F + G) + shortest tail)].

    A head is the longest forward path to a stage of the rank, before the rank can begin; a tail the longest backward
    path after its last gradient. G is a stage's time before it sends a gradient: B, or, if the table splits its
    backward, only I, since the W's may come last. Without a split the bound is head + m·Σ(F + B) + tail.

    An R counts as work, and not in tails, since an R need not wait. A gathered stage has m / K actions; its head has K
    forwards of each stage that feeds it, and the tails of these stages have K gradients. A stage on several ranks gives
    each rank its turns; a second bound of a rank omits such stages, whose heads and tails may be shorter than the
    others'. ``groups``: K of each stage. ``rows``: the table, if it has an I or an R.
    """
    count, ranks = len(stages.placement), [ranks_of(entry) for entry in stages.placement]
    size = groups or (1,) * count
    gradient, forward = list(costs.backward), list(costs.forward)
    for stage, kind in dict.fromkeys((action.stage, action.kind) for row in rows for action in row):
        if kind.messages is BACKWARD:
            gradient[stage] = min(gradient[stage], kind.times(costs)[stage])
        elif kind.is_optional and kind.part_of is BACKWARD:  # for all micro-batches
            forward[stage] += kind.times(costs)[stage]
    head, tail = [0.0] * count, [0.0] * count
    after: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for source, target in stages.edges:
        after[source].append(target)
    # Longest paths, in topological order. A gathered target needs K forwards of its source first, and returns K
    # gradients; a source on r ranks runs ⌈K / r⌉ of these one after another.
    for source in topological_order({stage: stage for stage in range(count)}, after):
        for target in after[source]:
            hop = costs.comm * set(ranks[source]).isdisjoint(ranks[target])
            times = -(-max(size[target] // size[source], 1) // len(ranks[source]))
            head[target] = max(head[target], head[source] + times * costs.forward[source] + hop)
            if stages.backward[source] and stages.backward[target]:
                tail[target] = max(tail[target], tail[source] + times * gradient[source] + hop)
    bounds = []
    for rank in range(rank_count(stages.placement)):
        mine = [stage for stage in range(count) if rank in ranks[stage]]
        for some in {tuple(mine), tuple(stage for stage in mine if len(ranks[stage]) == 1)} - {()}:
            work = sent = 0.0
            for s in some:
                turns = len(range(ranks[s].index(rank), stages.microbatches // size[s], len(ranks[s])))
                work += (forward[s] + costs.backward[s] * stages.backward[s]) * turns
                sent += (forward[s] + gradient[s] * stages.backward[s]) * turns
            # The rank may run W's while the last gradient is under way, so only F and G add the tail.
            last = min(tail[s] for s in some)
            bounds.append(min(head[s] for s in some) + max(work, sent + last))
    return max(bounds, default=0.0)


# --- the micro-batches and bytes that stages hold: of a micro-batch all from F, or from R, to the end of its backward,
# and the inputs alone from F to R ---


def changes_in_flight(schedule: Schedule) -> Callable[[Action], int]:
    """Returns a function: action → how many more micro-batches its stage holds after it; negative if it frees some."""
    recomputed = schedule.dependencies.recomputed

    def change(action: Action) -> int:
        if not schedule.backward[action.stage]:
            return 0
        load = Held(1, 0, 1, (action.stage, action.microbatch) in recomputed)
        return action.count * int(action.kind.change(load))

    return change


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns, per stage, the most micro-batches that the stage holds on any of its ranks."""
    peaks, change = [0] * len(schedule.placement), changes_in_flight(schedule)
    for row in schedule.rows:
        in_flight = [0] * len(peaks)
        for action in row:
            in_flight[action.stage] += change(action)
            peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
    return tuple(peaks)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Returns, per rank, the most bytes that its micro-batches hold; the costs must give ``activation_bytes``.

    Inputs that have arrived for a forward that has not run yet do not count.
    """
    # The peak may occur inside an action, which may hold more bytes while it runs than before or after.
    recomputed = schedule.dependencies.recomputed
    peaks = []
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            if schedule.backward[action.stage]:
                peak = max(peak, now + costs.beside(action))
                now += costs.held(action, (action.stage, action.microbatch) in recomputed)
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
