"""Recomputation: which stages of a plan run their forward again, and what that saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fxpipe.errors import PartitionError, ScheduleError, nearest
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import AUTO, Recompute
from fxpipe.schedules.families.recompute import worthwhile
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.schedule import Schedule, Timeline

if TYPE_CHECKING:
    from fxpipe.plan.balance.stage_work import StageWork

Marked = tuple[bool, ...]
"""Whether each stage is recomputed."""
Make = Callable[[Marked], Schedule]
"""The table for that."""


def recomputed(
    graph: StageGraph, wanted: Recompute, make: Make, work: Callable[[], StageWork | None], memory: float | None
) -> Marked:
    """The stages that are recomputed, of those that have a backward.

    ``work``: what stages take, where it is known. PartitionError for a name that no stage has; ScheduleError where
    "auto" cannot be decided, or does not fit into ``memory`` bytes a rank.
    """
    has_backward = tuple(stage.has_backward for stage in graph)
    if wanted == AUTO:
        return _fewest(graph, make, work(), memory or 0.0)
    if isinstance(wanted, tuple):
        for name in wanted:
            if name not in graph.names:
                raise PartitionError(
                    f"recompute names stage {name!r}, which does not exist{nearest(name, graph.names)}"
                )
        return tuple(stage.has_backward and stage.name in wanted for stage in graph)
    return worthwhile(make((False,) * len(has_backward))) if wanted else (False,) * len(has_backward)


def _fewest(graph: StageGraph, make: Make, work: StageWork | None, memory: float) -> Marked:
    """As few as fit: one after another the stage with which it fits in the least time or, while none does, the one that
    takes most off what is over for its time; then those are left out again that later ones have made needless."""
    if work is None:
        raise ScheduleError(
            'recompute="auto" needs what the stages take: pass example_args= or example_kwargs=, one batch as it will '
            "be passed in calls; for stages of your own, name them: recompute=[...]"
        )
    room = _Fitting(graph, make, work, memory)
    flags = (False,) * len(graph)
    while room.over(flags):
        more = [_with(flags, stage, True) for stage in room.helpful(flags)]
        if not more:
            raise ScheduleError(room.no_fit(flags))
        flags = min(more, key=lambda one: room.merit(one, flags))
    for stage in reversed(range(len(graph))):
        fewer = _with(flags, stage, False)
        if flags[stage] and not room.over(fewer):
            flags = fewer
    return flags


def _with(flags: Marked, stage: int, value: bool) -> Marked:
    return (*flags[:stage], value, *flags[stage + 1 :])


class _Fitting:
    """What tables take, of the memory that there is; each is simulated once."""

    def __init__(self, graph: StageGraph, make: Make, work: StageWork, memory: float) -> None:
        self._graph, self._make, self._work, self._memory = graph, make, work, memory
        self._known: dict[Marked, tuple[float, tuple[float, ...]]] = {}

    def _figures(self, flags: Marked) -> tuple[float, tuple[float, ...]]:
        """Seconds, and each rank's bytes."""
        if flags not in self._known:
            plan = self._work.simulated(self._make(flags), flags)
            self._known[flags] = plan.makespan, self._work.peaks(plan)
        return self._known[flags]

    def over(self, flags: Marked) -> float:
        """The bytes that do not fit, over all ranks."""
        return sum(max(peak - self._memory, 0.0) for peak in self._figures(flags)[1])

    def helpful(self, flags: Marked) -> list[int]:
        """The stages on ranks that are too full with which less is over."""
        peaks, placement = self._figures(flags)[1], self._graph.placement
        full = [
            stage.index
            for stage in self._graph
            if stage.has_backward and not flags[stage.index] and peaks[placement[stage.index]] > self._memory
        ]
        return [stage for stage in full if self.over(_with(flags, stage, True)) < self.over(flags)]

    def merit(self, flags: Marked, before: Marked) -> tuple[bool, float, float]:
        """Less is better."""
        seconds, over = self._figures(flags)[0], self.over(flags)
        longer = max(seconds - self._figures(before)[0], 0.0)
        return over > 0, longer / (self.over(before) - over) if over else seconds, over

    def no_fit(self, flags: Marked) -> str:
        peaks = self._figures(flags)[1]
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        return (
            f"rank {rank} takes {peaks[rank]:,.0f} bytes even where all its stages that this helps are recomputed, "
            f"memory_per_rank={self._memory:,.0f}; use more pipe ranks, smaller micro-batches, or a schedule that "
            "holds fewer of them"
        )


def told(graph: StageGraph, without: Schedule, plan: Schedule, work: StageWork | None) -> str:
    """What recomputation saves and costs, in words: against the table without it."""
    again = {stage for stage, _ in plan.dependencies.recomputed}
    flags = tuple(stage.index in again for stage in graph)
    names = [stage.name for stage in graph if stage.index in again]
    before, after = without.planned(), plan.planned()
    lines = [f"recomputed: {', '.join(names) or 'no stage'}"]
    if work is not None:
        before, after = work.simulated(without, (False,) * len(graph)), work.simulated(plan, flags)
        pairs = zip(_activations(before), _activations(after), strict=True)
        sizes = [f"rank {rank} {_mib(old)} → {_mib(new)}" for rank, (old, new) in enumerate(pairs)]
        lines.append(f"activations at their peak, MiB: {', '.join(sizes)}")
    longer = after.makespan / before.makespan - 1 if before.makespan else 0.0
    lines.append(f"makespan {longer:+.1%}" + (", at costs from shapes" if work is not None else ", at B = 2 F"))
    return "\n".join(lines)


def _activations(plan: Timeline) -> tuple[float, ...]:
    return peak_bytes(plan.schedule, plan.costs)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.{1 if size >= 10 * 2**20 else 3}f}"
