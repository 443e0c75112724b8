"""In flight: how many micro-batches the stages of a table hold, from a forward to the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.schedule import Schedule


def held(schedule: Schedule, action: Action) -> int:
    """+1 where a stage begins to hold a micro-batch with this action, −1 where it lets go of it, else 0."""
    if action.op is Op.F:
        return int(schedule.backward[action.stage])
    return 0 if action.op is Op.I else -1


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward has run and whose backward has not ended."""
    in_flight = [0] * len(schedule.placement)
    peaks = list(in_flight)
    for row in schedule.rows:
        for action in row:
            in_flight[action.stage] += held(schedule, action)
            if in_flight[action.stage] > peaks[action.stage]:
                peaks[action.stage] = in_flight[action.stage]
    return tuple(peaks)


def peak_bytes(schedule: Schedule, sizes: Sequence[float]) -> tuple[float, ...]:
    """Per rank, the most bytes that its micro-batches in flight hold; ``sizes``: of one, per stage."""
    peaks = []
    for row in schedule.rows:
        now = peak = 0.0
        for action in row:
            now += held(schedule, action) * sizes[action.stage]
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
