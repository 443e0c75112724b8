"""Beside: tables with stages on several ranks, whose work fills what the other stages of those ranks leave idle.

The stages of one rank keep the order that their family gives them, as if each stage on r ranks had a rank of its own
that takes 1/r of the time. Then the actions of those stages are placed beside them by list scheduling. It aims at a
makespan T: an action may begin no later than leaves time for all that waits for it until T, its latest start. A rank
takes the ready action with the least latest start, but none that would end behind the latest start of the next action
of its fixed order. Forwards aim at a T of their own: early ones make room for what waits for them, late backwards keep
nobody waiting. The shortest of a grid of both is taken.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import RankOf, ranks_of, replicated
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import Dependencies
from fxpipe.schedules.families.caps import exceeds, excess
from fxpipe.schedules.families.limited import Family
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.families.shortest import Chosen
from fxpipe.schedules.families.zb_v import zb_v
from fxpipe.schedules.in_flight import peak_in_flight
from fxpipe.schedules.schedule import Row, Schedule

_FINEST = 8
"""Steps of the grid, on each of its axes."""
_MANY = 60_000
"""Of larger tables fewer are tried: as many as have so many actions together."""

Unit = tuple[Action, ...]
"""Actions that run one behind the other: an R with its backward, or one alone."""


def beside(family: Family) -> Family:
    """The family, for problems with stages on several ranks, too."""

    def placed(problem: Problem) -> Sequence[Sequence[Action]]:
        if not replicated(problem.placement):
            return family(problem)
        if family is zb_v:
            raise ScheduleError('"zb_v" is for stages on one rank each; write "zb_h1"')
        alone, real = _alone(problem)
        found = family(alone)
        rows = found if isinstance(found, Chosen) else tuple(map(tuple, found))
        best = _Floating(problem, alone, real, rows).best()
        return Chosen.of(best, rows.name) if isinstance(rows, Chosen) else best

    return placed


def _alone(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """The problem with a rank for each stage that is on several, and the real rank of each of its other ranks."""
    stages = replicated(problem.placement)
    real = sorted({place for place in problem.placement if isinstance(place, int)})
    extra = {stage: len(real) + number for number, stage in enumerate(stages)}
    homes = (extra[s] if s in extra else real.index(problem.homes[s]) for s in range(len(problem.placement)))
    costs, memory = problem.costs, problem.memory
    for stage in stages:
        turns = len(ranks_of(problem.placement[stage]))
        costs = costs.at_stages([stage], costs.forward[stage] / turns, costs.backward[stage] / turns)
    if memory is not None:
        rooms = [room - _least(problem, rank) for rank, room in enumerate(memory)]
        memory = (*(rooms[rank] for rank in real), *[math.inf] * len(stages))
    return dataclasses.replace(problem, placement=tuple(homes), costs=costs, memory=memory), real


def _least(problem: Problem, rank: int) -> float:
    """What a rank sets aside: the bytes of one micro-batch, or group, of each of its stages that are on several.

    ScheduleError where that leaves no room for one of each of its other stages.
    """
    sizes, rooms = problem.costs.activation_bytes or (), problem.memory or ()
    mine = {s: sizes[s] * problem.group(s) for s in problem.stages_of[rank] if problem.backward[s]}
    if exceeds(sum(mine.values()), rooms[rank]):
        raise ScheduleError(
            f"rank {rank} may hold {rooms[rank]:g} bytes, but one micro-batch at each of its stages {list(mine)} takes "
            f"{sum(mine.values()):g}; use smaller micro-batches, or place a stage on fewer ranks"
        )
    return sum(size for stage, size in mine.items() if not isinstance(problem.placement[stage], int))


class _Floating:
    """What is known before the actions of stages on several ranks are placed. ``rows``: the family's, of ``alone``."""

    def __init__(self, problem: Problem, alone: Problem, real: Sequence[int], rows: Sequence[Row]) -> None:
        self.problem, self.costs = problem, problem.costs
        self.fixed: list[Row] = [()] * problem.ranks
        for rank, row in zip(real, rows, strict=False):
            self.fixed[rank] = tuple(row)
        groups = problem.dependencies.groups
        self.dependencies = Dependencies.of(problem.links, problem.backward, rows)
        self.rank_of = RankOf.of(problem.placement, groups)
        table = Schedule(tuple(rows), problem.edges, alone.placement, problem.backward, problem.microbatches)
        table.verify()
        self.caps = peak_in_flight(table)  # which the family's own order holds: with them none waits for ever
        self.lines: list[list[list[Unit]]] = [[] for _ in range(problem.ranks)]  # what floats, by rank, each in order
        for row in rows[len(real) :]:
            self._add_lines(row)
        self.units: list[Unit] = [(action,) for row in self.fixed for action in row]
        self.units += [unit for lines in self.lines for line in lines for unit in line]
        self.unit_of = {action: unit for unit in self.units for action in unit}
        self.home = {unit: self.rank_of(unit[0].stage, unit[0].microbatch) for unit in self.units}
        self.time = {unit: sum(map(self.costs.time, unit)) for unit in self.units}
        self.before = {unit: self._needs(unit) for unit in self.units}
        self.after: dict[Unit, list[Unit]] = {unit: [] for unit in self.units}
        for unit, others in self.before.items():
            for other in others:
                self.after[other].append(unit)
        self.next: dict[Unit, Unit] = {(a,): (b,) for row in self.fixed for a, b in pairwise(row)}
        self.next |= {a: b for lines in self.lines for line in lines for a, b in pairwise(line)}
        self.previous = {b: a for a, b in self.next.items()}
        self.most = [self._most(row) for row in self.fixed] if problem.memory is not None else []

    def _add_lines(self, row: Row) -> None:
        """Forwards, backwards and weight gradients of a stage each keep their order on a rank."""
        again: list[Action] = []
        lines: dict[tuple[int, bool, bool], list[Unit]] = {}
        for action in row:
            if action.op is Op.R:
                again = [action]
                continue
            rank = self.rank_of(action.stage, action.microbatch)
            lines.setdefault((rank, action.op is Op.F, action.op is Op.W), []).append((*again, action))
            again = []
        for (rank, *_), line in lines.items():
            self.lines[rank].append(line)

    def _most(self, row: Row) -> list[float]:
        """The most bytes that a fixed row holds from each of its places on."""
        changes = (self.costs.held(a) if self.problem.backward[a.stage] else 0.0 for a in row)
        return list(accumulate(reversed([0.0, *accumulate(changes)]), max))[::-1]

    def _needs(self, unit: Unit) -> list[Unit]:
        needed = (other for action in unit for other in self.dependencies.needs(action))
        return [other for other in dict.fromkeys(map(self.unit_of.__getitem__, needed)) if other is not unit]

    def hop(self, one: Unit, other: Unit) -> float:
        return self.costs.comm if self.home[one] != self.home[other] else 0.0

    @cached_property
    def order(self) -> list[Unit]:
        """All units, each behind what it needs and what is ahead of it."""
        missing = {unit: len(self.before[unit]) + (unit in self.previous) for unit in self.units}
        able = [unit for unit in self.units if not missing[unit]]
        for unit in able:
            for other in (*self.after[unit], *([self.next[unit]] if unit in self.next else [])):
                missing[other] -= 1
                if not missing[other]:
                    able.append(other)
        return able

    @cached_property
    def earliest(self) -> dict[Unit, float]:
        """When each could begin if a rank could run several at once, but its fixed order."""
        found: dict[Unit, float] = {}
        for unit in self.order:
            ready = [found[other] + self.time[other] + self.hop(other, unit) for other in self.before[unit]]
            ahead = self.previous.get(unit)
            found[unit] = max([*ready, 0.0 if ahead is None else found[ahead] + self.time[ahead]])
        return found

    @cached_property
    def latest(self) -> dict[Unit, float]:
        """The latest start of each for a makespan of 0: a negative number."""
        found: dict[Unit, float] = {}
        for unit in reversed(self.order):
            limits = [found[other] - self.hop(unit, other) for other in self.after[unit]]
            found[unit] = min([*limits, found[self.next[unit]] if unit in self.next else 0.0]) - self.time[unit]
        return found

    def best(self) -> tuple[Row, ...]:
        """The shortest that keeps within the limits; where none does, the shortest."""
        shortest, over = None, (True, math.inf)
        for forward, backward in self._targets():
            attempt = _Attempt(self, forward, backward)
            rows = attempt.run()
            if attempt.makespan < over[1] or over[0]:
                found = self._exceeds(rows), attempt.makespan
                if found < over:
                    shortest, over, self._best = rows, found, attempt.makespan
        assert shortest is not None
        return shortest

    def _targets(self) -> Iterator[tuple[float, float]]:
        """Makespans for forwards and for backwards: from the longest path, up to what aiming at that gives."""
        work = [0.0] * self.problem.ranks
        for unit in self.units:
            work[self.home[unit]] += self.time[unit]
        path, self._best = -min(self.latest.values()), math.inf
        yield path, path
        first, least = self._best, max(path, *work)
        steps = min(_FINEST, math.isqrt(2 * _MANY // len(self.units)))
        for late in range(1, steps + 1):
            for early in range(late + 1):
                if self._best <= least * (1 + 1e-9):
                    return
                forward, backward = (path + (first - path) * part / steps for part in (early, late))
                yield forward, backward

    def _exceeds(self, rows: tuple[Row, ...]) -> bool:
        problem = self.problem
        if problem.in_flight is None and problem.memory is None:
            return False
        schedule = Schedule(rows, problem.edges, problem.placement, problem.backward, problem.microbatches)
        return excess(schedule, problem.costs, problem.in_flight, problem.memory) is not None


@dataclass
class _Lane:
    """One rank: what it has still to run."""

    fixed: deque[Unit]
    lines: list[deque[Unit]]
    row: list[Action]
    free: float = 0.0
    held: float = 0.0
    """Bytes of what is not in its fixed order."""


class _Attempt:
    """One list schedule, and how far it has come."""

    def __init__(self, known: _Floating, forward: float, backward: float) -> None:
        self.known, self.targets = known, (forward, backward)
        pairs = zip(known.fixed, known.lines, strict=True)
        self.lanes = [_Lane(deque((a,) for a in row), [deque(line) for line in lines], []) for row, lines in pairs]
        self.missing = {unit: len(others) for unit, others in known.before.items()}
        self.ready = dict.fromkeys(known.units, 0.0)  # when what it needs has arrived, as far as it has run
        self.in_flight: dict[tuple[int, int], int] = {}
        self.makespan = 0.0

    def run(self) -> tuple[Row, ...]:
        moments = [(0.0, rank) for rank in range(len(self.lanes))]  # a rank becomes free, or a message reaches it
        left = len(self.known.units)
        now, forced = 0.0, False
        while left:
            if not moments:  # all wait for what was held back
                moments, forced = [(now, rank) for rank in range(len(self.lanes))], True
            now, rank = heapq.heappop(moments)
            lane = self.lanes[rank]
            unit = self._chosen(lane, now, forced) if lane.free <= now else None
            if unit is not None:
                left, forced = left - 1, False
                self._run(lane, rank, unit, now, moments)
        return tuple(tuple(lane.row) for lane in self.lanes)

    def _run(self, lane: _Lane, rank: int, unit: Unit, now: float, moments: list[tuple[float, int]]) -> None:
        known = self.known
        line = next(line for line in (lane.fixed, *lane.lines) if line and line[0] is unit)
        line.popleft()
        end = lane.free = now + known.time[unit]
        self.makespan = max(self.makespan, end)
        lane.row += unit
        last = unit[-1]
        if known.problem.backward[last.stage]:
            if known.problem.memory is not None and line is not lane.fixed:
                lane.held += sum(map(known.costs.held, unit))
            change = last.count if last.op is Op.F else 0 if last.op is Op.I else -last.count
            self.in_flight[rank, last.stage] = self.in_flight.get((rank, last.stage), 0) + change
        heapq.heappush(moments, (end, rank))
        for user in known.after[unit]:
            arrival = end + known.hop(unit, user)
            self.missing[user] -= 1
            self.ready[user] = max(self.ready[user], arrival)
            heapq.heappush(moments, (arrival, known.home[user]))

    def _chosen(self, lane: _Lane, now: float, forced: bool) -> Unit | None:
        """What a rank begins now; None: it waits. ``forced``: nothing is held back."""
        known = self.known
        following = lane.fixed[0] if lane.fixed else None
        heads = [line[0] for line in (lane.fixed, *lane.lines) if line]
        able = [unit for unit in heads if not self.missing[unit] and self.ready[unit] <= now]
        for unit in sorted(able, key=known.latest.__getitem__):
            if unit is following or forced:
                return unit
            if self._has_room(lane, unit) and (following is None or self._keeps_nobody_waiting(unit, following, now)):
                return unit
        return following if following in able else None

    def _keeps_nobody_waiting(self, unit: Unit, following: Unit, now: float) -> bool:
        known, end = self.known, now + self.known.time[unit]
        if known.latest[unit] <= known.latest[following]:
            return True
        arrives = max(self.ready[following], known.earliest[following] if self.missing[following] else 0.0)
        target = self.targets[unit[-1].op is not Op.F]
        return arrives >= end or known.latest[following] + target >= end

    def _has_room(self, lane: _Lane, unit: Unit) -> bool:
        """Whether a forward keeps within its cap, and its rank within its memory."""
        known, action = self.known, unit[-1]
        if action.op is not Op.F or not known.problem.backward[action.stage]:
            return True
        rank = known.home[unit]
        if self.in_flight.get((rank, action.stage), 0) + action.count > known.caps[action.stage]:
            return False
        if known.problem.memory is None:
            return True
        most = known.most[rank][-1 - len(lane.fixed)]
        return not exceeds(lane.held + known.costs.held(action) + most, known.problem.memory[rank])
