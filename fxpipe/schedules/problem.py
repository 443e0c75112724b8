"""What a schedule family is asked to solve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from fxpipe.dependency import Dependencies
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Link


@dataclass(frozen=True)
class Problem:
    """Stages 0 … n−1 with edges between them, each placed on a rank, and a number of micro-batches."""

    edges: tuple[tuple[int, int], ...]
    microbatches: int
    placement: tuple[int, ...]
    backward: tuple[bool, ...]

    @staticmethod
    def checked(
        edges: tuple[tuple[int, int], ...],
        microbatches: int,
        placement: tuple[int, ...],
        backward: tuple[bool, ...],
    ) -> Problem:
        """A problem that makes sense; ScheduleError with the values where it does not."""
        count = len(placement)
        if microbatches < 1:
            raise ScheduleError(f"{microbatches} micro-batches; at least 1 is needed")
        if len(backward) != count:
            raise ScheduleError(f"backward= has {len(backward)} entries for {count} stages")
        for source, target in edges:
            if not (0 <= source < count and 0 <= target < count):
                raise ScheduleError(f"edge {source}-{target} names a stage outside of 0..{count - 1}")
        ranks = sorted(set(placement))
        if ranks != list(range(len(ranks))):
            raise ScheduleError(f"placement {list(placement)} leaves a rank without stages; ranks count from 0")
        problem = Problem(edges, microbatches, placement, backward)
        try:
            _ = problem.order
        except CycleError as error:
            cycle = " → ".join(map(str, error.args[1]))
            raise ScheduleError(f"the edges form a cycle, {cycle}; a stage graph must be acyclic") from None
        return problem

    @property
    def ranks(self) -> int:
        return 1 + max(self.placement)

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies.of([Link(*edge) for edge in self.edges], self.backward)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The stages in topological order: those with nothing left before them, by number, then the next."""
        sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(self.placement)), ()))
        for source, target in self.edges:
            sorter.add(target, source)
        sorter.prepare()
        order: list[int] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            sorter.done(*ready)
            order += ready
        return tuple(order)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """d(s): the number of stages on the longest path from s to a sink, s included."""
        targets: list[list[int]] = [[] for _ in self.placement]
        for source, target in self.edges:
            targets[source].append(target)
        depth = [1] * len(self.placement)
        for stage in reversed(self.order):
            depth[stage] = 1 + max((depth[target] for target in targets[stage]), default=0)
        return tuple(depth)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in self.order if self.placement[stage] == rank]
