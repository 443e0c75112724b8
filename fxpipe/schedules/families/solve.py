"""Solve: a family's rows, with three features that no family handles: stages on several ranks, recomputation, and
offload.

*Stages on several ranks.* Their work fills the idle times of the other stages of those ranks. The stages on one rank
keep the order that their family gives them, as if each stage on r ranks had a rank of its own and took 1/r of the time.
Then list scheduling places the actions of those stages. It aims at a makespan T: the latest start of an action is the
latest time that leaves enough time until T for all actions that wait for it. A rank takes the ready action with the
least latest start, but none that would end after the latest start of the next action of its fixed order. Forwards have
a T of their own: early forwards make room for the actions that wait for them, late backwards delay no action. The
result is the shortest table of a grid of both.

*Recomputation.* The family orders backwards of F + B; each backward is then split into R and B.

*Offload.* The family orders all actions within no memory; ``offload`` then adds copies to the host and back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import RankOf, ranks_of, replicated
from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies
from fxpipe.schedules.families.limits import Chosen, Family, Limited, exceeds, excess
from fxpipe.schedules.families.list_scheduler import ListScheduler, Unit, Units
from fxpipe.schedules.families.offload import with_offload
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.in_flight import peak_in_flight
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Held, Kind
from fxpipe.schedules.schedule import Schedule

_FINEST = 8
"""The number of steps of the grid, on each axis."""
_MANY = 60_000
"""The most actions of all tried tables together: of larger tables, fewer are tried."""


def solved(family: Family, problem: Problem) -> Sequence[Sequence[Action]]:
    """A family's rows, with an R for each backward of the stages that ``problem.recompute`` marks, and with O's and P's
    of the stages that ``problem.offload`` marks."""
    if problem.offloaded:
        # The memory limits what stays on the device: without copies the table may hold more.
        rows = solved(family, replace(problem, memory=None, offload=None))
        return Chosen.renamed(rows, with_offload(rows, problem))
    if not problem.recomputed:
        return placed_beside(family, problem)
    rows = placed_beside(family, reckoned(problem))
    return Chosen.renamed(rows, with_recompute(rows, problem.recomputed))


def in_numbers(limited: Limited, problem: Problem) -> Limited:
    """Returns the family with ``in_flight="2x"`` in numbers: twice what its table without limits holds at each stage,
    and at least 1."""
    if not isinstance(limited.in_flight, str):
        return limited
    alone = replace(problem, in_flight=None, memory=None, recompute=None, offload=None)
    alone = replace(limited, in_flight=None, memory=None).within(alone)
    peaks = peak_in_flight(alone.table(tuple(map(tuple, placed_beside(limited.family, alone)))))
    return replace(limited, in_flight=tuple(max(2 * peak, 1) for peak in peaks))


def reckoned(problem: Problem) -> Problem:
    """The problem that the family solves instead, whose table has no R: B takes F + B; inputs are held from F to B;
    memory is less by the largest additional bytes of a recomputed micro-batch or group, one at a time."""
    costs, memory = problem.costs.with_recompute(problem.recomputed), problem.memory
    whole = costs.activation_bytes
    if whole is not None:
        costs = costs.changed(partial(_with_inputs_alone, stages=problem.recomputed))
        activation_bytes = costs.activation_bytes or ()
        if memory is not None:
            # While a micro-batch is recomputed, a stage holds all of it and the inputs of the others. A rank recomputes
            # one at a time, so it reserves the largest bytes of its stages.
            beside = [max(size - activation_bytes[s], 0) * problem.group(s) for s, size in enumerate(whole)]
            most = [max(beside[stage] for stage in stages) for stages in problem.stages_of]
            for rank, (room, peak) in enumerate(zip(memory, most, strict=True)):
                if exceeds(peak, room):
                    raise ScheduleError(
                        f"rank {rank} may hold {room:g} bytes, but what is run again at once takes {peak:g} beside its "
                        "inputs; use smaller micro-batches, or move a stage"
                    )
            memory = tuple(max(room - peak, 0) for room, peak in zip(memory, most, strict=True))
    return replace(problem, costs=costs, memory=memory)


def _with_inputs_alone(costs: Costs, stages: Collection[int]) -> Costs:
    """The costs if these stages hold only their inputs of a micro-batch in flight."""
    whole = costs.activation_bytes or ()
    inputs = costs.input_bytes or (0.0,) * len(whole)
    return replace(costs, activation_bytes=tuple(inputs[s] if s in stages else size for s, size in enumerate(whole)))


def with_recompute(rows: Sequence[Sequence[Action]], stages: Collection[int]) -> tuple[Row, ...]:
    """Returns the rows with an R directly before each B or I of these stages, except for stages that have an R already.

    An R waits for no gradient, so it runs while the gradient is under way, and a rank holds only one whole micro-batch
    at a time. An earlier R would hold more bytes, and gain time only if the rank idles before another action.
    """
    # The family ``cached`` inserts R's itself.
    left = frozenset(stages) - {action.stage for row in rows for action in row if action.kind.is_optional}

    def again(row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            if action.stage in left and action.kind.messages is BACKWARD:
                yield action._replace(kind=Kind.R)
            yield action

    return tuple(tuple(again(row)) for row in rows)


def worthwhile(schedule: Schedule) -> tuple[bool, ...]:
    """Returns, per stage, whether the backward does not always directly follow the forward: if it always does,
    recomputation saves no memory."""
    gains = [False] * len(schedule.placement)
    for row in schedule.rows:
        for action, following in zip(row, [*row[1:], None], strict=True):
            if action.kind.part_of is FORWARD and schedule.backward[action.stage]:
                gains[action.stage] |= following is None or following._replace(kind=Kind.F) != action
    return tuple(gains)


# --- stages on several ranks ---


def placed_beside(family: Family, problem: Problem) -> Sequence[Sequence[Action]]:
    """Returns the family's rows, also for problems with stages on several ranks."""
    if not replicated(problem.placement):
        return family(problem)
    if not getattr(family, "__module__", "").startswith(__package__):
        raise ScheduleError(
            f"{getattr(family, '__name__', 'it')} is a family of your own, and stages are on several ranks: it would "
            "be asked another problem, and its rows changed; give a Schedule, with the rows that shall run"
        )
    alone, real = _alone(problem)
    rows = family(alone)
    best = _Floating(problem, alone, real, tuple(map(tuple, rows))).best()
    return Chosen.renamed(rows, best)


def _alone(problem: Problem) -> tuple[Problem, Sequence[int]]:
    """The problem with a new rank for each stage on several ranks, and the real rank of each other rank."""
    stages = replicated(problem.placement)
    real = sorted({entry for entry in problem.placement if isinstance(entry, int)})
    extra = {stage: len(real) + number for number, stage in enumerate(stages)}
    homes = (extra[s] if s in extra else real.index(problem.homes[s]) for s in range(len(problem.placement)))
    costs, memory = problem.costs, problem.memory
    for stage in stages:
        # On r ranks of its own in turn, a stage needs only 1/r of its time for each micro-batch.
        turns = len(ranks_of(problem.placement[stage]))
        costs = costs.changed(partial(_in_turns, stage=stage, turns=turns))
    if memory is not None:
        # One micro-batch of each shared stage must fit on each of its ranks: the family has the remaining bytes.
        rooms = [room - _least(problem, rank) for rank, room in enumerate(memory)]
        memory = (*(rooms[rank] for rank in real), *[math.inf] * len(stages))
    return replace(problem, placement=tuple(homes), costs=costs, memory=memory), real


def _in_turns(costs: Costs, stage: int, turns: int) -> Costs:
    return costs.at_stages([stage], costs.forward[stage] / turns, costs.backward[stage] / turns)


def _least(problem: Problem, rank: int) -> float:
    """Returns the bytes that a rank reserves: one micro-batch, or group, of each of its stages on several ranks.

    ScheduleError if the rest does not fit one micro-batch of each of its other stages.
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
    """The facts known before stages on several ranks are placed. ``rows``: the family's rows for ``alone``."""

    def __init__(self, problem: Problem, alone: Problem, real: Sequence[int], rows: tuple[Row, ...]) -> None:
        self.problem = problem
        self.caps = peak_in_flight(alone.table(rows))  # of the family's own order: within these caps no table deadlocks
        fixed: list[Row] = [()] * problem.ranks
        for rank, row in zip(real, rows, strict=False):
            fixed[rank] = row
        # Line r is the fixed row of rank r; the lines of the stages on several ranks follow.
        self.units = Units(problem.ranks, problem.costs)
        for rank, row in enumerate(fixed):
            self.units.add_line(rank, [(action,) for action in row])
        rank_of = RankOf.from_placement(problem.placement, problem.dependencies.groups)
        for row in rows[len(real) :]:
            for (rank, *_), line in _lines(row, rank_of).items():
                self.units.add_line(rank, line)
        self.units.need_by(Dependencies.from_edges(problem.links, problem.backward, rows))
        self.held_by_rest = [self._most_from(row) for row in fixed] if problem.memory is not None else []
        self.latest = self._latest()

    def _most_from(self, row: Row) -> list[float]:
        """Returns the most bytes that a fixed row holds from each of its places on."""
        byte_change, backward = self.problem.costs.held, self.problem.backward
        changes = (byte_change(action) if backward[action.stage] else 0.0 for action in row)
        return list(accumulate(reversed([0.0, *accumulate(changes)]), max))[::-1]

    def _latest(self) -> list[float]:
        """Returns the latest start of each unit for a makespan of 0: a negative number."""
        # Goes back in time over two relations: needs, and the order of each line. start ≤ min(later start − hop) −
        # time.
        behind = {unit: dict(users) for unit, users in enumerate(self.units.after)}
        for line in self.units.lines:
            for unit, following in pairwise(line):
                behind[unit].setdefault(following, 0.0)
        latest = [0.0] * len(behind)
        for unit in reversed(list(topological_order({unit: unit for unit in behind}, behind))):
            ends = (latest[other] - hop for other, hop in behind[unit].items())
            latest[unit] = min(ends, default=0.0) - self.units.time[unit]
        return latest

    def best(self) -> tuple[Row, ...]:
        """Returns the shortest rows within the limits; if none are within the limits, the shortest rows."""
        # The longest path and the busiest rank bound every makespan: the aims are between the path and the first
        # makespan.
        work = [0.0] * self.problem.ranks
        for home, time in zip(self.units.home, self.units.time, strict=True):
            work[home] += time
        path = -min(self.latest)
        rows, longest = self._attempted(path, path)
        best, over = (self._exceeds(rows), longest), rows
        steps = min(_FINEST, math.isqrt(2 * _MANY // len(self.latest)))
        # Forwards aim at the same makespan as backwards, or at a shorter one.
        for late in range(1, steps + 1):
            for early in range(late + 1):
                if best[1] <= max(path, *work) * (1 + 1e-9):
                    return over
                forward, backward = (path + (longest - path) * part / steps for part in (early, late))
                rows, makespan = self._attempted(forward, backward)
                if best[0] or makespan < best[1]:
                    candidates = (best, over), ((self._exceeds(rows), makespan), rows)
                    best, over = min(candidates, key=lambda candidate: candidate[0])
        return over

    def _attempted(self, forward: float, backward: float) -> tuple[tuple[Row, ...], float]:
        """Returns the rows for these aims, and their makespan."""
        attempt = _Attempt(self, forward, backward)
        return attempt.run(), max(attempt.free)

    def _exceeds(self, rows: tuple[Row, ...]) -> bool:
        problem = self.problem
        if problem.in_flight is None and problem.memory is None:
            return False
        return excess(problem.table(rows), problem.costs, problem.in_flight, problem.memory) is not None


def _lines(row: Row, rank_of: RankOf) -> dict[tuple[int, bool, bool], list[Unit]]:
    """Returns the lines of a stage on several ranks: forwards, backwards and weight gradients each keep their order on
    a rank, the first number of the key."""
    again: Unit = ()
    lines: dict[tuple[int, bool, bool], list[Unit]] = {}
    for action in row:
        if action.kind.is_optional:
            again = (action,)
            continue
        rank = rank_of(action.stage, action.microbatch)
        lines.setdefault((rank, action.kind.part_of is FORWARD, action.kind.messages is None), []).append(
            (*again, action)
        )
        again = ()
    return lines


class _Attempt(ListScheduler):
    """A list schedule. ``forward``, ``backward``: the makespans that forwards and backwards aim at."""

    def __init__(self, facts: _Floating, forward: float, backward: float) -> None:
        super().__init__(facts.units, facts.latest)  # by latest start: the most urgent unit first
        self.facts, self.forward, self.backward = facts, forward, backward
        self.extra_bytes = [0.0] * len(self.free)  # bytes held by actions outside the fixed order
        self.in_flight: dict[tuple[int, int], int] = {}

    def begin(self, rank: int, unit: int) -> None:
        problem, actions = self.facts.problem, self.units.actions[unit]
        last = actions[-1]
        if problem.backward[last.stage]:
            if problem.memory is not None and self.units.line_of[unit] != rank:
                self.extra_bytes[rank] += sum(map(problem.costs.held, actions))
            change = last.count * int(last.kind.change(Held(1, 0, 1, 0, False)))
            self.in_flight[rank, last.stage] = self.in_flight.get((rank, last.stage), 0) + change

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        # The fixed order's next action is never held back.
        rest = self.units.lines[rank][self.begun[rank] :]
        if forced or unit in rest:
            return True
        return self._has_room(rank, unit, len(rest)) and not (rest and self._delays(unit, rest[0], now))

    def _delays(self, unit: int, following: int, now: float) -> bool:
        """Whether a unit would delay the next action of the fixed order too much."""
        # A unit delays the fixed order if that action could have begun before the unit ends, and cannot afford to wait.
        latest, end = self.facts.latest, now + self.units.time[unit]
        aim = self.forward if self.units.actions[unit][-1].kind.part_of is FORWARD else self.backward
        arrives = 0.0 if self.missing[following] else self.arrives[following]
        return latest[unit] > latest[following] and end > max(arrives, latest[following] + aim)

    def _has_room(self, rank: int, unit: int, left: int) -> bool:
        """Whether a forward keeps within its cap, and its rank within its memory. ``left``: the number of remaining
        actions of the fixed row."""
        facts, action = self.facts, self.units.actions[unit][-1]
        if action.kind.part_of is BACKWARD or not facts.problem.backward[action.stage]:
            return True
        if self.in_flight.get((rank, action.stage), 0) + action.count > facts.caps[action.stage]:
            return False
        if facts.problem.memory is None:
            return True
        # The most bytes that the fixed row will hold from here on are reserved for it.
        rest = facts.held_by_rest[rank][-1 - left]
        return not exceeds(self.extra_bytes[rank] + facts.problem.costs.held(action) + rest, facts.problem.memory[rank])
