"""Tables in which activations wait in the host's memory, of any family."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

from fxpipe.run.actions.offload import Offloaded
from fxpipe.schedules import SCHEDULES, Costs
from fxpipe.schedules.action import Action
from fxpipe.schedules.families.offload import with_offload
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind

Rows = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Offloading:
    """A family. All that has a backward leaves right behind its F, and comes back right before its B or I; what W needs
    leaves right behind I, and comes back right before W. With
    ``costs``, as few micro-batches leave as a plan gains by, within ``memory`` if that is given."""

    family: str
    costs: Costs | None = None
    memory: tuple[float, ...] | None = None

    def __call__(self, problem: Problem) -> Rows:
        rows = SCHEDULES[self.family](problem)
        stages = {stage for stage, has in enumerate(problem.backward) if has} - problem.recomputed
        if self.costs is None:
            return [[cell for action in row for cell in _moved(action, stages)] for row in rows]
        marks = tuple(stage in stages for stage in range(len(problem.placement)))
        return with_offload(rows, replace(problem, offload=marks, costs=self.costs, memory=self.memory))


class Left(NamedTuple):
    """The saved tensors of a forward that leave, the storages that they are in, and the bytes of these."""

    tensors: int
    storages: int
    bytes: int


@contextlib.contextmanager
def leaving() -> Iterator[list[Left]]:
    """What leaves, of each forward inside."""
    left: list[Left] = []
    plain = Offloaded.leave

    def leave(self: Offloaded, mark: Callable[[], None] | None = None) -> None:
        plain(self, mark)
        memories = self._memories
        tensors = sum(away.memory is not None and away.memory.source is not None for away in self._away)
        left.append(Left(tensors, len(memories), sum(memory.end - memory.begin for memory in memories)))

    with mock.patch.object(Offloaded, "leave", leave):
        yield left


def _moved(action: Action, stages: set[int]) -> list[Action]:
    if action.stage in stages and action.kind.messages is FORWARD:
        return [action, action._replace(kind=Kind.O)]
    if action.stage in stages and action.kind is Kind.I:
        return [action._replace(kind=Kind.P), action, action._replace(kind=Kind.OW)]
    if action.stage in stages and action.kind is Kind.W:
        return [action._replace(kind=Kind.PW), action]
    if action.stage in stages and action.kind.messages is BACKWARD:
        return [action._replace(kind=Kind.P), action]
    return [action]
