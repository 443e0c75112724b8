"""Timeline recorder: the last step that was timed, and what all ranks together make of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.stopwatch import Course, Stopwatch, clock_of
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.plain_data import admitted
from fxpipe.run.measured_timeline import Recording, clock_offset, has_run, mean_costs, timeline_of
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.schedule import Schedule, Timeline

admitted(Costs)  # here, for schedules know nothing of torch


class TimelineRecorder:
    """``on``: whether the steps from now on are timed; the same on every rank."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self._last: Recording | None = None
        self._course: Course | None = None
        self.loaded: Costs | None = None
        """Those of a checkpoint, until a step is timed; the same on every rank."""
        self.on = False

    @property
    def has_costs(self) -> bool:
        """Whether a step was timed, or costs were loaded."""
        return self._last is not None or self.loaded is not None

    def known_costs(self) -> Costs | None:
        """Each stage's costs, where all ranks have timed a step with weight. A collective call of all ranks."""
        try:
            return self.costs(None)
        except PeerLost:
            raise
        except RunError:  # of which all ranks raise the same
            return None

    def stopwatch(self) -> Stopwatch:
        """For one rank's actions of a step."""
        return Stopwatch(clock_of(self._device) if self.on else None)

    def begin(self) -> None:
        """A step begins."""
        self._course = Course(clock_of(self._device)) if self.on else None

    def passed(self, what: str) -> None:
        """A part of it is over."""
        if self._course is not None:
            self._course.mark(what)

    def keep(self, step: int, schedule: Schedule, stopwatches: Sequence[Stopwatch]) -> None:
        """A step is over."""
        course, self._course = self._course, None
        if course is not None:
            self._last = Recording(step, schedule, stopwatches, course)

    def timeline(self) -> Timeline:
        """When each action of the last timed step ran. A collective call of a pipe group."""
        recording = self._recorded("pipe")
        ahead = clock_offset(self._transport)
        mine = recording.laps(ahead), recording.reductions(ahead), recording.course.passed(ahead)
        laps, reductions, courses = zip(*self._transport.gather("pipe", mine), strict=True)
        in_turns = self._transport.pipe_rank is None
        beside = itertools.chain(*reductions)
        return timeline_of(recording.schedule, itertools.chain(*laps), in_turns, beside, courses)

    def costs(self, activation_bytes: Cost | None) -> Costs:
        """Each stage's costs in the last timed step, over replicas their mean. A collective call of all ranks."""
        if self._last is None and self.loaded is not None:
            return mean_costs([self.loaded], activation_bytes)
        self._recorded("pipe", "data")
        timeline = self.timeline()
        everyone = self._transport.gather("data", timeline.costs if has_run(timeline) else None)
        measured = [costs for costs in everyone if costs is not None]
        if not measured:
            raise RunError("no micro-batch of the recorded step had weight, so no backward ran; record another step")
        return mean_costs(measured, activation_bytes)

    def _recorded(self, *scopes: str) -> Recording:
        """What was recorded last, or an error on all ranks of these groups alike."""
        steps = {self._last.step if self._last is not None else -1}
        for scope in scopes:
            steps = set().union(*self._transport.gather(scope, steps))
        if self._last is None or -1 in steps:
            raise RunError("no step was recorded; call record_timeline() before the step, on every rank")
        if len(steps) > 1:
            raise RunError(f"the ranks last recorded different steps, {sorted(steps)}; call record_timeline() on all")
        return self._last
