"""The tape: the list of operations that one run of forward on fake tensors did, from which a graph is made.

Takes: nothing; ``Recorder`` fills it. Gives: the types of its entries, and functions that walk their arguments.

- ``Operation``: one node to be, with its arguments, fake result, surroundings and memory. ``Obstacle``: code that
  cannot be recorded here.
- ``TapeValue``: one tensor of the program, by the operation or ``NamedSource`` that makes it, and its path in the
  result.
- ``Surroundings``: the line, modes, submodules and checkpointed parts in which an operation runs.
- ``Touched``: the memory that an operation reads and writes, by the ids of storages. ``TouchedMode`` finds it.

For example, ``x.view(2, -1).add_(y)`` is two operations. Both touch the storage of ``x``, and the second writes it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxpipe.graph.program import Effects
from fxpipe.snapshots.snapshot import storage_of
from fxpipe.stage.modes import Autocast, Modes, autocast_now
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.torch_compat.operators import TorchDispatchMode, schema_of
from fxpipe.torch_compat.tensors import tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""The arguments of a call."""


@dataclass
class Touched:
    """The ids of the storages that operations read and wrote, and whether they drew random numbers.

    ``generators``: the ids of the generators, of Python, NumPy or the model's own, from which they drew.
    ``is_stateful``: whether Python code changed attributes or drew random numbers, so that the next call may return
    another result.
    """

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    draws_random: bool = False
    generators: set[int] = field(default_factory=set)
    is_stateful: bool = False

    def add(self, other: Touched) -> None:
        """Adds another record to this one, as if both had happened."""
        self.reads |= other.reads
        self.writes |= other.writes
        self.draws_random |= other.draws_random
        self.generators |= other.generators
        self.is_stateful |= other.is_stateful


_RUNNING_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalisation operators write, although some of their schemas do not say so."""


class TouchedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that each operation touches; ``noting()`` collects the notes of a part of the run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = Touched()

    @contextlib.contextmanager
    def noting(self) -> Iterator[Touched]:
        """Collects the memory touched while this context is open; on exit, adds it to the context around."""
        around, self._now = self._now, Touched()
        try:
            yield self._now
        finally:
            around.add(self._now)
            self._now = around

    def note(self, touched: Touched) -> None:
        """Adds touched memory that was found without watching operators to the open contexts."""
        self._now.add(touched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (schema := schema_of(func)) is None:  # a higher-order operator, such as flex_attention
            self._now.reads |= {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
            return func(*args, **kwargs)
        arguments: dict[str, Any] = {}
        # the schema says which arguments an operator writes: "Tensor(a!) self"
        for position, argument in enumerate(schema.arguments):
            value = arguments[argument.name] = args[position] if position < len(args) else kwargs.get(argument.name)
            storages = set(map(storage_of, tensors_in(value)))
            self._now.reads |= storages
            if argument.is_write or argument.name in _RUNNING_STATISTICS:
                self._now.writes |= storages
        # attention has the tag, but draws random numbers only if dropout_p is not 0
        if torch.Tag.nondeterministic_seeded in func.tags and arguments.get("dropout_p") != 0.0:
            self._now.draws_random = True
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ModesNow:
    """Gradients on or off, autocast on each type of device, and the number of the autocast block."""

    grad: bool
    autocast: tuple[Autocast, ...]
    region: int = 0

    @staticmethod
    def current(region: int = 0) -> ModesNow:
        """The modes of this thread now. ``region``: the number of the innermost autocast block."""
        return ModesNow(torch.is_grad_enabled(), autocast_now(), region)

    def beside(self, around: ModesNow) -> Modes | None:
        """The modes that differ from ``around``, or None if all are equal."""
        grad = self.grad if self.grad != around.grad else None
        # autocast that is off on both sides has no effect, whatever its dtype
        autocast = tuple(
            mine
            for mine, theirs in zip(self.autocast, around.autocast, strict=True)
            if (mine.enabled or theirs.enabled) and (mine != theirs or self.region != around.region)
        )
        if grad is None and not autocast:
            return None
        return Modes(grad, autocast, self.region)


@dataclass(frozen=True)
class Surroundings:
    """The user's line, the modes, the submodules (call → path, class) and the checkpoints around an operation."""

    line: str
    modes: ModesNow
    stack: Mapping[str, tuple[str, type]]
    checkpoints: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One call of ``torch.utils.checkpoint.checkpoint``: its options, and the surroundings of its start."""

    options: Mapping[str, Any]
    scope: Surroundings


@dataclass(frozen=True, eq=False)
class NamedSource:
    """An input of the program ("placeholder"), or a parameter, buffer or constant ("get_attr"), by name."""

    kind: str
    name: str
    result: Any
    values: tuple[TapeValue, ...] = ()
    """No operation computes it from other values."""


@dataclass(eq=False)
class Operation:
    """One operation. ``args`` and ``kwargs`` hold a ``TapeValue`` for each tensor, ``result`` the fake result."""

    kind: str
    target: Any
    args: Args
    kwargs: Kwargs
    result: Any
    scope: Surroundings
    touched: Touched
    serial: int
    effects: Effects | None = None
    stays: bool = False
    """Whether the operation stays in the graph even if nothing uses its result."""
    writes: frozenset[int] = frozenset()
    """The storages of its arguments that the operation writes."""
    hidden_in: str | None = None
    """The path of the opaque call that has replaced this operation on the tape."""
    stands_for: Mapping[Any, int] = field(default_factory=dict)
    """The key of a value that this call of a checkpointed part returns → the value's index in the call's result."""

    @property
    def values(self) -> Iterator[TapeValue]:
        """The values among the arguments, in order, with repetitions."""
        for _, leaf in paths((self.args, self.kwargs)):
            if isinstance(leaf, TapeValue):
                yield leaf


@dataclass(frozen=True, eq=False)
class TapeValue:
    """One tensor of the program: its maker, and the tensor's path in the maker's result."""

    maker: Operation | NamedSource
    path: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[int, tuple[Any, ...]]:
        """Equal for two objects that stand for the same tensor of the program."""
        return id(self.maker), self.path


@dataclass(frozen=True, eq=False)
class Obstacle:
    """An action of forward that the tracer refuses unless an opaque submodule's call contains the action.

    ``descend``: the submodule that the next run must trace through to avoid the obstacle, if any.
    """

    message: str
    descend: str | None = None


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(the keys of the path, leaf) for each leaf of nested tuples, lists, mappings and slices."""
    if isinstance(value, torch.Size):
        yield path, value
    elif isinstance(value, slice):  # an argument x[start:], where start may be a tensor
        yield from paths((value.start, value.stop, value.step), path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from paths(part, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from paths(part, (*path, index))
    else:
        yield path, value


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and slices, in order."""
    return [leaf for _, leaf in paths(value) if isinstance(leaf, Tensor)]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The argument with ``change`` applied to each leaf; tuples, named tuples, lists, dicts and slices stay such."""
    # not torch.fx's map_aggregate, which reads a ``Listed`` without asking it; a graph accepts no torch.Size
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
    """Whether a graph can hold the argument: tensors and plain values in tuples, lists, dicts and slices."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(
            isinstance(key, (str, int)) and is_plain(part) for key, part in value.items()
        )
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return (type(value) in (tuple, list) or hasattr(value, "_fields")) and all(map(is_plain, value))
    if isinstance(value, slice):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return isinstance(value, (Tensor, *PLAIN_LEAF))


# --- The graph's nodes for calls that a torch function mode has seen ---

_OPERATORS = {
    name: function
    for name, function in vars(operator).items()
    if name.startswith("__") and callable(function) and hasattr(Tensor, name)
}
"""``"__add__"`` → ``operator.add``, ``"__iadd__"`` → ``operator.iadd``, and so on."""
_REVERSED = {f"__r{name[2:]}": function for name, function in _OPERATORS.items()}
"""``"__rsub__"`` → ``operator.sub``, with swapped arguments. ``1 / x`` calls ``"__rdiv__"``."""
_OPERATORS["__div__"] = _REVERSED["__rdiv__"] = operator.truediv
_BY_FUNCTION = {getattr(Tensor, name): function for name, function in _OPERATORS.items() if hasattr(Tensor, name)}
"""Methods of Tensor → functions of operator. Some, as ``Tensor.__pow__``, have the ``__name__`` of another method."""

Target = tuple[str, Any, Args, Kwargs]
"""(kind of node, target, args, kwargs)"""


def target_of(function: Any, args: Args, kwargs: Kwargs) -> Target:
    """The node for a call: functions of ``operator`` for Python's operators, methods by name, other functions as is."""
    name = name_of(function)
    # The order of the checks matters: __get__ reads an attribute; the __name__ of Tensor.__pow__ is "pow"; 2 - x
    # arrives as Tensor.__rsub__(x, 2), whose arguments the graph swaps.
    if (attribute := accessed(function, "__get__")) is not None:
        return "call_function", getattr, (args[0], attribute), {}
    if isinstance(args[0] if args else None, Tensor) and function in _BY_FUNCTION:
        return "call_function", _BY_FUNCTION[function], args, kwargs
    if not isinstance(args[0] if args else None, Tensor) or getattr(Tensor, name, None) is not function:
        return "call_function", function, args, kwargs
    if name in _REVERSED:
        return "call_function", _REVERSED[name], (args[1], args[0]), kwargs
    return "call_method", name, args, kwargs


def name_of(function: Any) -> str:
    """A function's name, or the name of its class for a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))


def accessed(function: Any, how: str) -> str | None:
    """The attribute that a call reads ("__get__") or sets ("__set__"): a torch function mode sees ``x.T`` as
    ``Tensor.T.__get__(x)``."""
    return str(function.__self__.__name__) if name_of(function) == how else None
