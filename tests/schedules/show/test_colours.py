"""Colours: told apart, readable, and equally light in each hue."""

from __future__ import annotations

import re

import pytest

from fxpipe.schedules.action import Op
from fxpipe.schedules.show import svg_picture as colours


def test_many_stages_have_colours_of_their_own() -> None:
    fills = {colours.fill(stage, op) for stage in range(128) for op in Op}
    assert len(fills) == 128 * len(Op)
    assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills)


def luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2 define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("op", Op)
def test_numbers_can_be_read_on_every_colour(op: Op) -> None:
    """4.5 is what the guidelines ask of text."""
    for stage in range(80):
        for colour in (colours.fill(stage, op), colours.stripes(stage, op)):
            assert colour is None or contrast(colours.ink(op), colour) >= 4.5


def test_a_tone_is_about_as_light_in_each_hue_and_unlike_the_other_tones() -> None:
    """So that F and B are told apart without seeing colours at all."""
    lightest_backward = max(luminance(colours.fill(stage, Op.B)) for stage in range(80))
    darkest_forward = min(luminance(colours.fill(stage, Op.F)) for stage in range(80))
    assert darkest_forward > 2 * lightest_backward


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
