"""Notebook: shows values that print as tables as the output of a cell, and in a single line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxpipe.errors import printable

_NAMES, _NAME = 6, 30
"""The most names in a line, and the most characters of a name."""


def preformatted(text: str) -> str:
    """A table as HTML: monospaced text that does not wrap, and scrolls if the table is wide or long."""
    style = "overflow: auto; max-height: 32em; white-space: pre; line-height: 1.3; font-family: monospace"
    return f'<pre style="{style}">{escape(printable(text))}</pre>'


def listed(names: Sequence[str]) -> str:
    """Names on a single line of limited width, for any number and length of names.

    >>> listed(["image", "text", "loss"]), listed([str(number) for number in range(100)])
    ('image, text, loss', '0, 1, 2, 3, 4, …, 99')
    """
    short = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in names]
    if len(names) > _NAMES:
        short[_NAMES - 1 : -1] = ["…"]
    return printable(", ".join(short))


class Tabular:
    """A base class for values that print as tables: a notebook cell shows the same table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))
