"""Stopwatch: measures the times of a rank's actions in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fxpipe.device import is_accelerator
from fxpipe.distributed.observer import StepObserver
from fxpipe.graph.stage_graph import Stage
from fxpipe.schedules.action import Action


class HostClock:
    """Marks moments of work on the CPU, in the order in which the work runs, and returns their times in seconds
    later."""

    mark: Callable[[], Any] = staticmethod(time.perf_counter_ns)
    """Returns a mark of the present moment; does not wait."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns the marks' times in seconds on the host's clock, ``time.perf_counter``, after the work is done."""
        return [mark / 1e9 for mark in marks]


class DeviceClock:
    """A clock of work on the current stream of an accelerator, timed with events.

    ``of_a_step``: all marks are close in time; times from different calls of ``seconds`` are then consistent to the
    precision of events.
    """

    def __init__(self, device: torch.device, of_a_step: bool = False) -> None:
        self._device, self._of_a_step = device, of_a_step
        self._first: tuple[torch.Event, float] | None = None  # a mark, and its time in seconds on the host's clock

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        return torch.accelerator.current_stream(self._device).record_event(event)

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        if not marks:
            return []
        # Events give only relative times. An event with a known host time relates them to the host's clock.
        torch.accelerator.synchronize(self._device)
        if self._first is None or not self._of_a_step:
            now = self.mark()
            now.synchronize()
            self._first = marks[0], time.perf_counter() - marks[0].elapsed_time(now) / 1e3
        first, at = self._first
        return [at + first.elapsed_time(mark) / 1e3 for mark in marks]  # single precision: the first must be close


Clock = HostClock | DeviceClock


class Lap(NamedTuple):
    """Seconds on the host's clock: when the rank was ready for the action, when the action started and ended."""

    action: Action
    since: float
    start: float
    end: float


class Reduced(NamedTuple):
    """Seconds on the host's clock: when collectives that overlap the actions started, and when the last was done."""

    what: str
    start: float
    end: float


class Copied(NamedTuple):
    """Seconds on the host's clock: when the copy of an action's activations started, and when it was done."""

    action: Action
    start: float
    end: float


class Elapsed(NamedTuple):
    """The end of a part of a step, in seconds on the host's clock; the first, unnamed entry is the step's beginning."""

    what: str
    end: float


class Stopwatch(StepObserver):
    """Records three marks per action: when the wait for its inputs begins, when it starts, and when it ends.

    Records the end of each part of the step; and two marks each for copies, and for collectives that overlap the
    actions, of which any thread may record the second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now = clock, clock.mark
        self._moments: list[Any] = []
        self._actions: list[Action] = []
        self._parts: list[tuple[str, Any]] = []
        self._started: list[list[Any]] = []  # what, its start, its end
        self._copied: list[tuple[Action, Any]] = []
        self._waits = False

    def on_wait(self, action: Action) -> None:
        """Records the beginning of a wait, unless it has begun already."""
        if not self._waits:
            self._moments.append(self._now())
        self._waits = True

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        self._moments.append(self._now())
        self._waits = False

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        self._moments.append(self._now())
        self._actions.append(action)

    def on_copy(self, action: Action) -> None:
        self._copied.append((action, self._now()))

    def on_step(self, part: str) -> None:
        self._parts.append((part, self._now()))

    def started(self, what: str) -> Callable[[], None]:
        """Marks the start of collectives; returns a function that marks their end, to be called after the last."""
        now = self._now
        entry = [what, now()]
        self._started.append(entry)
        return lambda: entry.append(now())  # an atomic append: no other thread sees a partial entry

    def laps(self, ahead: float = 0.0) -> list[Lap]:
        """Returns the laps in order. ``ahead``: the seconds by which this clock is ahead of the reported clock."""
        moments = [moment - ahead for moment in self._clock.seconds(self._moments)]
        return [Lap(*lap) for lap in zip(self._actions, moments[::3], moments[1::3], moments[2::3], strict=True)]

    def parts(self, ahead: float = 0.0) -> list[Elapsed]:
        """Returns the parts of the step in order; ``ahead`` as in ``laps``."""
        moments = self._clock.seconds([mark for _, mark in self._parts])
        return [Elapsed(what, moment - ahead) for (what, _), moment in zip(self._parts, moments, strict=True)]

    def copies(self, ahead: float = 0.0) -> list[Copied]:
        """Returns the copies in the order in which they were started; ``ahead`` as in ``laps``."""
        moments = [moment - ahead for moment in self._clock.seconds([mark for _, mark in self._copied])]
        actions = [action for action, _ in self._copied[::2]]
        return [Copied(*copy) for copy in zip(actions, moments[::2], moments[1::2], strict=True)]

    def reductions(self, ahead: float = 0.0) -> list[Reduced]:
        """Returns the collectives that have ended, in the order of their starts; ``ahead`` as in ``laps``."""
        # Entries without an end are still under way.
        done = [entry for entry in self._started if len(entry) == 3]
        moments = iter(self._clock.seconds([mark for _, *marks in done for mark in marks]))
        return [Reduced(what, next(moments) - ahead, next(moments) - ahead) for what, *_ in done]


def clock_of(device: torch.device, of_a_step: bool = False) -> Clock:
    """Returns the clock of a device's work; ``of_a_step`` as in ``DeviceClock``."""
    return DeviceClock(device, of_a_step) if is_accelerator(device) else HostClock()
