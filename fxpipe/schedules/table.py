"""Show: a schedule or a timeline as a text table, folded to the terminal's width if the table is long."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxpipe.errors import ScheduleError, printable
from fxpipe.graph.ranks import ranks_of
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import ActionTable
from fxpipe.schedules.action_times import ActionTimes
from fxpipe.schedules.dependency import in_steps
from fxpipe.schedules.kinds import Lane
from fxpipe.schedules.show.words import in_bytes, measured_peaks

Step = tuple[Action | None, ...]
"""A column of the table: the action of each rank in that step, None if the rank idles."""

Column = list[str]
"""A column as text: its header, then a cell for each rank."""

LEFT_OUT = "⋯"
AIRY, CLOSE = 2, 1
"""The number of blanks between two columns. An airy table adds two more after the longest header."""


def table(schedule: ActionTable, planned: Callable[[], ActionTimes], full: bool = False) -> str:
    """Returns the table as text: rows are ranks with their stages, columns are steps of one action each; then figures.

    A table wider than the terminal is folded: of steps that repeat for each micro-batch, the table shows one period,
    and a line lists the omitted steps. A table that is still too wide becomes several blocks.

    Args:
        schedule: the table.
        planned: returns the times for the figures; the text says so if it raises ScheduleError.
        full: never folds.
    """
    stages, ranks = len(schedule.placement), len(schedule.rows)
    head = f"{schedule.name}: {stages} stages on {ranks} ranks, {schedule.microbatches} micro-batches"
    return printable("\n".join([*_drawn(schedule, full=full), head, *_figures(planned)]))


def grid(schedule: ActionTable, marked: Collection[Action] = ()) -> str:
    """The table's cells, marked cells in brackets; of a table wider than the terminal only steps near these."""
    return "\n".join(_drawn(schedule, marked))


def _drawn(schedule: ActionTable, marked: Collection[Action] = (), full: bool = False) -> list[str]:
    """Returns the lines of cells: all cells if they fit, else the steps near the marked cells, or a folded table."""
    steps = list(zip(*in_steps(schedule.rows, schedule.dependencies), strict=True))
    whole = [*_heads(schedule), *_columns(steps, marked)]
    if full or _fits(whole, AIRY):
        return _draw(whole, AIRY)
    places = [index for index, step in enumerate(steps) if not set(step).isdisjoint(marked)]
    return _near(schedule, steps, places, marked) if places else _folded(schedule, steps)


# --- the steady state ---


@dataclass(frozen=True)
class Fold:
    """Steps that repeat the ``period`` steps before ``first``, ``times`` times, each time for micro-batches whose
    numbers are ``shift`` higher."""

    first: int
    period: int
    times: int
    shift: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.times

    def __str__(self) -> str:
        again = f"repeat {_range(self.first - self.period, self.first)} {self.times} times"
        following = "micro-batch" if self.shift == 1 else f"{self.shift} micro-batches"
        return f"{LEFT_OUT} {_range(self.first, self.end)} {again}, for the next {following} each time"


def _range(first: int, end: int) -> str:
    return f"step {first}" if end == first + 1 else f"steps {first}–{end - 1}"


def _folds(schedule: ActionTable, steps: Sequence[Step]) -> list[Fold]:
    """Returns the steady states of a table; of several choices, the folds that omit the most steps."""
    places = {action: index for index, step in enumerate(steps) for action in step if action is not None}
    # A pattern may repeat for each micro-batch, for a lap of interleaved stages, for a group, or for a round of ranks.
    turns = (len(ranks_of(entry)) for entry in schedule.placement)
    shifts = {*range(1, len(schedule.placement) + 1), *schedule.groups, *turns}
    fitting = sorted(shift for shift in shifts if shift <= schedule.microbatches // 2)
    choices = [list(_folds_by(shift, steps, places)) for shift in fitting]
    return max(choices, key=lambda folds: sum(fold.end - fold.first for fold in folds), default=[])


def _folds_by(shift: int, steps: Sequence[Step], places: dict[Action, int]) -> Iterator[Fold]:
    """Yields the folds in which each step repeats equally many steps later, for micro-batches ``shift`` higher."""
    # A run of steps with the same period repeats: the table shows the first period, and omits the others.
    periods = (_period(step, index, shift, steps, places) for index, step in enumerate(steps))
    done = start = 0
    for period, run in groupby(periods):
        start, end = max(start, done), start + len(list(run))
        times = (end - start) // period if period else 0
        if period * times > 2:  # a fold of fewer steps saves no space
            done = start + period * (1 + times)
            yield Fold(start + period, period, times, shift)
        start = end


def _period(step: Step, index: int, shift: int, steps: Sequence[Step], places: dict[Action, int]) -> int:
    """Returns after how many steps a step repeats for micro-batches ``shift`` higher; 0 if the step does not repeat."""
    # The first action of the step gives the later step: all other actions must repeat in that same step.
    again = next((places.get(_later(action, shift), index) for action in step if action is not None), index)
    if again <= index:
        return 0
    pairs = zip(step, steps[again], strict=True)
    same = all(second == (first and _later(first, shift)) for first, second in pairs)
    return again - index if same else 0


def _later(action: Action, shift: int) -> Action:
    return Action(action.stage, action.kind, action.microbatch + shift, action.count)


# --- drawing ---


def _folded(schedule: ActionTable, steps: Sequence[Step]) -> list[str]:
    """Returns the whole table if it fits with narrower gaps, else the folded table, in as many blocks as needed."""
    # A narrow terminal loses, in this order: long names, blanks between columns, repeated steps, one block.
    columns, heads = _columns(steps), _heads(schedule, _width() // 3)
    if _fits([*heads, *columns], CLOSE):
        return _draw([*heads, *columns], CLOSE)
    folds = _folds(schedule, steps)
    shown: list[Column] = []
    index = 0
    for fold in folds:
        shown += [*columns[index : fold.first], _left_out(schedule)]
        index = fold.end
    shown += columns[index:]
    drawn = _draw([*heads, *shown], AIRY) if _fits([*heads, *shown], AIRY) else _blocks(heads, shown)
    return [*drawn, *map(str, folds)]


def _near(schedule: ActionTable, steps: Sequence[Step], places: Sequence[int], marked: Collection[Action]) -> list[str]:
    """Returns as many steps around these places as fit on a line: all steps if possible, at least one on each side."""
    columns, heads = _columns(steps, marked), _heads(schedule, _width() // 3)
    shown: list[Column] = []
    # Tries the widest neighbourhood first; if none fits on one line, one step on each side remains.
    for reach in (len(steps), 16, 8, 4, 2, 1):
        near = {step for index in places for step in range(index - reach, index + reach + 1)}
        shown = []
        for is_near, run in groupby(enumerate(columns), key=lambda column: column[0] in near):
            shown += [column for _, column in run] if is_near else [_left_out(schedule)]
        if _fits([*heads, *shown], CLOSE):
            break
    return _blocks(heads, shown)


def _blocks(heads: Sequence[Column], columns: Sequence[Column]) -> list[str]:
    """Returns blocks of as many columns as fit on a line, one block below another, each with the head columns."""
    # Greedy, as lines of text are filled: a block ends before the first column that does not fit.
    blocks: list[list[Column]] = []
    for column in columns:
        if blocks and _fits([*blocks[-1], column], CLOSE):
            blocks[-1].append(column)
        else:
            blocks.append([*heads, column])
    drawn = [_draw(block, CLOSE) for block in blocks or [list(heads)]]
    return [*drawn[0], *(line for block in drawn[1:] for line in ("", *block))]


def _draw(columns: Sequence[Column], gap: int) -> list[str]:
    """Returns the lines: the headers, a rule, and a row for each rank."""
    padded = [
        [header.ljust(width), "-" * width, *(cell.ljust(width) for cell in cells)]
        for (header, *cells), width in zip(columns, _widths(columns, gap), strict=True)
    ]
    return [(" " * gap).join(line).rstrip() for line in zip(*padded, strict=True)]


def _fits(columns: Sequence[Column], gap: int) -> bool:
    return sum(_widths(columns, gap)) + gap * (len(columns) - 1) <= _width()


def _widths(columns: Iterable[Column], gap: int) -> list[int]:
    padding = 2 if gap == AIRY else 0
    return [max(len(column[0]) + padding, *map(len, column)) for column in columns]


def _width() -> int:
    return shutil.get_terminal_size(fallback=(120, 24)).columns


def _columns(steps: Sequence[Step], marked: Collection[Action] = ()) -> list[Column]:
    return [
        [str(index), *("" if cell is None else f"[{cell}]" if cell in marked else str(cell) for cell in step)]
        for index, step in enumerate(steps)
    ]


def _left_out(schedule: ActionTable) -> Column:
    return [LEFT_OUT] * (1 + len(schedule.rows))


def _heads(schedule: ActionTable, most: int | None = None) -> list[Column]:
    """The head columns: ranks, and each rank's stages by number and name. ``most``: the most letters."""
    texts = [", ".join(map(schedule.label, mine)) for mine in schedule.stages_of]
    if most is not None:
        texts = [text if len(text) <= most else f"{text[: max(most - 1, 0)]}…" for text in texts]
    return [["rank", *map(str, range(len(texts)))], ["stages", *texts]]


# --- figures ---


def _figures(planned: Callable[[], ActionTimes]) -> list[str]:
    try:
        timeline = planned()
    except ScheduleError as error:
        return [str(error)]
    schedule = timeline.schedule
    name, m = schedule.name_of, schedule.microbatches
    trained = [stage for stage, has_backward in enumerate(schedule.backward) if has_backward]
    peaks = [f"{name(stage)} {timeline.peak_in_flight[stage]}" for stage in trained]
    figures = [_times(timeline), f"peak in flight: {', '.join(peaks) or 'nothing is differentiated'}"]
    caps = [f"{name(stage)} {cap}" for stage, cap in sorted(schedule.dependencies.ahead.items()) if cap < m]
    if caps:
        figures.append(f"most ahead of those that read it: {', '.join(caps)}")
    if timeline.memory:
        figures += measured_peaks(timeline).values()
    elif timeline.peak_bytes is not None:
        sizes = (f"rank {rank} {in_bytes(size)}" for rank, size in enumerate(timeline.peak_bytes))
        figures.append(f"activations at most: {', '.join(sizes)}")
    return figures


def _times(timeline: ActionTimes) -> str:
    """Bubble, makespan and lower bound: in seconds if known, else in the costs' unit, F if each F is 1."""
    makespan, bound, costs = timeline.makespan, timeline.lower_bound, timeline.costs
    bubble = f"bubble {timeline.bubble:.1%}"
    if timeline.measured:
        return f"measured: {bubble}, makespan {in_seconds(makespan)} (lower bound {in_seconds(bound)})"
    if costs.source:
        return f"{bubble}, {in_seconds(makespan)} planned (lower bound {in_seconds(bound)}), {costs.source}"
    if costs.by_microbatch or any(cost != 1 for cost in costs.forward):
        return f"{bubble}, makespan {makespan:g} (lower bound {bound:g}) in the costs' unit"
    # The other costs, if each is the same for all stages.
    others = []
    if len(set(costs.backward)) == 1:
        others.append(f"B = {costs.backward[0]:g} F")
    split = any(action.kind.replaces and action.kind.messages for row in timeline.schedule.rows for action in row)
    if split and len(set(costs.weight)) == 1 and costs.weight[0] != costs.backward[0] / 2:
        others.append(f"W = {costs.weight[0]:g} F")
    if costs.comm:
        others.append(f"a hop = {costs.comm:g} F")
    if timeline.copies and costs.copy is not None and len(set(costs.copy)) == 1:
        others.append(f"a copy = {costs.copy[0]:g} F")
    at = f" at {', '.join(others)}" if others else ""
    return f"{bubble}, makespan {makespan:g} F (lower bound {bound:g} F){at}"


def copies_in_words(timeline: ActionTimes) -> str:
    """How long the copies of a measured step took, and how long ranks waited for them."""
    took = {lane: sum(copy.end - copy.start for copy in timeline.copies if copy.lane is lane) for lane in Lane}
    names = {copy.what for copy in timeline.copies}
    waited = sum(spell.duration for spell in timeline.spells if spell.what in names)
    lanes = ", ".join(f"{in_seconds(time)} {lane.value}" for lane, time in took.items())
    return f"copies of all ranks: {lanes}; the ranks waited for them {in_seconds(waited)}"


def in_seconds(time: float) -> str:
    """Seconds in s or ms, to three digits."""
    number, unit = (time, "s") if time >= 1 else (time * 1e3, "ms")
    return f"{number:.3g} {unit}" if number < 99.95 else f"{number:.0f} {unit}"
