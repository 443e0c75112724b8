"""Tables: chooses the table of a plan: the user's own, a table that a family makes, or the table of an earlier plan.

Takes: the plans so far with their options, a placed ``StageGraph`` and a ``Pattern``. Gives: a ``Schedule``, not yet
proven.

1. If the first plan's table fits the graph, training keeps it: replicas with different batches then reduce in the same
   order.
2. Else, if the user gave a table, it is checked against the graph, and used for training.
3. Else the family that the options name makes a table, at the best known costs: given, of the first plan, of the
   search, or by shapes.
4. With ``recompute=``, the table is made with the stages marked that run their forward again. "auto" marks as few as
   fit into memory (``_fewest``).

Evaluation has a table of its own, without backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING

from fxpipe.batch.pattern import Pattern
from fxpipe.errors import DoesNotFit, PartitionError, ScheduleError, nearest
from fxpipe.graph.ranks import replicated
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import AUTO, Options
from fxpipe.plan.plan import Plan, Planned
from fxpipe.schedules import Limited, Problem, make_table, with_costs
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
Make = Callable[[Marked], Schedule]
"""Makes the table in which these stages are recomputed."""


def choose_table(planned: Planned, graph: StageGraph, pattern: Pattern) -> Schedule:
    """Returns the table of a placed graph, not yet proven.

    Raises:
        ScheduleError: the user's table does not fit the graph, or the family has no table for it.
        PartitionError: ``recompute`` names a stage that does not exist, or a group does not divide the micro-batches.
        DoesNotFit: with ``recompute="auto"``, a rank exceeds its memory even if all that helps is recomputed.
    """
    options, first = planned.options, planned.first if planned.plans else None
    tied = (graph if first is None else first.graph).tied  # stages with copies of a parameter exchange gradients
    # 1. the table of the first plan
    if pattern.training and first is not None and _fits(first, graph, pattern.microbatches):
        # replicas with different batches then reduce in the same order
        return replace(first.schedule, edges=graph.stage_edges)
    # 2. the user's table
    if isinstance(options.schedule, Schedule) and pattern.training:
        return _given(options, graph, pattern.microbatches, tied)
    # 3. a family's table
    make = partial(_made, _family(planned, graph, pattern), graph, pattern.microbatches, tied)
    if not pattern.training:
        return make((False,) * len(graph))
    # 4. recomputation
    recomputed = planned.again if first is None else first.graph.recomputed
    if recomputed is not None:
        return make(tuple(stage.has_backward and stage.name in recomputed for stage in graph))
    return make(_recomputed(planned, graph, pattern, make))


def _family(planned: Planned, graph: StageGraph, pattern: Pattern) -> Limited:
    """The family that the options name, at the costs for which it makes the table; without costs, B = 2 F."""
    table = planned.options.schedule
    family = with_costs("1f1b" if isinstance(table, Schedule) else table)

    def costs_by_shapes() -> Costs | None:
        shaped = pattern if pattern.shapes else planned.shown or pattern
        work = planned.captures.stage_work(shaped, graph.placement)
        return None if work is None else work.costs_with((bool(planned.options.recompute),) * len(graph))

    costs = family.costs
    if costs is None and planned.plans and not isinstance(table, Schedule):
        costs = planned.first.schedule.costs
    elif costs is None and planned.captures.searched is not None:
        costs = planned.captures.searched.outcome.costs
    elif costs is None and replicated(graph.placement):
        # A stage on several ranks fills idle time between their other stages, and only true costs show idle time.
        costs = costs_by_shapes()
    if family.memory is not None and not _tells_bytes(costs) and (known := costs_by_shapes()) is not None:
        costs = known if costs is None else costs.or_else(known)
    return replace(family, costs=costs)


def _tells_bytes(costs: Costs | None) -> bool:
    """Whether the costs give some bytes. Bytes from shapes are then not added, since their unit may differ."""
    return costs is not None and {costs.activation_bytes, costs.input_bytes, costs.deferred_bytes} != {None}


def _given(options: Options, graph: StageGraph, microbatches: int, tied: tuple[tuple[int, ...], ...]) -> Schedule:
    """The user's own table, checked and completed for this graph."""
    table: Schedule = options.schedule
    if options.recompute:
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


def _recomputed(planned: Planned, graph: StageGraph, pattern: Pattern, make: Make) -> Marked:
    """For each stage, whether its forward runs again; only stages with a backward may be recomputed."""
    wanted = planned.options.recompute
    if isinstance(wanted, tuple):
        for name in wanted:
            if name not in graph.names:
                raise PartitionError(
                    f"recompute names stage {name!r}, which does not exist{nearest(name, graph.names)}"
                )
        return tuple(stage.has_backward and stage.name in wanted for stage in graph)
    if wanted != AUTO:
        return worthwhile(make((False,) * len(graph))) if wanted else (False,) * len(graph)
    work = planned.captures.stage_work(pattern, graph.placement)
    if work is None:
        raise ScheduleError(
            'recompute="auto" needs what the stages take: pass example_args= or example_kwargs=, one batch as it '
            "will be passed in calls; for stages of your own, name them: recompute=[...]"
        )
    return _fewest(graph, make, work, planned.options.memory_per_rank or 0.0)


def saving(planned: Planned, work: Staged | None) -> str:
    """The savings and costs of recomputation in the first plan, against the table without it, in words; empty if it is
    off."""
    if planned.options.recompute is False:
        return ""
    assert planned.shown is not None
    graph, table = planned.first.graph, planned.first.schedule
    none = (False,) * len(graph)
    without = _made(_family(planned, graph, planned.shown), graph, table.microbatches, table.tied, none)
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


def _fits(first: Plan, graph: StageGraph, microbatches: int) -> bool:
    """Whether the first plan's table is valid for this graph."""
    table, backward = first.schedule, tuple(stage.has_backward for stage in graph)
    same = (microbatches, backward, graph.placement) == (table.microbatches, table.backward, table.placement)
    return same and set(graph.stage_edges) <= set(first.graph.stage_edges)


def _made(
    family: Limited, graph: StageGraph, microbatches: int, tied: tuple[tuple[int, ...], ...], recompute: Marked
) -> Schedule:
    """The family's table in which these stages are recomputed."""
    graph.groups(microbatches)  # PartitionError if the groups do not divide the micro-batches
    backward = tuple(stage.has_backward for stage in graph)
    alone = Problem(graph.stage_edges, microbatches, graph.placement, backward, Costs.of(len(graph)))
    groups = groups_behind(graph.gathers, alone) if graph.gathers else None
    return make_table(family, replace(alone, groups=groups, recompute=recompute), graph.names, tied)


def _fewest(graph: StageGraph, make: Make, work: Staged, memory: float) -> Marked:
    """Marks as few stages as fit into ``memory`` bytes per rank; ScheduleError if no marks fit.

    Each round marks the stage with which the table fits in the least time. If no stage makes it fit, the round marks
    the stage that removes most excess bytes per second. At the end, stages that later marks made needless are unmarked.

    A greedy choice: it need not be the optimum. For s stages it makes at most about s²/2 tables.
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
    """The flags with one changed."""
    return (*flags[:stage], value, *flags[stage + 1 :])


def _mib(size: float) -> str:
    """Bytes in MiB, for a message."""
    return f"{size / 2**20:,.{1 if size >= 10 * 2**20 else 3}f}"
