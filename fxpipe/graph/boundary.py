"""``stage_boundary``: the one mark that users put into a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fxpipe.errors import TraceError
from fxpipe.validation import is_whole, shown

T = TypeVar("T")
Mode = Literal["batch", "global"]


class Gather(NamedTuple):
    """What a boundary gathers. ``mode``: the rows of a group of micro-batches, or those of every replica's, too.

    ``group``: how many micro-batches; None for all.
    """

    mode: Mode
    group: int | None = None


@dataclass(frozen=True)
class Gathered:
    """A stage that runs once for a group of micro-batches. ``group``: how many of them; None for all.

    ``modes``: whose rows it is given, the group's own, or those of every replica.
    """

    group: int | None
    modes: frozenset[Mode]


_PLAIN = (bool, int, float, complex, str, bytes)
Recorder = Callable[[Any, str | None, Gather | None], Any]


class _OfThread(threading.local):
    """What boundaries meet in this thread: another one may run models while this one captures."""

    recorder: Recorder | None = None
    stage: str | None = None
    """The stage whose code runs."""
    ignored = False


_here = _OfThread()


def stage_boundary(value: T, *, name: str | None = None, gather: Mode | None = None, group: int | None = None) -> T:
    """Marks a place where the model may be cut into pipeline stages.

    Outside a capture the very same object comes back, at the cost of a function call. In a compiled model the
    boundary costs nothing either: it decides where the graph is cut, and is then erased.

    Args:
        value: a tensor, or any tuple, list, dict or dataclass that holds tensors: one boundary carries them all, and
            what is no tensor passes through unchanged.
        name: names the stage that the boundary opens, the code behind it.
        gather: "batch": the stage behind it, and all that come after, run once for a group of micro-batches, on what
            these send concatenated along ``batch_dim``; gradients are cut, and sent back to each. "global": and on
            what those of every replica send, in the order of the data axis. None: once for each micro-batch.
        group: how many micro-batches to a group, a divisor of their number; None: all of them.

    Raises:
        TraceError: the value is a number or a text (in a capture: it holds no tensor), the name is none, or what is to
            be gathered is not said as above.
    """
    # nearly all calls end here: outside of a capture a boundary costs a function call
    return _record(value, name, gather, group) if _here.recorder or gather or group or type(value) in _PLAIN else value


def _record(value: T, name: str | None, mode: Mode | None, group: int | None) -> T:
    if not (name is None or (isinstance(name, str) and name)):
        raise TraceError(f"stage_boundary is given name={shown(name)}; it is the name of the stage behind it, a text")
    gather = checked_gather("stage_boundary is given", mode, group)
    if _here.recorder is None:
        if gather is not None and _here.stage is not None:
            raise TraceError(
                f"stage_boundary gathers {gather.mode!r} inside stage {_here.stage!r}, which is not captured: nothing "
                "is gathered there, and the loss would be another; compile the model itself"
            )
        if isinstance(value, _PLAIN):
            raise TraceError(f"stage_boundary is given {shown(value)}; give it the tensors that cross the cut")
        return value
    if not _here.ignored:
        captured: T = _here.recorder(value, name, gather)
        return captured
    if gather is not None:
        raise TraceError(
            f'a boundary gathers "{gather.mode}", and boundaries="auto" looks for cuts of its own, which gather '
            "nothing: the loss would be another; name the cuts"
        )
    return value


def checked_gather(given: str, mode: Any, group: Any) -> Gather | None:
    """What a boundary gathers; TraceError, which begins with the fact ``given``, for what is no way to say it."""
    if mode is None and group is not None:
        raise TraceError(f'{given} group={shown(group)} and no gather; write gather="batch" beside it, or "global"')
    if mode is not None and not (isinstance(mode, str) and mode in get_args(Mode)):
        raise TraceError(f'{given} gather={shown(mode)}; write "batch", or "global" for the rows of all replicas')
    if group is not None and not (is_whole(group) and group >= 1):
        raise TraceError(f"{given} group={shown(group)}; write how many micro-batches make a group, 1 or more")
    return None if mode is None else Gather("global" if mode == "global" else "batch", group)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While it is open, boundaries met by this thread are handed to ``recorder(value, name, gather)``."""
    before, _here.recorder = _here.recorder, recorder
    try:
        yield
    finally:
        _here.recorder = before


class running:  # a context manager; as a class, for it is around each call of a stage
    """While it is open, code of a stage runs in this thread: a boundary in it that gathers raises, since it is lost."""

    __slots__ = ("_before", "_stage")

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        self._before, _here.stage = _here.stage, self._stage

    def __exit__(self, *error: object) -> None:
        _here.stage = self._before


@contextlib.contextmanager
def ignored(on: bool = True) -> Iterator[None]:
    """While it is open, boundaries mark nothing: a search decides where to cut."""
    before, _here.ignored = _here.ignored, on
    try:
        yield
    finally:
        _here.ignored = before


def boundary(
    values: Sequence[Any], name: str | None = None, gather: Mode | None = None, group: int | None = None
) -> list[Any]:
    """The operator that a boundary becomes in a captured graph: its values, each behind the cut.

    Never executed after the split; here so that an uncut graph runs and prints.
    """
    return list(values)


def words(name: str | None, gather: Gather | None) -> tuple[Any, ...]:
    """What a boundary's operator is given behind its values."""
    return (name,) if gather is None else (name, *gather)
