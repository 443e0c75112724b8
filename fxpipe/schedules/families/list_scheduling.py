"""List scheduling: each rank, when free, takes the best action that is ready. Here priorities are decided."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, held_back
from fxpipe.schedules.families.limits import Caps, Maker, exceeds
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

Key = Callable[[Action], tuple[float, ...]]
"""Of the actions that are ready the one with the least key runs; W's come last."""

Priority = Callable[[Problem], Key]


def backward_first(problem: Problem) -> Key:
    """A backward first, then the forward of the stage nearest to a sink."""
    depth = problem.depth
    return lambda action: (action.op is Op.F, depth[action.stage], action.microbatch)


def longest_way_first(problem: Problem) -> Key:
    """A backward first; among backwards and among forwards, the one with the longest way still to go."""
    way = _way_to_go(problem)
    return lambda action: (action.op is Op.F, way(action), action.microbatch)


def oldest_first(problem: Problem) -> Key:
    """The micro-batch that began first, whatever there is to do for it."""
    depth = problem.depth
    return lambda action: (action.microbatch, action.op is Op.F, depth[action.stage])


def forward_first(problem: Problem) -> Key:
    """A forward first, as far as the cap allows; otherwise as ``longest_way_first``."""
    way = _way_to_go(problem)
    return lambda action: (action.op is not Op.F, way(action), action.microbatch)


PRIORITIES: Sequence[Priority] = (backward_first, longest_way_first, oldest_first, forward_first)


def by_each_priority(costs: Costs, caps: Caps, **limits: Any) -> list[Maker]:
    """Makers of a list schedule for each priority. ``limits``: as for ``list_schedule``."""
    return [partial(list_schedule, costs=costs, caps=caps, priority=one, **limits) for one in PRIORITIES]


def _way_to_go(problem: Problem) -> Callable[[Action], int]:
    """Minus how many stages a micro-batch still has in front of it, in forward or in backward."""
    height = [1] * len(problem.placement)
    for stage in problem.order:
        for target in problem.targets[stage]:
            height[target] = max(height[target], 1 + height[stage])
    return lambda action: -(problem.depth if action.op is Op.F else height)[action.stage]


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
    stages, key = range(len(problem.placement)), priority(problem)
    split = held is not None or room is not None
    every = frozenset((stage, j) for stage in stages for j in range(problem.microbatches)) if split else ()
    free = replace(problem.dependencies, halves=every)

    listing = partial(_Listing, problem, costs, caps, key, held, room)

    def makespan(dependencies: Dependencies) -> float:
        tried = listing(dependencies)
        tried.run()
        return max(tried.ends.values())

    return listing(held_back(free, problem.backward, problem.microbatches, makespan, [1] * len(stages))).run()


Ranked = tuple[bool, tuple[float, ...], int, bool, Action]
"""An action behind what orders those that are ready: W's last, then by key, by stage, and forwards first."""


@dataclass
class _Listing:
    """How far list scheduling has come: when each action ends, and how many micro-batches of each stage have begun."""

    problem: Problem
    costs: Costs
    caps: Caps
    key: Key
    held: Caps | None
    room: Sequence[float] | None
    dependencies: Dependencies

    def __post_init__(self) -> None:
        problem, dependencies = self.problem, self.dependencies
        self.split = self.held is not None or self.room is not None
        self.gradient = Op.I if self.split else Op.B
        # (stage, op) → the other ranks that wait for it
        self.users: dict[tuple[int, Op], set[int]] = {}
        for stage, home in enumerate(problem.homes):
            sources = dependencies.sources.get(stage, ())
            # A forward also lets a source go on that may not run further ahead of its readers.
            held_sources = (one for one in sources if one in dependencies.ahead)
            for op, users in ((Op.F, (*problem.targets[stage], *held_sources)), (self.gradient, sources)):
                self.users[stage, op] = {problem.homes[user] for user in users} - {home}
        self.ends: dict[Action, float] = {}
        self.bytes = [0.0] * problem.ranks
        self.begun: dict[Op, list[int]] = {op: [0] * len(problem.placement) for op in Op}
        self.turn = {stage: turn for stages in problem.stages_of for turn, stage in enumerate(stages)}
        self.offered: set[Action] = set()
        self.waiting: dict[Action, list[Action]] = {}  # what has not begun → the actions that wait for it
        self.coming: list[list[tuple[float, Ranked]]] = [[] for _ in range(problem.ranks)]  # with when they are ready
        self.ready: list[list[Ranked]] = [[] for _ in range(problem.ranks)]

    def run(self) -> tuple[Row, ...]:
        ranks = self.problem.ranks
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        free = [0.0] * ranks
        moments = [(0.0, rank) for rank in range(ranks)]  # a rank becomes free, or a message reaches it
        for stage in self.problem.order:
            self._offer(stage)
        # Event by event: time goes from one moment at which a rank could begin something to the next.
        while moments:
            now, rank = heapq.heappop(moments)
            action = self._best(rank, now) if free[rank] <= now else None
            if action is None:
                continue
            rows[rank].append(action)
            self.begun[action.op][action.stage] += action.count
            if self.room is not None and self.problem.backward[action.stage]:
                self.bytes[rank] += self.costs.held(action)
            end = free[rank] = self.ends[action] = now + self.costs.time(action)
            heapq.heappush(moments, (end, rank))
            for user in self.users.get((action.stage, action.op), ()):
                heapq.heappush(moments, (end + self.costs.comm, user))
            self._offer(action.stage)
            for waiting in self.waiting.pop(action, ()):
                self._await(waiting)
        return tuple(map(tuple, rows))

    def _best(self, rank: int, now: float) -> Action | None:
        """The action with the least key of those that are ready and have room."""
        # Two heaps: what is not ready yet by time, what is ready by key. One by key alone would begin what it must wait
        # for, and leave the rank idle.
        coming, ready = self.coming[rank], self.ready[rank]
        while coming and coming[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(coming)[1])
        best, without_room = None, []
        while ready and best is None:
            ranked = heapq.heappop(ready)
            if self._fits(ranked[-1]):
                best = ranked[-1]
            else:
                without_room.append(ranked)
        for ranked in without_room:
            heapq.heappush(ready, ranked)
        return best

    def _offer(self, stage: int) -> None:
        """What is next at a stage now, once: that can change by actions of this stage alone."""
        for action in self._next(stage):
            if action not in self.offered:
                self.offered.add(action)
                self._await(action)

    def _await(self, action: Action) -> None:
        """Puts an action where it waits: for what has not begun, or until it is ready."""
        homes, ready = self.problem.homes, 0.0
        rank = homes[action.stage]
        # It waits for the first of its needs that has not begun, and is looked at again then: each pair once.
        for other in self.dependencies.before(action):
            if other not in self.ends:
                self.waiting.setdefault(other, []).append(action)
                return
            ready = max(ready, self.ends[other] + (0 if homes[other.stage] == rank else self.costs.comm))
        ranked = (action.op is Op.W, self.key(action), self.turn[action.stage], action.op is not Op.F, action)
        heapq.heappush(self.coming[rank], (ready, ranked))

    def _next(self, stage: int) -> list[Action]:
        """The next actions of a stage: its forward, within its caps, its backward, and its weight gradients."""
        forwards, gradients, weights = (self.begun[op][stage] for op in (Op.F, self.gradient, Op.W))
        size, trained = self.problem.group(stage), self.problem.backward[stage]
        actions = []
        may_begin = forwards < self.problem.microbatches
        if trained:
            may_begin &= forwards - gradients + size <= self.caps[stage]
            may_begin &= self.held is None or forwards - weights + size <= self.held[stage]
        if self.split and weights < gradients:
            actions.append(Action(stage, Op.W, weights, size))
        if may_begin:
            actions.append(Action(stage, Op.F, forwards, size))
        if trained and gradients < forwards:
            actions.append(Action(stage, self.gradient, gradients, size))
        return actions

    def _fits(self, action: Action) -> bool:
        """Whether its rank has room for it, or would have none sooner: with no W put off."""
        if self.room is None or not self.problem.backward[action.stage]:
            return True
        rank, change = self.problem.homes[action.stage], self.costs.held(action)
        if change <= 0 or not exceeds(self.bytes[rank] + change, self.room[rank]):
            return True
        # No W left to run on this rank would make room, so this must run in spite of the limit, or nothing ever would.
        return all(self.begun[Op.W][stage] == self.begun[Op.I][stage] for stage in self.problem.stages_of[rank])
