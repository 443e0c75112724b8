"""Colours: a hue for each stage, a tone of it for each op.

Made in OKLCH, where lightness is as the eye sees it: a tone is equally light in each hue, so that ops look alike
whatever the stage, and the number in a cell can always be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from fxpipe.schedules.action import Op


class Tone(NamedTuple):
    """Lightness and chroma of an op. ``stripes``: the lightness of stripes across it, if any."""

    lightness: float
    chroma: float
    stripes: float | None = None


TONES: Mapping[Op, Tone] = {
    Op.F: Tone(0.85, 0.085),
    Op.R: Tone(0.78, 0.085, stripes=0.86),
    Op.B: Tone(0.52, 0.135),
    Op.I: Tone(0.68, 0.125),
    Op.W: Tone(0.90, 0.05, stripes=0.79),
}

NEUTRAL = None
"""In place of a stage: grey."""

DARK_INK, LIGHT_INK = "#14171c", "#ffffff"


def fill(stage: int | None, op: Op) -> str:
    """The colour of a stage's action, as #rrggbb; below the stripes, where it has some."""
    return _colour(stage, TONES[op].lightness, TONES[op].chroma)


def stripes(stage: int | None, op: Op) -> str | None:
    """The colour of the stripes of a stage's action, where it has some."""
    lightness = TONES[op].stripes
    return None if lightness is None else _colour(stage, lightness, TONES[op].chroma)


def ink(op: Op) -> str:
    """What can be read on that op's cells."""
    return DARK_INK if TONES[op].lightness > 0.6 else LIGHT_INK


@cache
def _colour(stage: int | None, lightness: float, chroma: float) -> str:
    if stage is NEUTRAL:
        return _hex(lightness, 0, 0)
    # The golden angle keeps any number of hues apart, and neighbours far apart. Three neighbours also differ in
    # lightness, for eyes that take red for green.
    hue = math.radians(255 + stage * 180 * (3 - math.sqrt(5)))
    lightness += (0.0, -0.03, 0.03)[stage % 3]
    while not all(0 <= part <= 1 for part in _linear(lightness, chroma, hue)):
        chroma *= 0.97  # as colourful as a screen can show it
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
