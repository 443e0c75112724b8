"""Outside: the globals and the closures' variables that forward reads. ``Reads`` compares them as it does attributes.

Takes: the model's modules that a capture has traced, and the loss function. Gives: a ``Variable`` for each.

1. ``outside`` starts at the loss function, at forward of each module, and at the methods that forward names.
2. The bytecode of a function names the globals that it reads. Its cells are the variables of its closure.
3. A plain value or a container is a variable to compare. A function is one, too, and leads to what it reads itself.

For example, ``def forward(self, x): return x * SCALE`` leads to ``SCALE``. Functions of torch and of Python's library
lead nowhere.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from fxpipe.snapshots.contents import is_library

_PLAIN = (bool, int, float, complex, str, types.FunctionType)
_COMPARED = (*_PLAIN, dict, list, tuple, set, types.SimpleNamespace, argparse.Namespace)


class Table:
    """Variables, as the attributes of a module without submodules: ``vars`` returns them by name."""

    _modules: Mapping[str, Any] = types.MappingProxyType({})
    _buffers = _modules

    def __init__(self, variables: dict[str, Any]) -> None:
        object.__setattr__(self, "__dict__", variables)


class _Cells(dict[str, Any]):
    """The cells of a closure by name. ``get`` returns a variable's present value."""

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name].cell_contents
        except (KeyError, ValueError):  # ValueError: the variable has no value yet
            return default


class Variable(NamedTuple):
    """A variable, with the table that has it. ``owner``: an id that is the same for each table of the same variables.
    ``path``: the Python module, or the function, that the variable belongs to."""

    owner: int
    path: str
    table: Table
    name: str

    @property
    def value(self) -> Any:
        return vars(self.table).get(self.name)


def outside(modules: Iterable[tuple[str, nn.Module]], loss_fn: Any, left_out: Iterable[str]) -> Iterator[Variable]:
    """Yields the variables that the functions of a capture read, if their values are plain, containers or functions.

    Args:
        modules: the modules whose forward is traced, with their paths.
        loss_fn: the loss function, if any.
        left_out: paths of submodules and methods whose code runs in every step, and reads its variables there.
    """
    skipped, seen, waiting = frozenset(left_out), set[int](), list[Any]()
    for path, module in modules:
        waiting += _methods(module, "forward", path, skipped)
    given, inner = _given_to(loss_fn)
    is_method = isinstance(inner, types.MethodType)
    owner = inner.__self__ if is_method else inner
    named = _methods(owner, inner.__name__ if is_method else "__call__")
    is_own = bool(named) and not isinstance(owner, nn.Module)  # Reads has a module's attributes already
    waiting += [inner, *named]
    names = {name for method in named for code in _codes(method) for name in code.co_names}
    own = Table(vars(owner) if is_own and type(owner).__dictoffset__ else {})
    attributes = (Variable(id(vars(own)), type(owner).__name__, own, name) for name in sorted(names))
    yield from (variable for variable in (*given, *attributes) if isinstance(variable.value, _COMPARED))
    for function in waiting:  # the list grows
        if not isinstance(function, types.FunctionType) or id(function) in seen or is_library(f"{function.__module__}"):
            continue
        seen.add(id(function))
        for variable in _read_by(function):
            waiting.append(variable.value)
            if isinstance(variable.value, _COMPARED):
                yield variable


def _given_to(loss_fn: Any) -> tuple[list[Variable], Any]:
    """The arguments that ``functools.partial`` has given to a loss function, and the function inside."""
    variables = list[Variable]()
    while isinstance(loss_fn, functools.partial):
        table = Table(
            {**{f"argument {number}": value for number, value in enumerate(loss_fn.args)}, **loss_fn.keywords}
        )
        variables += [Variable(id(loss_fn), "loss_fn", table, name) for name in vars(table)]
        loss_fn = loss_fn.func
    return variables, loss_fn


def _methods(
    owner: object, first: str, path: str = "", skipped: frozenset[str] = frozenset()
) -> list[types.FunctionType]:
    """The method of this name, and the methods that it names, directly or through others, without ``skipped``."""
    names, methods = [first], list[types.FunctionType]()
    for name in names:  # the list grows
        method = inspect.getattr_static(owner, name, None)
        if isinstance(method, (staticmethod, classmethod, types.MethodType)):
            method = method.__func__
        if isinstance(method, types.FunctionType) and f"{path}.{name}".lstrip(".") not in skipped:
            methods.append(method)
            names += [other for code in _codes(method) for other in code.co_names if other not in names]
    return methods


def _codes(function: types.FunctionType) -> list[types.CodeType]:
    """The function's code, and the code of the functions inside of it."""
    codes = [function.__code__]
    for code in codes:  # the list grows
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return codes


def _read_by(function: types.FunctionType) -> Iterator[Variable]:
    """The globals that a function reads, and the variables of its closure."""
    table = Table(function.__globals__)
    for code in _codes(function):
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                yield Variable(id(function.__globals__), f"{function.__module__}", table, f"{step.argval}")
    cells = _Cells(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in cells:
        yield Variable(id(function.__closure__), function.__qualname__, Table(cells), name)
