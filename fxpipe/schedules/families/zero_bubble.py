"""ZB-H1 and ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): backwards in halves, whose W's fill bubbles.

I makes the gradients that the stages before wait for, W those of the weights, which nobody waits for.

ZB-H1 runs on a graph of stages. Stages near the sink put W off, until as many micro-batches are held there as at the
deepest stage that is trained, D in all; a stage of depth d is D − d weight gradients behind.

    d=3   F0 F1 F2       I0 W0 F3 I1 W1 ...
    d=2      F0 F1    I0 F2 I1 W0 F3 I2 W1 ...
    d=1         F0 I0 F1 I1 F2 I2 W0 F3 ...

ZB-V (section 6; 2024, "Pipeline Parallelism with Controllable Memory") folds a chain of 2p stages over p ranks.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 ...     stages 0 and 3
    rank 1       1F0 2F0 1F1 2F1 2I0 ...     stages 1 and 2

A micro-batch comes back to the rank that it started from, so that its last stage's backward runs while others still
go down. Each rank holds what the first one does with 1F1B, and at F = I = W idles at the beginning and the end alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import interleaved_groups
from fxpipe.schedules.families.limits import shortest
from fxpipe.schedules.families.list_scheduling import backward_first, by_each_priority, list_schedule
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
    makers = [in_halves, *by_each_priority(problem.costs, limits, held=limits)]
    return shortest(problem, makers, problem.costs).rows


def in_halves(problem: Problem) -> tuple[Row, ...]:
    """The order above, whatever the costs."""
    deepest = _deepest(problem)
    if problem.one_stage_a_rank:
        return tuple(_h1_row(problem, stage, deepest) for (stage,) in problem.stages_of)
    stages = len(problem.placement)
    return list_schedule(problem, Costs.of(stages), problem.depth, backward_first, held=(deepest,) * stages)


def _deepest(problem: Problem) -> int:
    pairs = zip(problem.depth, problem.backward, strict=True)
    return max((depth for depth, has_backward in pairs if has_backward), default=1)


def _h1_row(problem: Problem, stage: int, deepest: int) -> Row:
    m, depth = problem.microbatches, problem.depth[stage]
    if not problem.backward[stage]:
        return tuple(problem.actions(stage, Op.F))
    row = [Action(stage, Op.F, j) for j in range(min(depth, m))]
    # I_j at once, for others wait for it; the W of so many micro-batches before, which evens out what stages hold.
    behind = deepest - depth
    for j in range(m):
        row.append(Action(stage, Op.I, j))
        if j >= behind:
            row.append(Action(stage, Op.W, j - behind))
        if j + depth < m:
            row.append(Action(stage, Op.F, j + depth))
    row += [Action(stage, Op.W, j) for j in range(max(m - behind, 0), m)]
    return tuple(row)


# --- ZB-V ---

DOWN, UP = 0, 1  # the two halves of the V


def zb_v(problem: Problem) -> tuple[Row, ...]:
    """Rows of the makespan 6m + p − 1 for m ≥ 2p − 1 micro-batches and F = I = W = 1, which hold 2p micro-batches at
    the two stages of a rank together.

    Raises:
        ScheduleError: the stages are no chain, with or without skips, or its placement does not fold.
    """
    _check_v(problem)
    ranks, order = problem.ranks, problem.order
    return tuple(tuple(_v_row(problem, rank, (order[rank], order[2 * ranks - 1 - rank]))) for rank in range(ranks))


def folded(ranks: int) -> tuple[int, ...]:
    """The rank of each stage of a chain: there and back."""
    return (*range(ranks), *reversed(range(ranks)))


def _v_row(problem: Problem, rank: int, stages: tuple[int, int]) -> Iterator[Action]:
    """With fewer than 2p − 1 micro-batches, the order of so many without those that there are not."""
    begun: Counter[tuple[int, Op]] = Counter()
    for half, op in _v_order(rank, problem.ranks, max(problem.microbatches, 2 * problem.ranks - 1)):
        microbatch = begun[half, op]
        begun[half, op] += 1
        if microbatch < problem.microbatches and (op is Op.F or problem.backward[stages[half]]):
            yield Action(stages[half], op, microbatch)


def _v_order(rank: int, ranks: int, m: int) -> Iterator[tuple[int, Op]]:
    """What a rank does, in which half of the V."""
    down = (DOWN, Op.I), (DOWN, Op.W)
    up = (UP, Op.F), (UP, Op.I), (UP, Op.W)
    left = ranks - rank
    # 1. Warm-up: forwards down until the first micro-batch has come round, then in turns with forwards up.
    yield from [(DOWN, Op.F)] * (2 * left - 1)
    yield from [(UP, Op.F), (DOWN, Op.F)] * rank
    yield from up * left
    # 2. Steady: six actions of a micro-batch each, F, I and W of both halves. Down there were 2(p − r) − 1 + r forwards
    # so far, up p.
    ahead = 2 * left - 1 + rank
    yield from ((DOWN, Op.F), *down, *up) * (m - ahead)
    # 3. Cool-down: no forwards are left down; the I's that others wait for come first, the W's last.
    yield from (*down, *up) * (ahead - ranks)
    yield from [(DOWN, Op.I), (UP, Op.I)] * rank
    yield from down * left
    yield from [(UP, Op.W)] * rank
    yield from [(DOWN, Op.W)] * rank


def _check_v(problem: Problem) -> None:
    if problem.is_grouped:
        raise ScheduleError('"zb_v" runs micro-batch by micro-batch, and a stage here is gathered; write "zb_h1"')
    order, count = problem.order, len(problem.order)
    for stage, following in pairwise(order):
        if following not in problem.targets[stage]:
            raise ScheduleError(
                f'"zb_v" is for a chain of stages, and stage {following} is not fed by stage {stage}; write "zb_h1"'
            )
    ranks = tuple(problem.homes[stage] for stage in order)
    wanted = folded(max(count // 2, 1))
    if ranks != wanted:
        there = "two stages a rank, there and back"
        raise ScheduleError(
            f'"zb_v" is for {there}, and the {count} stages are on ranks {list(ranks)}; '
            + (f"write placement={list(wanted)}" if count % 2 == 0 else "make it an even number of stages")
        )
