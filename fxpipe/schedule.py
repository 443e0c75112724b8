"""``Schedule``: the table that is printed, verified, simulated and executed. One object, immutable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fxpipe.action import Action
from fxpipe.dependency import Dependencies
from fxpipe.errors import ScheduleError
from fxpipe.lower import Instruction, lower
from fxpipe.show import table
from fxpipe.simulate import Simulation, simulate
from fxpipe.verify import verify

Row = tuple[Action, ...]


class Link(NamedTuple):
    """An edge of a bare stage graph."""

    source: int
    target: int


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one per pipe rank, and the stage graph that they are for.

    ``edges``: pairs of stages. ``placement``: the rank of each stage. ``backward``: whether each stage has one.
    ``str()`` is the table: a row per rank, a column per step, then bubble, makespan and peak in flight.
    ScheduleError where these do not fit each other; what the rows do is for ``verify`` to say.
    """

    rows: tuple[Row, ...]
    edges: tuple[tuple[int, int], ...]
    placement: tuple[int, ...]
    backward: tuple[bool, ...]
    microbatches: int
    name: str = "custom"
    stage_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.placement)
        for name, given in (("backward", self.backward), ("stage_names", self.stage_names or self.placement)):
            if len(given) != stages:
                raise ScheduleError(f"{name} has {len(given)} entries for {stages} stages")
        for source, target in self.edges:
            if not (0 <= source < stages and 0 <= target < stages):
                raise ScheduleError(f"edge {source}-{target} names a stage outside of 0..{stages - 1}")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.rows):
                raise ScheduleError(f"stage {stage} is placed on rank {rank}, but there are {len(self.rows)} rows")

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies.of(self.links, self.backward)

    @cached_property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each rank's instructions, with one message per edge of the stage graph."""
        return lower(self.rows, self.links, self.placement, self.backward)

    def verify(self) -> None:
        """ScheduleError if an action is missing or repeated, a dependency is broken, or the ranks would hang."""
        verify(self)

    def simulate(
        self,
        forward: float | Sequence[float] = 1,
        backward: float | Sequence[float] = 2,
        weight: float | Sequence[float] | None = None,
        comm: float = 0,
    ) -> Simulation:
        """When each action would run. Costs are one number, or one per stage; ``comm`` is the latency of a hop."""
        return simulate(self, forward, backward, weight, comm)

    def __str__(self) -> str:
        return table(self)
