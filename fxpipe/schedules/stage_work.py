"""How the work of a table divides over stages and ranks."""

from __future__ import annotations

from fxpipe.graph.ranks import ranks_of
from fxpipe.graph.stage_work import StageWork
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule


def stage_work_of(schedule: Schedule, costs: Costs) -> StageWork | None:
    """The work of a table; None if the costs are not known to be in seconds."""
    if not costs.source:
        return None
    of_stage, of_rank = [0.0] * len(schedule.placement), [0.0] * len(schedule.rows)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            of_stage[action.stage] += costs.time(action)
            of_rank[rank] += costs.time(action)
    of_ranks = [sum(of_rank[rank] for rank in ranks_of(entry)) for entry in schedule.placement]
    pairs = zip(costs.backward, schedule.backward, strict=True)
    return StageWork(
        costs.forward,
        tuple(seconds if has_backward else None for seconds, has_backward in pairs),
        tuple(mine / (every or 1.0) for mine, every in zip(of_stage, of_ranks, strict=True)),
        tuple(mine / (sum(of_rank) or 1.0) for mine in of_rank),
        costs.source,
    )
