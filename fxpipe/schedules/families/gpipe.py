"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row


def gpipe(problem: Problem) -> tuple[Row, ...]:
    """Rows with every forward before every backward; peak in flight is the number of micro-batches.

    On a balanced chain of p stages the bubble is (p − 1) / (m + p − 1).
    """
    return tuple(_row(problem, stages) for stages in problem.stages_of)


def _row(problem: Problem, stages: Sequence[int]) -> Row:
    batches = range(problem.microbatches)
    forward = [Action(stage, Op.F, batch) for stage in stages for batch in batches]
    backward = [
        Action(stage, Op.B, batch) for stage in reversed(stages) if problem.backward[stage] for batch in batches
    ]
    return (*forward, *backward)
