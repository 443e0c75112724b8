"""Simulate: costs → when each action would run."""

from __future__ import annotations

import math

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, in_order
from fxpipe.schedules.no_gc import paused
from fxpipe.schedules.schedule import Schedule, Span, Timeline


@paused()
def simulate(schedule: Schedule, costs: Costs, dependencies: Dependencies | None = None) -> Timeline:
    """Runs every action as early as its row and its dependencies allow, the table's own where none are given.
    ScheduleError where it deadlocks."""
    spans: dict[Action, Span] = {}
    since: dict[Action, float] = {}
    free = [0.0] * len(schedule.rows)
    ran = [0] * len(schedule.rows)
    rank_of, comm = schedule.rank_of, costs.comm
    for rank, _, action, before in in_order(schedule.rows, dependencies or schedule.dependencies):
        start = since[action] = free[rank]
        for other in before:
            arrival = spans[other].end
            if comm and rank_of(other.stage, other.microbatch) != rank:
                arrival += comm
            if arrival > start:
                start = arrival
        end = free[rank] = start + costs.time(action)
        spans[action] = Span(start, end)
        ran[rank] += 1
    stuck = [str(row[count]) for row, count in zip(schedule.rows, ran, strict=True) if count < len(row)]
    if stuck:
        raise ScheduleError(f"the table deadlocks at {', '.join(stuck)}; verify() says why")
    return Timeline(schedule, spans, since, costs)


def makespan(schedule: Schedule, dependencies: Dependencies) -> float:
    """At the table's costs, or F = 1 and B = 2; infinite where it deadlocks, or is of stages that there are none of."""
    if any(action.stage >= len(schedule.placement) for row in schedule.rows for action in row):
        return math.inf
    try:
        return simulate(schedule, schedule.costs or Costs.of(len(schedule.placement)), dependencies).makespan
    except ScheduleError:
        return math.inf
