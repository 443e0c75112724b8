"""``Schedule``, the table that is printed, verified, simulated and executed, and ``Timeline``, when its actions run.

They speak of each other, so they are one file. What shows and checks them stands above, and is imported where it is
called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import Placement, RankOf, as_placement, ranks_of
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.dependency import Dependencies, Link, groups_of, held_back
from fxpipe.schedules.given import check_cells, check_given, check_graph, check_length, in_order, nested
from fxpipe.schedules.lower import Instruction, Lowering, lower
from fxpipe.schedules.step_breakdown import Spell, Spent, in_csv, spent, tabulated
from fxpipe.small_file import write_whole

StrPath = str | os.PathLike[str]
Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one per pipe rank, and the stage graph that they are for.

    ``str()`` is the table: a row per rank, a column per step, then bubble, makespan and peak in flight. ``verify``
    finds out whether the rows can run.

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
    """The rank of each stage, or its ranks: there micro-batch i is on the (i mod r)-th of r."""
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
        if any(not 0 <= rank < len(self.rows) for place in self.placement for rank in ranks_of(place)):
            raise ScheduleError(f"placement={self.placement} names a rank outside of 0..{len(self.rows) - 1}, the rows")

    @staticmethod
    def from_csv(path: StrPath, edges: Iterable[tuple[int, int]] | None = None) -> Schedule:
        """Reads a table in the cells that torch.distributed.pipelining reads and writes: a line per rank, ``0F3,2B1``.

        A stage is on the rank that has most of its actions, and has a backward where the table has a B, I or W of it.
        Files with sends and receives, and torch's UNSHARD, RESHARD and REDUCE_GRAD, are read too: such a cell is
        dropped, for fxpipe lowers anew, so that messages and reductions follow from the rows. An OVERLAP_F_B is read as
        its actions in order.

        Args:
            path: the file; the table is called after it.
            edges: pairs of stages; None: a chain in the order of their numbers. ``fxpipe.compile`` puts the model's own
                in their place. Give them to have the messages compared: each line must have those that its rank has in
                the lowered table. Without them they are taken for those of another graph, which the file does not hold.

        Raises:
            ScheduleError: the file is malformed, or its messages do not fit; with line and cell, which count from 1.
                ``verify`` finds what is wrong with its table.
            OSError: it cannot be read.
        """
        from fxpipe.schedules.show import csv_file

        return csv_file.read(path, edges)

    def to_csv(self, path: StrPath, communication: bool = False) -> None:
        """Writes the table for ``from_csv``, or for torch.distributed.pipelining: a line per rank.

        Which stages share a parameter (``tied``) is not in it. torch has no cells for a group of micro-batches,
        ``4F0-3``, or for an R: a file with one is for ``from_csv`` alone.

        Args:
            path: the file.
            communication: False: the lines are aligned by step, with an empty cell where a rank idles. True: they have
                a cell for every message, ``0SEND_F3`` on the rank that sends and ``1RECV_F3`` on the one that receives,
                in an order in which a receive may be waited for.

        Raises:
            ScheduleError: a table that is to be written with communication does not verify.
            OSError: the file cannot be written.
        """
        from fxpipe.schedules.show import csv_file

        csv_file.write(self, path, communication)

    def name_of(self, stage: int) -> str:
        """A stage's name, or its number where it has none."""
        return self.stage_names[stage] if self.stage_names else str(stage)

    def label(self, stage: int) -> str:
        """A stage's number and, where it has one, its name: ``2: loss``."""
        name = self.name_of(stage)
        return name if name == str(stage) else f"{stage}: {name}"

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Of how many micro-batches an action of each stage is: 1, or as many as a gathered stage's group has."""
        sizes = groups_of(self.rows)
        return tuple(sizes.get(stage, 1) for stage in range(len(self.placement)))

    @cached_property
    def rank_of(self) -> RankOf:
        """(stage, micro-batch) → the rank that runs it."""
        return RankOf.of(self.placement, groups_of(self.rows))

    def rank(self, action: Action) -> int:
        """The rank that runs an action."""
        return self.rank_of(action.stage, action.microbatch)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        places = [ranks_of(place) for place in self.placement]
        return tuple(tuple(s for s, ranks in enumerate(places) if rank in ranks) for rank in range(len(self.rows)))

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(Link(*edge) for edge in self.edges)

    @cached_property
    def dependencies(self) -> Dependencies:
        """With what stages without backward wait for, so as not to run too far ahead, at the table's own costs."""
        from fxpipe.schedules.simulate import makespan

        # Caps are found by simulation, for they must not make the step longer.
        free = Dependencies.of(self.links, self.backward, self.rows)
        turns = [len(ranks_of(place)) for place in self.placement]
        return held_back(free, self.backward, self.microbatches, lambda held: makespan(self, held), turns)

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

        # A table cannot change, so once is enough; the flag is no field, and takes no part in comparison.
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
        """When each action would run, at costs that are one number each, or one per stage.

        Args:
            forward: what an action F takes; or all costs, as ``Costs``.
            backward: what an action B takes, and I and W together.
            weight: the part of ``backward`` that W does; None: half of it.
            comm: what a message between two ranks takes. Each directed pair carries one at a time.
            activation_bytes: what a stage holds per micro-batch in flight.

        Raises:
            ScheduleError: the costs do not fit the stages, or the table deadlocks.
        """
        from fxpipe.schedules.simulate import simulate

        if not isinstance(forward, Costs):
            forward = Costs.of(len(self.placement), forward, backward, weight, comm, activation_bytes)
        check_length("costs.forward", forward.forward, len(self.placement))
        return simulate(self, forward)

    def planned(self, costs: Costs | None = None) -> Timeline:
        """Simulated at these costs, or those that it was built for, or F = 1 and B = 2."""
        return self.simulate(costs or self.costs or 1)

    def to_svg(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the picture of the plan, at these costs or those that it was built for; see ``Timeline.to_svg``."""
        self.planned(costs).to_svg(path)

    def to_html(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the plan as a page, at these costs or those that it was built for; see ``Timeline.to_html``."""
        self.planned(costs).to_html(path)

    def to_trace(self, path: StrPath, costs: Costs | None = None) -> None:
        """Writes the plan as a trace, at these costs or those that it was built for; see ``Timeline.to_trace``."""
        self.planned(costs).to_trace(path)

    def __str__(self) -> str:
        from fxpipe.schedules.table import table

        return table(self)

    def __repr__(self) -> str:
        sizes = f"{len(self.placement)} stages on {len(self.rows)} ranks, {self.microbatches} micro-batches"
        return f"<Schedule {self.name}: {sizes}>"

    def _repr_html_(self) -> str:
        """Behind a cell of a notebook: the picture of the plan, and the table."""
        from fxpipe.schedules.show.html_page import pictured

        return pictured(self, self.planned)


class Span(NamedTuple):
    """When an action runs."""

    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


class Cause(NamedTuple):
    """What an action waited for before it began: another action, and whether its result had to change ranks."""

    action: Action
    crosses: bool


class Reduction(NamedTuple):
    """When gradients were reduced over the data axis beside the actions of a pipe rank: from the start of the first
    collective to the end of the last; there may be several, one after another."""

    rank: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a schedule's actions, and what follows from them.

    ``Schedule.simulate`` makes one from costs; ``ForwardBackward.timeline`` measures one. Times are in the unit of the
    costs: measured ones in seconds. The first action begins at 0.
    """

    schedule: Schedule
    spans: Mapping[Action, Span]
    since: Mapping[Action, float]
    """Since when an action's rank stood ready for it; from then to the span's start it waited."""
    costs: Costs
    """What the plan reckoned with; of a measured timeline, the medians measured."""
    measured: bool = False
    reductions: tuple[Reduction, ...] = ()
    """What ran beside the actions, where it was measured: a rank's in the order in which they were started."""
    spells: tuple[Spell, ...] = ()
    """Where it was measured, what each process did from the step's beginning to its end, one process after another."""
    awaited: Mapping[Action, Action] = field(default_factory=dict)
    """Of a plan, which action of another rank one waited for when its own rank stood ready."""

    @cached_property
    def spent(self) -> tuple[Spent, ...]:
        """How the step of each process divides: compute, waiting for which message, Python between actions, and what
        lies before the first and after the last. Of a plan, nothing."""
        return spent(self.spells)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(self.spans[action].duration for action in row) for row in ran(self))

    @cached_property
    def overlapped(self) -> tuple[Reduction, ...]:
        """The reductions that started before the last backward of their rank had ended."""
        # A reduction that starts behind the last backward of its rank has nothing to run beside.
        last = [0.0] * len(self.schedule.rows)
        for action, span in self.spans.items():
            if action.op is not Op.F:
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
        """Per stage, the most micro-batches whose forward has run, for a recomputed stage its R, and whose backward has
        not ended. A group counts as all of its micro-batches."""
        from fxpipe.schedules.simulate import peak_in_flight

        return peak_in_flight(self.schedule)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank, the most bytes that its micro-batches in flight hold; None where the costs do not give them."""
        from fxpipe.schedules.simulate import peak_bytes

        return None if self.costs.activation_bytes is None else peak_bytes(self.schedule, self.costs)

    @cached_property
    def lower_bound(self) -> float:
        """What no table that splits the same backwards in halves could undercut at these costs."""
        from fxpipe.schedules.simulate import lower_bound

        return lower_bound(self.schedule, self.costs, self.schedule.groups, self.schedule.rows)

    def cause(self, action: Action) -> Cause | None:
        """The last thing that had to happen before an action could begin; None where nothing had to.

        Where its rank was busy until then, that is the action in front of it.
        """
        if action in self.awaited:
            return Cause(self.awaited[action], True)
        # The action in front on the same rank counts first: where that ended last, nothing else was waited for.
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
        """How long an action's rank stood ready for it; 0 where it did not run, or that is not known."""
        return self.spans[action].start - self.since[action] if action in self.spans and action in self.since else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The actions from the first to the one that ends the step; each waited for the one before it."""
        # From the end back, from each action to what it waited for last.
        path: list[Action] = []
        action = max(self.spans, key=lambda action: self.spans[action].end, default=None)
        while action is not None:
            path.append(action)
            cause = self.cause(action)
            action = cause.action if cause is not None else None
        return tuple(reversed(path))

    def to_svg(self, path: StrPath) -> None:
        """Writes the picture: a row a rank, to scale, with its bubbles and the critical path."""
        from fxpipe.schedules.show.svg_picture import svg

        write_whole(path, svg(self))

    def to_html(self, path: StrPath) -> None:
        """Writes the picture as a page; a cell's title says when the action ran and what it waited for."""
        from fxpipe.schedules.show.html_page import html

        write_whole(path, html(self))

    def to_trace(self, path: StrPath) -> None:
        """Writes a trace that ui.perfetto.dev and chrome://tracing open; a planned unit of time is shown as 1 ms."""
        from fxpipe.schedules.show.chrome_trace import chrome_trace

        write_whole(path, chrome_trace(self))

    def to_csv(self, path: StrPath) -> None:
        """Writes what each process did, a line for each spell: ``rank,category,what,start,end``, in seconds."""
        write_whole(path, in_csv(self.spells))

    @cached_property
    def _ahead(self) -> Mapping[Action, Action]:
        """Action → the one in front of it on its rank."""
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
        """Behind a cell of a notebook: the picture, and the table."""
        from fxpipe.schedules.show.html_page import pictured

        return pictured(self, lambda: self)


def ran(timeline: Timeline) -> list[list[Action]]:
    """Each rank's actions that ran, in order; a micro-batch without weight has no backward."""
    return [[action for action in row if action in timeline.spans] for row in timeline.schedule.rows]
