"""ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6; 2024, "Pipeline Parallelism with Controllable
Memory"): a chain of 2p stages folded over p ranks like a V, each backward in two halves.

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
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row

DOWN, UP = 0, 1  # the two halves of the V


def zb_v(problem: Problem) -> tuple[Row, ...]:
    """Rows of the makespan 6m + p − 1 for m ≥ 2p − 1 micro-batches and F = I = W = 1, which hold 2p micro-batches at
    the two stages of a rank together.

    Raises:
        ScheduleError: the stages are no chain, with or without skips, or its placement does not fold.
    """
    _check(problem)
    ranks, order = problem.ranks, problem.order
    return tuple(tuple(_row(problem, rank, (order[rank], order[2 * ranks - 1 - rank]))) for rank in range(ranks))


def folded(ranks: int) -> tuple[int, ...]:
    """The rank of each stage of a chain: there and back."""
    return (*range(ranks), *reversed(range(ranks)))


def _row(problem: Problem, rank: int, stages: tuple[int, int]) -> Iterator[Action]:
    """With fewer than 2p − 1 micro-batches, the order of so many without those that there are not."""
    begun: Counter[tuple[int, Op]] = Counter()
    for half, op in _order(rank, problem.ranks, max(problem.microbatches, 2 * problem.ranks - 1)):
        microbatch = begun[half, op]
        begun[half, op] += 1
        if microbatch < problem.microbatches and (op is Op.F or problem.backward[stages[half]]):
            yield Action(stages[half], op, microbatch)


def _order(rank: int, ranks: int, m: int) -> Iterator[tuple[int, Op]]:
    """What a rank does, in which half of the V."""
    down = (DOWN, Op.I), (DOWN, Op.W)
    up = (UP, Op.F), (UP, Op.I), (UP, Op.W)
    left = ranks - rank
    yield from [(DOWN, Op.F)] * (2 * left - 1)  # until the first micro-batch has come round
    yield from [(UP, Op.F), (DOWN, Op.F)] * rank
    yield from up * left
    ahead = 2 * left - 1 + rank  # forwards down so far; up there were p
    yield from ((DOWN, Op.F), *down, *up) * (m - ahead)
    yield from (*down, *up) * (ahead - ranks)
    yield from [(DOWN, Op.I), (UP, Op.I)] * rank
    yield from down * left
    yield from [(UP, Op.W)] * rank
    yield from [(DOWN, Op.W)] * rank


def _check(problem: Problem) -> None:
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
