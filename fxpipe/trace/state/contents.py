"""Contents: what is in a value that may be changed in place, to be compared from step to step.

Looked into are dicts, lists, tuples, sets and deques; the attributes of objects, in ``__dict__``, in ``__slots__`` and
of their classes; what a bound method or a ``functools.partial`` is bound to; NumPy's arrays, by their bytes. All else
is compared by identity: tensors, modules, functions, and objects of classes of torch's and of Python's own library.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST, DEEP = 1000, 6
"""So many values are compared of one attribute, the nearest first, and within so many others."""
LARGE = 2**20
"""The bytes of an array beyond which it is compared by identity."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CLOSED = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, torch.Generator)
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, types.MemberDescriptorType)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "sympy", "numpy", "fxpipe"})


@dataclass(frozen=True)
class _Reading:
    """How to read what values of a class hold: without calling what the class defines, which may raise anything."""

    items: Callable[[Any], list[Any]] | None
    has_dict: bool = False
    slots: tuple[types.MemberDescriptorType, ...] = ()
    shared: tuple[tuple[Mapping[str, Any], str], ...] = ()
    """The attributes of the class itself that are no methods: where each stands, and its name."""

    @property
    def is_leaf(self) -> bool:
        return self.items is None and not self.has_dict and not self.slots

    def attributes(self, value: Any) -> dict[str, Any]:
        """Those that the value holds itself, by name."""
        found = dict(object.__getattribute__(value, "__dict__")) if self.has_dict else {}
        for slot in self.slots:
            try:
                found[slot.__name__] = slot.__get__(value)
            except AttributeError:  # it has not been set
                continue
        return found

    def parts(self, value: Any) -> list[Any]:
        parts = [] if self.items is None else self.items(value)
        if self.has_dict or self.slots:
            own = self.attributes(value)
            parts += [*own.keys(), *own.values(), *(home.get(name) for home, name in self.shared if name not in own)]
        return parts


def _reading_of(cls: type) -> _Reading:
    """How to read what values of a class hold."""
    if cls is types.MethodType:
        return _Reading(lambda method: [method.__func__, method.__self__])
    if issubclass(cls, functools.partial):
        return _Reading(lambda partial: [partial.func, partial.args, partial.keywords])
    if any(base.__module__ == "numpy" and hasattr(base, "tobytes") for base in cls.__mro__):
        return _Reading(_numbers)
    if issubclass(cls, _CLOSED):
        return _Reading(None)
    container = next((base for base in _CONTAINERS if issubclass(cls, base)), None)
    items = None if container is None else _entries if container is dict else _iterated(container)
    users = [base for base in cls.__mro__ if not is_library(base.__module__)]
    if not users and cls not in _SETTINGS:
        return _Reading(items)
    tables = [vars(base) for base in users]
    slots = [slot for table in tables if "__slots__" in table for slot in table.values()]
    shared = {name: table for table in reversed(tables) for name in table if not name.startswith("__")}
    return _Reading(
        items,
        cls.__dictoffset__ != 0,
        tuple(slot for slot in slots if isinstance(slot, types.MemberDescriptorType)),
        tuple((table, name) for name, table in shared.items() if not isinstance(table[name], _DESCRIPTORS)),
    )


reading_of: Callable[[type], _Reading] = functools.lru_cache(1024)(_reading_of)


def is_library(module: str) -> bool:
    """Whether a module is torch's, SymPy's, NumPy's, fxpipe's or of Python's own library."""
    return module.partition(".")[0] in _LIBRARIES


def _iterated(container: Any) -> Callable[[Any], list[Any]]:
    return lambda value: [*container.__iter__(value)]  # list(value) would ask for the class's own __len__


def _entries(table: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(table), *dict.values(table)]


def _numbers(array: Any) -> list[Any]:
    kind = f"{array.dtype} {array.shape}"
    return [kind, array.tobytes() if array.nbytes <= LARGE and not array.dtype.hasobject else array]


def contents(value: Any) -> Any:
    """A value, or, where it may be changed in place, a flat tuple of all that is in it."""
    reading = reading_of(type(value))
    if reading.is_leaf:
        return value
    if type(value) is tuple and all(reading_of(type(item)).is_leaf for item in value):
        return value
    found: list[Any] = []
    for part in walk(value):
        if part.parts is None:
            found.append(part.value)
        else:
            found += [type(part.value) if part.is_entered else part.value, len(part.parts)]
    return tuple(found)


class Inner(NamedTuple):
    """A value within another. ``parts``: what it holds itself; None for what cannot be changed in place, and, as its
    number, for what was met before. ``is_entered``: whether these parts come, too."""

    value: Any
    parts: list[Any] | None = None
    is_entered: bool = False


def walk(value: Any) -> Iterator[Inner]:
    """A value and all that is in it, the nearest first, as far as ``MOST`` and ``DEEP``."""
    level, seen, count = [value], dict[int, int](), 1
    for depth in range(DEEP + 1):
        below: list[Any] = []
        for one in level:
            reading = reading_of(type(one))
            if reading.is_leaf:
                yield Inner(one)
            elif id(one) in seen:
                yield Inner(seen[id(one)])
            else:
                seen[id(one)] = len(seen)
                parts = reading.parts(one)
                is_entered = depth < DEEP and count + len(parts) <= MOST
                yield Inner(one, parts, is_entered)
                if is_entered:
                    count += len(parts)
                    below += parts
        level = below


class Taken:
    """What a value held itself, to be compared and put back."""

    def __init__(self, value: Any) -> None:
        self._value, self._reading = value, reading_of(type(value))
        self._items = [] if self._reading.items is None else self._reading.items(value)
        self._own = self._reading.attributes(value)

    @property
    def has_changed(self) -> bool:
        """Not by a new attribute of an object that holds no tensor: that is found again, as
        ``functools.cached_property`` does."""
        before, now = self._own, self._reading.attributes(self._value)
        kept = all(name in now and alike(value, now[name]) for name, value in before.items())
        new = (now[name] for name in now.keys() - before.keys())
        return self._has_other_items() or not kept or any(isinstance(p.value, Tensor) for one in new for p in walk(one))

    def _has_other_items(self) -> bool:
        now = [] if self._reading.items is None else self._reading.items(self._value)
        return len(now) != len(self._items) or not all(map(alike, self._items, now))

    def put_back(self) -> None:
        value, now = self._value, self._reading.attributes(self._value)
        if self._has_other_items():
            _fill(value, self._items)
        for slot in self._reading.slots:
            if slot.__name__ in self._own:
                slot.__set__(value, self._own[slot.__name__])
            elif slot.__name__ in now:
                slot.__delete__(value)
        if self._reading.has_dict and (table := object.__getattribute__(value, "__dict__")) is not value:
            names = {slot.__name__ for slot in self._reading.slots}
            table.clear()
            table.update((name, held) for name, held in self._own.items() if name not in names)


def _fill(value: Any, items: list[Any]) -> None:
    """A container, or an array, holds these items and no others."""
    kind = type(value)
    if isinstance(value, (list, dict, set, deque)):
        kind.clear(value)
    if isinstance(value, dict):
        for key, item in zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True):
            kind.__setitem__(value, key, item)
    elif isinstance(value, (list, deque)):
        kind.extend(value, items)
    elif isinstance(value, set):
        kind.update(value, items)
    elif items and isinstance(items[-1], bytes):
        value.flat = sys.modules["numpy"].frombuffer(items[-1], value.dtype)


def alike(one: Any, other: Any) -> bool:
    """Whether two ``contents`` are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return isinstance(one, _PLAIN) and bool(one == other or (one != one and other != other))
