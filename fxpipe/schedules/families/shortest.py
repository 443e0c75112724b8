"""The shortest of several tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.schedule import Row, Schedule

Maker = Callable[[Problem], tuple[Row, ...]]


class Choice(NamedTuple):
    """A table, and what made it."""

    maker: Maker
    rows: tuple[Row, ...]


def shortest(problem: Problem, makers: Iterable[Maker], costs: Costs) -> Choice:
    """The table of the least makespan at these costs, the first of equal ones; looks no further at the lower bound."""
    best: Choice | None = None
    least = math.inf
    for maker in makers:
        rows = maker(problem)
        schedule = Schedule(rows, problem.edges, problem.placement, problem.backward, problem.microbatches)
        plan = schedule.simulate(costs)
        if best is None or plan.makespan < least:
            best, least = Choice(maker, rows), plan.makespan
        if least <= plan.lower_bound:
            break
    assert best is not None
    return best
