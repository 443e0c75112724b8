"""Stage times: the measured times of each stage beside the planned ones, and its share of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from fxpipe.errors import printable
from fxpipe.graph.ranks import ranks_of
from fxpipe.graph.stage_work import in_ms
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionTimes
from fxpipe.schedules.kinds import KINDS, Kind

SLOWEST = "<- slowest"


class StageTimes(NamedTuple):
    """``seconds``: kind of action → the medians over micro-batches: measured, and then planned, if known.
    ``share``: the part of the step that the stage computes, from 0 to 1; of a stage on several ranks, the mean.
    ``typical``: the share if each of its actions had taken the median time."""

    stage: int
    seconds: Mapping[Kind, Sequence[float]]
    share: float
    typical: float


def stage_times(timeline: ActionTimes) -> list[StageTimes]:
    """The times of each stage in a measured step."""
    ran: dict[tuple[int, Kind], list[Action]] = {}
    for action in timeline.spans:
        ran.setdefault((action.stage, action.kind), []).append(action)
    plan, rows = timeline.planned, []
    for stage, entry in enumerate(timeline.schedule.placement):
        mine = {kind: ran[stage, kind] for kind in KINDS.values() if kind.lane is None and (stage, kind) in ran}
        each = {kind: [timeline.spans[action].duration for action in actions] for kind, actions in mine.items()}
        seconds = {kind: [median(durations)] for kind, durations in each.items()}
        if plan is not None and plan.source:  # otherwise its times may be in another unit
            for kind, actions in mine.items():
                seconds[kind].append(median(map(plan.time, actions)))
        whole = timeline.makespan * len(ranks_of(entry)) or 1.0
        typical = sum(seconds[kind][0] * len(actions) for kind, actions in mine.items())
        rows.append(StageTimes(stage, seconds, sum(map(sum, each.values())) / whole, typical / whole))
    return rows


def stage_table(timeline: ActionTimes) -> str:
    """Returns a table with a row for each stage, in ms: medians over micro-batches. The stage with most of the step, if
    no action had been unusually slow, is marked ``SLOWEST``."""
    every, schedule = stage_times(timeline), timeline.schedule
    kinds = [kind for kind in KINDS.values() if any(kind in times.seconds for times in every)]
    slowest = max(every, key=lambda times: times.typical).stage if len(every) > 1 and kinds else None
    source = timeline.planned.source if timeline.planned is not None else ""
    columns, rows = 1 + bool(source), []
    for stage, seconds, share, _ in every:
        times = [text for kind in kinds for text in [*map(in_ms, seconds.get(kind, ()))] or ["-"] * columns]
        ranks = ", ".join(map(str, ranks_of(schedule.placement[stage])))
        rows.append([schedule.label(stage), ranks, *times, f"{share:.1%}", SLOWEST * (stage == slowest)])
    heads = [head for kind in kinds for head in (f"{kind.letter} ms", "planned")[:columns]]
    sides = ["left", *["right"] * (len(heads) + 2), "left"]
    drawn = tabulate(rows, ["stage", "rank", *heads, "of the step", ""], disable_numparse=True, colalign=sides)
    lines = [*map(str.rstrip, drawn.splitlines()), *[f"planned: {source}"] * bool(source)]
    return printable("\n".join(lines))
