"""How a call that a torch function mode has seen is written in a graph."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from fxpipe.graph.program import IN_PLACE_NAMES

_UNARY = ("abs", "invert", "neg", "pos")
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", *IN_PLACE_NAMES),
)


def _operator(name: str) -> Any:
    return getattr(operator, f"{name}_" if name in ("and", "or") else name)


_OPERATORS = {f"__{name}__": _operator(name) for name in (*_UNARY, *_BINARY)} | {"__div__": operator.truediv}
_REVERSED = {f"__r{name}__": _operator(name) for name in _BINARY[:13]} | {"__rdiv__": operator.truediv}
_BY_FUNCTION = {getattr(Tensor, name): function for name, function in _OPERATORS.items() if hasattr(Tensor, name)}
"""Some, such as ``Tensor.__pow__``, bear the name of another method."""

Target = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""(kind of node, target, args, kwargs)"""


def target_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target:
    """The node for a call: Python's operators as such, methods by name, other functions as they are."""
    name = name_of(function)
    if getter_of(function) is not None:
        return "call_function", getattr, (args[0], getter_of(function)), {}
    if isinstance(args[0] if args else None, Tensor) and function in _BY_FUNCTION:
        return "call_function", _BY_FUNCTION[function], args, kwargs
    if not isinstance(args[0] if args else None, Tensor) or getattr(Tensor, name, None) is not function:
        return "call_function", function, args, kwargs
    if name in _REVERSED:
        return "call_function", _REVERSED[name], (args[1], args[0]), kwargs
    return "call_method", name, args, kwargs


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def getter_of(function: Any) -> str | None:
    """The attribute that a call reads: ``x.T`` reaches a torch function mode as ``Tensor.T.__get__(x)``."""
    return str(function.__self__.__name__) if name_of(function) == "__get__" else None


def setter_of(function: Any) -> str | None:
    """The attribute that a call sets."""
    return str(function.__self__.__name__) if name_of(function) == "__set__" else None
