"""``Schedule``, a table to print, verify, simulate and execute, and ``Timeline``, the times of its actions.

Both add to ``ActionTable`` and ``ActionTimes`` the methods that call the code which checks, simulates and shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fxpipe.graph.ranks import ranks_of
from fxpipe.schedules.action_table import ActionTable, StrPath
from fxpipe.schedules.action_times import ActionTimes
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.dependency import Dependencies, held_back
from fxpipe.schedules.given import check_costs
from fxpipe.schedules.show import csv_file
from fxpipe.schedules.show.chrome_trace import chrome_trace
from fxpipe.schedules.show.html_page import html, pictured
from fxpipe.schedules.show.svg_picture import svg
from fxpipe.schedules.show.words import headline
from fxpipe.schedules.simulate import makespan, simulate
from fxpipe.schedules.stage_times import stage_table
from fxpipe.schedules.step_breakdown import in_csv, tabulated
from fxpipe.schedules.table import copies_in_words, table
from fxpipe.schedules.verify import verify
from fxpipe.small_file import write_whole


@dataclass(frozen=True)
class Schedule(ActionTable):
    """Rows of actions, one row per pipe rank, and the stage graph that the rows are for.

    ``str()`` is the table: a row per rank, a column per step, then bubble, makespan and peak in flight. ``verify``
    checks that the rows can run.

    Raises:
        ScheduleError: the fields do not fit each other.

    >>> from fxpipe import Action
    >>> rows = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
    >>> table = tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)
    >>> schedule = Schedule(table, edges=((0, 1),), placement=(0, 1), backward=(True, True), microbatches=2)
    >>> schedule.verify()
    >>> schedule.simulate(forward=1, backward=2).makespan  # (m + p − 1)(F + B), for m = 2 micro-batches on p = 2 ranks
    9.0
    """

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
        return csv_file.read(Schedule, path, edges)

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
        csv_file.write(self, path, communication)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependencies, with the waits that limit how far stages without backward run ahead."""
        # Simulation finds the caps, since caps must not make the step longer.
        free = Dependencies.from_edges(self.links, self.backward, self.rows)
        turns = [len(ranks_of(entry)) for entry in self.placement]
        return held_back(free, self.backward, self.microbatches, lambda capped: makespan(self, capped), turns)

    def verify(self) -> None:
        """ScheduleError if an action is missing or repeated, a dependency is broken, or the ranks would hang."""
        # A table cannot change, so one check is enough; the flag is no field, and comparison ignores it.
        if "_verified" not in vars(self):
            verify(self)
            object.__setattr__(self, "_verified", True)

    def simulate(
        self,
        forward: Cost | Costs = 1,
        backward: Cost | None = None,
        weight: Cost | None = None,
        comm: float = 0,
        activation_bytes: Cost | None = None,
    ) -> Timeline:
        """Returns when each action would run. Each cost is one number, or a list with an entry per stage: a number, or
        a row with a number per micro-batch.

        Args:
            forward: the time of an action F; or all costs, as ``Costs``.
            backward: the time of an action B, and of I and W together. None: 2; if ``forward`` has rows, twice
                ``forward``.
            weight: the part of ``backward`` that W takes; None: half of ``backward``.
            comm: the time of a message between two ranks. Each directed pair carries one message at a time.
            activation_bytes: the bytes that a stage holds per micro-batch in flight.

        Raises:
            ScheduleError: the costs do not fit the stages, or the table deadlocks.
        """
        if not isinstance(forward, Costs):
            forward = Costs.of(len(self.placement), forward, backward, weight, comm, activation_bytes)
        check_costs(forward, len(self.placement), self.microbatches)
        return Timeline(**vars(simulate(self, forward)))

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
        return table(self, self.planned)

    def __repr__(self) -> str:
        sizes = f"{len(self.placement)} stages on {len(self.rows)} ranks, {self.microbatches} micro-batches"
        return f"<Schedule {self.name}: {sizes}>"

    def _repr_html_(self) -> str:
        """Returns the output of a notebook cell: the picture of the plan, and the table."""
        return pictured(self, self.planned, str(self))


@dataclass(frozen=True)
class Timeline(ActionTimes):
    """The spans of a schedule's actions, and figures derived from the spans.

    ``Schedule.simulate`` makes a timeline from costs; ``ForwardBackward.timeline`` measures a timeline. Times are in
    the unit of the costs, in seconds if measured. The first action begins at 0.
    """

    schedule: Schedule

    def to_svg(self, path: StrPath) -> None:
        """Writes the picture as SVG: a row per rank, to scale, with bubbles and the critical path."""
        write_whole(path, svg(self))

    def to_html(self, path: StrPath) -> None:
        """Writes the picture as an HTML page; a cell's title says when the action ran and what it waited for."""
        write_whole(path, html(self))

    def to_trace(self, path: StrPath) -> None:
        """Writes a trace that ui.perfetto.dev and chrome://tracing open; a planned unit of time is shown as 1 ms."""
        write_whole(path, chrome_trace(self))

    def to_csv(self, path: StrPath) -> None:
        """Writes the spells of each process, a line for each: ``rank,category,what,start,end``, in seconds."""
        write_whole(path, in_csv(self.spells))

    def __str__(self) -> str:
        text = table(self.schedule, lambda: self)
        if self.measured:
            text += f"\n{stage_table(self)}"
        if self.reductions:
            early, all_of_them = len(self.overlapped), len(self.reductions)
            text += f"\nreductions: {early} of {all_of_them} started before the last backward of their rank had ended"
        if self.order:
            text += f"\nmicro-batches 0, 1, … of the table are these of the batch: {', '.join(map(str, self.order))}"
        if self.measured and self.copies:
            text += f"\n{copies_in_words(self)}"
        return f"{text}\n{tabulated(self.spells)}" if self.spells else text

    def __repr__(self) -> str:
        what, figures = headline(self)
        return f"<Timeline of {what}: {figures}>"

    def _repr_html_(self) -> str:
        """Returns the output of a notebook cell: the picture, and the table."""
        return pictured(self.schedule, lambda: self, str(self))
