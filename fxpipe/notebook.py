"""Notebook: how the values that print as tables show themselves behind a cell, and in one line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_NAMES = 6


def preformatted(text: str) -> str:
    """A table as HTML: its own characters in one width, which scrolls and does not wrap."""
    return f'<pre style="overflow-x: auto; white-space: pre; line-height: 1.3">{escape(text)}</pre>'


def listed(names: Sequence[str]) -> str:
    """Names on one line, however many there are.

    >>> listed(["image", "text", "loss"]), listed([str(number) for number in range(100)])
    ('image, text, loss', '0, 1, 2, 3, 4, …, 99')
    """
    few = names if len(names) <= _NAMES else [*names[: _NAMES - 1], "…", names[-1]]
    return ", ".join(few)


class Tabular:
    """What prints as a table: behind a cell of a notebook it is shown as it prints."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(str(self))
