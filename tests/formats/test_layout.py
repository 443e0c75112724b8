"""Layout: texts that fit, ticks that are round."""

from __future__ import annotations

import re

import pytest

from fxpipe.formats.layout import text_width, ticks, truncated


def test_a_truncated_text_fits() -> None:
    for text, room in (("abc", 100), ("a longer one, that is cut", 60), ("mmmmmmm", 30), ("层层层层", 40)):
        cut = truncated(text, room)
        assert text_width(cut) <= room
        assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


@pytest.mark.parametrize("most", [1, 3, 10, 12])
@pytest.mark.parametrize("end", [1e-7, 0.3, 1, 9.99, 10, 117, 12345.6])
def test_ticks_are_round_and_not_too_many(end: float, most: int) -> None:
    times = ticks(end, most)
    assert times[0] == 0
    assert times[-1] <= end * (1 + 1e-9)
    assert len(times) <= most + 1
    if len(times) > 1:
        digits = f"{times[1]:e}"
        assert re.match(r"[125]\.0+e", digits)
        assert times[-1] + times[1] > end  # and they reach as far as the rows do
    assert ticks(0, 5) == [0]
