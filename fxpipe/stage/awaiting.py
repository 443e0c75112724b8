"""Awaiting: a stage's forward that begins before its parameters have arrived, and waits for each where it reads it.

The code of a captured stage is a function of its module: ``self.layers.0(x)``, ``x * self.scale``. While the stage
awaits parameters, a ``_Reader`` takes the place of ``self``, and waits for each attribute before it returns it. So the
code and the module are not changed, and a forward that has nothing to await costs nothing.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import fx, nn

from fxpipe.stage.deferred import runs_hooks
from fxpipe.stage.opaque_call import has_opaque_calls

T = TypeVar("T")


class Waits(dict[int, Callable[[], object]]):
    """The identity of a parameter under way → a function that returns once the parameter may be read. Parameters that
    arrive together have the same function, and are removed together."""

    around: AbstractContextManager[object] = contextlib.nullcontext()
    """The context in which the forward runs."""


_waits: ContextVar[Waits] = ContextVar("waits")


def awaiting(waits: Waits, call: Callable[..., T], *args: Any) -> T:
    """Runs ``call(*args)``; the stage inside awaits its parameters, all of which have arrived when this returns."""
    token = _waits.set(waits)
    try:
        with waits.around:
            result = call(*args)
    finally:
        _waits.reset(token)
    _wait(waits, waits)
    return result


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a stage's function that waits for each parameter where it reads it. Functions other than captured code
    cannot do so: for these, all parameters are awaited first."""
    waits = _waits.get(None)
    if not waits:
        return function
    module = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and isinstance(module, fx.GraphModule):
        return types.MethodType(function.__func__, _Reader(module, waits))
    _wait(waits, waits)
    return function


def _wait(waits: Waits, keys: Iterable[int]) -> None:
    for key in list(keys):
        if arrived := waits.get(key):
            arrived()
            for other in [other for other, wait in waits.items() if wait == arrived]:
                del waits[other]


class _Reader:
    """Replaces a graph's module, or a module of the graph's own that represents a dot in a name."""

    __slots__ = ("_module", "_waits")

    def __init__(self, module: nn.Module, waits: Waits) -> None:
        self._module, self._waits = module, waits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if type(value) is nn.Module and self._waits:
            return _Reader(value, self._waits)
        if isinstance(value, nn.Module) and self._waits:
            # hooks and opaque calls may read any parameter
            unknown = runs_hooks(value) or has_opaque_calls(value)
            _wait(self._waits, self._waits if unknown else map(id, value.parameters()))
        elif isinstance(value, nn.Parameter):
            _wait(self._waits, [id(value)])
        return value
