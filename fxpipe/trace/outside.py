"""Outside: the globals and the closures' variables that forward reads. ``Reads`` compares them as it does attributes.

Takes: the model's modules that a capture has traced, and the loss function. Gives: a ``Variable`` for each.

1. ``outside`` starts at the loss function, at forward of each module, and at the methods that forward names.
2. The bytecode of a function names the globals that it reads. Its cells are the variables of its closure.
3. A plain value or a container is a variable to compare. A function is one, too, and leads to what it reads itself.
4. Of an object or a Python module, only the attributes that the bytecode names count: a script may keep its counter of
   steps in the same object.

For example, ``def forward(self, x): return x * SCALE * args.beta`` leads to ``SCALE`` and to ``beta``. Functions of
torch and of Python's library lead nowhere.
"""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.snapshots.contents import codes_of, is_library, names_in

_COMPARED = (bool, int, float, complex, str, types.FunctionType, dict, list, tuple, set)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_NO_OBJECTS = (type, nn.Module, Tensor, *_COMPARED)


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
    waiting += [inner, *named]
    yield from (variable for variable in given if isinstance(variable.value, _COMPARED))
    yield from _attributes(owner, type(owner).__name__, {name for method in named for name in names_in(method)})
    for function in waiting:  # the list grows
        if not isinstance(function, types.FunctionType) or id(function) in seen or is_library(f"{function.__module__}"):
            continue
        seen.add(id(function))
        names = names_in(function)
        for variable in _read_by(function):
            waiting.append(variable.value)
            if isinstance(variable.value, _COMPARED):
                yield variable
            else:
                yield from _attributes(variable.value, variable.name, names)


def _attributes(value: Any, path: str, names: Collection[str]) -> Iterator[Variable]:
    """Yields the attributes of these names of a user's object or Python module, and of the objects in them. ``Reads``
    has a model's attributes already."""
    kind = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
    own = getattr(value, "__dict__", None)
    is_users = isinstance(value, _NAMESPACES) or not is_library(kind)
    if not isinstance(own, dict) or isinstance(value, _NO_OBJECTS) or not is_users:
        return
    table = Table(own)
    for name in sorted(own.keys() & names):
        if isinstance(own[name], _COMPARED):
            yield Variable(id(own), path, table, name)
        elif own[name] is not value:
            yield from _attributes(own[name], f"{path}.{name}", {*names} - {name})


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
            names += names_in(method) - {*names}
    return methods


def _read_by(function: types.FunctionType) -> Iterator[Variable]:
    """The globals that a function reads, and the variables of its closure."""
    table = Table(function.__globals__)
    for code in codes_of(function):
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                yield Variable(id(function.__globals__), f"{function.__module__}", table, f"{step.argval}")
    cells = _Cells(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in cells:
        yield Variable(id(function.__closure__), function.__qualname__, Table(cells), name)
