"""List scheduling: each rank, when free, takes the best action that is ready. Here priorities are decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, held_back
from fxpipe.schedules.families.limits import Caps, Maker, exceeds
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
    return [partial(list_schedule, costs=costs, caps=caps, priority=one, **limits) for one in PRIORITIES]


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
    run = partial(_listed, problem, costs, caps, priority(problem), held, room)
    turns, tried = [1] * len(problem.placement), {}

    def makespan(dependencies: Dependencies) -> float:
        tried[id(dependencies)] = run(dependencies)
        return max(tried[id(dependencies)][1])

    best = held_back(problem.dependencies, problem.backward, problem.microbatches, makespan, turns)
    return (tried.get(id(best)) or run(best))[0]


Ranked = tuple[tuple[int, ...], int, tuple[int, ...]]
"""What orders the actions that are ready: W's last, then by key and micro-batch, by stage, and forwards first. The slot
of the action is the last of its numbers."""


def _listed(
    problem: Problem,
    costs: Costs,
    caps: Caps,
    key: Key,
    held: Caps | None,
    room: Sequence[float] | None,
    dependencies: Dependencies,
) -> tuple[tuple[Row, ...], list[float]]:
    """The rows, and when each rank has ended."""
    # Numbers in lists instead of Actions, and one function: a search for stages and ranks makes hundreds of tables. A
    # stage has a slot for its F's, 3 · stage, one for its B's or I's, and one for its W's. What a slot has begun is
    # known by when each ends, in the order of micro-batches, or groups.
    homes, backward, microbatches = problem.homes, problem.backward, problem.microbatches
    split = held is not None or room is not None
    ops = (Op.F, Op.I if split else Op.B, Op.W)
    sizes = [problem.group(stage) for stage in range(len(homes))]
    kinds = [Action(stage, op, 0, size) for stage, size in enumerate(sizes) for op in ops]
    time = [costs.time(kind) for kind in kinds]
    # what each holds more; where there is no room to keep within, nothing is counted
    change = [costs.held(kind) if room is not None and backward[kind.stage] else 0.0 for kind in kinds]
    turn = {stage: turn for stages in problem.stages_of for turn, stage in enumerate(stages)}
    ranked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    # slot → what its action of micro-batch j needs: of another slot the one with micro-batch j + shift, and a hop
    needs: list[list[tuple[int, int, int, float]]] = []
    for slot, (stage, op, _, size) in enumerate(kinds):
        before, behind = key(stage, op)
        ranked.append(((op is Op.W, *before), (*behind, turn[stage], op is not Op.F, slot)))
        needed = [(slot - 1, 0)]
        if op is Op.F:
            needed = [(3 * source, size - 1) for source in dependencies.sources.get(stage, ())]
            if (ahead := dependencies.ahead.get(stage)) is not None:
                needed += [(3 * reader, -ahead) for reader in dependencies.readers[stage]]
        elif op is not Op.W:
            needed += [(3 * target + 1, 0) for target in dependencies.targets.get(stage, ())]
        hops = [costs.comm * (homes[other // 3] != homes[stage]) for other, _ in needed]
        needs.append([(other, shift, sizes[other // 3], hop) for (other, shift), hop in zip(needed, hops, strict=True)])

    ends: list[list[float]] = [[] for _ in kinds]
    queued = [False] * len(kinds)
    waiting: dict[tuple[int, int], list[int]] = {}  # what has not begun → the slots that wait for it
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    # Rank → its actions, in two heaps: what is not ready yet by time, what is ready by key. One by key alone would
    # begin what it must wait for, and leave the rank idle.
    coming: list[list[tuple[float, Ranked]]] = [[] for _ in rows]
    ready: list[list[Ranked]] = [[] for _ in rows]
    free, holds = [0.0] * len(rows), [0.0] * len(rows)  # when a rank is, and its bytes
    moments: list[tuple[float, int]] = []  # a rank becomes free, or what an action needs reaches it

    def queue(slot: int) -> None:
        """Puts the next action of a slot where it waits: for what has not begun, or until it is ready."""
        queued[slot] = True
        microbatch, arrives = len(ends[slot]) * sizes[slot // 3], 0.0
        # It waits for the first of its needs that has not begun, and is looked at again then: each pair once. Of
        # several micro-batches of a stage the last one is made last.
        for other, shift, size, hop in needs[slot]:
            made, place = ends[other], (microbatch + shift) // size
            if place >= len(made):
                waiting.setdefault((other, place), []).append(slot)
                return
            if place >= 0 and made[place] + hop > arrives:
                arrives = made[place] + hop
        rank, (before, behind) = homes[slot // 3], ranked[slot]
        heappush(coming[rank], (arrives, (before, microbatch, behind)))
        if arrives >= free[rank]:
            heappush(moments, (arrives, rank))

    def queue_next(stage: int) -> None:
        """What is next at a stage now, once: that can change by actions of this stage alone."""
        first, size = 3 * stage, sizes[stage]
        forwards, gradients, weights = len(ends[first]), len(ends[first + 1]), len(ends[first + 2])
        may_begin = not queued[first] and forwards * size < microbatches
        if backward[stage]:
            may_begin = may_begin and (forwards - gradients + 1) * size <= caps[stage]
            may_begin = may_begin and (held is None or (forwards - weights + 1) * size <= held[stage])
            if gradients < forwards and not queued[first + 1]:
                queue(first + 1)
            if split and weights < gradients and not queued[first + 2]:
                queue(first + 2)
        if may_begin:
            queue(first)

    def fits(rank: int, slot: int, room: Sequence[float]) -> bool:
        """Whether its rank has room for it, or would have none sooner: with no W put off."""
        if change[slot] <= 0 or not exceeds(holds[rank] + change[slot], room[rank]):
            return True
        # No W left to run on this rank would make room, so this must run in spite of the limit, or nothing ever would.
        return all(len(ends[3 * stage + 1]) == len(ends[3 * stage + 2]) for stage in problem.stages_of[rank])

    for stage in problem.order:
        queue_next(stage)
    # Event by event: time goes from one moment at which a rank could begin something to the next.
    while moments:
        now, rank = heappop(moments)
        if free[rank] > now:
            continue
        able, later = ready[rank], coming[rank]
        while later and later[0][0] <= now:
            heappush(able, heappop(later)[1])
        # The action with the least key of those that are ready and have room.
        without_room = []
        while able and room is not None and not fits(rank, able[0][-1][-1], room):
            without_room.append(heappop(able))
        best = heappop(able) if able else None
        for one in without_room:
            heappush(able, one)
        if best is None:
            continue
        microbatch, slot = best[1], best[-1][-1]
        stage = slot // 3
        rows[rank].append(Action(stage, ops[slot % 3], microbatch, sizes[stage]))
        holds[rank] += change[slot]
        end = free[rank] = now + time[slot]
        ends[slot].append(end)
        queued[slot] = False
        heappush(moments, (end, rank))
        queue_next(stage)
        for other in waiting.pop((slot, len(ends[slot]) - 1), ()):
            queue(other)
    return tuple(map(tuple, rows)), free
