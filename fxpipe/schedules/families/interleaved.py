"""Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM): several stages a rank, in groups of micro-batches.

A rank runs a group of micro-batches through its first stage, then the same group through its second one, and so on:
when the group is done at the first, its front has come round to the second. Backwards go the other way round.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 ...
    rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.limits import shortest
from fxpipe.schedules.families.one_f_one_b import one_f_one_b
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row


def interleaved_1f1b(problem: Problem) -> tuple[Row, ...]:
    """Megatron's order on a chain whose p·v stages go round p ranks, for m a multiple of p: idle (p − 1)(F + B) a rank.

    On other graphs and placements, where stages do not go round their ranks, that order can be far from good: there
    the shorter of it and 1F1B at F = 1 and B = 2. With a stage a rank this is 1F1B.
    """
    if problem.one_stage_a_rank or problem.is_grouped:
        return one_f_one_b(problem)
    return shortest(problem, [in_laps, one_f_one_b], Costs.of(len(problem.placement))).rows


def in_laps(problem: Problem) -> tuple[Row, ...]:
    """Megatron's order, on any graph and placement.

    A lap is ⌈D / v⌉ deep, D being the depth of ranks with v stages, the most: p on Megatron's chain. So many
    micro-batches make a group. A rank warms up with two forwards for each stage behind its last one, and a group for
    each of its other stages; then one forward, one backward. Where that would deadlock, the ranks that wait run further
    forwards.
    """
    most = max(len(stages) for stages in problem.stages_of)
    going_round = [stage for stages in problem.stages_of if len(stages) == most for stage in stages]
    lap = math.ceil(max(problem.depth[stage] for stage in going_round) / most)
    ranks = [_Rank(problem, stages, lap) for stages in problem.stages_of]
    done: set[Action] = set()
    while any(rank.next for rank in ranks):
        if not sum([rank.run(done) for rank in ranks]):
            # All wait. Of those that could run a forward instead of a backward the first one does. There is one: take
            # the first action that has not run, by group, stage in topological order, and micro-batch, with backwards
            # behind all forwards and the other way round. All that it needs stands before it, and has run.
            able = (one for one in ranks if one.next is not one.forward and one.is_ready(one.forward, done))
            next(able).warm_up += 1
    return tuple(tuple(rank.row) for rank in ranks)


class _Rank:
    """One rank: what it still has to run, the next at the end, and how many forwards it runs ahead of backwards."""

    def __init__(self, problem: Problem, stages: tuple[int, ...], lap: int) -> None:
        self.problem = problem
        trained = [stage for stage in stages if problem.backward[stage]]
        self.forwards = list(_in_groups(problem, Op.F, stages, lap))[::-1]
        self.backwards = list(_in_groups(problem, Op.B, trained[::-1], lap))[::-1]
        self.warm_up = 2 * (problem.depth[stages[-1]] - 1) + (len(stages) - 1) * lap
        self.row: list[Action] = []
        self.in_flight = 0

    @property
    def forward(self) -> Action | None:
        return self.forwards[-1] if self.forwards else None

    @property
    def next(self) -> Action | None:
        """What comes next: warm-up, then forwards and backwards in turns; a frozen stage's forward at once."""
        forward = self.forward
        ahead = forward and (self.in_flight <= self.warm_up or not self.problem.backward[forward.stage])
        return self.backwards[-1] if self.backwards and not ahead else forward

    def is_ready(self, action: Action | None, done: set[Action]) -> bool:
        return action is not None and done.issuperset(self.problem.dependencies.before(action))

    def run(self, done: set[Action]) -> int:
        """Runs as far as dependencies allow, and returns how many actions."""
        before = len(self.row)
        while (action := self.next) and self.is_ready(action, done):
            (self.forwards if action.op is Op.F else self.backwards).pop()
            if self.problem.backward[action.stage]:
                self.in_flight += 1 if action.op is Op.F else -1
            self.row.append(action)
            done.add(action)
        return len(self.row) - before


def _in_groups(problem: Problem, op: Op, stages: Iterable[int], lap: int) -> Iterator[Action]:
    """Group by group of ``lap`` micro-batches, each through all ``stages``."""
    m = problem.microbatches
    for start in range(0, m, lap):
        for stage in stages:
            for microbatch in range(start, min(start + lap, m)):
                yield Action(stage, op, microbatch)
