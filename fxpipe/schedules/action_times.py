"""``ActionTimes``: when the actions of a table run, and figures derived from the times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.in_flight import peak_bytes, peak_in_flight
from fxpipe.schedules.kinds import BACKWARD, Lane, kind_of
from fxpipe.schedules.lower_bound import lower_bound
from fxpipe.schedules.step_breakdown import Spell, Spent, spent


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

    ``action``: the F or the I after which activations left for the host, or the P that brought them back.
    """

    rank: int
    lane: Lane
    action: Action
    start: float
    end: float

    @property
    def what(self) -> str:
        """The copy in words: ``0F3 to the host``, or ``0I3 to the host`` of what W needs."""
        replaced = self.action.kind.replaces if self.lane is Lane.BACK else None
        return f"{self.action._replace(kind=kind_of(replaced)) if replaced else self.action} {self.lane.value}"


def awaits_copy(action: Action, other: Action) -> bool:
    """Whether an action waits for the copy that ``other`` has begun, and not for ``other`` alone."""
    return other.kind.lane is Lane.BACK or action.kind.lane is Lane.OUT


class Reduction(NamedTuple):
    """When gradients were reduced over the data axis while a pipe rank ran its actions: from the start of the first
    collective to the end of the last; a reduction may have several collectives."""

    rank: int
    what: str
    start: float
    end: float


class ActionBytes(NamedTuple):
    """The bytes of memory when an action started, and when it had ended."""

    action: Action
    start: int
    end: int

    @property
    def most(self) -> int:
        return max(self.start, self.end)


@dataclass(frozen=True)
class ActionTimes:
    """The spans of a table's actions. Times are in the unit of the costs, in seconds if measured; the first action
    begins at 0."""

    schedule: ActionTable
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
    order: tuple[int, ...] = ()
    """The micro-batch of the batch that ran as each micro-batch of the table; empty where these are the same."""
    memory: tuple[tuple[ActionBytes, ...], ...] = ()
    """For each rank, the bytes around its actions, in order; empty if no bytes were recorded."""
    plan: Costs | Callable[[], Costs | None] | None = field(default=None, compare=False, repr=False)
    """For a measured timeline of a run: the costs of the plan, or finds them; see ``planned``."""
    advice: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    """For a measured timeline of a run: finds the one change of placement that would help most, as ``advise`` does."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.planned, "advice": None}  # both come from the run's own state

    @cached_property
    def planned(self) -> Costs | None:
        """For a measured timeline: the costs of the plan, in seconds and bytes as far as known; None if not known."""
        return self.plan() if callable(self.plan) else self.plan

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
        return peak_in_flight(self.schedule)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank, the most bytes: as measured, if they were recorded; otherwise the bytes of micro-batches in flight,
        or None if the costs have no ``activation_bytes``."""
        if self.memory:
            return tuple(0.0 if peak is None else float(peak.most) for peak in self.peaks)
        return None if self.costs.activation_bytes is None else peak_bytes(self.schedule, self.costs)

    @property
    def planned_peak_bytes(self) -> tuple[float, ...] | None:
        """Per rank, the most bytes of micro-batches in flight by the plan of a measured step; None if not known."""
        plan = self.planned
        return None if plan is None or not plan.activation_bytes else peak_bytes(self.schedule, plan)

    def bytes_over_time(self, rank: int) -> list[tuple[float, int]]:
        """Returns (time, bytes) of a rank, in order, at the start and end of each action; empty if not measured."""
        rows = self.memory[rank] if self.memory else ()
        return [point for each in rows for point in zip(self.spans[each.action], each[1:], strict=True)]

    @cached_property
    def peaks(self) -> tuple[ActionBytes | None, ...]:
        """Per rank, the first action around which the most bytes were measured; None for a rank without actions."""
        return tuple(max(row, key=lambda each: each.most, default=None) for row in self.memory)

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound of the makespan, at these costs, of all tables that split the same backwards in halves."""
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

    @cached_property
    def _ahead(self) -> Mapping[Action, Action]:
        return {second: first for row in ran(self) for first, second in pairwise(row)}


def ran(timeline: ActionTimes) -> list[list[Action]]:
    """Returns each rank's actions that ran, in order; a micro-batch without weight has no backward."""
    return [[action for action in row if action in timeline.spans] for row in timeline.schedule.rows]
