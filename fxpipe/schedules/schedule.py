"""``Schedule``: the table that is printed, verified, simulated and executed. One object, immutable."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fxpipe.errors import ScheduleError
from fxpipe.formats import csv_file
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.dependency import Dependencies, Link
from fxpipe.schedules.lower import Instruction, lower
from fxpipe.schedules.simulate import simulate
from fxpipe.schedules.table import table
from fxpipe.schedules.timeline import Timeline
from fxpipe.schedules.verify import verify

Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one per pipe rank, and the stage graph that they are for.

    ``str()`` is the table: a row per rank, a column per step, then bubble, makespan and peak in flight. What the rows
    do is for ``verify`` to say.

    Raises:
        ScheduleError: the fields do not fit each other.

    >>> rows = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
    >>> table = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    >>> schedule = Schedule(table, edges=((0, 1),), placement=(0, 1), backward=(True, True), microbatches=2)
    >>> schedule.verify()
    >>> schedule.simulate(forward=1, backward=2).makespan  # (m + p − 1)(F + B), for m = 2 micro-batches on p = 2 ranks
    9.0
    """

    rows: tuple[Row, ...]
    edges: tuple[tuple[int, int], ...]
    """Pairs of stages."""
    placement: tuple[int, ...]
    """The rank of each stage."""
    backward: tuple[bool, ...]
    """Whether each stage has one."""
    microbatches: int
    name: str = "custom"
    stage_names: tuple[str, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    """Groups of stages that share a parameter, whose gradients are summed over their ranks at the end."""
    costs: Costs | None = None
    """What it was built for, where that is known; the figures below the printed table are at these."""

    def __post_init__(self) -> None:
        for name in ("rows", "edges", "tied"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        for name in ("placement", "backward", "stage_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.microbatches < 1:
            raise ScheduleError(f"{self.microbatches} micro-batches; at least 1 is needed")
        stages = len(self.placement)
        for name, given in (("backward", self.backward), ("stage_names", self.stage_names or self.placement)):
            if len(given) != stages:
                raise ScheduleError(f"{name} has {len(given)} entries for {stages} stages")
        for source, target in self.edges:
            if not (0 <= source < stages and 0 <= target < stages):
                raise ScheduleError(f"edge {source}-{target} names a stage outside of 0..{stages - 1}")
        for stage in (stage for group in self.tied for stage in group):
            if not 0 <= stage < stages:
                raise ScheduleError(f"tied names stage {stage}, which is outside of 0..{stages - 1}")
        stranger = next((cell for row in self.rows for cell in row if not isinstance(cell, Action)), None)
        if stranger is not None:
            raise ScheduleError(f"{stranger!r} is no Action; write Action(2, Op.F, 0), or Action.parse('2F0')")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < len(self.rows):
                raise ScheduleError(f"stage {stage} is placed on rank {rank}, but there are {len(self.rows)} rows")

    @staticmethod
    def from_csv(path: csv_file.StrPath, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
        """Reads a table in the cells that torch.distributed.pipelining reads and writes: a line per rank, ``0F3,2B1``.

        A stage is on the rank that has most of its actions, and has a backward where the table has a B, I or W of it.
        Files with sends and receives, and torch's UNSHARD, RESHARD and REDUCE_GRAD, are read too: such a cell is
        checked and then dropped, for fxpipe lowers anew, so that messages and reductions follow from the rows. An
        OVERLAP_F_B is read as its actions in order.

        Args:
            path: the file; the table is called after it.
            edges: pairs of stages; None: a chain in the order of their numbers. ``fxpipe.compile`` puts the model's own
                in their place. Give them to have the messages checked: each send behind its action, each receive in
                front of its own, one for the other, in one order at both ends. Without them, those that are no chain's
                are of another graph, which the file does not tell: then only their places by their actions and their
                number are checked.

        Raises:
            ScheduleError: the file is malformed, or its messages do not fit; with line, cell (both count from 1) and
                its text. What is wrong with its table is for ``verify`` to say.
            OSError: it cannot be read.
        """
        table = csv_file.read(path, edges)
        name = Path(path).stem
        return Schedule(table.rows, table.edges, table.placement, table.backward, table.microbatches, name)

    def to_csv(self, path: csv_file.StrPath, communication: bool = False) -> None:
        """Writes the table for ``from_csv``, or for torch.distributed.pipelining: a line per rank.

        Which stages share a parameter (``tied``) is not in it.

        Args:
            path: the file.
            communication: False: the lines are aligned by step, with an empty cell where a rank idles. True: they have
                a cell for every message, ``0SEND_F3`` on the rank that sends and ``1RECV_F3`` on the one that receives,
                in an order in which a receive may be waited for.

        Raises:
            ScheduleError: a table that is to be written with communication does not verify.
            OSError: the file cannot be written.
        """
        if communication:
            self.verify()
        csv_file.write(self, path, communication)

    def name_of(self, stage: int) -> str:
        """A stage's name, or its number where it has none."""
        return self.stage_names[stage] if self.stage_names else str(stage)

    def label(self, stage: int) -> str:
        """A stage's number and, where it has one, its name: ``2: loss``."""
        name = self.name_of(stage)
        return name if name == str(stage) else f"{stage}: {name}"

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @cached_property
    def dependencies(self) -> Dependencies:
        return Dependencies.of(self.links, self.backward, self.rows)

    @cached_property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each rank's instructions, with one message per edge of the stage graph."""
        return lower(self.rows, self.links, self.placement, self.backward, self.tied)

    def verify(self) -> None:
        """ScheduleError if an action is missing or repeated, a dependency is broken, or the ranks would hang."""
        _ = self._verified

    @cached_property
    def _verified(self) -> None:
        """A table cannot change, so that it need be verified only once."""
        verify(self)

    def simulate(
        self,
        forward: Cost | Costs = 1,
        backward: Cost = 2,
        weight: Cost | None = None,
        comm: float = 0,
        activation_bytes: Cost | None = None,
    ) -> Timeline:
        """When each action would run, at costs that are one number each, or one per stage.

        Args:
            forward: what an action F takes; or all costs, as ``Costs``.
            backward: what an action B takes, and I and W together.
            weight: the part of ``backward`` that W does; None: half of it.
            comm: the latency of a hop between ranks.
            activation_bytes: what a stage holds per micro-batch in flight.

        Raises:
            ScheduleError: the costs do not fit the stages, or the table comes to a halt.
        """
        if not isinstance(forward, Costs):
            forward = Costs.of(len(self.placement), forward, backward, weight, comm, activation_bytes)
        return simulate(self, forward)

    def planned(self, costs: Costs | None = None) -> Timeline:
        """Simulated at these costs, or those that it was built for, or F = 1 and B = 2."""
        return self.simulate(costs or self.costs or 1)

    def to_svg(self, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
        """Writes the picture of the plan, at these costs or those that it was built for; see ``Timeline.to_svg``."""
        self.planned(costs).to_svg(path)

    def to_html(self, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
        """Writes the plan as a page, at these costs or those that it was built for; see ``Timeline.to_html``."""
        self.planned(costs).to_html(path)

    def to_trace(self, path: str | os.PathLike[str], costs: Costs | None = None) -> None:
        """Writes the plan as a trace, at these costs or those that it was built for; see ``Timeline.to_trace``."""
        self.planned(costs).to_trace(path)

    def __str__(self) -> str:
        return table(self)
