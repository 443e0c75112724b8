"""Layout: where the parts of a picture stand, in pixels."""

from __future__ import annotations

import math
import unicodedata
from typing import NamedTuple

from fxpipe.schedules.schedule import Reduction, Timeline

MARGIN = 16
FONT = 11
DIGIT = 6.8
"""The width of a digit of FONT pixels, with a little to spare."""
LINE = 14
HEAD = 104
"""The height of headline, legend and axis."""
LABEL = 230
"""The most width that the stages of a rank get beside its row."""
SWATCH = 15
LANE = 5
"""The height of a lane of reductions beneath a row, with what parts it from the next."""
PLOT = (680, 8000)
CELL = 19
"""The least that a short cell would like to have."""


class Label(NamedTuple):
    """A stage beside its rank's row: where its swatch stands, and its text."""

    stage: int
    x: float
    y: float
    text: str


class PictureLayout:
    """Times and ranks → pixels."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self.timeline = timeline
        self.stages = schedule.stages_of
        ranks, most = len(self.stages), max(map(len, self.stages), default=0)
        self.lanes = tuple(lanes(timeline, rank) for rank in range(ranks))
        # Beside a row stand its stages, in one column or several.
        self.columns = 1 if most <= 3 else 2 if most <= 8 else 4
        self.lines = -(-most // self.columns)
        names = (schedule.label(stage) for stages in self.stages for stage in stages)
        widest = SWATCH + max(map(text_width, names), default=0.0) + 10
        self.column = min(widest, LABEL / self.columns)
        self.labels_left = MARGIN + text_width(f"rank {max(ranks - 1, 0)}") + 12
        # A row, and from a row to the next.
        self.height = max(26 if ranks <= 16 else 18, self.lines * LINE + 2)
        self.pitch = self.height + (6 if ranks <= 16 else 3) + LANE * max(map(len, self.lanes), default=0)
        self.bottom = HEAD + ranks * self.pitch
        # Time 0 stands at the left; the end is that of what is drawn: a reduction may end after the last action.
        self.left = float(math.ceil(self.labels_left + self.columns * self.column))
        self.end = max(timeline.makespan, *(reduction.end for reduction in timeline.reductions), 0.0)
        # What a cell needs to show its micro-batch: the same for all, so that no row is numbered half.
        self.number_width = len(str(max(schedule.microbatches - 1, 0))) * DIGIT + 2
        lengths = sorted(span.duration for span in timeline.spans.values() if span.duration > 0)
        # Enough for numbers in most cells, if that is not too wide.
        wanted = self.end / lengths[len(lengths) // 5] * max(CELL, self.number_width) if lengths else 0.0
        self.plot = float(round(min(max(wanted, PLOT[0]), PLOT[1])))
        self.scale = self.plot / self.end if self.end else 0.0
        # The width of the makespan, which is that of a row.
        self.track = round(self.plot * timeline.makespan / self.end, 2) if self.end else self.plot
        self.width = self.left + self.plot + 80

    def x(self, time: float) -> float:
        """In hundredths of a pixel, so that what follows without a gap is drawn so."""
        return round(self.left + time * self.scale, 2)

    def y(self, rank: int) -> int:
        return HEAD + rank * self.pitch

    def labels(self, rank: int) -> list[Label]:
        """The stages of a rank, column by column, in the middle of its row."""
        stages = self.stages[rank]
        lines = min(self.lines, len(stages))
        top = self.y(rank) + (self.height - lines * LINE) / 2
        room = self.column - SWATCH - 8
        found = []
        for place, stage in enumerate(stages):
            x, y = self.labels_left + place // lines * self.column, top + place % lines * LINE
            found.append(Label(stage, x, y, truncated(self.timeline.schedule.label(stage), room)))
        return found


Lanes = tuple[tuple[Reduction, ...], ...]
"""Reductions of one rank, of which those of a lane do not overlap."""


def lanes(timeline: Timeline, rank: int) -> Lanes:
    """The reductions of a rank on as few lanes as hold them, each on the first that is free."""
    free: list[list[Reduction]] = []
    for reduction in sorted((one for one in timeline.reductions if one.rank == rank), key=lambda one: one.start):
        lane = next((lane for lane in free if lane[-1].end <= reduction.start), None)
        if lane is None:
            free.append([reduction])
        else:
            lane.append(reduction)
    return tuple(map(tuple, free))


def ticks(end: float, most: int) -> list[float]:
    """Round times from 0 to ``end``: 1, 2 or 5 times a power of ten apart, at most about ``most`` of them."""
    if end <= 0 or most < 1:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if end / step <= most)
    return [step * count for count in range(math.floor(end / step + 1e-9) + 1)]


def text_width(text: str) -> float:
    """About how wide a text of FONT pixels is; no font is measured."""
    return sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if letter in " .,:;'|!fijlrtI()[]":
        return 0.6 * DIGIT
    if unicodedata.east_asian_width(letter) in "WF":
        return 2 * DIGIT
    return 1.45 * DIGIT if letter in "mwMW@%" else DIGIT * (1.2 if letter.isupper() else 1)


def truncated(text: str, room: float) -> str:
    if text_width(text) <= room:
        return text
    while text and text_width(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"
