"""Problem: the input of a schedule family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, rank_count, ranks_of, replicated
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, Link, longest_paths
from fxpipe.schedules.given import check_costs, check_graph, check_length
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """Stages 0 … n−1 with edges between them, each placed on a rank, and a number of micro-batches.

    Families solve problems with one rank per stage: ``solve.placed_beside`` places stages on several ranks.
    """

    edges: tuple[tuple[int, int], ...]
    microbatches: int
    placement: Placement
    backward: tuple[bool, ...]
    costs: Costs
    """The costs, for families that use them."""
    in_flight: tuple[int, ...] | None = None
    """The most micro-batches that each stage may hold, if the user limits them."""
    memory: tuple[float, ...] | None = None
    """The most bytes of micro-batches in flight that each rank may hold."""
    groups: tuple[int, ...] | None = None
    """The number of micro-batches in an action of each stage, 1 if not gathered. None: no stage is gathered."""
    recompute: tuple[bool, ...] | None = None
    """Whether each stage runs its forward again for its backward. A family may ignore it: ``build`` adds the R's."""
    offload: tuple[bool, ...] | None = None
    """Whether the activations of each stage may leave for the host. A family may ignore it: ``build`` adds the O's."""

    def check(self) -> None:
        """Raises ScheduleError, with the values, if the problem is not valid."""
        count = len(self.placement)
        check_length("backward=", self.backward, count)
        check_graph(self.edges, count, self.microbatches)
        check_costs(self.costs, count, self.microbatches)
        ranks = {rank for entry in self.placement for rank in ranks_of(entry)}
        if ranks != set(range(len(ranks))):
            raise ScheduleError(f"placement {list(self.placement)} leaves a rank without stages; ranks count from 0")
        if self.in_flight is not None:
            check_length("in_flight=", self.in_flight, count)
            if min(self.in_flight) < 1:
                raise ScheduleError(f"in_flight={self.in_flight}; at least 1 micro-batch must be in flight")
        for name, flags in (("recompute=", self.recompute), ("offload=", self.offload)):
            if flags is not None:
                check_length(name, flags, count)
        for stage in self.recomputed & self.offloaded:
            raise ScheduleError(f"stage {stage} is in recompute= and in offload=; leave out one of them")
        if self.memory is not None:
            check_length("memory=", self.memory, self.ranks, "ranks")
            if self.costs.activation_bytes is None:
                raise ScheduleError("memory= needs the costs' activation_bytes: what a stage holds of a micro-batch")
        for stage in replicated(self.placement):
            turns, groups = len(ranks_of(self.placement[stage])), self.microbatches // self.group(stage)
            if self.group(stage) > 1 and turns > groups:
                raise ScheduleError(
                    f"stage {stage} is gathered, and on {turns} ranks, with {groups} group{'s' * (groups > 1)} of "
                    f"{self.group(stage)} micro-batches; place it on as many ranks at most as it has groups"
                )
        sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(count), ()))
        for source, target in self.edges:
            sorter.add(target, source)
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " → ".join(map(str, error.args[1]))
            raise ScheduleError(f"the edges form a cycle, {cycle}; a stage graph must be acyclic") from None

    @property
    def ranks(self) -> int:
        return rank_count(self.placement)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The rank of each stage, the first rank if the stage is on several."""
        return tuple(ranks_of(entry)[0] for entry in self.placement)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependencies for backwards that are not split."""
        groups = {stage: size for stage, size in enumerate(self.groups or ()) if size > 1}
        return replace(Dependencies.from_edges(self.links, self.backward), groups=groups)

    @property
    def is_grouped(self) -> bool:
        """Whether some stage runs for several micro-batches at once."""
        return bool(self.dependencies.groups)

    @property
    def recomputed(self) -> frozenset[int]:
        """The stages that are recomputed; a stage without backward never is."""
        return self._trained(self.recompute)

    @property
    def offloaded(self) -> frozenset[int]:
        """The stages that may be offloaded; a stage without backward never is."""
        return self._trained(self.offload)

    def _trained(self, marked: tuple[bool, ...] | None) -> frozenset[int]:
        flags = zip(marked or (), self.backward, strict=False)
        return frozenset(stage for stage, (is_marked, trained) in enumerate(flags) if is_marked and trained)

    def group(self, stage: int) -> int:
        """Returns the number of micro-batches in an action of a stage."""
        return self.groups[stage] if self.groups else 1

    def actions(self, stage: int, kind: Kind) -> list[Action]:
        """Returns all actions of a stage and kind, in the order of their micro-batches."""
        size = self.group(stage)
        return [Action(stage, kind, microbatch, size) for microbatch in range(0, self.microbatches, size)]

    def table(self, rows: tuple[Row, ...]) -> Schedule:
        """Returns the schedule of these rows, without names and costs."""
        return Schedule(rows, self.edges, self.placement, self.backward, self.microbatches)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The stages in topological order: first those without predecessors, by number, then the next."""
        height = longest_paths(self.dependencies.sources, len(self.placement))
        return tuple(sorted(range(len(height)), key=height.__getitem__))

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """d(s): the number of stages on the longest path from s to a sink, s included."""
        return longest_paths(self.dependencies.readers, len(self.placement))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that use its values, each once."""
        return tuple(self.dependencies.readers.get(stage, ()) for stage in range(len(self.placement)))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in topological order."""
        stages: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage in self.order:
            for rank in ranks_of(self.placement[stage]):
                stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @property
    def one_stage_a_rank(self) -> bool:
        return self.ranks == len(self.placement)
