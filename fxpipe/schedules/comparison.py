"""``compare``: compares a planned timeline with the real one, and shows where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tabulate import tabulate

from fxpipe.errors import ScheduleError, printable
from fxpipe.notebook import Tabular
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import Span, ran
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.schedule import Timeline
from fxpipe.schedules.step_breakdown import milliseconds
from fxpipe.validation import shown

_SHOWN_WAITS = 5


class Part(NamedTuple):
    """A part of the critical path: how often it occurs there, and how long it takes in total."""

    what: str
    times: int
    planned: float
    real: float


class Share(NamedTuple):
    """How a rank's real time divides into four parts that sum to the makespan, and the planned times of these parts."""

    rank: int
    planned_compute: float
    compute: float
    planned_waiting: float
    waiting: float
    planned_rest: float
    rest: float
    """After the rank's last action."""
    between: float
    """Between actions and before the first: sends, receives and the interpreter. A plan has no such time."""


class Wait(NamedTuple):
    """An action that waited for an action of another rank longer than planned."""

    action: Action
    source: Action
    planned: float
    real: float


def compare(planned: Timeline, real: Timeline) -> Comparison:
    """Compares the times of a real step with its plan. Print the result.

    Args:
        planned: ``schedule.simulate(...)`` of the same table, with costs in seconds;
            ``real.schedule.simulate(real.costs)`` gives the times of the schedule alone at the measured costs.
        real: the result of ``ForwardBackward.timeline``.

    Raises:
        ScheduleError: the tables differ, or the plan is at the default costs, which are not in seconds.
    """
    for name, timeline in (("planned", planned), ("real", real)):
        if not isinstance(timeline, Timeline):
            raise ScheduleError(f"{name} is {shown(timeline)}; it is a Timeline, as schedule.simulate() gives")
    if planned.schedule.rows != real.schedule.rows:
        raise ScheduleError(
            "the timelines are of different tables, and an action of one has none beside it; compare a plan with a "
            "step that ran the same table. Two tables are set side by side by python -m fxpipe compare one.csv two.csv"
        )
    if real.measured and not planned.measured and planned.costs == Costs.of(len(planned.costs.forward)):
        raise ScheduleError(
            "the plan counts in forwards, F = 1 and B = 2, the real step in seconds; plan with costs in seconds, as in "
            "real.schedule.simulate(real.costs)"
        )
    return Comparison(planned, real)


@dataclass(frozen=True)
class Comparison(Tabular):
    """Two timelines of the same table, and their differences."""

    planned: Timeline
    real: Timeline

    @cached_property
    def path(self) -> tuple[Part, ...]:
        """The parts of the real step's critical path; their real times sum to its makespan."""
        parts: dict[str, Part] = {}
        for what, planned, real in self._along_the_path():
            part = parts.get(what, Part(what, 0, 0.0, 0.0))
            parts[what] = Part(what, part.times + 1, part.planned + planned, part.real + real)
        return tuple(sorted(parts.values(), key=lambda part: part.planned - part.real))

    @property
    def slack(self) -> float:
        """The planned makespan minus this path's planned time; above 0 if another path is critical in the plan."""
        return self.planned.makespan - sum(part.planned for part in self.path)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """How each rank's time divides."""
        return tuple(self._share(rank) for rank in range(len(self.real.schedule.rows)))

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The actions that waited for a message longer than planned, the largest difference first."""
        waits = []
        for action in self.real.spans:
            cause = self.real.cause(action)
            if cause is not None and cause.crosses:
                planned, real = self.planned.waited(action), self.real.waited(action)
                if real > planned:
                    waits.append(Wait(action, cause.action, planned, real))
        return tuple(sorted(waits, key=lambda wait: wait.planned - wait.real))

    def _along_the_path(self) -> Iterator[tuple[str, float, float]]:
        """Yields (what, planned, real) of each action on the critical path, and of each gap before an action."""
        # Each action of the path begins when its cause has ended, and, from another rank, arrived: so the actions and
        # the gaps between them sum to the makespan.
        path = self.real.critical_path
        if path:
            yield "before the first action", 0.0, self.real.spans[path[0]].start
        for before, action in zip((None, *path), path, strict=False):
            if before is not None:
                gap = self.real.spans[action].start - self.real.spans[before].end
                here, there = map(self.real.schedule.rank, (before, action))
                if here == there:
                    yield f"rank {here}, between actions", 0.0, gap
                else:
                    yield f"hop from rank {here} to rank {there}", self.planned.costs.comm, gap
            what = f"{action.kind.letter} of stage {printable(self.real.schedule.label(action.stage))}"
            planned, real = (timeline.spans.get(action, Span(0.0, 0.0)) for timeline in (self.planned, self.real))
            yield what, planned.duration, real.duration

    def _share(self, rank: int) -> Share:
        def parts(timeline: Timeline) -> tuple[float, float, float]:
            row = ran(timeline)[rank]
            rest = timeline.makespan - max((timeline.spans[action].end for action in row), default=0.0)
            return timeline.busy[rank], sum(map(timeline.waited, row)), rest

        # The remaining time, neither compute, waiting nor the end, is not measured by itself.
        planned, real = parts(self.planned), parts(self.real)
        between = self.real.makespan - real[0] - real[1] - real[2]
        return Share(rank, planned[0], real[0], planned[1], real[1], planned[2], real[2], between)

    def __str__(self) -> str:
        # The headline, the critical path, the ranks' shares, and the longest waits, if any are longer than planned.
        planned, real, ms = self.planned, self.real, milliseconds
        longer = real.makespan / planned.makespan - 1 if planned.makespan else 0.0
        path = [(p.what, f"{p.times}", ms(p.planned), ms(p.real), ms(p.real - p.planned, "+")) for p in self.path]
        slack = ("slack of this path in the plan", "", ms(self.slack), "", ms(-self.slack, "+"))
        shares = [(f"{share.rank}", *map(ms, share[1:])) for share in self.shares]
        waits = [
            (f"{w.action}", f"{w.source} from rank {real.schedule.rank(w.source)}", ms(w.planned), ms(w.real))
            for w in self.waits[:_SHOWN_WAITS]
        ]
        in_turns = any(len(spell.ranks) > 1 for spell in real.spells)
        heads = "rank|compute planned (ms)|real|waiting planned|real|after last action planned|real|between actions"
        heading = f"of {len(self.waits)} longer waits|waited for|planned (ms)|real"
        return "\n\n".join(
            [
                f"{real.schedule.name}: makespan planned {ms(planned.makespan)} ms, real {ms(real.makespan)} ms, "
                f"{longer:+.1%}; bubble planned {planned.bubble:.1%}, real {real.bubble:.1%}",
                *["one process played all ranks of the real step, in turns: no two actions ran at a time"] * in_turns,
                _table("the critical path of the real step (ms)|times|planned|real|longer by", [*path, slack]),
                _table(heads, shares),
                *([_table(heading, waits)] if waits else []),
                *([f"{real.advice()}"] if real.advice is not None else []),
            ]
        )


def _table(headers: str, rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with words aligned left and numbers aligned right."""
    is_number = [not "".join(column).strip("+-.0123456789") for column in zip(*rows, strict=True)]
    sides = ["right" if number else "left" for number in is_number]
    return tabulate(rows, headers=headers.split("|"), disable_numparse=True, colalign=sides)
