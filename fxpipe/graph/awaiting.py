"""Awaiting: a stage's forward that begins while its parameters are under way, and waits for each where it reads it.

The code of a captured stage is a function of its module: ``self.layers.0(x)``, ``x * self.scale``. While it awaits
parameters, a ``_Reader`` stands for ``self``: it waits for what it then hands out. So the code and the module stay as
they are, and a forward that has nothing to await costs nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import fx, nn

from fxpipe.graph.deferred import runs_hooks

Waits = Mapping[int, Callable[[], object]]
"""The identity of a parameter that is under way → what returns once it may be read, however often it is called."""

_waits: ContextVar[Waits] = ContextVar("waits")


class ReadsMore(nn.Module):
    """A module that may read parameters which it does not hold."""


def awaiting(waits: Waits, call: Callable[..., object], *args: Any) -> None:
    """``call(*args)``; the stage that runs in it awaits its parameters, all of which are there when this returns."""
    token = _waits.set(waits)
    try:
        call(*args)
    finally:
        _waits.reset(token)
    _wait(waits, waits)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's function, which waits for each parameter where it reads it. What is no captured code cannot: this waits
    for all of them first."""
    waits, module = _waits.get({}), getattr(function, "__self__", None)
    if waits and isinstance(function, types.MethodType) and isinstance(module, fx.GraphModule):
        return types.MethodType(function.__func__, _Reader(module, waits))
    _wait(waits, waits)
    return function


def _wait(waits: Waits, keys: Iterable[int]) -> None:
    for key in keys:
        if key in waits:
            waits[key]()


class _Reader:
    """Stands for a graph's module, or for a module of the graph's own that stands for a dot in a name."""

    __slots__ = ("_module", "_waits")

    def __init__(self, module: nn.Module, waits: Waits) -> None:
        self._module, self._waits = module, waits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if type(value) is nn.Module:
            return _Reader(value, self._waits)
        if isinstance(value, nn.Module):
            # nobody knows what hooks read
            unknown = runs_hooks(value) or any(isinstance(part, ReadsMore) for part in value.modules())
            _wait(self._waits, self._waits if unknown else map(id, value.parameters()))
        elif isinstance(value, nn.Parameter):
            _wait(self._waits, [id(value)])
        return value
