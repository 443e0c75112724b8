"""Tables: which table a plan runs: the user's own, one that a family makes, or that of an earlier plan.

With ``recompute=`` it also decides which stages run their forward again, by what that saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fxpipe.errors import PartitionError, ScheduleError, nearest
from fxpipe.graph.ranks import Placement, replicated
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import AUTO, Options, Recompute
from fxpipe.plan.capture.captures import Captures
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.plan.plan import Plan
from fxpipe.schedules import Family, Limited, ScheduleName, build
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.recompute import worthwhile
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.schedule import Schedule, Timeline

if TYPE_CHECKING:
    from fxpipe.plan.balance import StageWork
if TYPE_CHECKING:
    from fxpipe.plan.balance.stage_work import StageWork


@dataclass(frozen=True)
class Tables:
    """Chooses tables for the plans of one planner."""

    options: Options
    captures: Captures | None
    """Which give what stages take; None for the user's own stages."""
    first: Plan | None
    """The plan that was made first, once there is one."""
    again: frozenset[str] | None
    """The names of the stages that are recomputed, once that is decided."""
    shown: list[Pattern]
    """The pattern of the first plan, with its shapes."""
    by_shapes: list[Costs]
    """What the stages take, once that is asked for: derived from the shapes of the example."""

    def schedule(self, graph: StageGraph, pattern: Pattern, costs: Costs | None) -> Schedule:
        """The table of a graph; ScheduleError where there is none. ``costs``: those of the search that found it."""
        backward, microbatches = tuple(stage.has_backward for stage in graph), pattern.microbatches
        groups = graph.groups(microbatches)  # which are to divide them
        table = self.options.schedule
        tied = graph.tied if self.first is None else self.first.graph.tied  # who has a copy must hear of its gradient
        if self.first is not None and pattern.training:
            known = _known_table(self.first, graph, microbatches, backward)
            if known is not None:
                return known
        if not isinstance(table, Schedule) or not pattern.training:
            if isinstance(table, Limited) and table.costs is not None:
                costs = None  # the user's own count
            elif self.first is not None and not isinstance(table, Schedule):
                costs = self.first.schedule.costs
            elif costs is None and replicated(graph.placement):  # whose actions fill what others leave idle
                work = self.stage_work(pattern, graph.placement)
                costs = None if work is None else work.costs((False,) * len(graph))
            make = partial(self._built, self.family(graph, pattern), graph, microbatches, backward, tied, costs)
            return make(self._recomputed(graph, pattern, make))
        if self.options.recompute:
            raise ScheduleError(
                "the schedule given says itself what is recomputed, by its cells R (as 0R3); leave recompute= out, or "
                "name a family"
            )
        if table.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule is for {table.microbatches} micro-batches, the batch has {microbatches}; "
                f"pass microbatches={table.microbatches}"
            )
        if table.groups != groups:
            raise ScheduleError(
                f"the schedule has actions of {list(table.groups)} micro-batches for the stages {list(graph.names)}, "
                f"which run for {list(groups)} at once: write F0-3 for a group of four"
            )
        schedule = dataclasses.replace(
            table, edges=graph.stage_edges, backward=backward, stage_names=graph.names, tied=tied
        )
        schedule.verify()
        return schedule

    def family(self, graph: StageGraph, pattern: Pattern) -> ScheduleName | Family:
        """The family that the options name; with bytes derived from shapes, where it has a limit of memory and none."""
        table: ScheduleName | Family | Schedule = self.options.schedule
        if isinstance(table, Schedule):
            return "1f1b"
        if not isinstance(table, Limited) or table.memory is None or tells_bytes(table.costs):
            return table
        shown = pattern if pattern.shapes or not self.shown else self.shown[0]
        if not self.by_shapes and (work := self.stage_work(shown, graph.placement)) is not None:
            again = (bool(self.options.recompute),) * len(graph)
            self.by_shapes.append(work.costs(again))
        for known in self.by_shapes:
            return dataclasses.replace(table, costs=known if table.costs is None else table.costs.or_else(known))
        return table

    def _built(
        self,
        family: ScheduleName | Family,
        graph: StageGraph,
        microbatches: int,
        backward: tuple[bool, ...],
        tied: tuple[tuple[int, ...], ...],
        costs: Costs | None,
        recompute: Marked,
    ) -> Schedule:
        return build(
            family,
            graph.stage_edges,
            microbatches,
            graph.placement,
            backward=backward,
            names=graph.names,
            tied=tied,
            costs=costs,
            gather=graph.gathers or None,
            recompute=recompute,
        )

    def _recomputed(self, graph: StageGraph, pattern: Pattern, make: Make) -> Marked:
        """The stages whose forward runs again: as in the first plan, for others of its kind."""
        if not pattern.training:
            return (False,) * len(graph)
        known = self.first.graph.recomputed if self.first is not None else self.again
        if known is not None:
            return tuple(stage.has_backward and stage.name in known for stage in graph)
        options = self.options
        work = partial(self.stage_work, pattern, graph.placement)
        return recomputed(graph, options.recompute, make, work, options.memory_per_rank)

    def stage_work(self, pattern: Pattern, placement: Placement) -> StageWork | None:
        """What the stages take, derived from shapes; None where these, or the costs, are not known."""
        return None if self.captures is None else self.captures.stage_work(pattern, placement)

    def saving(self, plan: Plan, pattern: Pattern, work: StageWork | None) -> str:
        """What recomputation saves, in words, where it was asked for."""
        if self.options.recompute is False:
            return ""
        graph, table = plan.graph, plan.schedule
        family, none = self.family(graph, pattern), (False,) * len(graph)
        without = self._built(family, graph, table.microbatches, table.backward, table.tied, table.costs, none)
        return described(graph, without, table, work)


def _known_table(first: Plan, graph: StageGraph, microbatches: int, backward: tuple[bool, ...]) -> Schedule | None:
    """The first plan's table, where it fits: replicas whose batches differ then reduce in one order."""
    fits = (
        set(graph.stage_edges) <= set(first.graph.stage_edges)
        and (microbatches, backward) == (first.schedule.microbatches, first.schedule.backward)
        and graph.placement == first.schedule.placement
    )
    return dataclasses.replace(first.schedule, edges=graph.stage_edges) if fits else None


def tells_bytes(costs: Costs | None) -> bool:
    """Whether they give some of the bytes: others would not be in their unit."""
    return costs is not None and {costs.activation_bytes, costs.input_bytes, costs.deferred_bytes} != {None}


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
        peaks = self._figures(flags)[1]
        fullest = [max(peaks[rank] for rank in self._graph.ranks(stage.index)) for stage in self._graph]
        full = [
            stage.index
            for stage in self._graph
            if stage.has_backward and not flags[stage.index] and fullest[stage.index] > self._memory
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


def described(graph: StageGraph, without: Schedule, plan: Schedule, work: StageWork | None) -> str:
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
