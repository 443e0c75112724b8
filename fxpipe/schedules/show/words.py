"""Words: texts about a timeline and about an action."""

from __future__ import annotations

import math
from typing import NamedTuple

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionTimes


def numbers(action: Action) -> str:
    """Returns the micro-batch of an action, or the first and the last of its group."""
    covered = action.microbatches
    return str(covered.start) if len(covered) == 1 else f"{covered.start}-{covered.stop - 1}"


class TimeUnit(NamedTuple):
    """How times are written: in unit ``name``, ``scale`` per unit of the timeline, with so many decimals."""

    name: str
    scale: float
    decimals: int

    def number(self, time: float) -> str:
        return f"{round(time * self.scale, self.decimals):.12g}"

    def time(self, time: float) -> str:
        return f"{self.number(time)} {self.name}".rstrip()

    def interval(self, start: float, end: float) -> str:
        return f"{self.number(start)} to {self.time(end)}"


def unit_of(timeline: ActionTimes) -> TimeUnit:
    """Returns the unit: seconds are written in s or ms; other planned times count F if each forward costs 1.

    Times are written to about a hundred-thousandth of the makespan: a clock is not more exact.
    """
    costs, scale = timeline.costs, 1.0
    name = "" if costs.by_microbatch or any(cost != 1 for cost in costs.forward) else "F"
    if timeline.measured or timeline.costs.source:
        name, scale = ("s", 1.0) if timeline.makespan >= 10 else ("ms", 1e3)
    # The number of digits before the decimal point, minus 1.
    size = math.floor(math.log10(timeline.makespan * scale)) if timeline.makespan else 0
    return TimeUnit(name, scale, (4 if timeline.measured else 5) - size)


def headline(timeline: ActionTimes) -> tuple[str, str]:
    """Returns the picture's title, and its figures."""
    schedule, unit = timeline.schedule, unit_of(timeline)
    stages, ranks = _count(len(schedule.placement), "stage"), _count(len(schedule.rows), "rank")
    batches = _count(schedule.microbatches, "micro-batch", "es")
    return (
        f"{schedule.name}: {stages} on {ranks}, {batches}, {'measured' if timeline.measured else 'planned'}",
        f"bubble {timeline.bubble:.1%}, makespan {unit.time(timeline.makespan)}"
        f" (lower bound {unit.time(timeline.lower_bound)})",
    )


def describe(timeline: ActionTimes, action: Action, unit: TimeUnit) -> str:
    """Returns the title of an action's cell: its rank, stage and kind, when it ran, and what it waited for."""
    start, end = timeline.spans[action]
    schedule, plural = timeline.schedule, "es" * (action.count > 1)
    return (
        f"{action} on rank {schedule.rank(action)}: {action.kind.words} of micro-batch{plural} {numbers(action)}"
        f" in stage {schedule.label(action.stage)}; {unit.interval(start, end)}, takes {unit.time(end - start)};"
        f" {waited(timeline, action, unit)}"
    )


def waited(timeline: ActionTimes, action: Action, unit: TimeUnit) -> str:
    """Returns a text that says what an action waited for, and how long."""
    cause, lost = timeline.cause(action), timeline.waited(action)
    time = unit.time(lost) if unit.number(lost) != "0" else None
    if cause is None:
        return f"waited {time}, for no other action" if time else "waited for nothing"
    if cause.crosses:
        source = f"{cause.action} from rank {timeline.schedule.rank(cause.action)}"
        return f"waited {time} for {source}" if time else f"{source} came in time"
    busy = f"its rank was busy with {cause.action}"
    return f"{busy}, then waited {time}" if time else busy


def measured_peaks(timeline: ActionTimes) -> dict[int, str]:
    """Returns, for each rank, its most bytes, the action around which they were measured, and the planned bytes."""
    planned, texts = timeline.planned_peak_bytes, dict[int, str]()
    for rank, (row, peak) in enumerate(zip(timeline.memory, timeline.peaks, strict=True)):
        if peak is not None:
            # On a GPU, other memory was allocated before the step.
            rise = f", {in_bytes(peak.most - row[0].start)} more than at the start" if row[0].start else ""
            beside = "" if planned is None else f" (planned {in_bytes(planned[rank])})"
            texts[rank] = f"rank {rank}: peak {in_bytes(peak.most)} at {peak.action}{rise}{beside}"
    return texts


def in_bytes(size: float) -> str:
    """Bytes in the largest unit of which there is at least one, to a tenth."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {units[power]}" if power else f"{size:g} {units[0]}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
