"""Kinds: checks of users' values, each a predicate and a description; fxpipe checks a value at its entry."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from fxpipe.errors import FxpipeError


class Expected(NamedTuple):
    """``fits``: whether a value is valid. ``words``: a description of valid values, after "it is" in a message."""

    fits: Callable[[Any], bool]
    words: str


def check(error: type[FxpipeError], kinds: Mapping[str, Expected], **values: Any) -> None:
    """Raises ``error`` for the first value that does not fit the entry of ``kinds`` under the value's name.

    >>> check(FxpipeError, {"microbatches": Expected(is_whole, "a whole number")}, microbatches="4")
    Traceback (most recent call last):
    fxpipe.errors.FxpipeError: microbatches is '4'; it is a whole number
    """
    for name, value in values.items():
        if name in kinds and not kinds[name].fits(value):
            raise error(f"{name} is {shown(value)}; it is {kinds[name].words}")


def shown(value: Any) -> str:
    """A value as a line of at most 100 characters, even if the value's ``repr`` is longer or raises."""
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
    """Whether a value is True, False, 1 or 0; Python does not count numpy's True and False as numbers."""
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, Integral) and value in (0, 1))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def is_list(value: Any) -> bool:
    """Whether a value is an ordered collection: no tensor, which is a single value, and no set, which has no order."""
    # Recognises a tensor by an attribute, since this file imports no torch.
    other = isinstance(value, (str, bytes, Mapping, set, frozenset)) or hasattr(value, "requires_grad")
    return isinstance(value, Collection) and not other


def list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: is_list(value) and all(map(fits, value))


def is_edge(value: Any) -> bool:
    """Whether a value is a pair of stage numbers."""
    return is_list(value) and len(value) == 2 and all(map(is_whole, value))


def or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def one_or_each(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: fits(value) or list_of(fits)(value)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
