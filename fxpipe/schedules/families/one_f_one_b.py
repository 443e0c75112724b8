"""1F1B (PipeDream-Flush, Narayanan et al. 2021) on a graph of stages.

Depth d(s) counts the stages on the longest path from s to the sink, and not all stages: a branch that runs beside
another needs no warm-up for it. On a chain this is the 1F1B everybody knows.

    d=3   F0 F1 F2 B0 F3 B1 ...
    d=2      F0 F1 B0 F2 B1 ...
    d=1         F0 B0 F1 B1 ...
"""

from __future__ import annotations

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import fastest
from fxpipe.schedules.families.limits import Caps
from fxpipe.schedules.families.list_scheduling import backward_first, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row


def one_f_one_b(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) − 1 warm-up forwards, then one forward, one backward; peak in flight min(m, d(s)).

    On a balanced graph with F and B per stage and D = max d the makespan is (m + D − 1)(F + B), the lower bound.
    Where a rank has several stages, list scheduling with the same limit in flight, for F = 1 and B = 2.
    With a gathered stage, the fastest of the tables for those.
    """
    return fastest(problem) if problem.is_grouped else with_caps(problem, problem.depth)


def with_caps(problem: Problem, caps: Caps) -> tuple[Row, ...]:
    """1F1B that holds up to ``caps`` micro-batches per stage, which must not grow along an edge."""
    if problem.one_stage_a_rank:
        return tuple(_alternating(problem, stage, caps[stage]) for (stage,) in problem.stages_of)
    return list_schedule(problem, Costs.of(len(problem.placement)), caps, backward_first)


def _alternating(problem: Problem, stage: int, cap: int) -> Row:
    m, warm_up = problem.microbatches, cap - 1
    if not problem.backward[stage]:
        return tuple(Action(stage, Op.F, j) for j in range(m))
    row = [Action(stage, Op.F, j) for j in range(min(warm_up, m))]
    for j in range(m):
        if j + warm_up < m:
            row.append(Action(stage, Op.F, j + warm_up))
        row.append(Action(stage, Op.B, j))
    return tuple(row)
