"""Awaiting: a stage's forward that begins while its parameters are under way, and waits for each where it reads it.

The code of a captured stage is a function of its module: ``self.layers.0(x)``, ``x * self.scale``. While it awaits
parameters, a ``_Reader`` stands for ``self``: it waits for what it then hands out. So the code and the module stay as
they are, and a forward that has nothing to await costs nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, fx, nn

from fxpipe.graph.deferred import runs_hooks

T = TypeVar("T")
Settle = Callable[[Iterable[Tensor] | None], object]
"""Returns once these parameters of a stage may be read; None: all of them."""


class ReadsMore(nn.Module):
    """A module that may read parameters which it does not hold."""


_settle: ContextVar[Settle | None] = ContextVar("settle", default=None)


def settling(homes: Mapping[int, T], wait: Callable[[T], object]) -> Settle:
    """What waits for the homes of parameters. ``homes``: the identity of a parameter → what it comes with."""

    def settle(parameters: Iterable[Tensor] | None) -> None:
        keys = homes if parameters is None else [id(one) for one in parameters if id(one) in homes]
        for home in dict.fromkeys(homes[key] for key in keys):
            wait(home)

    return settle


def awaiting(settle: Settle, call: Callable[..., T], *args: Any) -> T:
    """``call(*args)``; the stage that runs in it awaits its parameters."""
    token = _settle.set(settle)
    try:
        return call(*args)
    finally:
        _settle.reset(token)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's function, which waits for each parameter where it reads it; what is no captured code has all of them
    when this returns."""
    settle, module = _settle.get(), getattr(function, "__self__", None)
    if settle is None:
        return function
    if isinstance(function, types.MethodType) and isinstance(module, fx.GraphModule):
        return types.MethodType(function.__func__, _Reader(module, settle))
    settle(None)
    return function


class _Reader:
    """Stands for a graph's module, or for a module of the graph's own that stands for a dot in a name."""

    __slots__ = ("_module", "_settle")

    def __init__(self, module: nn.Module, settle: Settle) -> None:
        self._module, self._settle = module, settle

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if type(value) is nn.Module:
            return _Reader(value, self._settle)
        if isinstance(value, nn.Module):
            # what hooks read nobody knows
            unknown = runs_hooks(value) or any(isinstance(part, ReadsMore) for part in value.modules())
            self._settle(None if unknown else list(value.parameters()))
        elif isinstance(value, nn.Parameter):
            self._settle([value])
        return value
