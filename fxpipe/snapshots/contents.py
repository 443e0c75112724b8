"""Contents: the parts of a value that may change in place. fxpipe compares them between steps, and restores them.

Takes: any Python value. Gives: ``contents``, a flat tuple that is equal (``alike``) as long as nothing inside has
changed; ``walk``, the parts one by one; ``Taken``, the direct parts of one value, to put back.

The parts are the entries of dicts, lists, tuples, sets and deques; the attributes and slots of objects of users'
classes; the function and arguments of bound methods and ``functools.partial``; the bytes of NumPy arrays. All other
values are compared by identity: tensors, modules, functions, and objects of classes of torch and of Python's library.

1. ``_reading_of`` decides once for each class how its values are read, without a call of the class's own methods.
2. ``walk`` goes through the parts breadth first, within ``MOST`` values and ``DEEP`` levels. Values beyond are compared
   by identity. A repeated value is its number, so that cycles end.
3. ``contents`` writes the walk into a tuple.

For example, ``contents([1, {"a": x}])`` is (list, 2, 1, dict, 2, "a", x).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST, DEEP = 1000, 6
"""The most values that are compared in one attribute, the nearest first, and the most levels of nesting."""
LARGE = 2**20
"""The size in bytes above which an array is compared by identity."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CLOSED = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, torch.Generator)
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "functorch", "sympy", "mpmath", "numpy", "fxpipe"})


class _Reading(NamedTuple):
    """How to read the parts of a class's values, without calls of the class's own methods, which may raise anything."""

    items: Callable[[Any], list[Any]] | None = None
    """Returns the entries of a container, or the parts of a bound method and the like; None for other classes."""
    has_table: bool = False
    slots: tuple[types.MemberDescriptorType, ...] = ()
    """The slots of the class, as attrs and ``dataclass(slots=True)`` define them."""

    @property
    def is_leaf(self) -> bool:
        return self.items is None and not self.has_table and not self.slots

    def table(self, value: Any) -> dict[str, Any]:
        """The value's ``__dict__``, without a call of its class; empty for a value that has none, or whose attributes
        are not read."""
        return object.__getattribute__(value, "__dict__") if self.has_table else {}

    def attributes(self, value: Any) -> dict[str, Any]:
        """The value's attributes and set slots, by name."""
        values = dict(self.table(value))
        for slot in self.slots:
            with contextlib.suppress(AttributeError):  # the slot is not set
                values[slot.__name__] = slot.__get__(value)
        return values

    def parts(self, value: Any) -> list[Any]:
        """The entries, then the names and the values of attributes."""
        own = self.attributes(value)
        return [*(self.items(value) if self.items is not None else ()), *own.keys(), *own.values()]


def _reading_of(cls: type, is_open: bool = False) -> _Reading:
    """How to read a class's values. ``is_open``: also read functions, and objects of classes of torch and Python."""
    # 1. how the class is read
    if is_open and cls is types.FunctionType:
        return _Reading(captured_by)
    if cls is types.MethodType:
        return _Reading(lambda method: [method.__func__, method.__self__])
    if cls is types.BuiltinMethodType:  # such as random.Random(0).random; of a function, __self__ is its module
        return _Reading(lambda method: [method.__self__])
    if issubclass(cls, functools.partial):
        return _Reading(lambda partial: [partial.func, partial.args, partial.keywords])
    if issubclass(cls, _CLOSED):
        return _Reading()
    if any(base.__module__ == "numpy" and hasattr(base, "tobytes") for base in cls.__mro__):
        return _Reading(_numbers)
    # reads by the builtin container's methods, as a derived class's methods may do anything
    container: Any = next((base for base in _CONTAINERS if issubclass(cls, base)), None)
    items = None if container is None else _entries if container is dict else _iterated(container)
    # attributes that classes of torch and Python set are internal; users set the attributes of their own classes
    users = [base for base in cls.__mro__ if is_open or not is_library(base.__module__)]
    declared = [member for base in users if "__slots__" in vars(base) for member in vars(base).values()]
    slots = tuple(member for member in declared if isinstance(member, types.MemberDescriptorType))
    return _Reading(items, cls.__dictoffset__ != 0 and bool(users or cls in _SETTINGS), slots)


reading_of: Callable[[type], _Reading] = functools.lru_cache(1024)(_reading_of)
open_reading_of: Callable[[type], _Reading] = functools.lru_cache(1024)(functools.partial(_reading_of, is_open=True))


def is_library(module: str) -> bool:
    """Whether a module belongs to torch, SymPy, NumPy, fxpipe or Python's standard library."""
    return module.partition(".")[0] in _LIBRARIES


def users_modules() -> list[types.ModuleType]:
    """The imported modules that belong to no library as ``is_library`` says."""
    named = [*sys.modules.items()]
    return [module for name, module in named if isinstance(module, types.ModuleType) and not is_library(name)]


def captured_by(function: Any) -> list[Any]:
    """The variables that a function closes over, and its parameters' defaults."""
    return [inspect.getclosurevars(function).nonlocals, function.__defaults__, function.__kwdefaults__]


def codes_of(function: types.FunctionType) -> list[types.CodeType]:
    """The function's code, and the code of the functions inside of it."""
    codes = [function.__code__]
    for code in codes:  # the list grows
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return codes


def names_in(function: types.FunctionType) -> set[str]:
    """The names of globals, attributes and methods in a function's code."""
    return {name for code in codes_of(function) for name in code.co_names}


def _iterated(container: Any) -> Callable[[Any], list[Any]]:
    return lambda value: [*container.__iter__(value)]  # list(value) would call the class's own __len__


def _numbers(array: Any) -> list[Any]:
    """A NumPy array's dtype, shape and bytes; the array itself if it is large or holds objects."""
    kind = f"{array.dtype} {array.shape}"
    return [kind, array.tobytes() if array.nbytes <= LARGE and not array.dtype.hasobject else array]


def _entries(table: dict[Any, Any]) -> list[Any]:
    """A dict's keys, followed by its values."""
    return [*dict.keys(table), *dict.values(table)]


def contents(value: Any) -> Any:
    """The value itself, or, if the value can change in place, a flat tuple of all its parts."""
    if reading_of(type(value)).is_leaf:
        return value
    if type(value) is tuple and all(reading_of(type(item)).is_leaf for item in value):
        return value
    # 3. The number of a value's parts precedes them, level by level, so that different values give different tuples.
    parts: list[Any] = []
    for part in walk(value):
        if part.parts is None:
            parts.append(part.value)
        else:
            parts += [type(part.value) if part.is_entered else part.value, len(part.parts)]
    return tuple(parts)


class Inner(NamedTuple):
    """A value within another. ``parts``: its direct parts; None for a value that cannot change in place, and for
    a repeated value, which is replaced by its number. ``is_entered``: whether the walk also yields the parts."""

    value: Any
    parts: list[Any] | None = None
    is_entered: bool = False


def walk(value: Any, read: Callable[[type], _Reading] = reading_of) -> Iterator[Inner]:
    """Yields a value and its parts, the nearest first, within ``MOST`` and ``DEEP``. ``read``: class → its reading."""
    level, seen, count = [value], dict[int, int](), 1
    # 2. Breadth first, since ``MOST`` ends the walk: forward reads near parts more often than deeply nested parts.
    for depth in range(DEEP + 1):
        below: list[Any] = []
        for inner in level:
            reading = read(type(inner))
            if reading.is_leaf:
                yield Inner(inner)
            elif id(inner) in seen:
                # an object with two names, or a cycle
                yield Inner(seen[id(inner)])
            else:
                seen[id(inner)] = len(seen)
                parts = reading.parts(inner)
                is_entered = depth < DEEP and count + len(parts) <= MOST
                yield Inner(inner, parts, is_entered)
                if is_entered:
                    count += len(parts)
                    below += parts
        level = below


def alike(first: Any, other: Any) -> bool:
    """Whether two results of ``contents`` are equal."""
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    if isinstance(first, tuple):
        return len(first) == len(other) and all(map(alike, first, other))
    # nan is unequal to itself, and has not changed
    return isinstance(first, _PLAIN) and bool(first == other or (first != first and other != other))


class Taken:
    """The direct parts that a value had, to compare and to restore."""

    def __init__(self, value: Any) -> None:
        self._value, self._reading = value, reading_of(type(value))
        self._items = self._items_now()
        self._own = self._reading.attributes(value)

    def _items_now(self) -> list[Any]:
        return [] if self._reading.items is None else self._reading.items(self._value)

    @property
    def attributes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The dict of the value's attributes, which has the present values; and the values before."""
        return self._reading.table(self._value), self._own

    @property
    def has_changed(self) -> bool:
        """Whether the parts have changed. A new attribute without tensors, as ``functools.cached_property`` sets it,
        does not count."""
        before, now = self._own, self._reading.attributes(self._value)
        is_kept = all(name in now and alike(value, now[name]) for name, value in before.items())
        # a tensor that an object caches during a capture has no values, and so counts as a change
        new = (now[name] for name in now.keys() - before.keys())
        is_same = is_kept and alike(tuple(self._items), tuple(self._items_now()))
        return not is_same or any(isinstance(part.value, Tensor) for value in new for part in walk(value))

    def put_back(self) -> None:
        """Gives the value its earlier parts back: slots, attributes, entries, and the numbers of an array, in place.

        Attributes are set without the class's own ``__setattr__``, which may check or do anything.
        """
        value, items = self._value, self._items
        own, slots = dict(self._own), {slot.__name__: slot for slot in self._reading.slots}
        # A slot is set through its descriptor: the class may be frozen, or check what is set.
        for name in self._reading.attributes(value).keys() & slots.keys() - own.keys():
            slots[name].__delete__(value)
        for name in slots.keys() & own.keys():
            slots[name].__set__(value, own.pop(name))
        table = self._reading.table(value)
        if table is not value:  # both are the same dict in a mapping whose attributes are its items
            table.clear()
            table.update(own)
        if alike(tuple(items), tuple(self._items_now())):
            return
        if items and isinstance(items[-1], bytes) and hasattr(value, "tobytes"):
            # in place, since other objects may hold the array
            value.flat = sys.modules["numpy"].frombuffer(items[-1], value.dtype)
        if not isinstance(value, (dict, list, set, deque)):
            return
        kind: Any = type(value)  # whose own methods may do anything; those of the container do not
        kind.clear(value)
        if isinstance(value, dict):
            for key, item in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
                kind.__setitem__(value, key, item)
        elif isinstance(value, set):
            kind.update(value, items)
        else:
            kind.extend(value, items)
