"""The tape: what one run of forward on fake tensors did, operation by operation, before a graph is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpipe.graph.program import Effects
from fxpipe.trace.record.modes_now import ModesNow

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of the values that an argument may have, and that stand in the graph as they are."""


@dataclass
class Touched:
    """What operations did to memory: storages read and written, by identity; whether random numbers were drawn.

    ``is_stateful``: whether Python changed attributes or drew numbers, so that a call may return another result next
    time.
    """

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    draws_random: bool = False
    is_stateful: bool = False

    def add(self, other: Touched) -> None:
        self.reads |= other.reads
        self.writes |= other.writes
        self.draws_random |= other.draws_random
        self.is_stateful |= other.is_stateful


@dataclass(frozen=True)
class Surroundings:
    """Where an operation ran: the user's line, the modes, the submodules (path → class) and the checkpoints around."""

    line: str
    modes: ModesNow
    stack: Mapping[str, type]
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One call of ``torch.utils.checkpoint.checkpoint``: its options, and where it began."""

    options: Mapping[str, Any]
    place: Surroundings


@dataclass(frozen=True, eq=False)
class NamedSource:
    """An input of the program ("placeholder"), or a parameter, buffer or constant ("get_attr"), by name."""

    kind: str
    name: str
    result: Any


@dataclass(eq=False)
class Operation:
    """One operation. ``args`` and ``kwargs`` hold a ``TapeValue`` for each tensor, ``result`` what it returned."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    place: Surroundings
    touched: Touched
    serial: int
    effects: Effects | None = None
    kept: bool = False
    """Whether it stays although nothing uses its result."""
    writes: frozenset[int] = frozenset()
    """The memory of its arguments that it writes."""
    hidden_in: str | None = None
    """The submodule that is called as a whole, and that this operation was a part of."""
    stands_for: Mapping[Any, int] = field(default_factory=dict)
    """Values of operations that are now inside of it, by key: their places in its result."""

    @property
    def values(self) -> Iterator[TapeValue]:
        for leaf in leaves((self.args, self.kwargs)):
            if isinstance(leaf, TapeValue):
                yield leaf


@dataclass(frozen=True, eq=False)
class TapeValue:
    """One tensor of the program: where in which result it is."""

    maker: Operation | NamedSource
    path: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[int, tuple[Any, ...]]:
        return id(self.maker), self.path


@dataclass(frozen=True, eq=False)
class Obstacle:
    """What must not happen, unless it happened inside a submodule that is then called as a whole.

    ``descend``: the submodule that may not be called as a whole if that is to be mended.
    """

    message: str
    descend: str | None = None


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys that lead there, leaf) for everything in nested tuples, lists and mappings."""
    if isinstance(value, torch.Size):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from paths(part, (*path, key))
    elif isinstance(value, (tuple, list)):
        for place, part in enumerate(value):
            yield from paths(part, (*path, place))
    else:
        yield path, value


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of an argument: nested tuples, lists, dicts and slices."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    for _, leaf in paths(value):
        if isinstance(leaf, slice):
            yield from leaves(leaf)
        else:
            yield leaf


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with each leaf changed; tuples, named tuples, lists, dicts and slices stay what they are."""
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, tuple):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if type(value) is dict:
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def is_plain(value: Any) -> bool:
    """Whether an argument can stand in a graph: tensors and plain values in tuples, lists, dicts."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves(value)) and _has_plain_containers(value)


def _has_plain_containers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, (str, int)) and _has_plain_containers(part) for key, part in value.items()
        )
    if isinstance(value, (tuple, list)):
        plain = type(value) in (tuple, list, torch.Size) or hasattr(value, "_fields")
        return plain and all(_has_plain_containers(part) for part in value)
    return True
