"""List schedules of a family: which action is best of those that are ready, and how many may be in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fxpipe.schedules.action import Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, held_back
from fxpipe.schedules.families.limits import Caps, Maker, exceeds
from fxpipe.schedules.families.list_scheduler import ListScheduler, Units
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

Key = Callable[[int, Op], tuple[tuple[int, ...], tuple[int, ...]]]
"""Stage, op → what counts before the micro-batch's number, and behind it. Of the actions that are ready the one with
the least runs; W's come last."""

Priority = Callable[[Problem], Key]


def backward_first(problem: Problem) -> Key:
    """A backward first, then the forward of the stage nearest to a sink."""
    return lambda stage, op: ((op is Op.F, problem.depth[stage]), ())


def longest_way_first(problem: Problem) -> Key:
    """A backward first; among backwards and among forwards, the one with the longest way still to go."""
    way = _way_to_go(problem)
    return lambda stage, op: ((op is Op.F, way(stage, op)), ())


def oldest_first(problem: Problem) -> Key:
    """The micro-batch that began first, whatever there is to do for it."""
    return lambda stage, op: ((), (op is Op.F, problem.depth[stage]))


def forward_first(problem: Problem) -> Key:
    """A forward first, as far as the cap allows; otherwise as ``longest_way_first``."""
    way = _way_to_go(problem)
    return lambda stage, op: ((op is not Op.F, way(stage, op)), ())


PRIORITIES: Sequence[Priority] = (backward_first, longest_way_first, oldest_first, forward_first)


def by_each_priority(costs: Costs, caps: Caps, **limits: Any) -> list[Maker]:
    """Makers of a list schedule for each priority. ``limits``: as for ``list_schedule``."""
    return [partial(list_schedule, costs=costs, caps=caps, priority=order, **limits) for order in PRIORITIES]


def _way_to_go(problem: Problem) -> Callable[[int, Op], int]:
    """Minus how many stages a micro-batch still has in front of it, in forward or in backward."""
    height = [1] * len(problem.placement)
    for stage in problem.order:
        for target in problem.targets[stage]:
            height[target] = max(height[target], 1 + height[stage])
    return lambda stage, op: -(problem.depth if op is Op.F else height)[stage]


def list_schedule(
    problem: Problem,
    costs: Costs,
    caps: Caps,
    priority: Priority,
    held: Caps | None = None,
    room: Sequence[float] | None = None,
) -> tuple[Row, ...]:
    """Rows in which no stage holds more than ``caps`` micro-batches between forward and backward.

    ``held``: splits backwards into I and W, and limits what is held from forward to W; ``caps`` then ends with I.
    ``room``: limits the bytes that each rank holds from forward to W, the costs' ``activation_bytes`` and
    ``deferred_bytes``; as many micro-batches as ``caps`` allows must fit.

    It does not deadlock: take the first micro-batch that is not done. Nothing before it is in flight, so the first
    stage's forward that is missing may run; and when all forwards have run, so may the last stage's backward. What
    W's hold keeps nothing waiting for long: they are ready. A stage without backward waits for its readers' earlier
    micro-batches, or groups, which have run by then.
    """
    turns, tried = [1] * len(problem.placement), {}

    def makespan(dependencies: Dependencies) -> float:
        scheduler = _WithinCaps(problem, costs, caps, priority(problem), held, room, dependencies)
        tried[id(dependencies)] = scheduler.run()
        return max(scheduler.free)

    best = held_back(problem.dependencies, problem.backward, problem.microbatches, makespan, turns)
    if id(best) not in tried:
        makespan(best)
    return tried[id(best)]


class _WithinCaps(ListScheduler):
    """Of each stage a line of F's, 3 · stage, one of B's or I's, and one of W's, which hold no more than they may."""

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        caps: Caps,
        key: Key,
        held: Caps | None,
        room: Sequence[float] | None,
        dependencies: Dependencies,
    ) -> None:
        self.problem, self.costs, self.caps, self.held, self.room = problem, costs, caps, held, room
        self.holds = [0.0] * problem.ranks  # bytes
        split = held is not None or room is not None
        turn = {stage: turn for stages in problem.stages_of for turn, stage in enumerate(stages)}
        units = Units(problem.ranks, costs)
        # W's come last; then the ready actions go by key and micro-batch, by stage, and forwards first.
        keys: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = []
        for stage, home in enumerate(problem.homes):
            for op in (Op.F, Op.I if split else Op.B, Op.W):
                before, behind = key(stage, op)
                first, last = (op is Op.W, *before), (*behind, turn[stage], op is not Op.F, stage)
                runs = op is Op.F or (problem.backward[stage] and (split or op is not Op.W))
                actions = problem.actions(stage, op) if runs else []
                units.add_line(home, [(action,) for action in actions])
                keys += [(first, action.microbatch, last) for action in actions]
        super().__init__(units, keys)
        for stage in range(len(problem.homes)):
            for source in dependencies.sources.get(stage, ()):
                # of several micro-batches of a source the last one is made last
                self._need(3 * stage, 3 * source, problem.group(stage) - 1)
            for reader in dependencies.readers.get(stage, ()) if stage in dependencies.ahead else ():
                self._need(3 * stage, 3 * reader, -dependencies.ahead[stage])
            for line in (3 * stage + 1, 3 * stage + 2):
                self._need(line, line - 1)
            for target in dependencies.targets.get(stage, ()):
                self._need(3 * stage + 1, 3 * target + 1)

    def _need(self, line: int, other: int, shift: int = 0) -> None:
        """Micro-batch i of a line needs i + shift of the other; a group the group that has it."""
        size, group = self.problem.group(line // 3), self.problem.group(other // 3)
        units, others = self.units.lines[line], self.units.lines[other]
        first = max(-(shift // size), 0)
        self.units.need(units[first:], (others[(place * size + shift) // group] for place in range(first, len(units))))

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        line = self.units.line_of[unit]
        stage = line // 3
        if line % 3 == 0 and self.problem.backward[stage]:
            forwards, gradients, weights = self.begun[line : line + 3]
            size = self.problem.group(stage)
            if (forwards - gradients + 1) * size > self.caps[stage]:
                return False
            if self.held is not None and (forwards - weights + 1) * size > self.held[stage]:
                return False
        if self.room is None or (change := self._change(unit)) <= 0:
            return True
        if not exceeds(self.holds[rank] + change, self.room[rank]):
            return True
        # No W left to run on this rank would make room, so this must run in spite of the limit, or nothing ever would.
        lines = (3 * stage + 1 for stage in self.problem.stages_of[rank])
        return all(self.begun[line] == self.begun[line + 1] for line in lines)

    def begin(self, rank: int, unit: int) -> None:
        if self.room is not None:
            self.holds[rank] += self._change(unit)

    def _change(self, unit: int) -> float:
        """How many bytes more its stage holds with a unit."""
        (action,) = self.units.actions[unit]
        return self.costs.held(action) if self.problem.backward[action.stage] else 0.0
