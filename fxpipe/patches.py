"""Patches: replaces attributes of modules and classes while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]
"""(owner, attribute name, replacement)"""


@contextlib.contextmanager
def all_patched(patches: Iterable[Patch]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patched(*patch))
        yield


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    # an attribute that the owner inherits is deleted afterwards, and not set to the inherited value
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def noting(note: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``note()`` and then ``function``."""

    def called(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return called
