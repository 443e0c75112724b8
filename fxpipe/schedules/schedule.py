"""``Schedule``, a table to print, verify, simulate and execute, and ``Timeline``, the times of its actions.

The two classes use each other, so they share a file. The code that shows and checks them depends on this file, and is
imported where it is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, RankOf, as_placement, ranks_of
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.dependency import Dependencies, Link, groups_of, held_back
from fxpipe.schedules.given import check_cells, check_given, check_graph, check_length, in_order, nested
from fxpipe.schedules.kinds import BACKWARD, Lane
from fxpipe.schedules.lower import Instruction, Lowering, lower
from fxpipe.schedules.step_breakdown import Spell, Spent, in_csv, spent, tabulated
from fxpipe.small_file import write_whole

StrPath = str | os.PathLike[str]
Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one row per pipe rank, and the stage graph that the rows are for.

    ``str()`` is the table: a row per rank, a column per step, then bubble, makespan and peak in flight. ``verify``
    checks that the rows can run.

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
        if self.costs is not None:
            check_length("costs.forward", self.costs.forward, stages)
        if any(not 0 <= stage < stages for group in self.tied for stage in group):
            raise ScheduleError(f"tied={self.tied} names a stage outside of 0..{stages - 1}")
        if any(not 0 <= rank < len(self.rows) for entry in self.placement for rank in ranks_of(entry)):
            raise ScheduleError(f"placement={self.placement} names a rank outside of 0..{len(self.rows) - 1}, the rows")

    @staticmethod
    def from_csv(path: StrPath, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
        """Reads a table from a file of torch.distributed.pipelining's format: a line per rank, ``0F3,2B1``.

        A stage is on the rank that has most of its actions, and has a backward if the table has a B, I or W of the
        stage. Files with sends and receives, and with torch's UNSHARD, RESHARD and REDUCE_GRAD, are read too: fxpipe
        drops such cells, and derives messages and reductions from the rows. An OVERLAP_F_B is read as its actions in
        order.

        Args:
            path: the file, after which the table is named.
            edges: pairs of stages; None: a chain in the order of their numbers. ``fxpipe.compile`` replaces them by the
                model's own. With edges, the messages are compared: each line must have the messages of its rank in
                the lowered table. Without edges, messages may be of another graph, which the file does not hold.

        Raises:
            ScheduleError: the file is malformed, or its messages do not fit; with line and cell, which count from 1.
                ``verify`` finds errors in the table itself.
            OSError: the file cannot be read.
        """
        from fxpipe.schedules.show import csv_file

        return csv_file.read(path, edges)

    def to_csv(self, path: StrPath, communication: bool = False) -> None:
        """Writes the table for ``from_csv``, or for torch.distributed.pipelining: a line per rank.

        The file does not say which stages share a parameter (``tied``). torch has no cells for a group of
        micro-batches, ``4F0-3``, or for an R: only ``from_csv`` reads a file with such cells.

        Args:
            path: the file.
            communication: False: the lines are aligned by step, with an empty cell where a rank idles. True: they have
                a cell for every message, ``0SEND_F3`` on the rank that sends and ``1RECV_F3`` on the receiver,
                in an order in which a receive may be waited for.

        Raises:
            ScheduleError: the table is written with communication, and does not verify.
            OSError: the file cannot be written.
        """
        from fxpipe.schedules.show import csv_file

        csv_file.write(self, path, communication)

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
        sizes = groups_of(self.rows)
        return tuple(sizes.get(stage, 1) for stage in range(len(self.placement)))

    @cached_property
    def rank_of(self) -> RankOf:
        """(stage, micro-batch) → the rank that runs it."""
        return RankOf.of(self.placement, groups_of(self.rows))

    def rank(self, action: Action) -> int:
        """Returns the rank that runs an action."""
        return self.rank_of(action.stage, action.microbatch)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        places = [ranks_of(entry) for entry in self.placement]
        return tuple(tuple(s for s, ranks in enumerate(places) if rank in ranks) for rank in range(len(self.rows)))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependencies, with the waits that limit how far stages without backward run ahead."""
        from fxpipe.schedules.simulate import makespan

        # Simulation finds the caps, since caps must not make the step longer.
        free = Dependencies.of(self.links, self.backward, self.rows)
        turns = [len(ranks_of(entry)) for entry in self.placement]
        return held_back(free, self.backward, self.microbatches, lambda capped: makespan(self, capped), turns)

    @cached_property
    def instructions(self) -> tuple[tuple[Instruction, ...], ...]:
        """Each rank's instructions, with one message per edge of the stage graph."""
        return lower(self.rows, self.links, self.placement, self.backward, self.tied, self.dependencies.ahead)

    @cached_property
    def _messages(self) -> Lowering:
        """The messages of the table. A stage's value goes once to each rank that needs it."""
        from fxpipe.schedules.verify import check_cells

        check_cells(self)
        values = [source for source, _ in self.edges]
        return Lowering(self.rows, self.links, self.placement, self.backward, values)

    def verify(self) -> None:
        """ScheduleError if an action is missing or repeated, a dependency is broken, or the ranks would hang."""
        from fxpipe.schedules.verify import verify

        # A table cannot change, so one check is enough; the flag is no field, and comparison ignores it.
        if "_verified" not in vars(self):
            verify(self)
            object.__setattr__(self, "_verified", True)

    def simulate(
        self,
        forward: Cost | Costs = 1,
        backward: Cost = 2,
        weight: Cost | None = None,
        comm: float = 0,
        activation_bytes: Cost | None = None,
    ) -> Timeline:
        """Returns when each action would run; each cost is one number, or a list with one per stage.

        Args:
            forward: the time of an action F; or all costs, as ``Costs``.
            backward: the time of an action B, and of I and W together.
            weight: the part of ``backward`` that W takes; None: half of ``backward``.
            comm: the time of a message between two ranks. Each directed pair carries one message at a time.
            activation_bytes: the bytes that a stage holds per micro-batch in flight.

        Raises:
            ScheduleError: the costs do not fit the stages, or the table deadlocks.
        """
        from fxpipe.schedules.simulate import simulate

        if not isinstance(forward, Costs):
            forward = Costs.of(len(self.placement), forward, backward, weight, comm, activation_bytes)
        check_length("costs.forward", forward.forward, len(self.placement))
        return simulate(self, forward)

    def planned(self, costs: Costs | None = None) -> Timeline:
        """Simulates the table at these costs, or at the costs that it was built for, or at F = 1 and B = 2."""
        return self.simulate(costs or self.costs or 1)

    def to_svg(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the plan as SVG, at these costs or the table's own; see ``Timeline.to_svg``."""
        self.planned(costs).to_svg(path)

    def to_html(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the plan as HTML, at these costs or the table's own; see ``Timeline.to_html``."""
        self.planned(costs).to_html(path)

    def to_trace(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the plan as a trace, at these costs or the table's own; see ``Timeline.to_trace``."""
        self.planned(costs).to_trace(path)

    def __str__(self) -> str:
        from fxpipe.schedules.table import table

        return table(self)

    def __repr__(self) -> str:
        sizes = f"{len(self.placement)} stages on {len(self.rows)} ranks, {self.microbatches} micro-batches"
        return f"<Schedule {self.name}: {sizes}>"

    def _repr_html_(self) -> str:
        """Returns the output of a notebook cell: the picture of the plan, and the table."""
        from fxpipe.schedules.show.html_page import pictured

        return pictured(self)


class Span(NamedTuple):
    """When an action runs."""

    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class Cause(NamedTuple):
    """The cause of an action's start: the action that it waited for, and whether that action's result changed ranks."""

    action: Action
    crosses: bool


class Copy(NamedTuple):
    """When a rank's copy lane copied the activations of an action's micro-batches.

    ``action``: the F whose activations left for the host, or the P that brought them back.
    """

    rank: int
    lane: Lane
    action: Action
    start: float
    end: float


class Reduction(NamedTuple):
    """When gradients were reduced over the data axis while a pipe rank ran its actions: from the start of the first
    collective to the end of the last; a reduction may have several collectives."""

    rank: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a schedule's actions, and figures derived from the spans.

    ``Schedule.simulate`` makes a timeline from costs; ``ForwardBackward.timeline`` measures a timeline. Times are in
    the unit of the costs, in seconds if measured. The first action begins at 0.
    """

    schedule: Schedule
    spans: Mapping[Action, Span]
    since: Mapping[Action, float]
    """The time at which an action's rank was ready for the action; the rank waited from then to the span's start."""
    costs: Costs
    """The costs of the plan; for a measured timeline, the measured medians."""
    measured: bool = False
    reductions: tuple[Reduction, ...] = ()
    """The reductions over the data axis, if measured; each rank's in the order in which they started."""
    spells: tuple[Spell, ...] = ()
    """If measured, the spells of each process from the step's beginning to its end, one process after another."""
    awaited: Mapping[Action, Action] = field(default_factory=dict)
    """For a plan: an action → the action of another rank, or the action that began a copy, that it waited for after
    its own rank was ready."""
    copies: tuple[Copy, ...] = ()
    """The copies of activations to the host and back; each rank's in the order in which they began."""
    advice: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    """For a measured timeline of a run: finds the one change of placement that would help most, as ``advise`` does."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "advice": None}  # the advice comes from the run's own state

    @cached_property
    def spent(self) -> tuple[Spent, ...]:
        """How each process's step divides: compute, waiting for each message, Python between actions, and the time
        before the first action and after the last one. Empty for a plan."""
        return spent(self.spells)

    @cached_property
    def makespan(self) -> float:
        """The time from the step's start at 0 to the end of the last action."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(self.spans[action].duration for action in row) for row in ran(self))

    @cached_property
    def overlapped(self) -> tuple[Reduction, ...]:
        """The reductions that started before the last backward of their rank had ended."""
        # A reduction that starts after the last backward of its rank overlaps nothing.
        last = [0.0] * len(self.schedule.rows)
        for action, span in self.spans.items():
            if action.kind.part_of is BACKWARD:
                rank = self.schedule.rank(action)
                last[rank] = max(last[rank], span.end)
        return tuple(reduction for reduction in self.reductions if reduction.start < last[reduction.rank])

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle part of each rank's time, from 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle part of all ranks' time: the mean over ranks."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else 0.0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches whose forward (at a recomputed stage, whose R) has run, and whose backward
        has not ended. A group counts as all of its micro-batches."""
        from fxpipe.schedules.simulate import peak_in_flight

        return peak_in_flight(self.schedule)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank, the most bytes of micro-batches in flight; None if the costs have no ``activation_bytes``."""
        from fxpipe.schedules.simulate import peak_bytes

        return None if self.costs.activation_bytes is None else peak_bytes(self.schedule, self.costs)

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound of the makespan, at these costs, of all tables that split the same backwards in halves."""
        from fxpipe.schedules.simulate import lower_bound

        return lower_bound(self.schedule, self.costs, self.schedule.groups, self.schedule.rows)

    def cause(self, action: Action) -> Cause | None:
        """Returns the last event that had to happen before an action could begin; None if no event had to.

        If the rank was busy until then, the cause is the rank's previous action.
        """
        if action in self.awaited:
            other = self.awaited[action]
            return Cause(other, self.schedule.rank(other) != self.schedule.rank(action))
        # The previous action on the same rank counts first: if it ended last, the action waited for nothing else.
        rank = self.schedule.rank(action)
        ahead = self._ahead.get(action)
        cause, latest = (None, 0.0) if ahead is None else (Cause(ahead, False), self.spans[ahead].end)
        for other in self.schedule.dependencies.needs(action):
            if other in self.spans:
                crosses = self.schedule.rank(other) != rank
                arrival = self.spans[other].end + self.costs.comm * crosses
                if cause is None or arrival > latest:
                    cause, latest = Cause(other, crosses), arrival
        return cause

    def waited(self, action: Action) -> float:
        """Returns how long an action's rank waited before the action; 0 if it did not run, or if unknown."""
        return self.spans[action].start - self.since[action] if action in self.spans and action in self.since else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The actions from the first to the action that ends the step; each waited for the action before it."""
        # Walks back from the step's end, from each action to the action that it waited for last.
        path: list[Action] = []
        action = max(self.spans, key=lambda action: self.spans[action].end, default=None)
        while action is not None:
            path.append(action)
            cause = self.cause(action)
            action = cause.action if cause is not None else None
        return tuple(reversed(path))

    def to_svg(self, path: StrPath) -> None:
        """Writes the picture as SVG: a row per rank, to scale, with bubbles and the critical path."""
        from fxpipe.schedules.show.svg_picture import svg

        write_whole(path, svg(self))

    def to_html(self, path: StrPath) -> None:
        """Writes the picture as an HTML page; a cell's title says when the action ran and what it waited for."""
        from fxpipe.schedules.show.html_page import html

        write_whole(path, html(self))

    def to_trace(self, path: StrPath) -> None:
        """Writes a trace that ui.perfetto.dev and chrome://tracing open; a planned unit of time is shown as 1 ms."""
        from fxpipe.schedules.show.chrome_trace import chrome_trace

        write_whole(path, chrome_trace(self))

    def to_csv(self, path: StrPath) -> None:
        """Writes the spells of each process, a line for each: ``rank,category,what,start,end``, in seconds."""
        write_whole(path, in_csv(self.spells))

    @cached_property
    def _ahead(self) -> Mapping[Action, Action]:
        return {second: first for row in ran(self) for first, second in pairwise(row)}

    def __str__(self) -> str:
        from fxpipe.schedules.table import table

        text = table(self)
        if self.reductions:
            early, all_of_them = len(self.overlapped), len(self.reductions)
            text += f"\nreductions: {early} of {all_of_them} started before the last backward of their rank had ended"
        return f"{text}\n{tabulated(self.spells)}" if self.spells else text

    def __repr__(self) -> str:
        from fxpipe.schedules.show.words import headline

        what, figures = headline(self)
        return f"<Timeline of {what}: {figures}>"

    def _repr_html_(self) -> str:
        """Returns the output of a notebook cell: the picture, and the table."""
        from fxpipe.schedules.show.html_page import pictured

        return pictured(self)


def ran(timeline: Timeline) -> list[list[Action]]:
    """Returns each rank's actions that ran, in order; a micro-batch without weight has no backward."""
    return [[action for action in row if action in timeline.spans] for row in timeline.schedule.rows]
