"""Tables in which activations wait in the host's memory, of any family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxpipe.schedules import SCHEDULES
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.offload import with_offload
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind

Rows = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Offloading:
    """A family. All that has a backward leaves right behind its F and comes back right before its B or I; with
    ``selective``, only micro-batches leave that a plan of even costs gains by."""

    family: str
    selective: bool = False

    def __call__(self, problem: Problem) -> Rows:
        rows = SCHEDULES[self.family](problem)
        leaving = {stage for stage, has in enumerate(problem.backward) if has} - problem.recomputed
        if self.selective:
            return with_offload(
                rows, replace(problem, offload=tuple(stage in leaving for stage in range(len(problem.placement))))
            )
        return [[cell for action in row for cell in _moved(action, leaving)] for row in rows]


def _moved(action: Action, leaving: set[int]) -> list[Action]:
    if action.stage in leaving and action.kind.messages is FORWARD:
        return [action, action._replace(kind=Kind.O)]
    if action.stage in leaving and action.kind.messages is BACKWARD:
        return [action._replace(kind=Kind.P), action]
    return [action]
