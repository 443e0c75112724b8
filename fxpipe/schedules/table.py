"""Show: a schedule or a timeline as a table, folded to the terminal where it is long."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, overload

from fxpipe.errors import ScheduleError
from fxpipe.graph.ranks import ranks_of
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.dependency import steps_of
from fxpipe.schedules.schedule import Schedule, Timeline

Step = tuple[Action | None, ...]
"""A column of the table: what each rank does in that step."""

Column = list[str]
"""A column as text: its header, then a cell for each rank."""

LEFT_OUT = "⋯"
_MOST_PLACES = 16  # steps with marked cells that an error shows
_MOST_CELLS = 500_000
"""Of a larger table only what is near to marked cells is drawn, or near to its corners."""
_MOST_FULL = 10_000_000
"""The same for one that is to be drawn in full."""
_AROUND_A_CORNER = 11  # ranks, and at most as many steps
_MOST_FIGURES = 256  # of stages or ranks, in a line


class Air(NamedTuple):
    """The blanks between two columns, and those behind the longest header."""

    gap: str
    padding: int


AIRY, CLOSE = Air("  ", 2), Air(" ", 0)


def table(what: Schedule | Timeline, full: bool = False) -> str:
    """Rows are ranks with their stages, columns are steps of one action each; then the figures, at the costs of the
    timeline, or those that the schedule was built for, or B = 2F.

    A table wider than the terminal is folded: of steps that repeat for micro-batch after micro-batch one period is
    shown, and a line says what was left out. What is still too wide is broken into blocks. ``full``: all in one piece.
    Of a table with too many cells to be looked at the first and last ranks and steps are shown.
    """
    schedule = what if isinstance(what, Schedule) else what.schedule
    stages, ranks = len(schedule.placement), len(schedule.rows)
    head = f"{schedule.name}: {stages} stages on {ranks} ranks, {schedule.microbatches} micro-batches"
    steps = _SparseSteps(schedule)
    if steps.cells > (_MOST_FULL if full else _MOST_CELLS):
        return "\n".join([*_corners(schedule, steps), head, *_figures(what)])
    whole = [*_heads(schedule), *_columns(steps)]
    drawn = _draw(whole, AIRY) if full or _fits(whole, AIRY) else _folded(schedule, list(steps))
    return "\n".join([*drawn, head, *_figures(what)])


def grid(schedule: Schedule, marked: Collection[Action] = ()) -> str:
    """The table's cells, the marked ones in brackets; of a table wider than the terminal what is near to them."""
    steps, wanted = _SparseSteps(schedule), frozenset(marked)
    places, ranks = steps.of(wanted)
    is_small = steps.cells <= _MOST_CELLS
    whole = [*_heads(schedule), *_columns(steps, wanted)] if is_small else []
    if is_small and _fits(whole, AIRY):
        drawn = _draw(whole, AIRY)
    elif places:
        drawn = _neighbourhood(schedule, steps, places, ranks, wanted)
    else:
        drawn = _folded(schedule, list(steps)) if is_small else _corners(schedule, steps)
    return "\n".join(drawn)


# --- steps ---


class _SparseSteps(Sequence[Step]):
    """The steps of a table, each made when it is asked for: a large table has many more cells than actions."""

    def __init__(self, schedule: Schedule) -> None:
        self._rows = steps_of(schedule.rows, schedule.dependencies)
        self._count = 1 + max((step for row in self._rows for step in row), default=-1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Step: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Step]: ...
    def __getitem__(self, place: int | slice) -> Step | Sequence[Step]:
        if isinstance(place, slice):
            return [self[each] for each in range(self._count)[place]]
        number = range(self._count)[place]  # IndexError behind the end
        return tuple(row.get(number) for row in self._rows)

    @property
    def cells(self) -> int:
        return self._count * len(self._rows)

    def of(self, actions: Collection[Action]) -> tuple[list[int], list[int]]:
        """The steps and the ranks where some of these are, in order."""
        found = [(place, rank) for rank, row in enumerate(self._rows) for place, one in row.items() if one in actions]
        places, ranks = {place for place, _ in found}, {rank for _, rank in found}
        return sorted(places), sorted(ranks)


@dataclass(frozen=True)
class Fold:
    """Steps that repeat the ``period`` of steps in front of ``first``, ``times`` times, each time for micro-batches
    that are ``shift`` further on."""

    first: int
    period: int
    times: int
    shift: int

    @property
    def end(self) -> int:
        """The step behind the last one."""
        return self.first + self.period * self.times

    def __str__(self) -> str:
        again = f"repeat {_steps_in_words(self.first - self.period, self.first)} {self.times} times"
        following = "micro-batch" if self.shift == 1 else f"{self.shift} micro-batches"
        return f"{LEFT_OUT} {_steps_in_words(self.first, self.end)} {again}, for the next {following} each time"


def _steps_in_words(first: int, end: int) -> str:
    return f"step {first}" if end == first + 1 else f"steps {first}–{end - 1}"


def _folds(steps: Sequence[Step], shifts: Sequence[int]) -> list[Fold]:
    """The steady states of a table, those that leave out most; micro-batches move on by one of ``shifts`` in a period.

    1F1B repeats for each micro-batch, interleaved 1F1B for each group of them, GPipe first forwards, then backwards.
    """
    places = {action: place for place, step in enumerate(steps) for action in step if action is not None}
    choices = [list(_folds_by(shift, steps, places)) for shift in shifts]
    return max(choices, key=lambda folds: sum(fold.end - fold.first for fold in folds), default=[])


def _folds_by(shift: int, steps: Sequence[Step], places: dict[Action, int]) -> Iterator[Fold]:
    """Where step after step comes again as many steps later, for micro-batches ``shift`` further on."""
    periods = (_period(step, place, shift, steps, places) for place, step in enumerate(steps))
    done = start = 0
    for period, run in groupby(periods):
        start, end = max(start, done), start + len(list(run))
        times = (end - start) // period if period else 0
        if period * times > 2:  # fewer are as well shown
            done = start + period * (1 + times)
            yield Fold(start + period, period, times, shift)
        start = end


def _period(step: Step, place: int, shift: int, steps: Sequence[Step], places: dict[Action, int]) -> int:
    """After how many steps a step comes again for micro-batches ``shift`` further on; 0 where it does not."""
    first = next(action for action in step if action is not None)
    again = places.get(Action(first.stage, first.op, first.microbatch + shift, first.count), place)
    same = again > place and all(
        first is second
        if first is None or second is None
        else (first.stage, first.op, first.microbatch + shift, first.count) == second
        for first, second in zip(step, steps[again], strict=True)
    )
    return again - place if same else 0


# --- drawing ---


def _folded(schedule: Schedule, steps: Sequence[Step]) -> list[str]:
    """Whole where that fits with less air, else folded, in as many blocks as it takes."""
    columns, heads = _columns(steps), _heads(schedule, _terminal().columns // 3)
    if _fits([*heads, *columns], CLOSE):
        return _draw([*heads, *columns], CLOSE)
    turns = (len(ranks_of(place)) for place in schedule.placement)
    shifts = {*range(1, len(schedule.placement) + 1), *schedule.groups, *turns}
    folds = _folds(steps, sorted(shift for shift in shifts if shift <= schedule.microbatches // 2))
    shown, place = [], 0
    for fold in folds:
        shown += [*columns[place : fold.first], _left_out(schedule)]
        place = fold.end
    shown += columns[place:]
    drawn = _draw([*heads, *shown], AIRY) if _fits([*heads, *shown], AIRY) else _blocks(heads, shown)
    return [*drawn, *map(str, folds)]


def _neighbourhood(
    schedule: Schedule, steps: _SparseSteps, places: Sequence[int], ranks: Sequence[int], marked: Collection[Action]
) -> list[str]:
    """As many steps around the marked cells as fit, all if possible; of many ranks, those around them."""
    tall = len(schedule.rows) > _terminal().lines
    rows = _near(ranks[:_MOST_PLACES], len(schedule.rows), reach=2) if tall else range(len(schedule.rows))
    reaches = (len(steps), 16, 8, 4, 2, 1) if steps.cells <= _MOST_CELLS else (16, 8, 4, 2, 1)
    return _part(schedule, steps, rows, places[:_MOST_PLACES], reaches, marked)


def _corners(schedule: Schedule, steps: _SparseSteps) -> list[str]:
    """The first and last ranks of a large table in its first and last steps."""
    ranks = len(schedule.rows)
    rows = _near(sorted({0, ranks - 1}), ranks, _AROUND_A_CORNER)
    places = sorted({0, max(len(steps) - 1, 0)})
    drawn = _part(schedule, steps, rows, places, range(_AROUND_A_CORNER, 0, -1))
    return [
        *drawn,
        f"{LEFT_OUT} of {ranks:,} ranks × {len(steps):,} steps the first and last; to_csv writes all of them",
    ]


def _part(
    schedule: Schedule,
    steps: _SparseSteps,
    rows: Sequence[int | None],
    places: Sequence[int],
    reaches: Iterable[int],
    marked: Collection[Action] = (),
) -> list[str]:
    """These ranks in the steps around ``places``, by the first of the reaches with which they fit."""
    heads = [_only(rows, column) for column in _heads(schedule, _terminal().columns // 3)]
    columns: list[Column] = []
    for reach in reaches:
        columns = [
            _only(rows, _left_out(schedule) if place is None else _column(place, steps[place], marked))
            for place in _near(places, len(steps), reach)
        ]
        if _fits([*heads, *columns], CLOSE):
            break
    return _blocks(heads, columns)


def _near(wanted: Sequence[int], count: int, reach: int) -> list[int | None]:
    """The numbers below ``count`` that are no further than ``reach`` from a wanted one; None where some are missing."""
    near: list[int | None] = []
    last = -1
    for number in wanted:
        first, end = max(number - reach, last + 1), min(number + reach + 1, count)
        near += [None] * (first > last + 1)
        near += range(first, end)
        last = max(last, end - 1)
    return near + [None] * (last < count - 1)


def _only(rows: Sequence[int | None], column: Column) -> Column:
    """A column with the cells of these ranks alone."""
    return [column[0], *(LEFT_OUT if rank is None else column[1 + rank] for rank in rows)]


def _blocks(heads: Sequence[Column], columns: Sequence[Column]) -> list[str]:
    """As many columns beside each other as fit, the next below them, each block with its heads."""
    room = _terminal().columns - sum(_widths(heads, CLOSE)) - len(heads)
    blocks: list[list[Column]] = [[]]
    used = 0
    for column, width in zip(columns, _widths(columns, CLOSE), strict=True):
        if blocks[-1] and used + width > room:
            blocks.append([])
            used = 0
        blocks[-1].append(column)
        used += width + 1
    first, *others = (_draw([*heads, *block], CLOSE) for block in blocks)
    return [*first, *(line for block in others for line in ("", *block))]


def _draw(columns: Sequence[Column], air: Air) -> list[str]:
    """Lines: the headers, a rule, a row for each rank."""
    padded = [
        [header.ljust(width), "-" * width, *(cell.ljust(width) for cell in cells)]
        for (header, *cells), width in zip(columns, _widths(columns, air), strict=True)
    ]
    return [air.gap.join(line).rstrip() for line in zip(*padded, strict=True)]


def _fits(columns: Sequence[Column], air: Air) -> bool:
    return sum(_widths(columns, air)) + len(air.gap) * (len(columns) - 1) <= _terminal().columns


def _widths(columns: Iterable[Column], air: Air) -> list[int]:
    return [max(len(column[0]) + air.padding, *map(len, column)) for column in columns]


def _terminal() -> os.terminal_size:
    return shutil.get_terminal_size(fallback=(120, 24))


def _columns(steps: Sequence[Step], marked: Collection[Action] = ()) -> list[Column]:
    return [_column(place, step, marked) for place, step in enumerate(steps)]


def _column(place: int, step: Step, marked: Collection[Action]) -> Column:
    cells = ("" if action is None else f"[{action}]" if action in marked else str(action) for action in step)
    return [str(place), *cells]


def _left_out(schedule: Schedule) -> Column:
    return [LEFT_OUT] * (1 + len(schedule.rows))


def _heads(schedule: Schedule, most: int | None = None) -> list[Column]:
    """The ranks, and the stages of each by number and, where they have one, name; ``most``: how many letters."""
    texts = [", ".join(map(schedule.label, mine)) for mine in schedule.stages_of]
    if most is not None:
        texts = [text if len(text) <= most else f"{text[: max(most - 1, 0)]}…" for text in texts]
    return [["rank", *map(str, range(len(texts)))], ["stages", *texts]]


# --- figures ---


def _figures(what: Schedule | Timeline) -> list[str]:
    try:
        timeline = what.planned() if isinstance(what, Schedule) else what
    except ScheduleError as error:
        return [str(error)]
    schedule = timeline.schedule
    peaks = [
        f"{schedule.name_of(stage)} {peak}"
        for stage, peak in enumerate(timeline.peak_in_flight)
        if schedule.backward[stage]
    ]
    figures = [_times(timeline), f"peak in flight: {_listed(peaks) or 'nothing is differentiated'}"]
    ahead = schedule.dependencies.ahead.items()
    caps = [f"{schedule.name_of(stage)} {cap}" for stage, cap in sorted(ahead) if cap < schedule.microbatches]
    if caps:
        figures.append(f"most ahead of those that read it: {_listed(caps)}")
    if timeline.peak_bytes is not None:
        sizes = [f"rank {rank} {_bytes(size)}" for rank, size in enumerate(timeline.peak_bytes)]
        figures.append(f"peak bytes: {_listed(sizes)}")
    return figures


def _listed(figures: Sequence[str]) -> str:
    left = len(figures) - _MOST_FIGURES
    return ", ".join(figures[:_MOST_FIGURES]) + (f", and {left:,} more" if left > 0 else "")


def _times(timeline: Timeline) -> str:
    """Bubble, makespan and lower bound: measured in seconds, planned in the unit of the costs, F where that is 1."""
    makespan, bound = timeline.makespan, timeline.lower_bound
    bubble = f"bubble {timeline.bubble:.1%}"
    if timeline.measured:
        return f"measured: {bubble}, makespan {_seconds(makespan)} (lower bound {_seconds(bound)})"
    if any(cost != 1 for cost in timeline.costs.forward):
        return f"{bubble}, makespan {makespan:g} (lower bound {bound:g}) in the costs' unit"
    others = _in_forwards(timeline.costs, timeline.schedule)
    return f"{bubble}, makespan {makespan:g} F (lower bound {bound:g} F){others}"


def _in_forwards(costs: Costs, schedule: Schedule) -> str:
    """The other costs in words, where each is one number for all stages."""
    facts = []
    if len(set(costs.backward)) == 1:
        facts.append(f"B = {costs.backward[0]:g} F")
    split = any(action.op is Op.W for row in schedule.rows for action in row)
    if split and len(set(costs.weight)) == 1 and costs.weight[0] != costs.backward[0] / 2:
        facts.append(f"W = {costs.weight[0]:g} F")
    if costs.comm:
        facts.append(f"a hop = {costs.comm:g} F")
    return f" at {', '.join(facts)}" if facts else ""


def _seconds(time: float) -> str:
    return f"{_three_digits(time)} s" if time >= 1 else f"{_three_digits(time * 1e3)} ms"


def _three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 99.95 else f"{number:.0f}"


def _bytes(size: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {units[power]}" if power else f"{size:g} {units[0]}"
