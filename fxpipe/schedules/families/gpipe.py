"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row


def gpipe(problem: Problem) -> tuple[Row, ...]:
    """Rows with every forward before every backward; peak in flight is the number of micro-batches.

    On a balanced chain of p stages the bubble is (p − 1) / (m + p − 1). Stages that run in groups stand in the middle,
    group by group: forward, backward.
    """
    return tuple(_row(problem, stages) for stages in problem.stages_of)


def _row(problem: Problem, stages: Sequence[int]) -> Row:
    alone = [stage for stage in stages if problem.group(stage) == 1]
    forward = [action for stage in alone for action in problem.actions(stage, Op.F)]
    backward = [
        action for stage in reversed(alone) if problem.backward[stage] for action in problem.actions(stage, Op.B)
    ]
    gathered = [stage for stage in stages if problem.group(stage) > 1]
    return (*forward, *_group_by_group(problem, gathered), *backward)


def _group_by_group(problem: Problem, stages: Sequence[int]) -> Iterator[Action]:
    """In an order that is the same on all ranks: by the micro-batch with which a group is complete."""
    sizes = {problem.group(stage) for stage in stages}
    ends = sorted((end, size) for size in sizes for end in range(size, problem.microbatches + 1, size))
    for end, size in ends:
        mine = [stage for stage in stages if problem.group(stage) == size]
        yield from (Action(stage, Op.F, end - size, size) for stage in mine)
        yield from (Action(stage, Op.B, end - size, size) for stage in reversed(mine) if problem.backward[stage])
