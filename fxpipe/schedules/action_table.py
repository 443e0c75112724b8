"""``ActionTable``: the rows of a schedule, and what follows from the rows alone.

Code that checks, simulates and shows a schedule needs this part of it, and ``Schedule`` calls this code.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, RankOf, as_placement, ranks_of
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import Dependencies, Link, groups_of
from fxpipe.schedules.given import check_cells, check_costs, check_given, check_graph, check_length, in_order, nested
from fxpipe.schedules.kinds import Kind, by_position
from fxpipe.schedules.lower import Instruction, Lowering, lower

StrPath = str | os.PathLike[str]
Row = tuple[Action, ...]


@dataclass(frozen=True)
class ActionTable(ABC):
    """Rows of actions, one row per pipe rank, and the stage graph that the rows are for.

    Raises:
        ScheduleError: the fields do not fit each other.
    """

    rows: tuple[Row, ...]
    edges: tuple[tuple[int, int], ...]
    """Pairs of stages."""
    placement: Placement
    """The rank of each stage, or its r ranks: micro-batch i is on the (i mod r)-th of these."""
    backward: tuple[bool, ...]
    """Whether each stage has a backward."""
    microbatches: int
    name: str = "custom"
    stage_names: tuple[str, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of stages that share a parameter, whose gradients are summed over the stages' ranks at the end."""
    costs: Costs | None = None
    """The costs that the schedule was built for, if known; the figures below the printed table use these costs."""

    def __post_init__(self) -> None:
        for name in ("rows", "edges", "tied"):
            object.__setattr__(self, name, nested(getattr(self, name)))
        for name in ("placement", "backward", "stage_names"):
            object.__setattr__(self, name, in_order(getattr(self, name)))
        check_given(**vars(self))
        object.__setattr__(self, "placement", as_placement(self.placement))
        stages = len(self.placement)
        check_length("backward", self.backward, stages)
        check_length("stage_names", self.stage_names or self.placement, stages)
        check_graph(self.edges, stages, self.microbatches)
        check_cells(self.rows, stages, self.microbatches)
        object.__setattr__(self, "rows", tuple(map(_named_by_position, self.rows)))
        if self.costs is not None:
            check_costs(self.costs, stages, self.microbatches)
        if any(not 0 <= stage < stages for group in self.tied for stage in group):
            raise ScheduleError(f"tied={self.tied} names a stage outside of 0..{stages - 1}")
        if any(not 0 <= rank < len(self.rows) for entry in self.placement for rank in ranks_of(entry)):
            raise ScheduleError(f"placement={self.placement} names a rank outside of 0..{len(self.rows) - 1}, the rows")

    def name_of(self, stage: int) -> str:
        """Returns a stage's name, or its number if the stage has no name."""
        return self.stage_names[stage] if self.stage_names else str(stage)

    def label(self, stage: int) -> str:
        """Returns a stage's number and, if the stage has one, its name: ``2: loss``."""
        name = self.name_of(stage)
        return name if name == str(stage) else f"{stage}: {name}"

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The number of micro-batches in an action of each stage: 1, or the group size at a gathered stage."""
        return self.rank_of.sizes

    @cached_property
    def rank_of(self) -> RankOf:
        """(stage, micro-batch) → the rank that runs it."""
        return RankOf.from_placement(self.placement, groups_of(self.rows))

    def rank(self, action: Action) -> int:
        """Returns the rank that runs an action."""
        return self.rank_of(action.stage, action.microbatch)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        stages: list[list[int]] = [[] for _ in self.rows]
        for stage, entry in enumerate(self.placement):
            for rank in ranks_of(entry):
                stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @property
    @abstractmethod
    def dependencies(self) -> Dependencies:
        """The dependencies, with the waits that limit how far stages without backward run ahead."""

    @cached_property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each rank's instructions, with one message per edge of the stage graph."""
        return lower(self.rows, self.links, self.placement, self.backward, self.tied, self.dependencies.ahead)

    @cached_property
    def _messages(self) -> Lowering:
        """The messages of a table with right cells. A stage's value goes once to each rank that needs it."""
        values = [source for source, _ in self.edges]
        return Lowering(self.rows, self.links, self.placement, self.backward, values)


def _named_by_position(row: Row) -> Row:
    """The row in which each O and P after the I of its micro-batch is of the kind OW or PW, and no other one is."""
    if all(action.kind.lane is None for action in row):
        return row
    halved_at = {(stage, microbatch): cell for cell, (stage, kind, microbatch, _) in enumerate(row) if kind is Kind.I}
    return tuple(
        action._replace(kind=by_position(action.kind, halved_at.get((action.stage, action.microbatch), cell) < cell))
        for cell, action in enumerate(row)
    )
