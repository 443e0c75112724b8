"""A family with costs and limits of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, TypeVar

from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.caps import excess
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Schedule

T = TypeVar("T", int, float)

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "greedy", "store_all", "group_interleaved", "cached", "zb_v"
]
"""A name out of ``SCHEDULES``, for editors and type checkers."""

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

    def or_else(self, other: Limited) -> Limited:
        """The same family; where this one leaves a limit, or bytes, open, as ``other`` has it."""
        costs = self.costs if self.costs is not None else other.costs
        if costs is not None and other.costs is not None:
            costs = costs.or_else(other.costs)
        in_flight = other.in_flight if self.in_flight is None else self.in_flight
        return Limited(self.family, self.name, costs, in_flight, other.memory if self.memory is None else self.memory)

    def excess(self, schedule: Schedule) -> str | None:
        """Which limit a table breaks, in words; None where it keeps within all."""
        costs = self.costs if self.costs is not None else Costs.of(len(schedule.placement))
        in_flight = None if self.in_flight is None else _each(self.in_flight, len(schedule.placement))
        return excess(
            schedule, costs, in_flight, None if self.memory is None else _each(self.memory, len(schedule.rows))
        )

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
    return tuple(limit) if isinstance(limit, Sized) else (limit,) * count
