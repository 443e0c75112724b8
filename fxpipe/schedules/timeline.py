"""``Timeline``: when each action of a schedule runs, planned or measured. One kind of object for both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fxpipe.formats import html, svg
from fxpipe.formats.chrome_trace import chrome_trace
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.in_flight import peak_bytes, peak_in_flight
from fxpipe.schedules.lower_bound import lower_bound
from fxpipe.schedules.table import table

if TYPE_CHECKING:
    from fxpipe.schedules.schedule import Schedule


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
    collective, of which there may be several one after another, to the end of the last."""

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

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans.values()), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(
            sum(self.spans[action].duration for action in row if action in self.spans) for row in self.schedule.rows
        )

    @cached_property
    def overlapped(self) -> tuple[Reduction, ...]:
        """The reductions that started before the last backward of their rank had ended."""
        placement, last = self.schedule.placement, [0.0] * len(self.schedule.rows)
        for action, span in self.spans.items():
            if action.op is not Op.F:
                last[placement[action.stage]] = max(last[placement[action.stage]], span.end)
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
        """Per stage, the most micro-batches whose forward has run and whose backward has not ended."""
        return peak_in_flight(self.schedule)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank, the most bytes that its micro-batches in flight hold; None where the costs do not tell them."""
        sizes = self.costs.activation_bytes
        return None if sizes is None else peak_bytes(self.schedule, sizes)

    @cached_property
    def lower_bound(self) -> float:
        """What no table that splits the same backwards in halves could undercut at these costs; see ``bound.py``."""
        return lower_bound(self.schedule, self.costs)

    def cause(self, action: Action) -> Cause | None:
        """The last thing that had to happen before an action could begin; None where nothing had to.

        Where its rank was busy until then, that is the action in front of it.
        """
        rank = self.schedule.placement[action.stage]
        ahead = self._ahead.get(action)
        cause, latest = (None, 0.0) if ahead is None else (Cause(ahead, False), self.spans[ahead].end)
        for other in self.schedule.dependencies.before(action):
            if other in self.spans:
                crosses = self.schedule.placement[other.stage] != rank
                arrival = self.spans[other].end + self.costs.comm * crosses
                if cause is None or arrival > latest:
                    cause, latest = Cause(other, crosses), arrival
        return cause

    def waited(self, action: Action) -> float:
        """How long an action's rank stood ready for it; 0 where it did not run, or that is not known."""
        return self.spans[action].start - self.since[action] if action in self.spans and action in self.since else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The actions of which each waited for the one before; the last one ends the step."""
        path: list[Action] = []
        action = max(self.spans, key=lambda action: self.spans[action].end, default=None)
        while action is not None:
            path.append(action)
            cause = self.cause(action)
            action = cause.action if cause is not None else None
        return tuple(reversed(path))

    def to_svg(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture: a row a rank, to scale, with its bubbles and the critical path."""
        Path(path).write_text(svg(self), encoding="utf-8")

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture as a page that tells, of the action pointed at, when it ran and what it waited for."""
        Path(path).write_text(html(self), encoding="utf-8")

    def to_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace that ui.perfetto.dev and chrome://tracing open; a planned unit of time is shown as 1 ms."""
        Path(path).write_text(chrome_trace(self), encoding="utf-8")

    @cached_property
    def _ahead(self) -> Mapping[Action, Action]:
        """Action → the one in front of it on its rank."""
        rows = ([action for action in row if action in self.spans] for row in self.schedule.rows)
        return {second: first for row in rows for first, second in pairwise(row)}

    def __str__(self) -> str:
        told = table(self)
        if self.reductions:
            early, all_of_them = len(self.overlapped), len(self.reductions)
            told += f"\nreductions: {early} of {all_of_them} started before the last backward of their rank had ended"
        return told
