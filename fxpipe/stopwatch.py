"""Stopwatch: when one rank's actions of a step really ran."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fxpipe.action import Action


class Clock(Protocol):
    """Marks moments in the order in which a rank's work runs, and tells them later."""

    def mark(self) -> Any:
        """This moment; does not wait."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The moments on the host's clock, ``time.perf_counter``; once the work is done."""


class HostClock:
    """Of work that runs when it is called."""

    mark = staticmethod(time.perf_counter_ns)

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [mark / 1e9 for mark in marks]


class CudaClock:
    """Of work on the current stream of a GPU, timed with events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize(self._device)
        now = self.mark()
        now.synchronize()
        first = time.perf_counter() - marks[0].elapsed_time(now) / 1e3 if marks else 0.0
        return [first + marks[0].elapsed_time(mark) / 1e3 for mark in marks]  # in single precision: so from near by


class Lap(NamedTuple):
    """Seconds on the host's clock: since when the rank stood ready for the action, its start and its end."""

    action: Action
    since: float
    start: float
    end: float


@dataclass
class Stopwatch:
    """Three marks per action: before it waits for its inputs, before it computes, and behind. Without a clock, none."""

    clock: Clock | None = None
    _marks: list[tuple[Action, Any]] = field(default_factory=list)

    def mark(self, action: Action) -> None:
        if self.clock is not None:
            self._marks.append((action, self.clock.mark()))

    def laps(self, ahead: float = 0.0) -> list[Lap]:
        """The laps in order. ``ahead``: by how much this clock is ahead of the one that they are to be told on."""
        if self.clock is None:
            return []
        moments = [moment - ahead for moment in self.clock.seconds([moment for _, moment in self._marks])]
        actions = [action for action, _ in self._marks[::3]]
        return [Lap(*lap) for lap in zip(actions, moments[::3], moments[1::3], moments[2::3], strict=True)]


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
