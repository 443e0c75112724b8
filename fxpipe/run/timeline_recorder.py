"""Timeline recorder: the last step that was timed, and one timeline of all ranks, on one clock."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import torch

from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.stopwatch import ACTIONS, Course, Elapsed, Lap, Reduced, Stopwatch, clock_of
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.plain_data import admitted
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.schedule import Reduction, Schedule, Span, Timeline
from fxpipe.schedules.step_breakdown import AFTER, BEFORE, BETWEEN, COMPUTE, WAITING, Spell

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
        """What was recorded last, or an error on all ranks of these groups."""
        steps = {self._last.step if self._last is not None else -1}
        for scope in scopes:
            steps = set().union(*self._transport.gather(scope, steps))
        if self._last is None or -1 in steps:
            raise RunError("no step was recorded; call record_timeline() before the step, on every rank")
        if len(steps) > 1:
            raise RunError(f"the ranks last recorded different steps, {sorted(steps)}; call record_timeline() on all")
        return self._last


_ROUNDS = 16


class Round(NamedTuple):
    """When a rank came to a collective call and when it left, on its own clock."""

    came: float
    left: float


@dataclass(frozen=True)
class Recording:
    """What a process recorded of a step, by its number: a stopwatch for each rank that it played."""

    step: int
    schedule: Schedule
    stopwatches: Sequence[Stopwatch]
    course: Course

    def laps(self, ahead: float) -> list[Lap]:
        """``ahead``: by how much this process's clock is ahead of the one that they are reported on, in seconds."""
        return [lap for stopwatch in self.stopwatches for lap in stopwatch.laps(ahead)]

    def reductions(self, ahead: float) -> list[list[Reduced]]:
        """The same of what ran beside the actions: a list for each rank that this process played, in their order."""
        return [stopwatch.reductions(ahead) for stopwatch in self.stopwatches]


def timeline_of(
    schedule: Schedule,
    laps: Iterable[Lap],
    in_turns: bool = False,
    reductions: Iterable[Iterable[Reduced]] = (),
    courses: Sequence[Sequence[Elapsed]] = (),
) -> Timeline:
    """The measured timeline of a step, in seconds from its first start.

    ``laps``: all ranks', on one clock. The costs are the medians over micro-batches, ``comm`` the median latency of a
    hop, which there is none of where one process plays all ranks ``in_turns``. A stage whose backward never ran costs
    nothing there. ``reductions``: a list for each pipe rank, in their order. ``courses``: the parts of the
    step, of each process; without them nothing is shown of what lies around actions.
    """
    every = {lap.action: lap for lap in laps}
    first = min((lap.start for lap in every.values()), default=0.0)
    spans = {action: Span(lap.start - first, lap.end - first) for action, lap in every.items()}
    since = {action: max(lap.since - first, 0.0) for action, lap in every.items()}
    hop = 0.0 if in_turns else _hop(schedule, spans, since)
    beside = tuple(
        Reduction(rank, one.what, max(one.start - first, 0.0), max(one.end - first, 0.0))
        for rank, row in enumerate(reductions)
        for one in row
    )
    costs = _costs(schedule, spans, hop)
    timeline = Timeline(schedule, spans, since, costs, measured=True, reductions=beside)
    spells: list[Spell] = []
    for rank, course in enumerate(courses):
        ranks = tuple(range(len(schedule.rows))) if in_turns else (rank,)
        mine = sorted((lap for lap in every.values() if schedule.rank(lap.action) in ranks), key=_start)
        spells += _spells(timeline, ranks, mine, course, first)
    return dataclasses.replace(timeline, spells=tuple(spells))


def _start(lap: Lap) -> float:
    return lap.start


def _spells(
    timeline: Timeline, ranks: tuple[int, ...], laps: Sequence[Lap], course: Sequence[Elapsed], first: float
) -> Iterator[Spell]:
    """A process's, one behind another. ``first``: the moment that times count from."""
    names = [one.what for one in course]
    ran = names.index(ACTIONS)
    moments: list[tuple[str, str, float]] = [(BEFORE, one.what, one.end) for one in course[1:ran]]
    kind, what = BEFORE, course[ran - 1].what  # until the first action what came before it goes on
    for lap in laps:
        source = _awaited(timeline, lap.action, ranks)
        moments.append((kind, what, lap.since))
        moments.append((WAITING, source, lap.start) if source else (BETWEEN, "", lap.start))
        moments.append((COMPUTE, str(lap.action), lap.end))
        kind, what = BETWEEN, ""
    last = course[ran + 1].what if laps else what
    moments += [(AFTER if laps else BEFORE, last, course[ran].end)]
    moments += [(AFTER, one.what, one.end) for one in course[ran + 1 :]]
    now = course[0].end - first
    for (kind, what), group in itertools.groupby(moments, key=lambda one: one[:2]):
        end = max(now, *(moment - first for *_, moment in group))  # events of a GPU are given in single precision
        if end > now:
            yield Spell(ranks, kind, what, now, end)
        now = end


def _awaited(timeline: Timeline, action: Action, ranks: Sequence[int]) -> str:
    """Of the messages that an action takes from other processes, the one that was made last; empty where none is."""
    rank = timeline.schedule.rank
    others = timeline.schedule.dependencies.before(action)
    sources = [one for one in others if one in timeline.spans and rank(one) not in ranks]
    last = max(sources, key=lambda one: timeline.spans[one].end, default=None)
    return f"{last} from rank {rank(last)}" if last is not None else ""


def has_run(timeline: Timeline) -> bool:
    """Whether every stage that has a backward in the table ran one; without weight for any micro-batch none runs."""
    ran = {action.stage for action in timeline.spans if action.op is not Op.F}
    return all(stage in ran for stage, has_backward in enumerate(timeline.schedule.backward) if has_backward)


def _costs(schedule: Schedule, spans: Mapping[Action, Span], hop: float) -> Costs:
    durations: dict[tuple[int, Op], list[float]] = {}
    for action, span in spans.items():
        durations.setdefault((action.stage, action.op), []).append(span.duration)
    typical = {key: max(median(values), 0.0) for key, values in durations.items()}
    stages = range(len(schedule.placement))
    of = {op: [typical.get((stage, op), 0.0) for stage in stages] for op in Op}
    halves = [of[Op.I][stage] + of[Op.W][stage] for stage in stages]
    backward = [whole or both for whole, both in zip(of[Op.B], halves, strict=True)]
    weight = [half or whole / 2 for half, whole in zip(of[Op.W], of[Op.B], strict=True)]
    return Costs.of(len(stages), of[Op.F], backward, weight, hop)


def _hop(schedule: Schedule, spans: Mapping[Action, Span], since: Mapping[Action, float]) -> float:
    """The median time from an action's end to the start of one that stood waiting for it on another rank."""
    waited: list[float] = []
    others: list[float] = []
    for action, span in spans.items():
        before = [other for other in schedule.dependencies.needs(action) if other in spans]
        last = max(before, key=lambda other: spans[other].end, default=None)
        if last is not None and schedule.rank(last) != schedule.rank(action):
            hop = max(span.start - spans[last].end, 0.0)
            (waited if since[action] <= spans[last].end else others).append(hop)
    return median(waited) if waited else min(others, default=0.0)


def mean_costs(costs: Sequence[Costs], activation_bytes: Cost | None = None) -> Costs:
    """The mean of what several replicas measured, with what a step does not measure."""

    def mean(of: Callable[[Costs], Sequence[float]]) -> list[float]:
        return [fmean(values) for values in zip(*map(of, costs), strict=True)]

    return Costs.of(
        len(costs[0].forward),
        mean(lambda one: one.forward),
        mean(lambda one: one.backward),
        mean(lambda one: one.weight),
        fmean(one.comm for one in costs),
        activation_bytes,
    )


def clock_offset(transport: Transport) -> float:
    """By how much this rank's clock is ahead of the pipe group's first rank's, in seconds. A collective call.

    Nobody leaves a collective call before everybody has come to it. So rank r left, by its own clock, no earlier than
    rank 0 came plus r's offset, and the other way round: each call narrows the offset from both sides, as in NTP.
    """
    rounds = []
    for _ in range(_ROUNDS):
        came = time.perf_counter()
        transport.gather_int("pipe", 0)
        rounds.append(Round(came, time.perf_counter()))
    return offset_between(transport.gather("pipe", rounds)[0], rounds)


def offset_between(first: Sequence[Round], other: Sequence[Round]) -> float:
    """The offset of ``other``'s clock that the same calls allow: 0 where that is possible, for ranks of one machine
    read one clock; or else the middle."""
    most = min(theirs.left - ours.came for ours, theirs in zip(first, other, strict=True))
    least = max(theirs.came - ours.left for ours, theirs in zip(first, other, strict=True))
    return 0.0 if least <= 0 <= most else (least + most) / 2
