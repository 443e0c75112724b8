"""List schedules of a family: which ready action is best, and how many micro-batches may be in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, held_back, longest_paths
from fxpipe.schedules.families.limits import Caps, Maker, exceeds
from fxpipe.schedules.families.list_scheduler import ListScheduler, Units
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind

Key = Callable[[int, Kind], tuple[tuple[int, ...], tuple[int, ...]]]
"""(stage, kind) → the sort keys before and after the micro-batch's number. Of the ready actions, the action with the
least key runs; W's come last."""

Priority = Callable[[Problem], Key]


def backward_first(problem: Problem) -> Key:
    """Prefers backwards, then the forward of the stage nearest to a sink."""
    return lambda stage, kind: ((kind.part_of is FORWARD, problem.depth[stage]), ())


def longest_way_first(problem: Problem) -> Key:
    """Prefers backwards; among backwards, and among forwards, the longest remaining path."""
    remaining = _way_to_go(problem)
    return lambda stage, kind: ((kind.part_of is FORWARD, remaining(stage, kind)), ())


def oldest_first(problem: Problem) -> Key:
    """Prefers the micro-batch that began first, for any action."""
    return lambda stage, kind: ((), (kind.part_of is FORWARD, problem.depth[stage]))


def forward_first(problem: Problem) -> Key:
    """Prefers forwards, as far as the cap allows; otherwise as ``longest_way_first``."""
    remaining = _way_to_go(problem)
    return lambda stage, kind: ((kind.part_of is BACKWARD, remaining(stage, kind)), ())


PRIORITIES: Sequence[Priority] = (backward_first, longest_way_first, oldest_first, forward_first)


def by_each_priority(costs: Costs, caps: Caps, **limits: Any) -> list[Maker]:
    """Returns a maker of list schedules for each priority. ``limits``: as in ``list_schedule``."""
    return [partial(list_schedule, costs=costs, caps=caps, priority=order, **limits) for order in PRIORITIES]


def _way_to_go(problem: Problem) -> Callable[[int, Kind], int]:
    """Returns minus the number of stages that a micro-batch still has ahead, in forward or in backward."""
    height = longest_paths(problem.dependencies.sources, len(problem.placement))
    return lambda stage, kind: -(problem.depth if kind.part_of is FORWARD else height)[stage]


def list_schedule(
    problem: Problem,
    costs: Costs,
    caps: Caps,
    priority: Priority,
    weight_caps: Caps | None = None,
    room: Sequence[float] | None = None,
) -> tuple[Row, ...]:
    """Returns rows in which no stage holds more than ``caps`` micro-batches between forward and backward.

    ``weight_caps``: splits backwards into I and W, and limits the micro-batches held from forward to W; ``caps`` then
    ends with I. ``room``: limits the bytes that each rank holds from forward to W, by the costs' ``activation_bytes``
    and ``deferred_bytes``; as many micro-batches as ``caps`` allows must fit.

    The rows do not deadlock. Take the first unfinished micro-batch: no earlier one is in flight, so the first stage's
    missing forward may run; and when all forwards have run, the last stage's backward may run. Micro-batches that wait
    for W delay no action for long: their W's are ready. A stage without backward waits for its readers' earlier
    micro-batches, or groups, which have run by then.
    """
    turns, tried = [1] * len(problem.placement), {}

    def makespan(dependencies: Dependencies) -> float:
        scheduler = _WithinCaps(problem, costs, caps, priority(problem), weight_caps, room, dependencies)
        tried[id(dependencies)] = scheduler.run()
        return max(scheduler.free)

    best = held_back(problem.dependencies, problem.backward, problem.microbatches, makespan, turns)
    if id(best) not in tried:
        makespan(best)
    return tried[id(best)]


class _WithinCaps(ListScheduler):
    """Three lines per stage: F's, line 3 · stage, B's or I's, and W's; each stage stays within its caps."""

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        caps: Caps,
        key: Key,
        weight_caps: Caps | None,
        room: Sequence[float] | None,
        dependencies: Dependencies,
    ) -> None:
        self.problem, self.costs, self.caps, self.weight_caps, self.room = problem, costs, caps, weight_caps, room
        self.holds = [0.0] * problem.ranks  # bytes
        split = weight_caps is not None or room is not None
        turn = {stage: turn for stages in problem.stages_of for turn, stage in enumerate(stages)}
        units = Units(problem.ranks, costs)
        # W's come last; the other ready actions are ordered by key and micro-batch, by stage, and forwards first.
        keys: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
        for stage, home in enumerate(problem.homes):
            for kind in (Kind.F, Kind.I if split else Kind.B, Kind.W):
                before, behind = key(stage, kind)
                first, last = (kind.messages is None, *before), (*behind, turn[stage], kind.part_of is BACKWARD, stage)
                runs = kind.part_of is FORWARD or (problem.backward[stage] and (split or kind.messages))
                actions = problem.actions(stage, kind) if runs else []
                units.add_line(home, [(action,) for action in actions])
                keys += [(first, action.microbatch, last) for action in actions]
        super().__init__(units, keys)
        for stage in range(len(problem.homes)):
            for source in dependencies.sources.get(stage, ()):
                # of a source's micro-batches in a group, the last is made last
                self._need(3 * stage, 3 * source, problem.group(stage) - 1)
            for reader in dependencies.readers.get(stage, ()) if stage in dependencies.ahead else ():
                self._need(3 * stage, 3 * reader, -dependencies.ahead[stage])
            for line in (3 * stage + 1, 3 * stage + 2):
                self._need(line, line - 1)
            for target in dependencies.targets.get(stage, ()):
                self._need(3 * stage + 1, 3 * target + 1)

    def _need(self, line: int, other: int, shift: int = 0) -> None:
        """Makes micro-batch i of a line need i + shift of the other line; a group needs the group that contains it."""
        size, group = self.problem.group(line // 3), self.problem.group(other // 3)
        units, others = self.units.lines[line], self.units.lines[other]
        first = max(-(shift // size), 0)
        self.units.need(units[first:], (others[(index * size + shift) // group] for index in range(first, len(units))))

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        line = self.units.line_of[unit]
        stage = line // 3
        if line % 3 == 0 and self.problem.backward[stage]:
            forwards, gradients, weights = self.begun[line : line + 3]
            size = self.problem.group(stage)
            if (forwards - gradients + 1) * size > self.caps[stage]:
                return False
            if self.weight_caps is not None and (forwards - weights + 1) * size > self.weight_caps[stage]:
                return False
        if self.room is None or (change := self._change(unit)) <= 0:
            return True
        if not exceeds(self.holds[rank] + change, self.room[rank]):
            return True
        # This rank has no W that could free bytes, so the action must run in spite of the limit, or none ever would.
        lines = (3 * stage + 1 for stage in self.problem.stages_of[rank])
        return all(self.begun[line] == self.begun[line + 1] for line in lines)

    def begin(self, rank: int, unit: int) -> None:
        if self.room is not None:
            self.holds[rank] += self._change(unit)

    def _change(self, unit: int) -> float:
        """Returns how many more bytes the unit's stage holds after the unit."""
        (action,) = self.units.actions[unit]
        return self.costs.held(action) if self.problem.backward[action.stage] else 0.0
