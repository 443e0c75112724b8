"""Kinds: what a value that a person gives may be, in a predicate and in words. Checked where the value comes in."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from fxpipe.errors import FxpipeError


class Expected(NamedTuple):
    """``fits``: whether a value can be meant. ``words``: what it is, behind "it is"."""

    fits: Callable[[Any], bool]
    words: str


def check(error: type[FxpipeError], kinds: Mapping[str, Expected], **given: Any) -> None:
    """Raises ``error`` for the first of the values that is not of the kind which ``kinds`` has under its name.

    >>> check(FxpipeError, {"microbatches": Expected(is_whole, "a whole number")}, microbatches="4")
    Traceback (most recent call last):
    fxpipe.errors.FxpipeError: microbatches is '4'; it is a whole number
    """
    for name, value in given.items():
        if name in kinds and not kinds[name].fits(value):
            raise error(f"{name} is {shown(value)}; it is {kinds[name].words}")


def shown(value: Any) -> str:
    """A value in one short line, however long it is, and whatever its own ``repr`` does."""
    try:
        text = _short.repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return f"{' '.join(text.split()):.100}"


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """True, False, 1 or 0; numpy's own True and False are no numbers to Python."""
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def is_list(value: Any) -> bool:
    """Values one after another. A tensor is one value, and what comes in a set comes in no order."""
    # A tensor is known by its attribute, since this file imports no torch.
    other = isinstance(value, (str, bytes, Mapping, set, frozenset)) or hasattr(value, "requires_grad")
    return isinstance(value, Collection) and not other


def list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: is_list(value) and all(map(fits, value))


def is_edge(value: Any) -> bool:
    """A pair of stage numbers."""
    return is_list(value) and len(value) == 2 and all(map(is_whole, value))


def or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def one_or_each(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: fits(value) or list_of(fits)(value)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
