"""Layout: where the parts of a picture stand, in pixels."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class Label:
    """A stage beside its rank's row: where its swatch stands, and its text."""

    stage: int
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class PictureLayout:
    """Times and ranks → pixels."""

    timeline: Timeline

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Rank → its stages."""
        return self.timeline.schedule.stages_of

    @cached_property
    def most(self) -> int:
        return max((len(stages) for stages in self.stages), default=0)

    @property
    def columns(self) -> int:
        """How many stages stand side by side in a row's label."""
        return 1 if self.most <= 3 else 2 if self.most <= 8 else 4

    @property
    def lines(self) -> int:
        return -(-self.most // self.columns)

    @property
    def height(self) -> int:
        """Of a row."""
        return max(26 if len(self.stages) <= 16 else 18, self.lines * LINE + 2)

    @property
    def pitch(self) -> int:
        """From a row to the next."""
        return self.height + (6 if len(self.stages) <= 16 else 3) + LANE * max(map(len, self.lanes), default=0)

    @cached_property
    def lanes(self) -> tuple[Lanes, ...]:
        """Rank → its reductions."""
        return tuple(lanes(self.timeline, rank) for rank in range(len(self.stages)))

    @cached_property
    def end(self) -> float:
        """Of what is drawn: a reduction may end after the last action."""
        return max(self.timeline.makespan, *(reduction.end for reduction in self.timeline.reductions), 0.0)

    @cached_property
    def column(self) -> float:
        """The width of a column of labels."""
        names = (self.timeline.schedule.label(stage) for stages in self.stages for stage in stages)
        widest = SWATCH + max(map(text_width, names), default=0.0) + 10
        return min(widest, LABEL / self.columns)

    @property
    def rank_width(self) -> float:
        return text_width(f"rank {max(len(self.stages) - 1, 0)}") + 12

    @cached_property
    def left(self) -> float:
        """Where time 0 is."""
        return float(math.ceil(MARGIN + self.rank_width + self.columns * self.column))

    @property
    def number_width(self) -> float:
        """What a cell needs to show its micro-batch: the same for all, so that no row is numbered half."""
        return len(str(max(self.timeline.schedule.microbatches - 1, 0))) * DIGIT + 2

    @cached_property
    def plot(self) -> float:
        """The width of all that is drawn: enough for numbers in most cells, if that is not too wide."""
        lengths = sorted(span.duration for span in self.timeline.spans.values() if span.duration > 0)
        if not lengths:
            return PLOT[0]
        short = lengths[len(lengths) // 5]
        return float(round(min(max(self.end / short * max(CELL, self.number_width), PLOT[0]), PLOT[1])))

    @property
    def track(self) -> float:
        """The width of the makespan, which is that of a row."""
        return round(self.plot * self.timeline.makespan / self.end, 2) if self.end else self.plot

    @property
    def width(self) -> float:
        return self.left + self.plot + 80

    @property
    def bottom(self) -> float:
        return HEAD + len(self.stages) * self.pitch

    @cached_property
    def scale(self) -> float:
        """Pixels per unit of time."""
        return self.plot / self.end if self.end else 0.0

    def x(self, time: float) -> float:
        """In hundredths of a pixel, so that what follows without a gap is drawn so."""
        return round(self.left + time * self.scale, 2)

    def y(self, rank: int) -> int:
        return HEAD + rank * self.pitch

    def labels(self, rank: int) -> list[Label]:
        """The stages of a rank, column by column, in the middle of its row."""
        stages = self.stages[rank]
        lines = min(self.lines, len(stages))
        left = MARGIN + self.rank_width
        top = self.y(rank) + (self.height - lines * LINE) / 2
        room = self.column - SWATCH - 8
        return [
            Label(
                stage,
                left + place // lines * self.column,
                top + place % lines * LINE,
                truncated(self.timeline.schedule.label(stage), room),
            )
            for place, stage in enumerate(stages)
        ]


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
