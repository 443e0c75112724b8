"""Tables: chooses the table of a plan: the user's own, a table that a family makes, or the table of an earlier plan.

Takes: the plans so far with their options, a placed ``StageGraph`` and a ``Pattern``. Gives: a ``Schedule``, not yet
proven.

1. If the first plan's table fits the graph, training keeps it: replicas with different batches then reduce in the same
   order.
2. Else, if the user gave a table, it is checked against the graph, and used for training.
3. Else the family that the options name makes a table, at the best known costs: given, of the first plan, of the
   search, or by shapes.
4. With ``recompute=`` or ``offload=``, the table is made with the stages marked whose activations do not stay until
   their backward. With "auto", ``activations`` decides which stages.
5. With ``offload="auto"`` and ``microbatch_cost=``, the table holds up to twice as many micro-batches, as far as the
   memory and the planned makespan allow: micro-batches of different costs then wait less for each other.

Evaluation has a table of its own, without backwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fxpipe.batch.pattern import Pattern
from fxpipe.errors import PartitionError, ScheduleError
from fxpipe.graph.ranks import replicated
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.graph.stage_work import in_ms
from fxpipe.options import AUTO, Options
from fxpipe.plan.activations import (
    AGAIN,
    BY_LAYERS,
    HOST,
    KEEP,
    Choice,
    Make,
    costs_at,
    marked,
    marks_of,
    named_choice,
    named_stages,
    no_costs,
    rooms_of,
    searched_choice,
)
from fxpipe.plan.plan import Plan, PlansSoFar
from fxpipe.schedules import Limited, Problem, make_table, with_costs
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import groups_behind
from fxpipe.schedules.families.offload import LONGER
from fxpipe.schedules.families.solve import worthwhile
from fxpipe.schedules.in_flight import peak_bytes, peak_host_bytes, peak_in_flight
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import check as check_table
from fxpipe.search.simulated_layouts import Staged

IN_FLIGHT = (2, 1.75, 1.5, 1.25)
"""How many times as many micro-batches in flight are tried, beginning with the most."""


class Tabled(NamedTuple):
    """A table, not yet proven, and the mark of each stage."""

    table: Schedule
    choice: Choice


def choose_table(plans: PlansSoFar, graph: StageGraph, pattern: Pattern) -> Tabled:
    """Returns the table of a placed graph, and how its stages' activations reach their backward.

    Raises:
        ScheduleError: the user's table does not fit the graph, the family has no table for it, or ``offload`` asks for
            more of the host's memory than a rank has.
        PartitionError: ``recompute`` or ``offload`` names a stage that does not exist, a group does not divide the
            micro-batches, or ``microbatch_cost`` is given for stages that gather groups.
        DoesNotFit: with "auto", a rank exceeds its memory even if all that helps is recomputed or offloaded.
    """
    options, first = plans.options, plans.first if plans.by_pattern else None
    if options.microbatch_cost is not None and graph.gathers:
        gathered = next(stage.name for stage in graph if stage.gathered is not None)
        raise PartitionError(
            f"microbatch_cost= orders micro-batches, and stage {gathered!r} runs for groups of them, in the order of "
            "the batch; leave microbatch_cost= out"
        )
    tied = (graph if first is None else first.graph).tied  # stages with copies of a parameter exchange gradients
    marks, keep = plans.marks if first is None else marks_of(first.graph), (KEEP,) * len(graph)
    known = None if marks is None else tuple(marks.get(s.name, KEEP) if s.has_backward else KEEP for s in graph)
    # 1. the table of the first plan
    if pattern.training and first is not None and _fits(first, graph, pattern.microbatches):
        # replicas with different batches then reduce in the same order
        return Tabled(replace(first.schedule, edges=graph.stage_edges), known or keep)
    # 2. the user's table
    if isinstance(options.schedule, Schedule) and pattern.training:
        return Tabled(_given(options.schedule, options, graph, pattern.microbatches, tied), keep)
    # 3. a family's table
    family, of_graph = _family(plans, graph, pattern), (graph, pattern.microbatches, tied)
    make = partial(_made, family, *of_graph)
    if not pattern.training:
        return Tabled(make(keep, None), keep)
    # 4. recomputation and offload
    choice = known or _choice(plans, graph, pattern, make)
    work = None if AUTO not in (options.recompute, options.offload) else _work(plans, graph, pattern)
    table = make(choice, None if work is None else rooms_of(choice, make, work, options.device.memory or 0.0))
    _check_host(plans, table)
    # 5. more in flight
    if work is None or options.offload != AUTO or options.microbatch_cost is None or family.in_flight is not None:
        return Tabled(table, choice)
    within = lambda most: partial(_made, replace(family, in_flight=most), *of_graph)  # noqa: E731
    return Tabled(_deepened(plans, work, choice, table, within), choice)


def _deepened(
    plans: PlansSoFar, work: Staged, choice: Choice, table: Schedule, within: Callable[[Sequence[int]], Make]
) -> Schedule:
    """The table with most in flight of ``IN_FLIGHT`` that fits the memory and takes at most ``LONGER`` longer than
    ``table``, which is returned if there is none. ``within``: returns a ``Make`` for the most in flight per stage."""
    costs, memory = costs_at(work, choice), plans.options.device.memory or 0.0
    # Only micro-batches that do not fit leave, so every stage may be offloaded.
    choice = tuple(HOST if mark is KEEP and has else mark for mark, has in zip(choice, table.backward, strict=True))
    # A rank has a buffer for each value in flight that it sends, and that it receives.
    message = 2 * max(work.messages.values(), default=0) * max(map(len, table.stages_of))
    usual = table.simulate(costs).makespan
    for factor in IN_FLIGHT:
        most = [max(int(factor * peak), 1) for peak in in_flight_of(table)]
        make, rest = within(most), memory - message * (max(most) + 1)
        with contextlib.suppress(ScheduleError):
            deeper = make(choice, rooms_of(choice, make, work, rest))
            _check_host(plans, deeper)
            longer = deeper.simulate(costs).makespan / usual - 1
            if longer <= LONGER and max(work.peaks(deeper, costs)) <= rest:
                return deeper
    return table


def _check_host(plans: PlansSoFar, table: Schedule) -> None:
    """ScheduleError if a rank would keep more activations on the host than its part of the node's memory."""
    memory, topology = plans.options.device.host_memory, plans.topology
    if memory is None or table.costs is None or table.costs.activation_bytes is None:
        return
    ranks = topology.ranks_per_node or topology.world_size
    for rank, size in enumerate(peak_host_bytes(table, table.costs)):
        if size > memory / ranks:
            raise ScheduleError(
                f"offload= would keep {size:,.0f} bytes of rank {rank} in the host's memory, and each of a node's "
                f"{ranks} ranks has {memory / ranks:,.0f} of host_memory={memory:,.0f}; offload fewer stages, or use "
                "more ranks"
            )


def _family(plans: PlansSoFar, graph: StageGraph, pattern: Pattern) -> Limited:
    """The family that the options name, at the costs for which it makes the table; without costs, B = 2 F."""
    table = plans.options.schedule
    family = with_costs("1f1b" if isinstance(table, Schedule) else table)

    def costs_by_shapes() -> Costs | None:
        work = _work(plans, graph, pattern)
        again = named_stages(plans.options, "recompute", graph)
        return None if work is None else work.costs_with([name in again for name in graph.names])

    costs = family.costs
    if costs is None and plans.by_pattern and not isinstance(table, Schedule):
        costs = plans.first.schedule.costs
    elif costs is None and plans.captures.searched is not None:
        costs = plans.captures.searched.outcome.costs
    elif costs is None and (replicated(graph.placement) or plans.options.offload):
        # Only true costs show idle time, which a stage on several ranks fills, and the time of copies to the host.
        costs = costs_by_shapes()
    lacks_bytes = (family.memory is not None or plans.options.offload) and not _tells_bytes(costs)
    if lacks_bytes and (known := costs_by_shapes()) is not None:
        # Costs without a source may be in another unit than seconds, in which the time of a copy is known.
        costs = known if costs is None else costs.or_else(known if costs.source else replace(known, copy=None))
    return replace(family, costs=costs)


def _tells_bytes(costs: Costs | None) -> bool:
    """Whether the costs give some bytes. Bytes from shapes are then not added, since their unit may differ."""
    return costs is not None and {costs.activation_bytes, costs.input_bytes, costs.deferred_bytes} != {None}


def _given(
    table: Schedule, options: Options, graph: StageGraph, microbatches: int, tied: tuple[tuple[int, ...], ...]
) -> Schedule:
    """The user's own table, checked and completed for this graph."""
    for option, what in (
        ("recompute", "recomputed, by its cells R (as 0R3)"),
        ("offload", "offloaded, by its cells O and P (as 0O3 and 0P3)"),
    ):
        if named_stages(options, option, graph):
            raise ScheduleError(f"the schedule given says itself what is {what}; leave {option}= out, or name a family")
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


def _choice(plans: PlansSoFar, graph: StageGraph, pattern: Pattern, make: Make) -> Choice:
    """How each stage's activations reach its backward; stages without a backward keep none."""
    options = plans.options
    is_auto = AUTO in (options.recompute, options.offload)
    work = _work(plans, graph, pattern) if is_auto or options.offload is True else None
    if work is None and (is_auto or options.offload is True):
        raise no_costs('recompute="auto"' if options.recompute == AUTO else f"offload={options.offload!r}")
    if work is not None and is_auto:
        return options.within_memory(lambda memory: searched_choice(options, graph, make, work, memory or 0.0))
    keep = (KEEP,) * len(graph)
    return named_choice(options, graph, lambda: worthwhile(make(keep, None)))


def _work(plans: PlansSoFar, graph: StageGraph, pattern: Pattern) -> Staged | None:
    """The stages' costs by the shapes of a pattern, or of the first plan's; None if they are not known."""
    shaped = pattern if pattern.shapes else plans.shown or pattern
    return plans.captures.stage_work(shaped, graph.placement)


def saving(plans: PlansSoFar, work: Staged | None) -> str:
    """The savings and costs of recomputation and offload in the first plan, against the table without them, in words;
    empty if both are off."""
    if plans.options.recompute is plans.options.offload is False:
        return ""
    assert plans.shown is not None
    graph, table = plans.first.graph, plans.first.schedule
    family, keep = _family(plans, graph, plans.shown), (KEEP,) * len(graph)
    without = _made(family, graph, table.microbatches, table.tied, keep, None)
    # The stages, each rank's peak bytes and the makespan, compared with the same family's table without R, O and P.
    marks = marks_of(graph)
    # Layers that the options name are checkpointed in every table. A search chooses them stage by stage.
    layered = bool(graph.layers) and not graph.by_layers
    shown = {
        AGAIN: plans.options.recompute is not False and not layered,
        BY_LAYERS: graph.by_layers,
        HOST: plans.options.offload is not False,
    }
    lines = [
        f"{kind.value}: {', '.join(name for name, mark in marks.items() if mark is kind) or 'no stage'}"
        for kind, is_shown in shown.items()
        if is_shown
    ]
    # With checkpointed layers, the costs without recomputation are those in which checkpoints keep their activations.
    before = without.planned(None if work is None else work.costs_with((layered,) * len(graph)))
    after = table.planned(None if work is None else costs_at(work, tuple(marks.values())))
    numbers = [in_flight_of(each) for each in (without, table)]
    if numbers[0] != numbers[1]:
        pairs = zip(graph.names, *numbers, strict=True)
        lines.append(f"micro-batches in flight: {', '.join(f'{name} {old} → {new}' for name, old, new in pairs)}")
    if work is not None:
        peaks = [peak_bytes(plan.schedule, plan.costs) for plan in (before, after)]
        sizes = [f"rank {rank} {mib(old)} → {mib(new)}" for rank, (old, new) in enumerate(zip(*peaks, strict=True))]
        lines.append(f"activations at their peak, MiB: {', '.join(sizes)}")
    if work is not None and plans.options.offload is not False:
        there = (f"rank {rank} {mib(size)}" for rank, size in enumerate(peak_host_bytes(table, after.costs)))
        # The longest of each stage's copies, after F and after I.
        times_of = sorted((copy.end - copy.start, copy.action.stage) for copy in after.copies)
        copies = {stage: in_ms(time) for time, stage in times_of}
        lines.append(f"in the host's memory at their peak, MiB: {', '.join(there)}")
        times = (f"{graph.names[stage]} {copies[stage]}" for stage in sorted(copies))
        lines.append(f"a copy of a micro-batch to the host, ms: {', '.join(times) or 'none'}")
    longer = after.makespan / before.makespan - 1 if before.makespan else 0.0
    lines.append(f"makespan {longer:+.1%}" + (", at costs by shapes" if work is not None else ", at B = 2 F"))
    return "\n".join(lines)


def in_flight_of(table: ActionTable) -> tuple[int, ...]:
    """The most micro-batches in flight at each stage: from F to the backward, also while they wait on the host."""
    rows = tuple(tuple(action for action in row if not action.kind.is_optional) for row in table.rows)
    return peak_in_flight(replace(table, rows=rows))


def _fits(first: Plan, graph: StageGraph, microbatches: int) -> bool:
    """Whether the first plan's table is valid for this graph."""
    table, backward = first.schedule, tuple(stage.has_backward for stage in graph)
    same = (microbatches, backward, graph.placement) == (table.microbatches, table.backward, table.placement)
    return same and set(graph.stage_edges) <= set(first.graph.stage_edges)


def _made(
    family: Limited,
    graph: StageGraph,
    microbatches: int,
    tied: tuple[tuple[int, ...], ...],
    choice: Choice,
    rooms: Sequence[float] | None,
) -> Schedule:
    """The family's table in which stages keep, recompute or offload by a choice. ``rooms``: as ``Make`` takes it."""
    graph.groups(microbatches)  # PartitionError if the groups do not divide the micro-batches
    backward = tuple(stage.has_backward for stage in graph)
    alone = Problem(graph.stage_edges, microbatches, graph.placement, backward, Costs.of(len(graph)))
    groups = groups_behind(graph.gathers, alone) if graph.gathers else None
    problem = replace(
        alone,
        groups=groups,
        recompute=marked(choice, AGAIN),
        offload=marked(choice, HOST),
        memory=None if rooms is None else tuple(rooms),
    )
    return make_table(family, problem, graph.names, tied)


def mib(size: float) -> str:
    """Bytes in MiB, for a message."""
    return f"{size / 2**20:,.{1 if size >= 10 * 2**20 else 3}f}"
