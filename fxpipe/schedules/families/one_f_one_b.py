"""1F1B (PipeDream-Flush, Narayanan et al. 2021) on a graph of stages, and its variants: interleaved 1F1B, and greedy.

Depth d(s) counts the stages on the longest path from s to the sink, and not all stages: parallel branches need no
warm-up for each other. On a chain this is the usual 1F1B.

    d=3   F0 F1 F2 B0 F3 B1 ...
    d=2      F0 F1 B0 F2 B1 ...
    d=1         F0 B0 F1 B1 ...

Interleaved 1F1B (Narayanan et al. 2021, Megatron-LM) has several stages per rank. A rank runs a group of micro-batches
through its first stage, then the same group through its second stage, and so on: when the first stage has finished the
group, the group's first micro-batch has reached the second stage. Backwards go the other way.

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 ...
    rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 ...

Greedy is list scheduling at the stages' real costs, the generalization of 1F1B to uneven stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import fastest
from fxpipe.schedules.families.limits import (
    Caps,
    Choice,
    Maker,
    caps,
    round_trip_caps,
    shortest,
    shortest_within_limits,
    with_fewer_microbatches,
)
from fxpipe.schedules.families.list_scheduler import ListScheduler, Unit, Units
from fxpipe.schedules.families.list_scheduling import backward_first, by_each_priority, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

MANY = 10_000
"""Above so many actions, greedy chooses with a smaller problem, and makes only few tables of full size."""


def one_f_one_b(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) − 1 warm-up forwards, then one forward, one backward; peak in flight min(m, d(s)).

    On a balanced graph with F and B per stage and D = max d the makespan is (m + D − 1)(F + B), the lower bound. If a
    rank has several stages, list scheduling with the same caps, for F = 1 and B = 2. With a gathered stage, the fastest
    of the tables for gathered stages.
    """
    return fastest(problem) if problem.is_grouped else with_caps(problem, problem.depth)


def with_caps(problem: Problem, caps: Caps) -> tuple[Row, ...]:
    """Returns 1F1B that holds up to ``caps`` micro-batches per stage; caps must not grow along an edge."""
    if problem.one_stage_a_rank:
        return tuple(_alternating(problem, stage, caps[stage]) for (stage,) in problem.stages_of)
    return list_schedule(problem, Costs.of(len(problem.placement)), caps, backward_first)


def _alternating(problem: Problem, stage: int, cap: int) -> Row:
    m, warm_up = problem.microbatches, cap - 1
    if not problem.backward[stage]:
        return tuple(problem.actions(stage, Op.F))
    row = [Action(stage, Op.F, j) for j in range(min(warm_up, m))]
    for j in range(m):
        if j + warm_up < m:
            row.append(Action(stage, Op.F, j + warm_up))
        row.append(Action(stage, Op.B, j))
    return tuple(row)


# --- interleaved ---


def interleaved_1f1b(problem: Problem) -> tuple[Row, ...]:
    """Megatron's order on a chain whose p·v stages go round p ranks, for m a multiple of p: idle (p − 1)(F + B) a rank.

    On other graphs and placements that order can be far from optimal: the result is the shorter of Megatron's order and
    1F1B at F = 1 and B = 2. With a stage per rank the result is 1F1B.
    """
    if problem.one_stage_a_rank or problem.is_grouped:
        return one_f_one_b(problem)
    return shortest(problem, [in_laps, one_f_one_b], Costs.of(len(problem.placement))).rows


def in_laps(problem: Problem) -> tuple[Row, ...]:
    """Megatron's order, on any graph and placement.

    A lap is ⌈D / v⌉ stages deep, p on Megatron's chain: v is the most stages of a rank, D the depth of ranks with v
    stages. A group has as many micro-batches. A rank warms up with two forwards for each stage after its last one, and
    a group for each of its other stages; then one forward, one backward. If that would deadlock, the waiting ranks
    run further forwards.
    """
    most = max(len(stages) for stages in problem.stages_of)
    going_round = [stage for stages in problem.stages_of if len(stages) == most for stage in stages]
    return _Laps(problem, math.ceil(max(problem.depth[stage] for stage in going_round) / most)).run()


class _Laps(ListScheduler):
    """A line of forwards and a line of backwards for each rank, which alternates, at any action times."""

    def __init__(self, problem: Problem, lap: int) -> None:
        units = Units(problem.ranks, Costs.of(len(problem.placement)))
        for rank, stages in enumerate(problem.stages_of):
            trained = [stage for stage in stages if problem.backward[stage]]
            units.add_line(rank, list(_in_groups(problem, Op.F, stages, lap)))
            units.add_line(rank, list(_in_groups(problem, Op.B, trained[::-1], lap)))
        units.need_by(problem.dependencies)
        super().__init__(units, range(len(units.actions)))
        self.backward = problem.backward
        # A micro-batch goes to the sink and back over as many stages: two actions for each. The rank's other stages run
        # a whole lap before its last stage begins.
        self.warm_up = [2 * (problem.depth[on[-1]] - 1) + (len(on) - 1) * lap for on in problem.stages_of]
        self.in_flight = [0] * problem.ranks

    def may_begin(self, rank: int, unit: int, now: float, forced: bool) -> bool:
        # All ranks wait. The first rank that could run a forward instead of a backward does so. Such a rank exists:
        # take the first action that has not run, by group, stage in topological order, and micro-batch, with backwards
        # after all forwards and in reverse order. All actions that it needs come before it, and have run.
        is_forward = self.units.line_of[unit] == 2 * rank
        if forced and is_forward and not self._forward_is_next(rank):
            self.warm_up[rank] += 1
        return is_forward == self._forward_is_next(rank)

    def _forward_is_next(self, rank: int) -> bool:
        """Whether a forward comes next: warm-up, then forwards and backwards in turns; frozen stages at once."""
        forwards, backwards = (self.units.lines[line][self.begun[line] :] for line in (2 * rank, 2 * rank + 1))
        if not forwards or not backwards:
            return not backwards
        ((stage, *_),) = self.units.actions[forwards[0]]
        return self.in_flight[rank] <= self.warm_up[rank] or not self.backward[stage]

    def begin(self, rank: int, unit: int) -> None:
        ((stage, op, *_),) = self.units.actions[unit]
        if self.backward[stage]:
            self.in_flight[rank] += 1 if op is Op.F else -1


def _in_groups(problem: Problem, op: Op, stages: Iterable[int], lap: int) -> Iterator[Unit]:
    """Yields the actions in groups of ``lap`` micro-batches, each group through all ``stages``."""
    m = problem.microbatches
    for start in range(0, m, lap):
        for stage in stages:
            for microbatch in range(start, min(start + lap, m)):
                yield (Action(stage, op, microbatch),)


# --- greedy ---


def greedy(problem: Problem) -> tuple[Row, ...]:
    """Returns the shortest of several tables at ``problem.costs``.

    A stage holds at most the larger of d(s) and ⌈round trip / bottleneck period⌉ micro-batches, or as many as
    ``in_flight`` and ``memory`` allow. 1F1B is among the tables: greedy is never slower within the same limits. For
    very many micro-batches, a smaller problem decides which of the other tables to make: the steady state repeats. If
    ``memory`` is set, and the costs give ``deferred_bytes``, the bytes held for a deferred W, backwards may be split,
    and each W runs anywhere that memory allows.
    """
    if problem.is_grouped:
        return fastest(problem)
    # Three sets of caps, from the least that keep the busiest rank busy to the most that are allowed.
    limits = caps(problem)
    lean, usual = (tuple(map(min, wanted, limits)) for wanted in (round_trip_caps(problem), problem.depth))
    tried = tuple(dict.fromkeys([lean, usual, limits]))
    # 1F1B comes first: if it reaches the lower bound, no other table is made.
    costs = problem.costs
    makers: list[Maker] = []
    for stage_caps in tried:
        makers += [partial(with_caps, caps=stage_caps), *by_each_priority(costs, stage_caps)]
    few = with_fewer_microbatches(problem, MANY, 2 * max(problem.depth))
    if few is not problem:
        makers = [partial(with_caps, caps=usual), shortest(few, makers, costs).maker]
    whole = shortest(problem, makers, costs)
    halves = None if problem.memory is None or costs.deferred_bytes is None else _in_halves(problem, few, tried)
    return halves.rows if halves is not None and halves.makespan < whole.makespan else whole.rows


def _in_halves(problem: Problem, few: Problem, tried: Sequence[Caps]) -> Choice | None:
    """The shortest table with split backwards; None if all hold too much: a W may need more bytes than its I."""
    makers = [make for stage_caps in tried for make in by_each_priority(problem.costs, stage_caps, room=problem.memory)]
    if few is problem:
        return shortest_within_limits(problem, makers)
    best = shortest_within_limits(few, makers)
    return best and shortest_within_limits(problem, [best.maker])
