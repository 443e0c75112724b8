"""Layouts: assign blocks to stages and stages to ranks; simulation gives the makespan and the bytes of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from fxpipe.errors import ScheduleError
from fxpipe.graph.program import LAYERS, named
from fxpipe.graph.ranks import Placement, rank_count, ranks_of
from fxpipe.options import Recompute
from fxpipe.schedules import Limited, Problem
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.solve import in_numbers, solved, worthwhile
from fxpipe.schedules.in_flight import peak_bytes
from fxpipe.schedules.lower_bound import lower_bound
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.simulate import least_makespan
from fxpipe.search.block_graph import BlockGraph


@dataclass(frozen=True)
class StageLayout:
    """``stage_of``: block → stage, in topological order of the stages. ``rank_of``: stage → rank."""

    stage_of: tuple[int, ...]
    rank_of: Placement
    origin: str = field(default="", compare=False)
    """How the layout was found, in words."""

    @property
    def stages(self) -> int:
        return len(self.rank_of)


@dataclass(frozen=True)
class LayoutOutcome:
    """The outcome of a layout. ``seconds``: the makespan of its table plus the sums of tied gradients after it."""

    layout: StageLayout
    seconds: float
    makespan: float
    schedule: Schedule
    costs: Costs
    peak_bytes: tuple[float, ...]
    """Bytes per rank: parameters, gradients, optimizer state, and the activations of micro-batches at their peak."""

    @property
    def most_bytes(self) -> float:
        return max(self.peak_bytes)

    @property
    def bubble(self) -> float:
        return self.schedule.simulate(self.costs).bubble


@dataclass(frozen=True)
class Rerun:
    """The blocks that run their forward again. A stage is recomputed if all of its blocks are."""

    blocks: tuple[bool, ...]
    at_need: bool = False
    """Whether to recompute only if no layout fits the memory without."""
    worthwhile: bool = False
    """Whether to recompute only the stages in which this saves memory."""

    @staticmethod
    def from_option(wanted: Recompute, names: Sequence[str]) -> Rerun | None:
        """The blocks to recompute for the option ``wanted``. ``names``: the stage of each block, or "" if stages do not
        exist yet; then named stages are recomputed only at need."""
        if isinstance(wanted, tuple) and "" not in names:
            return Rerun(tuple(any(named(each, [name]) for each in wanted) for name in names))
        is_of_stages = wanted and wanted != LAYERS
        return Rerun((True,) * len(names), wanted is not True, wanted is True) if is_of_stages else None


def _costs_at(costs: Costs, other: Costs, stages: Sequence[bool]) -> Costs:
    """The costs with what recomputation changes of a backward, and of the bytes kept for it, as ``other`` has it."""

    def chosen(name: str) -> Any:
        here, there = getattr(costs, name), getattr(other, name)
        if here is None and there is None:
            return None
        nothing = (0.0,) * len(stages)
        pairs = zip(here or nothing, there or nothing, stages, strict=True)
        return tuple(new if is_new else old for old, new, is_new in pairs)

    names = "backward", "weight", "activation_bytes", "deferred_bytes", "again_bytes"
    return replace(costs, **{name: chosen(name) for name in names})


class Staged:
    """A layout with the costs of its stages.

    ``keeping``: returns the costs if the model's own checkpoints keep their activations, as they do in an action R.
    ``by_layers``: returns the costs of stages whose layers are checkpointed.
    """

    def __init__(
        self,
        work: BlockGraph,
        layout: StageLayout,
        microbatches: int,
        again: Rerun | None = None,
        keeping: Callable[[], Costs] | None = None,
        by_layers: Callable[[], Costs] | None = None,
    ) -> None:
        self.work, self.layout, self.microbatches = work, layout, microbatches
        self._keeping, self._by_layers = keeping, by_layers
        self._hardware, self._rank_of = work.costs.hardware, layout.rank_of
        # A stage with a block that is not recomputed is not recomputed at all.
        storing = {stage for block, stage in enumerate(layout.stage_of) if again is None or not again.blocks[block]}
        self._recomputed = tuple(stage not in storing for stage in range(layout.stages))
        members: list[list[int]] = [[] for _ in range(layout.stages)]
        for block, stage in enumerate(layout.stage_of):
            members[stage].append(block)
        self.stages = tuple(work.stage_of(tuple(blocks)) for blocks in members)
        wanted = {layout.stage_of[block]: size or microbatches for block, size in work.gather.items()}
        self.groups = tuple(wanted.get(stage, 1) for stage in range(layout.stages))
        """For each stage, the number of micro-batches for which it runs once."""

    @cached_property
    def messages(self) -> Mapping[tuple[int, int], int]:
        """(source stage, target stage) → the bytes that pass between them for a micro-batch."""
        sizes: dict[tuple[int, int], int] = {}
        stage_of = self.layout.stage_of
        # The last stage that makes a part of the model's result assembles the result.
        last = max((stage_of[block] for block in self.work.result), default=0)
        for value in self.work.values:
            source = stage_of[value.source]
            users = {stage_of[target] for target in value.targets} | ({last} if value.returned else set())
            for target in users - {source}:
                sizes[source, target] = sizes.get((source, target), 0) + value.size
        return sizes

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self.messages))

    @cached_property
    def backward(self) -> tuple[bool, ...]:
        """Whether each stage has a backward: the stage, or a stage before it, has trained parameters."""
        has_backward = [stage.trains for stage in self.stages]
        # Stages are numbered in topological order, so sorting edges by target settles each source before its targets.
        for source, target in sorted(self.edges, key=lambda edge: edge[1]):
            has_backward[target] = has_backward[target] or has_backward[source]
        return tuple(has_backward)

    @cached_property
    def costs(self) -> Costs:
        """The stages' costs. All hops get the seconds of the longest hop. A stage holds the messages that arrive for
        each micro-batch; the batch's own inputs are in memory anyway."""
        rank_of, node_costs = self._rank_of, self.work.costs
        hops = [self._hardware.hop(size) for (a, b), size in self.messages.items() if rank_of[a] != rank_of[b]]
        arriving = [0.0] * self.layout.stages
        for (_, target), size in self.messages.items():
            arriving[target] += size

        def at_once(seconds: Iterable[float]) -> tuple[float, ...]:
            return tuple(cost * size for cost, size in zip(seconds, self.groups, strict=True))

        def saved_bytes(keys: Iterable[frozenset[int]]) -> tuple[float, ...]:
            return tuple(map(node_costs.saved_bytes, keys))

        again = tuple(float(stage.again) for stage in self.stages)
        saved = saved_bytes(stage.saved for stage in self.stages)
        return Costs(
            at_once(stage.forward for stage in self.stages),
            at_once(stage.backward for stage in self.stages),
            at_once(min(stage.weight, stage.backward) for stage in self.stages),
            max(hops, default=0.0),
            saved,
            tuple(arriving),
            saved_bytes(stage.deferred for stage in self.stages) if node_costs.halves else None,
            again if any(again) else None,
            node_costs.source,
            copy=None if self._hardware.host_link is None else tuple(map(self._hardware.copy, saved)),
        )

    def costs_with(self, recomputed: Sequence[bool], by_layers: Sequence[bool] = ()) -> Costs:
        """The stages' costs if these stages are recomputed, and those checkpoint their layers."""
        costs = self.costs
        if self._keeping is not None and any(recomputed):
            # In an R, the model's own checkpoints keep all activations, so the backward computes nothing again.
            costs = _costs_at(costs, replace(self._keeping(), again_bytes=None), recomputed)
        if self._by_layers is not None and any(by_layers):
            costs = _costs_at(costs, self._by_layers(), by_layers)
        return costs

    @cached_property
    def tied_seconds(self) -> float:
        """The seconds of the gradient sums of parameters on several ranks. Gradients of the same ranks share a message,
        in the type in which gradients are summed."""
        owners: dict[int, set[int]] = {}
        for stage, rank in zip(self.stages, self._rank_of, strict=True):
            for key in stage.parameters & self.work.shared if isinstance(rank, int) else stage.parameters:
                owners.setdefault(key, set()).update(ranks_of(rank))
        # A ring all-reduce over r ranks sends 2 (r - 1) / r of the bytes.
        precision = self.work.costs.account.precision
        sizes: dict[frozenset[int], float] = {}
        for key, ranks in owners.items():
            cost = self.work.costs.parameters[key]
            if len(ranks) > 1 and cost.trained:
                size = cost.count * precision.reduce.itemsize if precision and cost.floating else cost.size
                sizes[frozenset(ranks)] = sizes.get(frozenset(ranks), 0.0) + size
        return sum(2 * (len(ranks) - 1) / len(ranks) * self._hardware.hop(size) for ranks, size in sizes.items())

    @cached_property
    def static_bytes(self) -> tuple[float, ...]:
        """Per rank, the bytes of its parameters, gradients and optimizer state; shared parameters count once."""
        keys: list[set[int]] = [set() for _ in range(rank_count(self._rank_of))]
        for stage, entry in zip(self.stages, self._rank_of, strict=True):
            for rank in ranks_of(entry):
                keys[rank] |= stage.parameters
        return tuple(map(self.work.costs.static_bytes, keys))

    def peaks(self, schedule: Schedule, costs: Costs) -> tuple[float, ...]:
        """Per rank, the bytes of parameters, gradients and optimizer state plus the peak bytes of activations."""
        return tuple(a + b for a, b in zip(self.static_bytes, peak_bytes(schedule, costs), strict=True))

    @cached_property
    def problem(self) -> Problem:
        return Problem(
            self.edges,
            self.microbatches,
            self._rank_of,
            self.backward,
            self.costs,
            groups=self.groups if max(self.groups) > 1 else None,
            recompute=tuple(map(all, zip(self._recomputed, self.backward, strict=True))),
        )

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound in seconds for every table of this layout."""
        return lower_bound(self.problem, self.costs, self.problem.groups) + self.tied_seconds


class Judge:
    """Simulates layouts with the family that will run, and caches its estimates.

    ``memory``: the most bytes per rank, or None. ``least_bytes``: the least peak of any layout so far.
    """

    def __init__(
        self,
        work: BlockGraph,
        family: Limited,
        microbatches: int,
        memory: float | None,
        again: Rerun | None = None,
    ) -> None:
        self.work, self.family, self.microbatches, self.memory = work, family, microbatches, memory
        self.again = again
        self.least_bytes = float("inf")
        self.actions = 0
        """The number of actions in all tables so far, a measure of effort that is equal on every machine."""
        self.refused: ScheduleError | None = None
        """The error of the last layout for which the family had no table."""
        self._least = cache(self._estimated)
        self.staged = cache(partial(Staged, work, microbatches=microbatches, again=again))

    def lower_bound(self, layout: StageLayout) -> float:
        return self.staged(layout).lower_bound

    def estimate(self, layout: StageLayout) -> LayoutOutcome | None:
        """The outcome of a layout with a lower bound of its table's makespan; None if the layout does not fit the
        memory, or if the family has no table."""
        least = self._least(layout)
        return least if least and (self.memory is None or least.most_bytes <= self.memory) else None

    def outcome(self, layout: StageLayout) -> LayoutOutcome | None:
        """The simulated outcome of a layout, without a memory limit; None if the family has no table."""
        least = self._least(layout)
        if least is None:
            return None
        makespan = least.schedule.simulate(least.costs).makespan
        return replace(least, makespan=makespan, seconds=makespan + self.staged(layout).tied_seconds)

    def _estimated(self, layout: StageLayout) -> LayoutOutcome | None:
        staged = self.staged(layout)
        try:
            schedule = self._table(staged)
            if (makespan := least_makespan(schedule, staged.costs)) == math.inf:
                schedule.simulate(staged.costs)  # raises, and names the deadlock
        except ScheduleError as error:
            self.refused = error
            return None
        peaks = staged.peaks(schedule, staged.costs)
        self.least_bytes = min(self.least_bytes, max(peaks))
        return LayoutOutcome(layout, makespan + staged.tied_seconds, makespan, schedule, staged.costs, peaks)

    def _table(self, staged: Staged) -> Schedule:
        """The family's table; ScheduleError if no table exists, or if the table breaks a limit."""
        family = in_numbers(replace(self.family, costs=staged.costs), staged.problem)
        problem = family.within(staged.problem)
        # As in plan/tables.py, the table without recomputation shows the stages in which recomputing saves nothing.
        if self.again is not None and self.again.worthwhile:
            without = self._solved(family, replace(problem, recompute=None), staged)
            problem = replace(problem, recompute=worthwhile(without))
        schedule = self._solved(family, problem, staged)
        if (excess := family.excess(schedule)) is not None:
            raise ScheduleError(f"{family.name} {excess}")
        return schedule

    def _solved(self, family: Limited, problem: Problem, staged: Staged) -> Schedule:
        rows = tuple(map(tuple, solved(family.family, problem)))
        # A table with a gathered stage takes about as long as 16 tables without, with several groups as 64.
        effort = 1 if max(staged.groups) == 1 else 16 if max(staged.groups) == self.microbatches else 64
        self.actions += effort * sum(map(len, rows))
        placement, backward = staged.layout.rank_of, staged.backward
        return Schedule(
            rows, staged.edges, placement, backward, self.microbatches, family.name, tied=(), costs=staged.costs
        )
