"""List scheduling: each rank, when free, takes the best action that is ready. Here priorities are decided."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, held_back
from fxpipe.schedules.families.caps import Caps, exceeds
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

Priority = Callable[[Problem], Callable[[Action], tuple[float, ...]]]
"""Problem → action → its key. Of the actions that are ready the one with the least key runs; W's come last."""


def backward_first(problem: Problem) -> Callable[[Action], tuple[float, ...]]:
    """A backward first, then the forward of the stage nearest to a sink."""
    depth = problem.depth
    return lambda action: (action.op is Op.F, depth[action.stage], action.microbatch)


def longest_way_first(problem: Problem) -> Callable[[Action], tuple[float, ...]]:
    """A backward first; among backwards and among forwards, the one with the longest way still to go."""
    way = _way_to_go(problem)
    return lambda action: (action.op is Op.F, -way[action.op is Op.F][action.stage], action.microbatch)


def oldest_first(problem: Problem) -> Callable[[Action], tuple[float, ...]]:
    """The micro-batch that began first, whatever there is to do for it."""
    depth = problem.depth
    return lambda action: (action.microbatch, action.op is Op.F, depth[action.stage])


def forward_first(problem: Problem) -> Callable[[Action], tuple[float, ...]]:
    """A forward first, as far as the cap allows; otherwise as ``longest_way_first``."""
    way = _way_to_go(problem)
    return lambda action: (action.op is not Op.F, -way[action.op is Op.F][action.stage], action.microbatch)


PRIORITIES: Mapping[str, Priority] = MappingProxyType(
    {
        "backward first": backward_first,
        "longest way first": longest_way_first,
        "oldest first": oldest_first,
        "forward first": forward_first,
    }
)


def _way_to_go(problem: Problem) -> Mapping[bool, Sequence[int]]:
    """How many stages a micro-batch still has in front of it, per stage: True in forward, False in backward."""
    height = [1] * len(problem.placement)
    for stage in problem.order:
        for target in problem.targets[stage]:
            height[target] = max(height[target], 1 + height[stage])
    return {True: problem.depth, False: height}


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
    split = held is not None or room is not None
    every = ((stage, j) for stage in range(len(problem.placement)) for j in range(problem.microbatches))
    free = dataclasses.replace(problem.dependencies, halves=frozenset(every if split else ()))

    turns = [1] * len(problem.placement)

    def listing(dependencies: Dependencies) -> _Listing:
        return _Listing(problem, costs, caps, priority(problem), held, room, dependencies)

    return listing(
        held_back(free, problem.backward, problem.microbatches, lambda one: listing(one).makespan(), turns)
    ).run()


class _Ranked(NamedTuple):
    """An action, in the order in which those that are ready are taken: W's last, then by key, then by stage."""

    is_weights: bool
    key: tuple[float, ...]
    turn: int
    is_gradient: bool
    action: Action


class _Listing:
    """How far list scheduling has come: when each action ends, and how many micro-batches of each stage have begun."""

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        caps: Caps,
        key: Callable[[Action], tuple[float, ...]],
        held: Caps | None,
        room: Sequence[float] | None,
        dependencies: Dependencies,
    ) -> None:
        self.problem, self.costs, self.caps, self.key = problem, costs, caps, key
        self.held, self.room = held, room
        self.bytes = [0.0] * problem.ranks
        self.split = held is not None or room is not None
        self.gradient = Op.I if self.split else Op.B
        self.sizes = [problem.group(stage) for stage in range(len(problem.placement))]
        stages = range(len(problem.placement))
        self.dependencies, ahead = dependencies, dependencies.ahead
        sources = [dependencies.sources.get(stage, ()) for stage in stages]
        forward = [(*problem.targets[stage], *(one for one in sources[stage] if one in ahead)) for stage in stages]
        waiting = ((Op.F, forward), (self.gradient, sources))
        self.users = {  # (stage, op) → the other ranks that wait for it
            (stage, op): {problem.homes[other] for other in others} - {problem.homes[stage]}
            for op, users in waiting
            for stage, others in enumerate(users)
        }
        self.ends: dict[Action, float] = {}
        self.begun: dict[Op, list[int]] = {op: [0] * len(problem.placement) for op in Op}
        self.turn = {stage: turn for stages in problem.stages_of for turn, stage in enumerate(stages)}
        self.offered: set[Action] = set()
        self.waiting: dict[Action, list[Action]] = {}  # what has not begun → the actions that wait for it
        self.coming: list[list[tuple[float, _Ranked]]] = [[] for _ in range(problem.ranks)]  # with when they are ready
        self.ready: list[list[_Ranked]] = [[] for _ in range(problem.ranks)]

    def run(self) -> tuple[Row, ...]:
        ranks = self.problem.ranks
        rows: list[list[Action]] = [[] for _ in range(ranks)]
        free = [0.0] * ranks
        moments = [(0.0, rank) for rank in range(ranks)]  # a rank becomes free, or a message reaches it
        for stage in self.problem.order:
            self._offer(stage)
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

    def makespan(self) -> float:
        """Of the rows that it comes to."""
        self.run()
        return max(self.ends.values())

    def _best(self, rank: int, now: float) -> Action | None:
        """The action with the least key of those that are ready and have room."""
        coming, ready = self.coming[rank], self.ready[rank]
        while coming and coming[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(coming)[1])
        without_room = []
        while ready:
            best = heapq.heappop(ready)
            if self.room is None or self._fits(best.action, self.room):
                break
            without_room.append(best)
        else:
            best = None
        for ranked in without_room:
            heapq.heappush(ready, ranked)
        return None if best is None else best.action

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
        for other in self.dependencies.before(action):
            if other not in self.ends:
                self.waiting.setdefault(other, []).append(action)
                return
            ready = max(ready, self.ends[other] + (0 if homes[other.stage] == rank else self.costs.comm))
        ranked = _Ranked(action.op is Op.W, self.key(action), self.turn[action.stage], action.op is not Op.F, action)
        heapq.heappush(self.coming[rank], (ready, ranked))

    def _next(self, stage: int) -> list[Action]:
        """The next actions of a stage: its forward, within its caps, its backward, and its weight gradients."""
        forwards, gradients = self.begun[Op.F][stage], self.begun[self.gradient][stage]
        size = self.sizes[stage]
        if not self.problem.backward[stage]:
            return [Action(stage, Op.F, forwards, size)] if forwards < self.problem.microbatches else []
        actions = []
        below = forwards - gradients + size <= self.caps[stage]
        if self.split:
            weights = self.begun[Op.W][stage]
            below = below and (self.held is None or forwards - weights + size <= self.held[stage])
            if weights < gradients:
                actions.append(Action(stage, Op.W, weights, size))
        if below and forwards < self.problem.microbatches:
            actions.append(Action(stage, Op.F, forwards, size))
        if gradients < forwards:
            actions.append(Action(stage, self.gradient, gradients, size))
        return actions

    def _fits(self, action: Action, room: Sequence[float]) -> bool:
        """Whether its rank has room for it, or would have none sooner: with no W put off."""
        rank, change = self.problem.homes[action.stage], self.costs.held(action)
        holds = change > 0 and self.problem.backward[action.stage]
        if not holds or not exceeds(self.bytes[rank] + change, room[rank]):
            return True
        return all(self.begun[Op.W][stage] == self.begun[Op.I][stage] for stage in self.problem.stages_of[rank])
