"""``stage_boundary``: the one mark that users put into a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fxpipe.errors import TraceError
from fxpipe.kinds import shown

T = TypeVar("T")

_NO_TENSOR = (int, float, complex, str, bytes)
_recorder: Callable[[Any, str | None], Any] | None = None
_recording_thread = 0
_ignored = False


def stage_boundary(value: T, *, name: str | None = None) -> T:
    """Marks a place where the model may be cut into pipeline stages.

    Outside a capture the very same object comes back, at the cost of a function call. In a compiled model the
    boundary costs nothing either: it decides where the graph is cut, and is then erased.

    Args:
        value: a tensor, or any tuple, list or dict that holds tensors: one boundary carries them all, and what is no
            tensor passes through unchanged.
        name: names the stage that the boundary opens, the code behind it.

    Raises:
        TraceError: the value is a number or a text (in a capture: it holds no tensor), or the name is none.
    """
    return value if _recorder is None and not isinstance(value, _NO_TENSOR) else _record(value, name)


def _record(value: T, name: str | None) -> T:
    if not (name is None or (isinstance(name, str) and name)):
        raise TraceError(f"stage_boundary is given name={shown(name)}; it is the name of the stage behind it, a text")
    if _recorder is None or _ignored or threading.get_ident() != _recording_thread:
        if isinstance(value, _NO_TENSOR):
            raise TraceError(f"stage_boundary is given {shown(value)}; give it the tensors that cross the cut")
        return value  # or another thread's eager call while this process captures a model
    captured: T = _recorder(value, name)
    return captured


@contextlib.contextmanager
def recording(recorder: Callable[[Any, str | None], Any]) -> Iterator[None]:
    """While it is open, boundaries met by this thread are handed to ``recorder(value, name)``."""
    global _recorder, _recording_thread
    previous = _recorder, _recording_thread
    _recorder, _recording_thread = recorder, threading.get_ident()
    try:
        yield
    finally:
        _recorder, _recording_thread = previous


@contextlib.contextmanager
def ignored(on: bool = True) -> Iterator[None]:
    """While it is open, boundaries mark nothing: where to cut is found in another way."""
    global _ignored
    before, _ignored = _ignored, on
    try:
        yield
    finally:
        _ignored = before


def boundary(values: Sequence[Any], name: str | None = None) -> list[Any]:
    """The operator that a boundary becomes in a captured graph: its values, each behind the cut.

    Never executed after the split; here so that an uncut graph runs and prints.
    """
    return list(values)
