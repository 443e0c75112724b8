"""Stage work: the seconds of each stage, and how the work of a table divides over stages and ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.graph.ranks import ranks_of
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule

NEARLY_IDLE = 0.25
"""A rank with less than this fraction of an even share of the work is named as nearly idle."""


@dataclass(frozen=True)
class StageWork:
    """The seconds of each stage's F and B (None for no B), and shares of the work: all actions of the table.

    ``shares``: each stage's fraction of its ranks' work. ``ranks``: each rank's fraction of all work.
    """

    forward: tuple[float, ...]
    backward: tuple[float | None, ...]
    shares: tuple[float, ...]
    ranks: tuple[float, ...]
    source: str

    @staticmethod
    def of(schedule: Schedule, costs: Costs) -> StageWork | None:
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

    @property
    def idle(self) -> tuple[str, ...]:
        """A line for each rank that is nearly idle."""
        least = NEARLY_IDLE / len(self.ranks)
        return tuple(f"rank {n} has {part:.0%} of the work" for n, part in enumerate(self.ranks) if part < least)


def in_ms(seconds: float | None) -> str:
    """Seconds as milliseconds, to three digits; "-" for None."""
    return "-" if seconds is None else f"{float(f'{seconds * 1e3:.3g}'):,g}"
