"""The shortest of several tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.caps import excess
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row, Schedule

Maker = Callable[[Problem], tuple[Row, ...]]


class Choice(NamedTuple):
    """A table, what made it, and how long it takes."""

    maker: Maker
    rows: tuple[Row, ...]
    makespan: float


class Chosen(tuple[Row, ...]):
    """Rows that were chosen among those of several families, and the name of the one."""

    name: str

    @staticmethod
    def of(rows: tuple[Row, ...], name: str) -> Chosen:
        """These rows under that name."""
        chosen = Chosen(rows)
        chosen.name = name
        return chosen


def shortest(problem: Problem, makers: Iterable[Maker], costs: Costs) -> Choice:
    """The table of the least makespan at these costs, the first of equal ones; looks no further at the lower bound."""
    best = _shortest(problem, makers, costs, limited=False)
    assert best is not None
    return best


def shortest_within_limits(problem: Problem, makers: Iterable[Maker]) -> Choice | None:
    """The same at ``problem.costs``, of those that keep within its limits; None where none does."""
    return _shortest(problem, makers, problem.costs, limited=True)


def _shortest(problem: Problem, makers: Iterable[Maker], costs: Costs, limited: bool) -> Choice | None:
    best: Choice | None = None
    least = math.inf
    for maker in makers:
        rows = maker(problem)
        schedule = Schedule(rows, problem.edges, problem.placement, problem.backward, problem.microbatches)
        if limited and excess(schedule, costs, problem.in_flight, problem.memory) is not None:
            continue
        plan = schedule.simulate(costs)
        if best is None or plan.makespan < least:
            best, least = Choice(maker, rows, plan.makespan), plan.makespan
        if least <= plan.lower_bound:
            break
    return best
