"""A family with costs and limits of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fxpipe.action import Action
from fxpipe.costs import Costs
from fxpipe.schedules.problem import Problem

T = TypeVar("T", int, float)

Family = Callable[[Problem], Sequence[Sequence[Action]]]
"""Problem → a row of actions for each rank."""


@dataclass(frozen=True)
class Limited:
    """Asks ``family`` the problem at these costs and within these limits; what is None stays as it comes."""

    family: Family
    name: str
    costs: Costs | None = None
    in_flight: int | Sequence[int] | None = None
    memory: float | Sequence[float] | None = None

    def __call__(self, problem: Problem) -> Sequence[Sequence[Action]]:
        return self.family(self.within(problem))

    def within(self, problem: Problem) -> Problem:
        """The problem at these costs and within these limits; ScheduleError where they do not fit it."""
        problem = dataclasses.replace(
            problem,
            costs=problem.costs if self.costs is None else self.costs,
            in_flight=problem.in_flight if self.in_flight is None else _each(self.in_flight, len(problem.placement)),
            memory=problem.memory if self.memory is None else _each(self.memory, problem.ranks),
        )
        problem.check()
        return problem


def _each(limit: T | Sequence[T], count: int) -> tuple[T, ...]:
    """One number for all, or one for each."""
    return tuple(limit) if isinstance(limit, Sequence) else (limit,) * count
