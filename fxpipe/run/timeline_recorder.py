"""Timeline recorder: times steps, and merges all ranks' times of the last timed step to a timeline on one clock."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

import torch

from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.observer import ACTIONS
from fxpipe.distributed.stopwatch import Copied, Elapsed, Lap, Reduced, Stopwatch, clock_of
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.plain_data import admitted
from fxpipe.run.memory_recorder import MemoryRecorder
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionBytes, Copy, Reduction, Span, awaits_copy
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.kinds import BACKWARD, KINDS, Kind, Lane
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.schedules.step_breakdown import AFTER, BEFORE, BETWEEN, COMPUTE, WAITING, Spell

MEASURED = "costs measured"
admitted(Costs)  # registered here, since fxpipe.schedules does not import torch


class TimelineRecorder:
    """Times the steps that begin while ``on`` is True; ``on`` must be the same on every rank."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self.stopwatch: Stopwatch | None = None
        """The observer of the step that runs, if the step is timed."""
        self._last: _Records | None = None
        self.loaded: Costs | None = None
        """The costs that a checkpoint has brought, used until a step is timed; the same on every rank."""
        self.on = self.with_memory = False
        """Whether steps are timed; and whether their bytes are recorded, too."""
        self.memory: MemoryRecorder | None = None
        """The observer of the bytes of the step that runs, if they are recorded."""

    @property
    def has_costs(self) -> bool:
        """Whether a step was timed, or costs were loaded."""
        return self._last is not None or self.loaded is not None

    @property
    def last(self) -> int:
        """The number of the last timed step; -1 if there is none."""
        return -1 if self._last is None else self._last[0]

    def known_costs(self) -> Costs | None:
        """Each stage's costs; None unless all ranks have timed a step with weight. A collective call of all ranks."""
        try:
            return self.costs(None)
        except PeerLost:
            raise
        except RunError:  # all ranks raise the same
            return None

    def begin(self) -> None:
        """Starts recording a step, if ``on``."""
        self.memory = None
        self.stopwatch = Stopwatch(clock_of(self._device, of_a_step=True)) if self.on else None
        if self.stopwatch is not None:
            self.stopwatch.on_step("")

    def keep(self, step: int, schedule: Schedule, order: Sequence[int]) -> None:
        """Keeps the times of a step, if it was timed. ``order``: the number in the batch of each micro-batch."""
        if self.stopwatch is not None:
            notes = None if self.memory is None else self.memory.notes
            self._last = step, schedule, self.stopwatch, order, notes

    def timeline(self, memory: bool = False) -> Timeline:
        """Returns the start and end of each action of the last timed step, and the bytes around them if ``memory``. A
        collective call of a pipe group."""
        step, schedule, stopwatch, order, notes = self._recorded("pipe")
        noted = self._transport.gather("pipe", notes)
        if memory and None in noted:
            without = ", ".join(str(rank) for rank, notes in enumerate(noted) if notes is None)
            raise RunError(
                f"the bytes of step {step} were not recorded on rank {without} of the pipe group; call "
                "record_timeline(memory=True) before the step, on every rank"
            )
        ahead, in_turns = clock_offset(self._transport), self._transport.pipe_rank is None
        mine = stopwatch.laps(ahead), stopwatch.reductions(ahead), stopwatch.parts(ahead), stopwatch.copies(ahead)
        laps, reductions, courses, copies = zip(*self._transport.gather("pipe", mine), strict=True)
        chain = itertools.chain.from_iterable
        timeline = timeline_of(schedule, chain(laps), in_turns, reductions, courses, chain(copies))
        of_rank = {rank: tuple(row) for notes in noted for rank, row in notes.items()} if memory else {}
        bytes_around = tuple(of_rank[rank] for rank in sorted(of_rank))
        return replace(timeline, order=() if sorted(order) == list(order) else tuple(order), memory=bytes_around)

    def recorded(self) -> Timeline | None:
        """Returns ``timeline()``; None if costs were loaded and no step was timed since. A collective call of a pipe
        group."""
        return None if self._last is None and self.loaded is not None else self.timeline()

    def costs(self, activation_bytes: Cost | None) -> Costs:
        """Returns each stage's costs in the last timed step, averaged over replicas. A collective call of all ranks.

        ``activation_bytes``: the activation bytes of the returned costs, which a step does not measure."""
        if self._last is None and self.loaded is not None:
            return mean_costs([self.loaded], activation_bytes)
        self._recorded("pipe", "data")
        timeline = self.timeline()
        ran = {action.stage for action in timeline.spans if action.kind.part_of is BACKWARD}
        has_run = all(stage in ran for stage, has in enumerate(timeline.schedule.backward) if has)
        everyone = self._transport.gather("data", timeline.costs if has_run else None)
        measured = [costs for costs in everyone if costs is not None]
        if not measured:
            raise RunError("no micro-batch of the recorded step had weight, so no backward ran; record another step")
        return mean_costs(measured, activation_bytes)

    def _recorded(self, *scopes: str) -> _Records:
        """Returns the records of the last timed step. RunError on all ranks of ``scopes`` unless all of
        them have timed the same step."""
        steps = {self.last}
        for scope in scopes:
            steps = set().union(*self._transport.gather(scope, steps))
        if self._last is None or -1 in steps:
            raise RunError("no step was recorded; call record_timeline() before the step, on every rank")
        if len(steps) > 1:
            raise RunError(f"the ranks last recorded different steps, {sorted(steps)}; call record_timeline() on all")
        return self._last


_Records = tuple[int, Schedule, Stopwatch, Sequence[int], "Mapping[int, Sequence[ActionBytes]] | None"]
"""The step's number, its schedule and times, the number in the batch of each micro-batch, and each rank's bytes."""


def timeline_of(
    schedule: Schedule,
    laps: Iterable[Lap],
    in_turns: bool = False,
    reductions: Iterable[Iterable[Reduced]] = (),
    courses: Sequence[Sequence[Elapsed]] = (),
    copies: Iterable[Copied] = (),
) -> Timeline:
    """Returns the measured timeline of a step, in seconds from the start of its first action.

    ``laps``, ``copies``: of all ranks on one clock. ``in_turns``: whether a single process plays all ranks, so that a
    hop takes no time. ``reductions``: a list for each process. ``courses``: the parts of the step for each process.
    """
    every = sorted(laps, key=lambda lap: lap.start)
    first = every[0].start if every else 0.0
    spans = {lap.action: Span(lap.start - first, lap.end - first) for lap in every}
    since = {lap.action: max(lap.since - first, 0.0) for lap in every}
    beside = tuple(
        Reduction(rank, reduction.what, max(reduction.start - first, 0.0), max(reduction.end - first, 0.0))
        for rank, row in enumerate(reductions)
        for reduction in row
    )
    copied = tuple(
        Copy(schedule.rank(action), lane, action, start - first, end - first)
        for action, start, end in copies
        for lane in [action.kind.lane or Lane.OUT]
    )
    costs = _costs(schedule, spans, 0.0 if in_turns else _hop(schedule, spans, since))
    timeline = Timeline(schedule, spans, since, costs, measured=True, reductions=beside, copies=copied)
    spells: list[Spell] = []
    for rank, course in enumerate(courses):
        ranks = range(len(schedule.rows)) if in_turns else (rank,)
        mine = [lap for lap in every if schedule.rank(lap.action) in ranks]
        spells += _spells(timeline, tuple(ranks), mine, course, first)
    return replace(timeline, spells=tuple(spells))


def _spells(
    timeline: Timeline, ranks: tuple[int, ...], laps: Sequence[Lap], course: Sequence[Elapsed], first: float
) -> Iterator[Spell]:
    """Yields a process's spells in order of time. ``first``: the moment that times count from, in seconds."""
    ran = [part.what for part in course].index(ACTIONS)
    moments = [(BEFORE, part.what, part.end) for part in course[1:ran]]
    kind, what = BEFORE, course[ran - 1].what  # the part before the first action lasts until that action
    copies = {copy.action: copy for copy in timeline.copies}
    for lap in laps:
        source = _awaited(timeline, lap.action, ranks, copies)
        moments.append((kind, what, lap.since))
        moments.append((WAITING, source, lap.start) if source else (BETWEEN, "", lap.start))
        moments.append((COMPUTE, str(lap.action), lap.end))
        kind, what = BETWEEN, ""
    moments.append((AFTER, course[ran + 1].what, course[ran].end) if laps else (kind, what, course[ran].end))
    moments += [(AFTER, part.what, part.end) for part in course[ran + 1 :]]
    now = course[0].end - first
    # Neighbours of the same kind merge into a spell; a spell begins where the previous ends: they sum up to the step.
    for (kind, what), group in itertools.groupby(moments, key=lambda moment: moment[:2]):
        end = max(now, *(moment - first for *_, moment in group))  # a GPU's event times are in single precision
        if end > now:
            yield Spell(ranks, kind, what, now, end)
        now = end


def _awaited(timeline: Timeline, action: Action, ranks: Sequence[int], copies: Mapping[Action, Copy]) -> str:
    """Names the last of what an action waits for: a message from another process, or a copy that was not done when its
    rank was ready. Empty if the action waits for nothing. ``copies``: by the action that began the copy."""
    spans, rank = timeline.spans, timeline.schedule.rank
    before = timeline.schedule.dependencies.before(action)
    causes = [
        (spans[other].end, f"{other} from rank {rank(other)}")
        for other in before
        if other in spans and rank(other) not in ranks
    ]
    waited = (copies[other] for other in before if other in copies and awaits_copy(action, other))
    causes += [(copy.end, copy.what) for copy in waited if copy.end > timeline.since[action]]
    return max(causes, default=(0.0, ""))[1]


def _costs(schedule: Schedule, spans: Mapping[Action, Span], hop: float) -> Costs:
    """The medians over micro-batches; 0 for an action that never ran."""
    durations: dict[tuple[int, Kind], list[float]] = {}
    for action, span in spans.items():
        durations.setdefault((action.stage, action.kind), []).append(span.duration)
    stages = range(len(schedule.placement))
    of = {kind: [max(median(durations.get((s, kind), [0.0])), 0.0) for s in stages] for kind in KINDS.values()}
    # A schedule has B, or its halves I and W: B = I + W; of an unsplit B, half counts as W.
    backward = [of[Kind.B][stage] or of[Kind.I][stage] + of[Kind.W][stage] for stage in stages]
    weight = [of[Kind.W][stage] or of[Kind.B][stage] / 2 for stage in stages]
    return replace(Costs.of(len(stages), of[Kind.F], backward, weight, hop), source=MEASURED)


def _hop(schedule: Schedule, spans: Mapping[Action, Span], since: Mapping[Action, float]) -> float:
    """Returns the median seconds from an action's end to the start of an action on another rank that waited for it."""
    waited: list[float] = []
    others: list[float] = []
    for action, span in spans.items():
        before = [other for other in schedule.dependencies.needs(action) if other in spans]
        last = max(before, key=lambda other: spans[other].end, default=None)
        if last is not None and schedule.rank(last) != schedule.rank(action):
            hop = max(span.start - spans[last].end, 0.0)
            # Only an action that waited shows the latency; other actions may start long after the message came.
            (waited if since[action] <= spans[last].end else others).append(hop)
    return median(waited) if waited else min(others, default=0.0)


def mean_costs(costs: Sequence[Costs], activation_bytes: Cost | None = None) -> Costs:
    """Returns the mean of replicas' measured costs, with ``activation_bytes``, which a step does not measure."""
    kinds = zip(*((cost.forward, cost.backward, cost.weight) for cost in costs), strict=True)
    forward, backward, weight = (tuple(map(fmean, zip(*of_kind, strict=True))) for of_kind in kinds)
    mean = Costs.of(len(forward), forward, backward, weight, fmean(cost.comm for cost in costs), activation_bytes)
    return replace(mean, source=MEASURED)


Round = tuple[float, float]
"""The seconds at which a rank entered and left a collective call, on that rank's own clock."""


def clock_offset(transport: Transport) -> float:
    """Returns the seconds by which this rank's clock is ahead of the pipe group's first rank's. A collective call.

    No rank leaves a collective call before all ranks have entered it. So rank r left, by its own clock, no earlier than
    rank 0 entered plus r's offset, and vice versa: each call bounds the offset from both sides, as in NTP.
    """
    rounds: list[Round] = []
    for _ in range(16):
        came = time.perf_counter()
        transport.gather_int("pipe", 0)
        rounds.append((came, time.perf_counter()))
    return offset_between(transport.gather("pipe", rounds)[0], rounds)


def offset_between(first: Sequence[Round], other: Sequence[Round]) -> float:
    """Returns an offset in seconds of ``other``'s clock that fits all calls: 0 if 0 fits, since ranks of a machine
    share its clock; otherwise the middle of the tightest bounds."""
    pairs = list(zip(first, other, strict=True))
    most = min(left - came for (came, _), (_, left) in pairs)
    least = max(came - left for (_, left), (came, _) in pairs)
    return 0.0 if least <= 0 <= most else (least + most) / 2
