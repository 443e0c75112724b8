"""Greedy: list scheduling at the stages' real costs, which is what 1F1B becomes when they are uneven."""

from __future__ import annotations

from fxpipe.schedule import Row, Schedule
from fxpipe.schedules.in_flight import caps
from fxpipe.schedules.list_scheduling import PRIORITIES, list_schedule
from fxpipe.schedules.one_f_one_b import with_caps
from fxpipe.schedules.problem import Problem


def greedy(problem: Problem) -> tuple[Row, ...]:
    """The shortest of several tables at ``problem.costs``: one per priority, and 1F1B's own, at the same caps.

    A stage holds at most ⌈round trip / bottleneck period⌉ micro-batches, or what ``in_flight`` and ``memory`` say.
    """
    limits = caps(problem)
    usual = with_caps(problem, limits)
    schedule = Schedule(usual, problem.edges, problem.placement, problem.backward, problem.microbatches)
    plan = schedule.simulate(problem.costs)
    best, shortest = usual, plan.makespan
    for priority in PRIORITIES.values():
        if shortest <= plan.lower_bound:
            break
        listed = list_schedule(problem, problem.costs, limits, priority)
        if listed.makespan < shortest:
            best, shortest = listed.rows, listed.makespan
    return best
