"""Offload: adds O and P to a table, so that activations wait for their backward in the host's memory.

Takes a table that can run, its costs, the stages that may be offloaded, and the bytes that each rank may hold (its
*room*). Gives the table with O's and P's, or None if no O's make it fit. The order of the other actions stays.

Each rank's row is walked once, in the time of the table without copies:

1. A micro-batch that was offloaded comes back (P) at the last action from which its copy, and the copies of the others
   that are away, are in time for their next uses: their backwards.
2. Before an action that needs more bytes than the room has left, micro-batches leave (O). Of the micro-batches whose
   copy is over by then, the one whose next use comes last in the row leaves first (Belady 1966); if no copy is over,
   the one whose copy is over first. A micro-batch that has come back does not leave again: its P is dropped, and a
   later one takes its place.

So a micro-batch that fits the room is never copied. Where copies are slower than the row, the plan's times are too
early, and a walk that assumes shorter copies may wait less: each of ``SCALES`` is tried, and the shortest table kept.
Rows do not depend on each other, since no O or P waits for another rank.

A backward in two halves has two waits: from F to I, and from I to W. Each walk is tried with the first kind of wait
alone, and with both. Copies between I and W are used only if the table is shorter with them, or fits only with them.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.limits import exceeds
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.kinds import OFFLOADS, Kind, Lane
from fxpipe.schedules.schedule import Schedule, Timeline

SCALES = (1, 0.5, 0.25, 0)
"""The fractions of the copy times that walks assume, in the order in which they are tried."""
LONGER = 1e-3
"""How much longer a table may take, as a fraction, that holds as few bytes as possible."""


def within_rooms(schedule: Schedule, costs: Costs, stages: Collection[int], rooms: Sequence[float]) -> Schedule | None:
    """Returns the shortest table that was found in which each rank holds at most its room; None if there is none.

    Args:
        schedule: a table without O and P.
        costs: the table's costs, with ``activation_bytes``.
        stages: the stages that may be offloaded. Stages that the table recomputes stay.
        rooms: the bytes that each rank may hold.
    """
    plan, peaks = schedule.simulate(costs), peak_bytes(schedule, costs)
    best, shortest = None, math.inf
    waits = [(Kind.F,), (Kind.F, Kind.I)] if schedule.dependencies.halves else [(Kind.F,)]
    for scale, after in product(SCALES, waits):
        rows = [
            _Walk(row, plan, scale, stages, room, after).walked() if exceeds(peak, room) else row
            for row, room, peak in zip(schedule.rows, rooms, peaks, strict=True)
        ]
        fitting = [row for row in rows if row is not None]
        if len(fitting) < len(rows):
            continue
        table = replace(schedule, rows=tuple(fitting))
        makespan = table.simulate(costs).makespan
        if makespan < shortest * (1 - 1e-9):
            best, shortest = table, makespan
        if shortest <= plan.makespan * (1 + 1e-9):
            break
    return best


def least_bytes(schedule: Schedule, costs: Costs, stages: Collection[int]) -> Schedule:
    """Returns the table whose ranks hold as few bytes as possible while it takes at most ``LONGER`` longer.

    The least room of a rank is found by bisection, in micro-batches of the rank's smallest stage, one rank after
    another: a rank's O's delay no other rank as long as its own backwards are in time.
    """
    limit = schedule.simulate(costs).makespan * (1 + LONGER)
    rooms, best = list(peak_bytes(schedule, costs)), schedule
    for rank, mine in enumerate(schedule.stages_of):
        sizes = [schedule.groups[stage] * (costs.activation_bytes or ())[stage] for stage in mine if stage in stages]
        unit = min((size for size in sizes if size), default=0.0)
        few, many = 1, round(rooms[rank] / unit) if unit else 1  # ``many`` fits: the rank holds as much without an O
        while few < many:
            middle = (few + many) // 2
            tried = within_rooms(schedule, costs, stages, [*rooms[:rank], middle * unit, *rooms[rank + 1 :]])
            if tried is not None and tried.simulate(costs).makespan <= limit:
                many, best, rooms[rank] = middle, tried, middle * unit
            else:
                few = middle + 1
    return best


def least_rooms(schedule: Schedule, costs: Costs, stages: Collection[int]) -> tuple[float, ...]:
    """Returns, per rank, the least room for which ``within_rooms`` finds a table: the bytes that an action needs while
    all other micro-batches of these stages are away."""
    rooms, recomputed = [], schedule.dependencies.recomputed
    for row in schedule.rows:
        stays = least = 0.0
        uses = _uses(row, (*OFFLOADS,))
        away = {
            first: costs.held(_moved(first, Lane.OUT))
            for first in uses
            if first.stage in stages and _half(first) not in recomputed
        }
        ends = {row[cell]: away[first] for first, cell in uses.items() if first in away}
        for action in row:
            if not schedule.backward[action.stage]:
                continue
            # Only at its F, and at the uses that follow, is a micro-batch here; between these, what its O keeps.
            stays -= ends.get(action, 0.0)
            change = costs.held(action, _half(action) in recomputed)
            least = max(least, stays + max(change, costs.beside(action)))
            stays += change + away.get(action, 0.0)
        rooms.append(least)
    return tuple(rooms)


def with_offload(rows: Sequence[Sequence[Action]], problem: Problem) -> tuple[Row, ...]:
    """Returns a family's rows with O's and P's at the stages that ``problem.offload`` marks.

    With ``problem.memory`` as few micro-batches leave as fit it; without, a rank holds as few bytes as possible. If
    bytes are not known, each stage holds 1 of a micro-batch.

    Raises:
        ScheduleError: the rows do not fit the memory, whatever leaves.
    """
    table, costs = problem.table(tuple(map(tuple, rows))), problem.costs
    if costs.activation_bytes is None:
        ones = (1.0,) * len(problem.placement)
        costs = costs.changed(lambda each: replace(each, activation_bytes=ones))
    if problem.memory is None:
        return least_bytes(table, costs, problem.offloaded).rows
    fitting = within_rooms(table, costs, problem.offloaded, problem.memory)
    if fitting is None:
        peaks = zip(peak_bytes(table, costs), problem.memory, strict=True)
        over = [f"rank {rank} {room:g} of {peak:g}" for rank, (peak, room) in enumerate(peaks) if exceeds(peak, room)]
        raise ScheduleError(
            f"even with offload= the table holds more than memory= bytes: {', '.join(over)}; use smaller "
            "micro-batches, offload more stages, or give more memory"
        )
    return fitting.rows


class _Walk:
    """A walk along a rank's row. ``plan``: the table's times without copies. ``scale``: of the copies' times.
    ``after``: the kinds of actions after which activations may leave. A wait is named by its first action."""

    def __init__(
        self, row: Row, plan: Timeline, scale: float, stages: Collection[int], room: float, after: Collection[Kind]
    ) -> None:
        self._row, self._plan, self._costs, self._scale, self._room = row, plan, plan.costs, scale, room
        self._starts = [plan.spans[action].start for action in row]
        self._recomputed = plan.schedule.dependencies.recomputed
        self._use = {
            first: cell
            for first, cell in _uses(row, after).items()
            if first.stage in stages and _half(first) not in self._recomputed
        }
        """The first action of a wait that may be in the host's memory → the index in the row of its last action."""
        self._ends = {cell: first for first, cell in self._use.items()}
        # Dicts for their order: where two copies end at the same time, the micro-batch that came first leaves first.
        self._here: dict[Action, None] = {}
        self._away: dict[Action, None] = {}
        self._returned = set[Action]()
        """The waits that have left and come back."""
        self._bytes = 0.0
        self._lane = _OutLane()
        self._walked: list[Action] = []

    def walked(self) -> Row | None:
        """Returns the row with O's and P's; None if an action does not fit the room, whatever leaves."""
        for cell, action in enumerate(self._row):
            ended, now = self._ends.get(cell), self._starts[cell]
            # 1. What comes back: this action's own micro-batch at the latest, and others if they fit beside the action.
            if ended in self._away:
                if not self._makes_room(self._taken_by(Lane.BACK, ended), cell, now, late=True):
                    return None
                self._returns(ended)
            grows = max(self._change(action), self._beside(action), 0.0)
            for other in self._due(cell):
                if not self._makes_room(self._taken_by(Lane.BACK, other) + grows, self._use[other], now, late=False):
                    break
                self._returns(other)
            # 2. What leaves.
            if not self._makes_room(grows, cell, now, late=True):
                return None
            self._walked.append(action)
            self._bytes += self._change(action)
            if ended is not None:
                del self._here[ended]
            if action in self._use:
                self._here[action] = None
        return tuple(self._walked)

    def _makes_room(self, more: float, cell: int, now: float, late: bool) -> bool:
        """Lets micro-batches leave until so many more bytes fit, and returns whether they do. Only those leave whose
        next use comes after the cell ``cell``, and, unless ``late``, whose copy is over by now."""
        while exceeds(self._bytes + more, self._room):
            over = {
                first: 0.0 if first in self._returned else self._lane.end_of(self._copy(first))
                for first in self._here
                if self._use[first] > cell
            }
            ready = [first for first, end in over.items() if end <= now * (1 + 1e-9)]
            if not over or not (ready or late):
                return False
            leaves = max(ready, key=self._use.__getitem__) if ready else min(over, key=over.__getitem__)
            if leaves in self._returned:
                self._walked.remove(_moved(leaves, Lane.BACK))
            else:
                self._lane.insert(self._copy(leaves), now)
                self._walked.append(_moved(leaves, Lane.OUT))
            self._moves(Lane.OUT, leaves)
        return True

    def _returns(self, first: Action) -> None:
        self._returned.add(first)
        self._walked.append(_moved(first, Lane.BACK))
        self._moves(Lane.BACK, first)

    def _moves(self, lane: Lane, first: Action) -> None:
        self._bytes += self._taken_by(lane, first)
        source, target = (self._here, self._away) if lane is Lane.OUT else (self._away, self._here)
        target[first] = source.pop(first)

    def _taken_by(self, lane: Lane, first: Action) -> float:
        return self._costs.held(_moved(first, lane))

    def _change(self, action: Action) -> float:
        is_trained = self._plan.schedule.backward[action.stage]
        return self._costs.held(action, _half(action) in self._recomputed) if is_trained else 0.0

    def _beside(self, action: Action) -> float:
        return self._costs.beside(action) if self._plan.schedule.backward[action.stage] else 0.0

    def _copy(self, first: Action) -> _OutCopy:
        return _OutCopy(self._plan.spans[first].end, self._scale * self._costs.copied(first))

    def _due(self, cell: int) -> list[Action]:
        """The waits whose copy back must begin before the next action, in the order of their last actions."""
        following = self._starts[min(cell + 1, len(self._starts) - 1)]
        due: list[Action] = []
        latest = math.inf
        for first in sorted(self._away, key=self._use.__getitem__, reverse=True):
            latest = min(latest, self._starts[self._use[first]]) - self._copy(first).time
            if latest < following * (1 - 1e-9):
                due.append(first)
        return due[::-1]


@dataclass(frozen=True, slots=True)
class _OutCopy:
    """A copy to the host: ``ready``, when it may begin, at the end of its F or I; and the time that it takes."""

    ready: float
    time: float


class _OutLane:
    """The copies to the host that a walk decided on, in the order in which they may begin, and the lane runs them."""

    def __init__(self) -> None:
        self._copies: list[_OutCopy] = []
        self._ends: list[float] = []
        self._wanted: list[float] = []
        """When the O of each copy runs in the plan; a later copy must not delay it."""

    def end_of(self, copy: _OutCopy) -> float:
        """Returns when one more copy would end; infinite if it would delay another copy beyond that copy's O."""
        index = self._index(copy)
        end = free = self._after(index, copy)
        for cell in range(index, len(self._copies)):
            if free <= self._copies[cell].ready:
                break
            free += self._copies[cell].time
            if free > self._wanted[cell] * (1 + 1e-9):
                return math.inf
        return end

    def insert(self, copy: _OutCopy, wanted: float) -> None:
        index = self._index(copy)
        self._copies.insert(index, copy)
        self._wanted.insert(index, wanted)
        self._ends.insert(index, 0.0)
        for cell in range(index, len(self._copies)):
            self._ends[cell] = self._after(cell, self._copies[cell])

    def _index(self, copy: _OutCopy) -> int:
        return bisect(self._copies, copy.ready, key=lambda other: other.ready)

    def _after(self, index: int, copy: _OutCopy) -> float:
        return max(self._ends[index - 1] if index else 0.0, copy.ready) + copy.time


def _half(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch


def _uses(row: Row, after: Collection[Kind]) -> dict[Action, int]:
    """Returns the waits in a row for a next use: the F or I after which activations wait → the index in the row of the
    action that needs them. ``after``: the kinds whose waits are returned."""
    first: dict[tuple[int, int], Action] = {}
    uses: dict[Action, int] = {}
    for cell, action in enumerate(row):
        half = _half(action)
        if action.kind.after is not None and half in first and not action.kind.is_optional:
            uses[first.pop(half)] = cell
        if action.kind in after:
            first[half] = action
    return uses


def _moved(first: Action, lane: Lane) -> Action:
    """The O or the P of the wait that begins with an action."""
    offload, prefetch = OFFLOADS[first.kind]
    return first._replace(kind=offload if lane is Lane.OUT else prefetch)
