"""Simulate: costs → when each action would run."""

from __future__ import annotations

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import in_order
from fxpipe.schedules.no_gc import paused
from fxpipe.schedules.schedule import Schedule, Span, Timeline


@paused()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs every action as early as its row and its dependencies allow. ScheduleError where the table halts."""
    spans: dict[Action, Span] = {}
    since: dict[Action, float] = {}
    free = [0.0] * len(schedule.rows)
    ran = [0] * len(schedule.rows)
    placement, comm = schedule.placement, costs.comm
    for rank, _, action, before in in_order(schedule.rows, schedule.dependencies):
        start = since[action] = free[rank]
        for other in before:
            arrival = spans[other].end
            if placement[other.stage] != rank:
                arrival += comm
            if arrival > start:
                start = arrival
        end = free[rank] = start + costs.time(action)
        spans[action] = Span(start, end)
        ran[rank] += 1
    stuck = [str(row[count]) for row, count in zip(schedule.rows, ran, strict=True) if count < len(row)]
    if stuck:
        raise ScheduleError(f"the table comes to a halt at {', '.join(stuck)}; verify() says why")
    return Timeline(schedule, spans, since, costs)
