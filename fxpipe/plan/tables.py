"""Tables: chooses the table of a plan: the user's own, a table that a family makes, or the table of an earlier plan.

With ``recompute=``, ``Tables`` also decide which stages run their forward again, by the bytes that this saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING

from fxpipe.batch.pattern import Pattern
from fxpipe.errors import DoesNotFit, PartitionError, ScheduleError, nearest
from fxpipe.graph.ranks import Placement, replicated
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import AUTO, Options
from fxpipe.plan.capture.captures import Captures
from fxpipe.plan.plan import Plan
from fxpipe.schedules import Family, Limited, Problem, ScheduleName, make_table, with_costs
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import groups_behind
from fxpipe.schedules.families.solve import worthwhile
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.simulate import peak_bytes
from fxpipe.schedules.verify import check as check_table

if TYPE_CHECKING:
    from fxpipe.search.simulated_layouts import Staged

Marked = tuple[bool, ...]
"""Whether each stage is recomputed."""


@dataclass(frozen=True)
class Tables:
    """Chooses the table of a plan."""

    options: Options
    captures: Captures
    first: Plan | None
    shown: Pattern | None
    """The pattern of the first plan, with its shapes."""
    again: frozenset[str] | None
    """The names of the recomputed stages, if they were chosen before the first plan."""
    by_shapes: Costs | None
    """The stages' costs derived from the example's shapes, if a memory limit needs their bytes."""

    def costs_by_shapes(self, pattern: Pattern, graph: StageGraph) -> Costs | None:
        """The costs from shapes, if the options' family has a memory limit and no bytes in its own costs. ``graph``:
        the placed stages."""
        table = self.options.schedule
        if not isinstance(table, Limited) or table.memory is None or tells_bytes(table.costs) or self.by_shapes:
            return self.by_shapes
        work = self.stage_work(pattern if pattern.shapes else self.shown or pattern, graph.placement)
        return None if work is None else work.costs_with((bool(self.options.recompute),) * len(graph))

    def choose(self, graph: StageGraph, pattern: Pattern) -> Schedule:
        """Returns the table of a graph, not yet proven; ScheduleError if no table exists."""
        table, first = self.options.schedule, self.first
        tied = (graph if first is None else first.graph).tied  # stages with copies of a parameter exchange gradients
        if pattern.training and first is not None and _fits(first, graph, pattern.microbatches):
            # replicas with different batches then reduce in the same order
            return replace(first.schedule, edges=graph.stage_edges)
        if isinstance(table, Schedule) and pattern.training:
            return self._given(table, graph, pattern.microbatches, tied)
        costs = self._costs(graph, pattern)
        make = partial(_built, self._family(), graph, pattern.microbatches, tied, costs)
        if not pattern.training:
            return make((False,) * len(graph))
        recomputed = self.again if first is None else first.graph.recomputed
        if recomputed is not None:
            return make(tuple(stage.has_backward and stage.name in recomputed for stage in graph))
        return make(self._recomputed(graph, pattern, make))

    def _costs(self, graph: StageGraph, pattern: Pattern) -> Costs | None:
        """The costs for which a family makes a table; None for the family's own costs, or B = 2 F."""
        table = self.options.schedule
        if isinstance(table, Limited) and table.costs is not None:
            return None
        if self.first is not None and not isinstance(table, Schedule):
            return self.first.schedule.costs
        if self.captures.searched is not None:
            return self.captures.searched.outcome.costs
        # A stage on several ranks fills idle time between their other stages, and only true costs show idle time.
        work = self.stage_work(pattern, graph.placement) if replicated(graph.placement) else None
        return None if work is None else work.costs_with((False,) * len(graph))

    def _given(
        self, table: Schedule, graph: StageGraph, microbatches: int, tied: tuple[tuple[int, ...], ...]
    ) -> Schedule:
        """The user's own table, checked and completed for this graph."""
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
        # A gathered stage has a single action for a group of micro-batches, in a cell such as F0-3.
        groups = graph.groups(microbatches)
        if table.groups != groups:
            raise ScheduleError(
                f"the schedule has actions of {list(table.groups)} micro-batches for the stages {list(graph.names)}, "
                f"which run for {list(groups)} at once: write F0-3 for a group of four"
            )
        backward = tuple(stage.has_backward for stage in graph)
        schedule = replace(table, edges=graph.stage_edges, backward=backward, stage_names=graph.names, tied=tied)
        check_table(schedule)
        return schedule

    def _family(self) -> ScheduleName | Family:
        """The family that the options name, with bytes from shapes if it has a memory limit and no bytes of its own."""
        table: ScheduleName | Family | Schedule = self.options.schedule
        if isinstance(table, Schedule):
            return "1f1b"
        if not isinstance(table, Limited) or table.memory is None or tells_bytes(table.costs) or not self.by_shapes:
            return table
        costs = self.by_shapes if table.costs is None else table.costs.or_else(self.by_shapes)
        return replace(table, costs=costs)

    def _recomputed(self, graph: StageGraph, pattern: Pattern, make: Make) -> Marked:
        """For each stage, whether its forward runs again; only stages with a backward may be recomputed."""
        wanted = self.options.recompute
        if isinstance(wanted, tuple):
            for name in wanted:
                if name not in graph.names:
                    raise PartitionError(
                        f"recompute names stage {name!r}, which does not exist{nearest(name, graph.names)}"
                    )
            return tuple(stage.has_backward and stage.name in wanted for stage in graph)
        if wanted != AUTO:
            return worthwhile(make((False,) * len(graph))) if wanted else (False,) * len(graph)
        work = self.stage_work(pattern, graph.placement)
        if work is None:
            raise ScheduleError(
                'recompute="auto" needs what the stages take: pass example_args= or example_kwargs=, one batch as it '
                "will be passed in calls; for stages of your own, name them: recompute=[...]"
            )
        return _fewest(graph, make, work, self.options.memory_per_rank or 0.0)

    def stage_work(self, pattern: Pattern, placement: Placement) -> Staged | None:
        """The stages' work derived from shapes; None if shapes or costs are not known."""
        return self.captures.balancing.stage_work(self.captures.first, pattern, placement)

    def saving(self, plan: Plan, work: Staged | None) -> str:
        """The savings and costs of recomputation, against the table without it, in words; empty if it is off."""
        if self.options.recompute is False:
            return ""
        graph, table = plan.graph, plan.schedule
        none = (False,) * len(graph)
        without = _built(self._family(), graph, table.microbatches, table.tied, table.costs, none)
        again = {stage for stage, _ in table.dependencies.recomputed}
        # The stages, each rank's peak bytes and the makespan, compared with the same family's table without an R.
        names = [stage.name for stage in graph if stage.index in again]
        lines = [f"recomputed: {', '.join(names) or 'no stage'}"]
        flags = tuple(stage.index in again for stage in graph)
        costs = (lambda flags: None) if work is None else work.costs_with
        before, after = without.planned(costs(none)), table.planned(costs(flags))
        if work is not None:
            peaks = [peak_bytes(plan.schedule, plan.costs) for plan in (before, after)]
            pairs = enumerate(zip(*peaks, strict=True))
            sizes = [f"rank {rank} {_mib(old)} → {_mib(new)}" for rank, (old, new) in pairs]
            lines.append(f"activations at their peak, MiB: {', '.join(sizes)}")
        longer = after.makespan / before.makespan - 1 if before.makespan else 0.0
        lines.append(f"makespan {longer:+.1%}" + (", at costs by shapes" if work is not None else ", at B = 2 F"))
        return "\n".join(lines)


Make = Callable[[Marked], Schedule]
"""Makes the table in which these stages are recomputed."""


def _fits(first: Plan, graph: StageGraph, microbatches: int) -> bool:
    """Whether the first plan's table is valid for this graph."""
    table, backward = first.schedule, tuple(stage.has_backward for stage in graph)
    same = (microbatches, backward, graph.placement) == (table.microbatches, table.backward, table.placement)
    return same and set(graph.stage_edges) <= set(first.graph.stage_edges)


def _built(
    family: ScheduleName | Family,
    graph: StageGraph,
    microbatches: int,
    tied: tuple[tuple[int, ...], ...],
    costs: Costs | None,
    recompute: Marked,
) -> Schedule:
    graph.groups(microbatches)  # PartitionError if the groups do not divide the micro-batches
    backward = tuple(stage.has_backward for stage in graph)
    alone = Problem(graph.stage_edges, microbatches, graph.placement, backward, Costs.of(len(graph)))
    groups = groups_behind(graph.gathers, alone) if graph.gathers else None
    problem = replace(alone, groups=groups, recompute=recompute)
    return make_table(with_costs(family, costs), problem, graph.names, tied)


def tells_bytes(costs: Costs | None) -> bool:
    """Whether the costs give some bytes. Bytes from shapes are then not added, since their unit may differ."""
    return costs is not None and {costs.activation_bytes, costs.input_bytes, costs.deferred_bytes} != {None}


def _fewest(graph: StageGraph, make: Make, work: Staged, memory: float) -> Marked:
    """Marks as few stages as fit into ``memory`` bytes per rank; ScheduleError if no marks fit.

    Each round marks the stage with which the table fits in the least time. If no stage makes it fit, the round marks
    the stage that removes most excess bytes per second. At the end, stages that later marks made needless are unmarked.
    """

    @cache
    def figures(flags: Marked) -> tuple[float, tuple[float, ...], float]:
        """The makespan in seconds, each rank's peak bytes, and the sum of all ranks' bytes above ``memory``."""
        plan = make(flags).planned(work.costs_with(flags))
        peaks = work.peaks(plan.schedule, plan.costs)
        return plan.makespan, peaks, sum(max(peak - memory, 0.0) for peak in peaks)

    # 1. Mark stages on ranks above the limit, by seconds for each byte that they save, until all ranks fit.
    flags = (False,) * len(graph)
    while figures(flags)[2]:
        before, peaks, over_before = figures(flags)
        fullest = [max(peaks[rank] for rank in graph.ranks(stage.index)) for stage in graph]
        # Stages on other ranks would cost time and save bytes that their ranks do not lack.
        full = [s.index for s in graph if s.has_backward and not flags[s.index] and fullest[s.index] > memory]
        ranked: list[tuple[tuple[bool, float, float], Marked]] = []
        for marked in (_with(flags, stage, True) for stage in full):
            seconds, _, over = figures(marked)
            if over < over_before:
                cost = max(seconds - before, 0.0) / (over_before - over) if over else seconds
                ranked.append(((over > 0, cost, over), marked))
        if not ranked:
            rank = max(range(len(peaks)), key=peaks.__getitem__)
            raise DoesNotFit(
                f"rank {rank} takes {peaks[rank]:,.0f} bytes even where all its stages that this helps are recomputed, "
                f"memory_per_rank={memory:,.0f}; use more pipe ranks, smaller micro-batches, or a schedule that "
                "holds fewer of them",
                peaks[rank],
            )
        _, flags = min(ranked, key=itemgetter(0))
    # 2. A later mark may have made an earlier mark needless.
    for stage in reversed(range(len(graph))):
        fewer = _with(flags, stage, False)
        if flags[stage] and not figures(fewer)[2]:
            flags = fewer
    return flags


def _with(flags: Marked, stage: int, value: bool) -> Marked:
    return (*flags[:stage], value, *flags[stage + 1 :])


def _mib(size: float) -> str:
    return f"{size / 2**20:,.{1 if size >= 10 * 2**20 else 3}f}"
