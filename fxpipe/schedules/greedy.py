"""Greedy: list scheduling at the stages' real costs, which is what 1F1B becomes when they are uneven."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxpipe.schedule import Row, Schedule
from fxpipe.schedules.in_flight import Caps, caps, round_trip_caps
from fxpipe.schedules.list_scheduling import PRIORITIES, list_schedule
from fxpipe.schedules.one_f_one_b import with_caps
from fxpipe.schedules.problem import Problem


def greedy(problem: Problem) -> tuple[Row, ...]:
    """The shortest of several tables at ``problem.costs``.

    A stage holds at most d(s) or ⌈round trip / bottleneck period⌉ micro-batches, whichever is more, or else what
    ``in_flight`` and ``memory`` say. 1F1B is among the tables: greedy is never slower within the same limits.
    """
    best: tuple[Row, ...] = ()
    shortest = math.inf
    for rows in _tables(problem, caps(problem)):
        schedule = Schedule(rows, problem.edges, problem.placement, problem.backward, problem.microbatches)
        plan = schedule.simulate(problem.costs)
        if plan.makespan < shortest:
            best, shortest = rows, plan.makespan
        if shortest <= plan.lower_bound:
            break
    return best


def _tables(problem: Problem, limits: Caps) -> Iterator[tuple[Row, ...]]:
    """The tables to choose from, made one at a time, those that hold less first: an early one is often good enough."""
    lean, usual = (tuple(map(min, wanted, limits)) for wanted in (round_trip_caps(problem), problem.depth))
    for held in dict.fromkeys([lean, usual, limits]):
        yield with_caps(problem, held)
        for priority in PRIORITIES.values():
            yield list_schedule(problem, problem.costs, held, priority)
