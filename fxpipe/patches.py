"""Patches: replaces attributes, and entries of dicts, while a context is open.

Takes: rows (owner, name, value in its place). Gives: ``replaced``, the one context manager that makes and undoes all
replacements of fxpipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Replacement = tuple[Any, str, Any]
"""(an object or a dict, the name of an attribute or the key, the value in its place)"""
MISSING: Any = object()
"""Stands for an attribute, or an entry, that does not exist."""


@contextlib.contextmanager
def replaced(rows: Iterable[Replacement]) -> Iterator[None]:
    """While this context is open, each row's value is in place of the attribute, or of the entry of a dict.

    The rows are put in place in their order, and are undone in reverse, also after an exception; an attribute that the
    owner had only inherited is deleted again.

    Args:
        rows: read one by one, each after the row before is in place. A dict may lack the key, before and afterwards.
    """
    # A stack undoes all of them, the last first, whatever one of them raises.
    with contextlib.ExitStack() as undo:
        for owner, name, value in rows:
            # An attribute that the owner inherits is deleted afterwards, and not set to the inherited value.
            own = owner if isinstance(owner, dict) else vars(owner)
            undo.callback(put, owner, name, own.get(name, MISSING))
            put(owner, name, value)
        yield


def put(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute or an entry, or removes it for ``MISSING``."""
    if isinstance(owner, dict) and value is MISSING:
        owner.pop(name, None)
    elif isinstance(owner, dict):
        owner[name] = value
    elif value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def noting(note: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``note()`` and then ``function``."""

    def called(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return called
