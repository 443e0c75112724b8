"""Tables: which table a plan runs: the user's own, one that a family makes, or that of an earlier plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fxpipe.errors import ScheduleError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.options import Options
from fxpipe.plan.captures import Captures
from fxpipe.plan.pattern import Pattern
from fxpipe.plan.plan import Plan
from fxpipe.plan.recomputation import Make, Marked, recomputed, told
from fxpipe.schedules import Family, Limited, ScheduleName, build
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from fxpipe.plan.balance import StageWork


@dataclass(frozen=True)
class Tables:
    """Chooses tables for the plans of one planner."""

    options: Options
    captures: Captures | None
    """Which tell what stages take; None for the user's own stages."""
    first: Plan | None
    """The plan that was made first, once there is one."""
    again: frozenset[str] | None
    """The names of the stages that are recomputed, once that is decided."""
    shown: list[Pattern]
    """The pattern of the first plan, with its shapes."""
    by_shapes: list[Costs]
    """What the stages take, once that is asked for: told from the shapes of the example."""

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
        """The family that the options name; with bytes told from shapes, where it has a limit of memory and none."""
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

    def stage_work(self, pattern: Pattern, placement: tuple[int, ...]) -> StageWork | None:
        """What the stages take, told from shapes; None where these, or the costs, are not known."""
        return None if self.captures is None else self.captures.stage_work(pattern, placement)

    def saving(self, plan: Plan, pattern: Pattern, work: StageWork | None) -> str:
        """What recomputation saves, in words, where it was asked for."""
        if self.options.recompute is False:
            return ""
        graph, table = plan.graph, plan.schedule
        family, none = self.family(graph, pattern), (False,) * len(graph)
        without = self._built(family, graph, table.microbatches, table.backward, table.tied, table.costs, none)
        return told(graph, without, table, work)


def _known_table(first: Plan, graph: StageGraph, microbatches: int, backward: tuple[bool, ...]) -> Schedule | None:
    """The first plan's table, where it will do: replicas whose batches differ then reduce in one order."""
    fits = (
        set(graph.stage_edges) <= set(first.graph.stage_edges)
        and (microbatches, backward) == (first.schedule.microbatches, first.schedule.backward)
        and graph.placement == first.schedule.placement
    )
    return dataclasses.replace(first.schedule, edges=graph.stage_edges) if fits else None


def tells_bytes(costs: Costs | None) -> bool:
    """Whether they tell some of the bytes: others would not be in their unit."""
    return costs is not None and {costs.activation_bytes, costs.input_bytes, costs.deferred_bytes} != {None}
