"""ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism") on a graph of stages.

A backward is split: I makes the gradients that the stages before wait for, W those of the weights, which nobody waits
for, so that it fills what would be a bubble. Stages near the sink put W off, until as many micro-batches are held
there as at the deepest stage that is trained, D in all; a stage of depth d is D − d weight gradients behind.

    d=3   F0 F1 F2       I0 W0 F3 I1 W1 ...
    d=2      F0 F1    I0 F2 I1 W0 F3 I2 W1 ...
    d=1         F0 I0 F1 I1 F2 I2 W0 F3 ...
"""

from __future__ import annotations

from functools import partial

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import interleaved_groups
from fxpipe.schedules.families.limits import Maker, shortest
from fxpipe.schedules.families.list_scheduling import PRIORITIES, backward_first, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row


def zb_h1(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) warm-up forwards, then I_j, W_{j − (D − d(s))} and the next F; peak D at every stage.

    On a balanced chain of p stages with W ≤ min(F, I) the makespan is m(F + I + W) + (p − 1)(F + I − W). Where a rank
    has several stages, list scheduling with the same limits, for F = I = W = 1. At other
    costs the shortest of that and list schedules that hold no more; with a gathered stage, ``group_interleaved`` in
    halves.
    """
    if problem.is_grouped:
        return interleaved_groups(problem, split=True)
    if problem.costs.are_alike:
        return in_halves(problem)
    limits = (_deepest(problem),) * len(problem.placement)  # what ZB-H1 holds at any stage
    at_costs = partial(list_schedule, costs=problem.costs, caps=limits, held=limits)
    makers: list[Maker] = [in_halves, *(partial(at_costs, priority=one) for one in PRIORITIES)]
    return shortest(problem, makers, problem.costs).rows


def in_halves(problem: Problem) -> tuple[Row, ...]:
    """The order above, whatever the costs."""
    deepest = _deepest(problem)
    if problem.one_stage_a_rank:
        return tuple(_row(problem, stage, deepest) for (stage,) in problem.stages_of)
    stages = len(problem.placement)
    return list_schedule(problem, Costs.of(stages), problem.depth, backward_first, held=(deepest,) * stages)


def _deepest(problem: Problem) -> int:
    trained = [depth for depth, has_backward in zip(problem.depth, problem.backward, strict=True) if has_backward]
    return max(trained, default=1)


def _row(problem: Problem, stage: int, deepest: int) -> Row:
    m, depth = problem.microbatches, problem.depth[stage]
    if not problem.backward[stage]:
        return tuple(Action(stage, Op.F, j) for j in range(m))
    row = [Action(stage, Op.F, j) for j in range(min(depth, m))]
    behind = deepest - depth
    for j in range(m):
        row.append(Action(stage, Op.I, j))
        if j >= behind:
            row.append(Action(stage, Op.W, j - behind))
        if j + depth < m:
            row.append(Action(stage, Op.F, j + depth))
    row += [Action(stage, Op.W, j) for j in range(max(m - behind, 0), m)]
    return tuple(row)
