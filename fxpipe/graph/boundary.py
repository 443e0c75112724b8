"""``stage_boundary``: the only mark that users put into a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fxpipe.errors import TraceError
from fxpipe.patches import replaced
from fxpipe.validation import is_whole, shown

T = TypeVar("T")
Mode = Literal["batch", "global"]


class Gather(NamedTuple):
    """The rows that a boundary gathers. ``mode``: "batch", the rows of a group of micro-batches; "global", also of
    every replica.

    ``group``: the number of micro-batches in a group; None for all.
    """

    mode: Mode
    group: int | None = None


@dataclass(frozen=True)
class Gathered:
    """A stage that runs once for a group of micro-batches. ``group``: the number of micro-batches; None for all.

    ``modes``: whose rows the stage gets, the group's own, or every replica's.
    """

    group: int | None
    modes: frozenset[Mode]


_PLAIN = (bool, int, float, complex, str, bytes)
Recorder = Callable[[Any, str | None, Gather | None], Any]


def boundary_label(number: int, name: Any, index: int) -> str:
    """The words for a tensor that crosses a boundary, as "boundary 2 before layers.8, value 0". Boundaries count in the
    order in which forward reaches them; a mark may have no name."""
    return f"boundary {number}{f' before {name}' * bool(name)}, value {index}"


class _OfThread(threading.local):
    """The state of boundaries in this thread: another thread may run models while this thread captures."""

    recorder: Recorder | None = None
    stage: str | None = None
    """The name of the stage whose code runs."""
    ignored = False


_here = _OfThread()


def stage_boundary(value: T, *, name: str | None = None, gather: Mode | None = None, group: int | None = None) -> T:
    """Marks a place where the model may be cut into pipeline stages.

    Outside a capture the call returns the very same object, at the cost of a function call. In a compiled model the
    boundary costs nothing either: it decides where the graph is cut, and is then removed.

    Args:
        value: a tensor, or any tuple, list, dict or dataclass that holds tensors: one boundary carries all of them, and
            other values pass through unchanged.
        name: the name of the stage that the boundary opens, the code after the boundary.
        gather: "batch": this stage and all later stages run once for a group of micro-batches, on the micro-batches'
            values concatenated along ``batch_dim``. Gradients are split, and sent back to each. "global": also on the
            values of all replicas, in the order of the data axis. None: once for each micro-batch.
        group: the number of micro-batches in a group, a divisor of their total; None: all of them.

    Raises:
        TraceError: the value is a number or a text (in a capture: it holds no tensor), or ``name``, ``gather`` or
            ``group`` is invalid.
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
    # boundaries="auto" finds other cuts; but without a boundary that gathers, the loss would be another
    if _here.ignored and gather is None:
        return value
    captured: T = _here.recorder(value, name, gather)
    return captured


def checked_gather(fact: str, mode: Any, group: Any) -> Gather | None:
    """The ``Gather`` of a boundary; TraceError, which begins with ``fact``, if an argument is invalid."""
    if mode is None and group is not None:
        raise TraceError(f'{fact} group={shown(group)} and no gather; write gather="batch" beside it, or "global"')
    if mode is not None and not (isinstance(mode, str) and mode in get_args(Mode)):
        raise TraceError(f'{fact} gather={shown(mode)}; write "batch", or "global" for the rows of all replicas')
    if group is not None and not (is_whole(group) and group >= 1):
        raise TraceError(f"{fact} group={shown(group)}; write how many micro-batches make a group, 1 or more")
    return None if mode is None else Gather("global" if mode == "global" else "batch", group)


def recording(recorder: Recorder) -> AbstractContextManager[None]:
    """While the context is open, ``recorder(value, name, gather)`` gets the boundaries that this thread reaches."""
    return replaced([(_here, "recorder", recorder)])


class running:  # a context manager; as a class, for it is around each call of a stage
    """While open, this thread runs code of a stage: a gathering boundary there raises, since it has no effect."""

    __slots__ = ("_before", "_stage")

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        self._before, _here.stage = _here.stage, self._stage

    def __exit__(self, *error: object) -> None:
        _here.stage = self._before


def ignored(on: bool = True) -> AbstractContextManager[None]:
    """While the context is open, boundaries mark nothing: a search decides where to cut."""
    return replaced([(_here, "ignored", on)])


def boundary(
    values: Sequence[Any], name: str | None = None, gather: Mode | None = None, group: int | None = None
) -> list[Any]:
    """The operator of a boundary in a captured graph: returns its values, each after the cut.

    Never runs after the split; the function exists so that an uncut graph runs and prints.
    """
    return list(values)


def words(name: str | None, gather: Gather | None) -> tuple[Any, ...]:
    """Returns the arguments of a boundary's operator that follow its values."""
    return (name,) if gather is None else (name, *gather)
