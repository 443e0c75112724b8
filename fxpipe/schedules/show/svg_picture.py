"""Drawing: a timeline as SVG. A row is a rank, a cell is an action, and the rest of a row is bubble."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from typing import Literal, NamedTuple

from fxpipe.errors import printable
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionTimes, ran
from fxpipe.schedules.kinds import KINDS, Kind
from fxpipe.schedules.show.words import describe, headline, in_bytes, measured_peaks, numbers, unit_of

# Attributes give the colours, since every program understands them; a style changes the colours for dark mode.
PAPER, INK, DIM, TRACK, GRID = "#ffffff", "#14171c", "#59616b", "#e8eaee", "#d3d7dd"
REDUCTION, COPY, MEMORY = "#7c8794", "#a98b5d", "#9db4d6"
STYLE = """.fxpipe { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
.fxpipe .paper { fill: #15171b } .fxpipe .ink { fill: #e8eaed } .fxpipe .dim { fill: #a3abb5 }
.fxpipe .track { fill: #2c3037 } .fxpipe .grid { stroke: #444a53 }
.fxpipe .cells { stroke: #15171b } .fxpipe .critical { stroke: #fff } }"""

NARROW = 6  # pixels: in a narrower cell, an outline would fill the cell
MARK = 2  # the width in pixels of an action that takes no time
MARGIN = 16
FONT = 11
DIGIT = 6.8
"""The width of a digit in pixels at font size FONT, with a margin."""
LINE = 14
HEAD = 104
"""The height of headline, legend and axis in pixels."""
LABEL = 230
"""The most pixels of width for the stage labels of a rank, left of its row."""
SWATCH = 15
LANE = 5
"""The height in pixels of a lane of reductions or copies below a row, with the gap to the next lane."""
CURVE = 24
"""The height in pixels of the curve of a rank's bytes, below its row and lanes, with the gap above."""
PLOT = (680, 8000)
CELL = 19
"""The desired width in pixels of a short cell."""


def svg(timeline: ActionTimes) -> str:
    """The picture: a row for each rank, to scale; stages have colours, ops tones, the critical path an outline."""
    layout = PictureLayout(timeline)
    what, figures = headline(timeline)
    width = max(layout.width, MARGIN * 2 + text_width(what) * 1.4)
    parts = [
        *_begun(width, layout.bottom + MARGIN, f"{what}; {figures}", _patterns(timeline)),
        *_tracks(layout),
        *_axis(layout),
        *_cells(layout),
        *_bars(layout),
        *_curves(layout),
        f'<path class="critical" d="{"".join(_outlines(layout))}" fill="none" stroke="{INK}" stroke-width="1.5"'
        ' pointer-events="none"/>',
        *_labels(layout),
        _text(MARGIN, 28, what, 'font-size="16" font-weight="600"'),
        _text(MARGIN, 48, figures, 'font-size="13"'),
        *_legend(timeline),
        "</svg>\n",
    ]
    return "\n".join(parts)


def bar_chart(title: str, ways: Iterable[tuple[str, str, float, Sequence[float]]]) -> str:
    """The picture of several ways to run a step, to scale: a bar for each rank, with its busy and its idle time.

    Args:
        title: the title.
        ways: for each way its name, a text for its right, its makespan, and the time that each rank is busy.
    """
    names, _, lengths, _ = zip(*ways, strict=True)
    left, y = MARGIN + max(map(text_width, names)) + 12, 48
    scale, parts = PLOT[0] / max(lengths), [_text(MARGIN, 28, title, 'font-size="16" font-weight="600"')]
    for name, text, length, times in ways:
        middle = y + max(len(times), 1) * SWATCH / 2 + 3
        parts += [_text(MARGIN, middle, name), _text(left + length * scale + 8, middle, text)]
        for rank, busy in enumerate(times):
            idle = f"rank {rank}: idle {1 - busy / length:.1%}"
            parts.append(_rect(left, y, length * scale, SWATCH - 2, idle, f' class="track" fill="{TRACK}"'))
            parts.append(_rect(left, y, busy * scale, SWATCH - 2, idle, f' fill="{fill(0, Kind.F)}"'))
            y += SWATCH
        y += SWATCH
    return "\n".join([*_begun(left + PLOT[0] + 80, y, title), *parts, "</svg>\n"])


def _begun(width: float, height: float, label: str, patterns: Iterable[str] = ()) -> Iterator[str]:
    """Yields the head of a picture, with the patterns that it uses, and its paper."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fxpipe" width="{width:g}" height="{height:g}" viewBox="0 0'
        f' {width:g} {height:g}" style="--width: {width:g}px" font-family="system-ui, sans-serif" font-size="{FONT}"'
        f' role="img" aria-label="{escape(printable(label))}">'
    )
    yield f"<style>{STYLE}</style>"
    yield f"<defs>{''.join(patterns)}</defs>"
    yield f'<rect class="paper" width="100%" height="100%" fill="{PAPER}"/>'


def kinds_in(timeline: ActionTimes) -> list[Kind]:
    used = {action.kind for row in timeline.schedule.rows for action in row}
    return [kind for kind in KINDS.values() if kind in used]


def _text(x: float, y: float, text: str, more: str = "", dim: bool = False) -> str:
    kind, colour = ("dim", DIM) if dim else ("ink", INK)
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" fill="{colour}" {more}>{escape(printable(text))}</text>'


# --- fills ---


def _paint(stage: int | None, kind: Kind) -> str:
    return fill(stage, kind) if kind.tone.stripes is None else f"url(#{_pattern_id(stage, kind)})"


def _pattern_id(stage: int | None, kind: Kind) -> str:
    return f"fxpipe-{kind.name}-{'any' if stage is None else stage}"


def _patterns(timeline: ActionTimes) -> Iterator[str]:
    """Yields a pattern for each stage and kind that is striped."""
    for kind in kinds_in(timeline):
        for stage in (None, *range(len(timeline.schedule.placement))):
            if (colour := stripes(stage, kind)) is not None:
                yield (
                    f'<pattern id="{_pattern_id(stage, kind)}" width="6" height="6" patternUnits="userSpaceOnUse"'
                    f' patternTransform="rotate(45)"><rect width="6" height="6" fill="{fill(stage, kind)}"/>'
                    f'<rect width="3" height="6" fill="{colour}"/></pattern>'
                )


# --- around the rows ---


def _legend(timeline: ActionTimes) -> Iterator[str]:
    """Draws the kinds in grey: their tones are the same for each stage, and the rows' labels name the stages."""
    x = float(MARGIN)
    swatches = [
        *((f"{kind.letter}: {kind.words}", f'fill="{_paint(None, kind)}"') for kind in kinds_in(timeline)),
        ("bubble", f'class="track" fill="{TRACK}"'),
        ("critical path", f'class="critical" fill="none" stroke="{INK}" stroke-width="1.5"'),
    ]
    if timeline.reductions:
        swatches.append(("reduction", f'class="reduction" fill="{REDUCTION}"'))
    if timeline.copies:
        swatches.append(("copy to or from the host", f'class="copy" fill="{COPY}"'))
    if timeline.memory:
        swatches.append(("bytes", f'class="memory" fill="{MEMORY}"'))
    for text, style in swatches:
        yield f'<rect x="{x:g}" y="60.5" width="22" height="13" {style}/>'
        yield _text(x + 28, 71, text)
        x += 28 + text_width(text) + 16


def _tracks(layout: PictureLayout) -> Iterator[str]:
    """Draws the rows' background, visible where a rank idles, and the idle part of each rank's time."""
    idle = layout.left + layout.plot + 22
    yield _text(idle, HEAD - 10, "bubble", dim=True)
    for rank, bubble in enumerate(layout.timeline.bubbles):
        y = layout.y(rank)
        yield (
            f'<rect class="track" x="{layout.left:g}" y="{y}" width="{layout.track:g}" height="{layout.height}"'
            f' fill="{TRACK}"/>'
        )
        yield _text(idle, y + layout.height / 2 + 4, f"{bubble:.1%}", dim=True)


def _axis(layout: PictureLayout) -> Iterator[str]:
    unit = unit_of(layout.timeline)
    times = ticks(layout.end * unit.scale, int(layout.plot // 60))
    lines = [f"M{layout.x(time / unit.scale):g} {HEAD - 6}V{layout.bottom:g}" for time in times]
    yield f'<path class="grid" d="{"".join(lines)}" stroke="{GRID}" fill="none"/>'
    for time in times:
        yield _text(layout.x(time / unit.scale), HEAD - 10, f"{time:.6g}", 'text-anchor="middle"', dim=True)


def _labels(layout: PictureLayout) -> Iterator[str]:
    unit = unit_of(layout.timeline).name
    yield _text(layout.left - 12, HEAD - 10, f"time in {unit}" if unit else "time", 'text-anchor="end"', dim=True)
    for rank in range(len(layout.stages)):
        middle = layout.y(rank) + layout.height / 2
        yield _text(MARGIN, middle + 4, f"rank {rank}", 'font-weight="600"')
        for stage, x, y, text in layout.labels(rank):
            # The left half has the tone of F, the right half that of B: the stage's hue, whatever it runs.
            for kind, offset in ((Kind.F, 0), (Kind.B, 5)):
                yield f'<rect x="{x + offset:g}" y="{y + 2:g}" width="5" height="10" fill="{fill(stage, kind)}"/>'
            yield _text(x + SWATCH, y + 11, text)


# --- the rows ---


def _cells(layout: PictureLayout) -> Iterator[str]:
    """Draws the cells of each rank, grouped by fill, and the numbers in the cells."""
    gap, unit = _gap(layout), unit_of(layout.timeline)
    for rank, row in enumerate(ran(layout.timeline)):
        y = layout.y(rank)
        groups: dict[tuple[int, Kind], list[Action]] = {}
        for action in row:
            groups.setdefault((action.stage, action.kind), []).append(action)
        for (stage, kind), actions in groups.items():
            yield f'<g class="cells" fill="{_paint(stage, kind)}" stroke="{PAPER}" stroke-width="{gap:g}">'
            texts = []
            for action in actions:
                x, width = _extent(layout, action)
                yield _rect(x, y, width, layout.height, describe(layout.timeline, action, unit))
                number = numbers(action)
                if width >= (layout.number_width if action.count == 1 else text_width(number) + 2):
                    texts.append(f'<text x="{x + width / 2:.1f}" y="{y + layout.height / 2 + 4:g}">{number}</text>')
            yield "</g>"
            if texts:
                yield f'<g fill="{ink(kind)}" text-anchor="middle" pointer-events="none">'
                yield from texts
                yield "</g>"


def _rect(x: float, y: int, width: float, height: int, title: str, more: str = "") -> str:
    """Returns a rectangle with a title, which viewers show under the pointer."""
    return (
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{height}"{more}>'
        f"<title>{escape(printable(title))}</title></rect>"
    )


def _bars(layout: PictureLayout) -> Iterator[str]:
    """Draws the reductions and copies as thin bars below the rows."""
    unit = unit_of(layout.timeline)
    for rank, lanes in enumerate(layout.lanes):
        for index, lane in enumerate(lanes):
            y = layout.y(rank) + layout.height + 1 + index * LANE
            for what, kind, start, end in lane:
                x, width = layout.x(start), max(round(layout.x(end) - layout.x(start), 2), 1)
                text = f"{what}, rank {rank}: {unit.interval(start, end)}, takes {unit.time(end - start)}"
                colour = COPY if kind == "copy" else REDUCTION
                yield _rect(x, y, width, LANE - 1, text, f' class="{kind}" fill="{colour}"')


def _curves(layout: PictureLayout) -> Iterator[str]:
    """Draws each rank's bytes over time as an area above its least bytes, all to one scale, with its peak."""
    timeline, peaks = layout.timeline, measured_peaks(layout.timeline)
    sizes = {rank: [size for _, size in timeline.bytes_over_time(rank)] for rank in peaks}
    scale = (CURVE - 4) / (max((max(each) - min(each) for each in sizes.values()), default=0) or 1)
    for rank, text in peaks.items():
        points, bottom, least = timeline.bytes_over_time(rank), layout.y(rank) + layout.below, min(sizes[rank])
        tops = [f"{layout.x(time):g} {bottom - (size - least) * scale:.4g}" for time, size in points]
        ends = f"M{layout.x(points[0][0]):g} {bottom}", f"{layout.x(points[-1][0]):g} {bottom}Z"
        line = f'<path class="memory" d="{"L".join([ends[0], *tops, ends[1]])}" fill="{MEMORY}">'
        yield f"{line}<title>{escape(text)}</title></path>"
        yield _text(layout.left + layout.plot + 22, bottom - 4, in_bytes(max(sizes[rank])), dim=True)


def _gap(layout: PictureLayout) -> float:
    """Returns the pixels between cells: at most a tenth of a usual cell's width."""
    widths = sorted(span.duration * layout.scale for span in layout.timeline.spans.values() if span.duration)
    return round(min(1.0, widths[len(widths) // 4] / 10), 2) if widths else 0.0


def _extent(layout: PictureLayout, action: Action) -> tuple[float, float]:
    start, end = layout.timeline.spans[action]
    x = layout.x(start)
    return x, max(round(layout.x(end) - x, 2), MARK if action.kind.lane else 0)


def _outlines(layout: PictureLayout) -> Iterator[str]:
    """Yields outlines of the critical path: within each cell, or, if some are too narrow, around runs of cells."""
    cells = [
        (float(layout.y(layout.timeline.schedule.rank(action))), *_extent(layout, action))
        for action in layout.timeline.critical_path
        if action.kind.lane is None
    ]
    # An outline inside a narrow cell would cover it. So neighbours on the path share an outline if any cell is narrow.
    joined = min((width for _, _, width in cells), default=0) < NARROW
    runs: list[tuple[float, float, float]] = []  # (top, left, right)
    for y, x, width in cells:
        top, left, right = runs[-1] if runs else (-1.0, 0.0, 0.0)
        if joined and y == top and x - right < 1:
            runs[-1] = (y, left, x + width)
        else:
            runs.append((y, x, x + width))
    inset = 0.75
    for y, left, right in runs:
        across, down = max(right - left - 2 * inset, 0), layout.height - 2 * inset
        yield f"M{left + inset:.2f} {y + inset:g}h{across:.2f}v{down:g}h-{across:.2f}z"


# --- the positions of the parts, in pixels ---


class PictureLayout:
    """Times and ranks → pixels."""

    def __init__(self, timeline: ActionTimes) -> None:
        schedule = timeline.schedule
        self.timeline = timeline
        self.stages = schedule.stages_of
        ranks, most = len(self.stages), max(map(len, self.stages), default=0)
        self.lanes = tuple(lanes(timeline, rank) for rank in range(ranks))
        # The stage labels left of a row have one column, or several.
        self.columns = 1 if most <= 3 else 2 if most <= 8 else 4
        self.lines = -(-most // self.columns)
        names = (schedule.label(stage) for stages in self.stages for stage in stages)
        widest = SWATCH + max(map(text_width, names), default=0.0) + 10
        self.column = min(widest, LABEL / self.columns)
        self.labels_left = MARGIN + text_width(f"rank {max(ranks - 1, 0)}") + 12
        # The height of a row, and the distance from a row to the next.
        self.height = max(26 if ranks <= 16 else 18, self.lines * LINE + 2)
        self.below = self.height + LANE * max(map(len, self.lanes), default=0) + CURVE * bool(timeline.memory)
        self.pitch = self.below + (6 if ranks <= 16 else 3)
        self.bottom = HEAD + ranks * self.pitch
        # Time 0 is at the left. The end is the last time drawn: a reduction may end after the last action.
        self.left = float(math.ceil(self.labels_left + self.columns * self.column))
        ends = [bar.end for rank in self.lanes for lane in rank for bar in lane]
        self.end = max(timeline.makespan, *ends, 0.0)
        # The width of a micro-batch's number: the same for all cells, so that a row is numbered in full or not at all.
        self.number_width = len(str(max(schedule.microbatches - 1, 0))) * DIGIT + 2
        lengths = sorted(span.duration for span in timeline.spans.values() if span.duration > 0)
        # Wide enough for numbers in most cells, within the limits of PLOT.
        wanted = self.end / lengths[len(lengths) // 5] * max(CELL, self.number_width) if lengths else 0.0
        self.plot = float(round(min(max(wanted, PLOT[0]), PLOT[1])))
        self.scale = self.plot / self.end if self.end else 0.0
        # The width of the makespan, which is the width of a row.
        self.track = round(self.plot * timeline.makespan / self.end, 2) if self.end else self.plot
        self.width = self.left + self.plot + 80

    def x(self, time: float) -> float:
        """The x coordinate of a time, rounded to 0.01 pixels, so that adjacent spans are drawn without a gap."""
        return round(self.left + time * self.scale, 2)

    def y(self, rank: int) -> int:
        return HEAD + rank * self.pitch

    def labels(self, rank: int) -> Iterator[tuple[int, float, float, str]]:
        """Yields the labels of a rank's stages, column by column, centred in its row: (stage, x, y, text)."""
        stages = self.stages[rank]
        lines = min(self.lines, len(stages))
        top = self.y(rank) + (self.height - lines * LINE) / 2
        room = self.column - SWATCH - 8
        for index, stage in enumerate(stages):
            x, y = self.labels_left + index // lines * self.column, top + index % lines * LINE
            yield stage, x, y, truncated(self.timeline.schedule.label(stage), room)


class Bar(NamedTuple):
    """A reduction, or a copy to or from the host, that runs while a rank's actions run."""

    what: str
    kind: Literal["reduction", "copy"]
    start: float
    end: float


def lanes(timeline: ActionTimes, rank: int) -> list[list[Bar]]:
    """The reductions of a rank, and then its copies, on as few lanes as possible: bars of a lane do not overlap."""
    reductions = [
        Bar(each.what, "reduction", each.start, each.end) for each in timeline.reductions if each.rank == rank
    ]
    copies = [Bar(each.what, "copy", each.start, each.end) for each in timeline.copies if each.rank == rank]
    return [*_stacked(reductions), *_stacked(copies)]


def _stacked(bars: list[Bar]) -> list[list[Bar]]:
    """Puts each bar on the first lane that is free."""
    free: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: bar.start):
        lane = next((lane for lane in free if lane[-1].end <= bar.start), None)
        if lane is None:
            free.append([bar])
        else:
            lane.append(bar)
    return free


def ticks(end: float, most: int) -> list[float]:
    """Returns round times from 0 to ``end``: 1, 2 or 5 times a power of ten apart, at most about ``most`` of them."""
    if end <= 0 or most < 1:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if end / step <= most)
    return [step * count for count in range(math.floor(end / step + 1e-9) + 1)]


def text_width(text: str) -> float:
    """Returns the approximate width in pixels of a text at font size FONT; no font is measured."""
    return sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    if letter in " .,:;'|!fijlrtI()[]":
        return 0.6 * DIGIT
    return 1.45 * DIGIT if letter in "mwMW@%" else DIGIT * (1.2 if letter.isupper() else 1)


def truncated(text: str, room: float) -> str:
    if text_width(text) <= room:
        return text
    while text and text_width(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


# Colours are made in OKLCH, whose lightness is as the eye sees it: a tone is equally light in each hue, so that a kind
# looks alike in every stage, and the number in a cell is always readable.


def fill(stage: int | None, kind: Kind) -> str:
    """Returns the colour of a stage's action, as #rrggbb; of a striped kind, the background's. No stage: grey."""
    return _colour(stage, kind.tone.lightness, kind.tone.chroma)


def stripes(stage: int | None, kind: Kind) -> str | None:
    """Returns the colour of the stripes of a stage's action; None if the kind has no stripes."""
    lightness = kind.tone.stripes
    return None if lightness is None else _colour(stage, lightness, kind.tone.chroma)


def ink(kind: Kind) -> str:
    return INK if kind.tone.lightness > 0.6 else PAPER


@cache
def _colour(stage: int | None, lightness: float, chroma: float) -> str:
    if stage is None:
        return _hex(lightness, 0, 0)
    # The golden angle keeps any number of hues apart, and neighbours far apart. Three neighbours also differ in
    # lightness, for eyes that take red for green.
    hue = math.radians(255 + stage * 180 * (3 - math.sqrt(5)))
    lightness += (0.0, -0.03, 0.03)[stage % 3]
    while not all(0 <= part <= 1 for part in _linear(lightness, chroma, hue)):
        chroma *= 0.97  # reduces the chroma to what a screen can show
    return _hex(lightness, chroma, hue)


def _hex(lightness: float, chroma: float, hue: float) -> str:
    parts = (min(max(part, 0.0), 1.0) for part in _linear(lightness, chroma, hue))
    encoded = (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in parts)
    return "#" + "".join(f"{round(255 * part):02x}" for part in encoded)


def _linear(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """OKLCH → linear sRGB (Ottosson, "A perceptual color space for image processing", 2020)."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
