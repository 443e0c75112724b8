"""Notebook: how the values that print as tables show themselves behind a cell, and in one line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxpipe.errors import printable

_NAMES, _WIDTH, _NAME = 6, 70, 30
"""How many names a line has, how wide they are together, and one of them where they are too wide."""


def preformatted(text: str) -> str:
    """A table as HTML: its own characters in one width, which does not wrap, and scrolls where it is wide or long."""
    style = "overflow: auto; max-height: 32em; white-space: pre; line-height: 1.3"
    return f'<pre style="{style}">{escape(printable(text))}</pre>'


def listed(names: Sequence[str]) -> str:
    """Names on one line, however many there are, and however long.

    >>> listed(["image", "text", "loss"]), listed([str(number) for number in range(100)])
    ('image, text, loss', '0, 1, 2, 3, 4, …, 99')
    """
    if len(names) <= _NAMES and sum(map(len, names)) <= _WIDTH:
        return printable(", ".join(names))
    # The first names and the last one stay; names in the middle give way until the line fits.
    short = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in (*names[: _NAMES - 1], names[-1])]
    few, last = short[: len(names) - 1][: _NAMES - 1], short[-1]
    while len(few) > 1 and sum(map(len, few)) + len(last) > _WIDTH:
        few.pop()
    return printable(", ".join([*few, *["…"] * (len(few) + 1 < len(names)), last]))


class Tabular:
    """What prints as a table: behind a cell of a notebook it is shown as it prints."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))
