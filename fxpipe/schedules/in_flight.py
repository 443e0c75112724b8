"""In flight: how many micro-batches the stages of a table hold, from a forward to the end of its backward.

A stage that is recomputed holds a micro-batch from its R on; from its F to its R it keeps the inputs alone. A group
counts as all of its micro-batches.
"""

from __future__ import annotations

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule


def held(schedule: Schedule, action: Action) -> int:
    """How many micro-batches more a stage holds with this action, a negative number where it lets go of them."""
    if action.op is Op.F:
        recomputed = (action.stage, action.microbatch) in schedule.dependencies.recomputed
        return action.count if schedule.backward[action.stage] and not recomputed else 0
    return 0 if action.op is Op.I else action.count if action.op is Op.R else -action.count


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches that it holds, on any of its ranks."""
    peaks = [0] * len(schedule.placement)
    for row in schedule.rows:
        in_flight = [0] * len(peaks)
        for action in row:
            in_flight[action.stage] += held(schedule, action)
            if in_flight[action.stage] > peaks[action.stage]:
                peaks[action.stage] = in_flight[action.stage]
    return tuple(peaks)


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per rank, the most bytes that its micro-batches hold; the costs must give ``activation_bytes``.

    What has arrived for a forward that has not run yet is not in it.
    """
    recomputed = schedule.dependencies.recomputed
    peaks = []
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            if schedule.backward[action.stage]:
                peak = max(peak, now + costs.beside(action))
                now += costs.held(action, (action.stage, action.microbatch) in recomputed)
                peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
