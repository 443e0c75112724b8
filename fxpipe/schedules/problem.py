"""What a schedule family is asked to solve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpipe.errors import ScheduleError


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
        if len(problem.order) < count:
            left = sorted(set(range(count)) - set(problem.order))
            raise ScheduleError(f"the edges form a cycle through stages {left}; a stage graph must be acyclic")
        return problem

    @property
    def ranks(self) -> int:
        return 1 + max(self.placement)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The stages in topological order; shorter than their number where there is a cycle."""
        order: list[int] = []
        while True:
            ready = [
                stage
                for stage in range(len(self.placement))
                if stage not in order and all(source in order for source, target in self.edges if target == stage)
            ]
            if not ready:
                return tuple(order)
            order.extend(ready)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """d(s): the number of stages on the longest path from s to a sink, s included."""
        depth = [1] * len(self.placement)
        for stage in reversed(self.order):
            targets = [target for source, target in self.edges if source == stage]
            depth[stage] = 1 + max((depth[target] for target in targets), default=0)
        return tuple(depth)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in self.order if self.placement[stage] == rank]
