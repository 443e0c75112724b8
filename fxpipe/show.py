"""Show: a schedule as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from fxpipe.action import Action
from fxpipe.lower import needs

if TYPE_CHECKING:
    from fxpipe.schedule import Schedule


def table(schedule: Schedule) -> str:
    """Rows are ranks with their stages, columns are steps of one action each; then the figures, for B = 2F."""
    result = schedule.simulate()
    stages = len(schedule.placement)
    peaks = ", ".join(
        f"{_name(schedule, stage)} {peak}"
        for stage, peak in enumerate(result.peak_in_flight)
        if schedule.backward[stage]
    )
    figures = [
        f"{schedule.name}: {stages} stages on {len(schedule.rows)} ranks, {schedule.microbatches} micro-batches",
        f"bubble {result.bubble:.1%}, makespan {result.makespan:g} F (lower bound {result.lower_bound:g} F) at B = 2 F",
        f"peak in flight: {peaks or 'nothing is differentiated'}",
    ]
    return "\n".join([grid(schedule), *figures])


def grid(schedule: Schedule, marked: Action | None = None) -> str:
    """The table's cells; the marked one stands in brackets."""
    columns = _columns(schedule)
    width = 1 + max((column for column in columns.values()), default=-1)
    rows = []
    for rank, row in enumerate(schedule.rows):
        cells = [""] * width
        for place, action in enumerate(row):
            cells[columns[rank, place]] = f"[{action}]" if action == marked else str(action)
        names = ", ".join(
            f"{stage}: {_name(schedule, stage)}" if _name(schedule, stage) != str(stage) else str(stage)
            for stage, owner in enumerate(schedule.placement)
            if owner == rank
        )
        rows.append([rank, names, *cells])
    return tabulate(rows, headers=["rank", "stages", *map(str, range(width))], disable_numparse=True)


def _columns(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(rank, place in its row) → step: each action one step, as early as its row and its dependencies allow.

    A table that comes to a halt is still drawn: what cannot run stands at the end of its row.
    """
    columns: dict[tuple[int, int], int] = {}
    step: dict[Action, int] = {}
    place = [0] * len(schedule.rows)
    free = [0] * len(schedule.rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while place[rank] < len(row):
                action = row[place[rank]]
                before = needs(action, schedule.links, schedule.backward)
                if any(other not in step for other in before):
                    break
                free[rank] = max([free[rank], *(step[other] + 1 for other in before)])
                columns[rank, place[rank]] = step[action] = free[rank]
                free[rank] += 1
                place[rank] += 1
                progress = True
    for rank, row in enumerate(schedule.rows):
        for left in range(place[rank], len(row)):
            columns[rank, left] = free[rank] + left - place[rank]
    return columns


def _name(schedule: Schedule, stage: int) -> str:
    return schedule.stage_names[stage] if schedule.stage_names else str(stage)
