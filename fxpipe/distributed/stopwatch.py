"""Stopwatch: when one rank's actions of a step really ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fxpipe.device import is_accelerator
from fxpipe.schedules.action import Action


class HostClock:
    """Marks moments in the order in which a rank's work runs, and reports them later; of work that runs when it is
    called."""

    mark: Callable[[], Any] = staticmethod(time.perf_counter_ns)
    """This moment; does not wait."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The moments on the host's clock, ``time.perf_counter``; once the work is done."""
        return [mark / 1e9 for mark in marks]


class DeviceClock:
    """The same of work on the current stream of an accelerator, timed with events.

    ``of_a_step``: all of its marks are near each other, and what one call of ``seconds`` reports fits the others to the
    precision of events.
    """

    def __init__(self, device: torch.device, of_a_step: bool = False) -> None:
        self._device, self._of_a_step = device, of_a_step
        self._first: tuple[torch.Event, float] | None = None  # a mark, and its host time

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        return torch.accelerator.current_stream(self._device).record_event(event)

    def seconds(self, marks: Sequence[torch.Event]) -> list[float]:
        if not marks:
            return []
        # Events know times relative to each other alone. One whose host time is known ties them to the host's clock.
        torch.accelerator.synchronize(self._device)
        if self._first is None or not self._of_a_step:
            now = self.mark()
            now.synchronize()
            self._first = marks[0], time.perf_counter() - marks[0].elapsed_time(now) / 1e3
        first, at = self._first
        return [at + first.elapsed_time(mark) / 1e3 for mark in marks]  # in single precision: so from near by


Clock = HostClock | DeviceClock


class Lap(NamedTuple):
    """Seconds on the host's clock: since when the rank stood ready for the action, its start and its end."""

    action: Action
    since: float
    start: float
    end: float


class Reduced(NamedTuple):
    """Seconds on the host's clock: when collectives were started beside the actions, and when the last was done."""

    what: str
    start: float
    end: float


class Elapsed(NamedTuple):
    """When a part of a step was over, in seconds on the host's clock; the first, without a name, is its beginning."""

    what: str
    end: float


ACTIONS = "actions"
"""The part of a step in which a rank's row runs."""


class Course:
    """A mark behind each part of one step, from its beginning on."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, what: str) -> None:
        """``what`` is over."""
        self._marks.append((what, self.clock.mark()))

    def passed(self, ahead: float = 0.0) -> list[Elapsed]:
        """The parts, in order; ``ahead`` as for ``Stopwatch.laps``."""
        moments = self.clock.seconds([mark for _, mark in self._marks])
        return [Elapsed(what, moment - ahead) for (what, _), moment in zip(self._marks, moments, strict=True)]


class Stopwatch:
    """Three marks per action: before it waits for its inputs, before it computes, and its end; without a clock none.

    And two for what runs beside the actions, the second one on whatever thread it ends.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._now = clock.mark if clock else None
        self._moments: list[Any] = []
        self._actions: list[Action] = []
        self._started: list[list[Any]] = []  # what, its start, its end
        self._waits = False

    def mark(self) -> None:
        if self._now is not None and not self._waits:
            self._moments.append(self._now())
        self._waits = False

    def wait(self) -> None:
        """The next mark, ahead of its time: the rank waits already."""
        if not self._waits:
            self.mark()
            self._waits = True

    def end(self, action: Action) -> None:
        if self._now is not None:
            self._moments.append(self._now())
            self._actions.append(action)

    def started(self, what: str) -> Callable[[], None]:
        """Marks that collectives are started, and gives what marks their end, which is to follow the last one."""
        if self._now is None:
            return lambda: None
        now = self._now
        entry = [what, now()]
        self._started.append(entry)
        return lambda: entry.append(now())  # one call: no other thread sees half of it

    def laps(self, ahead: float = 0.0) -> list[Lap]:
        """The laps in order. ``ahead``: by how much this clock is ahead of the one that they are reported on."""
        if self._clock is None:
            return []
        moments = [moment - ahead for moment in self._clock.seconds(self._moments)]
        return [Lap(*lap) for lap in zip(self._actions, moments[::3], moments[1::3], moments[2::3], strict=True)]

    def reductions(self, ahead: float = 0.0) -> list[Reduced]:
        """What was started and has ended, in the order of the starts; ``ahead`` as for ``laps``."""
        if self._clock is None:
            return []
        # Those without an end are still under way.
        done = [entry for entry in self._started if len(entry) == 3]
        moments = iter(self._clock.seconds([mark for _, *marks in done for mark in marks]))
        return [Reduced(what, next(moments) - ahead, next(moments) - ahead) for what, *_ in done]


def clock_of(device: torch.device, of_a_step: bool = False) -> Clock:
    """The clock of what runs on a device; ``of_a_step`` as for ``DeviceClock``."""
    return DeviceClock(device, of_a_step) if is_accelerator(device) else HostClock()
