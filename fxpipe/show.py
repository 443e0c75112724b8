"""Show: a schedule as a table."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tabulate import tabulate

from fxpipe.action import Action
from fxpipe.dependency import in_order
from fxpipe.errors import ScheduleError

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule


def table(schedule: Schedule) -> str:
    """Rows are ranks with their stages, columns are steps of one action each; then the figures, for B = 2F."""
    stages, ranks = len(schedule.placement), len(schedule.rows)
    head = f"{schedule.name}: {stages} stages on {ranks} ranks, {schedule.microbatches} micro-batches"
    return "\n".join([grid(schedule), head, *_figures(schedule)])


def _figures(schedule: Schedule) -> list[str]:
    try:
        result = schedule.simulate()
    except ScheduleError as error:
        return [str(error)]
    peaks = ", ".join(
        f"{_name(schedule, stage)} {peak}"
        for stage, peak in enumerate(result.peak_in_flight)
        if schedule.backward[stage]
    )
    return [
        f"bubble {result.bubble:.1%}, makespan {result.makespan:g} F (lower bound {result.lower_bound:g} F) at B = 2 F",
        f"peak in flight: {peaks or 'nothing is differentiated'}",
    ]


def grid(schedule: Schedule, marked: Collection[Action] = ()) -> str:
    """The table's cells; the marked ones stand in brackets."""
    columns = _columns(schedule)
    width = 1 + max((column for row in columns for column in row), default=-1)
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells = [""] * width
        for column, action in zip(columns[rank], row, strict=True):
            cells[column] = f"[{action}]" if action in marked else str(action)
        lines.append([rank, _stages(schedule, rank), *cells])
    return tabulate(lines, headers=["rank", "stages", *map(str, range(width))], disable_numparse=True)


def _columns(schedule: Schedule) -> list[list[int]]:
    """Rank and place in its row → step: each action one step, as early as its row and its dependencies allow.

    A table that comes to a halt is still drawn: what cannot run stands at the end of its row.
    """
    columns: list[list[int]] = [[] for _ in schedule.rows]
    after: dict[Action, int] = {}
    free = [0] * len(schedule.rows)
    for rank, _, action, before in in_order(schedule.rows, schedule.dependencies):
        step = max([free[rank], *(after[other] for other in before)])
        columns[rank].append(step)
        free[rank] = after[action] = step + 1
    for rank, row in enumerate(schedule.rows):
        columns[rank] += range(free[rank], free[rank] + len(row) - len(columns[rank]))
    return columns


def _stages(schedule: Schedule, rank: int) -> str:
    """A rank's stages, by number and, where they have one, name."""
    mine = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    names = {stage: _name(schedule, stage) for stage in mine}
    return ", ".join(name if name == str(stage) else f"{stage}: {name}" for stage, name in names.items())


def _name(schedule: Schedule, stage: int) -> str:
    return schedule.stage_names[stage] if schedule.stage_names else str(stage)
