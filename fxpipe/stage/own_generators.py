"""Random generators of a model's own: held by its modules' attributes, classes, functions and their globals.

Takes: the model and its loss function. Gives: name → generator, with names that are the same on all ranks. Captures and
checks watch their states, and restore them.

1. The search begins at the modules' attributes and at the functions themselves.
2. It walks into each value (``contents.walk``): a generator inside is found.
3. A function leads to the values that it reads from its closure, its globals and its defaults; an object leads to the
   methods of its class, once for each class.

Functions and classes of libraries are not searched.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from fxpipe.seeds import is_generator
from fxpipe.snapshots.contents import is_library, names_in, walk
from fxpipe.stage.with_loss import loss_module


def own_generators(*code: Callable[..., Any] | None) -> dict[str, Any]:
    """The random generators that modules and functions can reach, by names that are the same on all ranks."""
    found, seen, classes = dict[str, Any](), set[int](), set[type]()
    waiting = deque[tuple[str, Any]](("loss_fn", each) for each in code)
    # 1. where the search begins
    for module in map(loss_module, code):
        for path, part in () if module is None else module.named_modules():
            waiting += [(f"{path}.{name}", value) for name, value in vars(part).items()]
            waiting.append((path, part))
    while waiting:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        # 2. and 3. generators inside, and where they lead
        for part in walk(_unwrapped(value)):
            inner = part.value
            if is_generator(inner) and all(inner is not other for other in found.values()):
                found[f"own {len(found)}: {name.lstrip('.')}"] = inner
            elif isinstance(inner, types.FunctionType) and not is_library(inner.__module__ or ""):
                waiting += [(inner.__qualname__, outside) for outside in _read_by(inner)]
            else:  # the methods of an object may read globals
                users = [
                    base for base in type(inner).__mro__ if base not in classes and not is_library(base.__module__)
                ]
                classes |= set(users)
                waiting += [(base.__qualname__, value) for base in users for value in vars(base).values()]
    return found


def _unwrapped(value: Any) -> Any:
    """The function of a property, a static method or a class method; other values as they are."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _read_by(function: types.FunctionType) -> Iterator[Any]:
    """The values that a function reads from its closure and its globals, and its parameters' defaults."""
    names, homes = names_in(function), [function.__globals__]
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType | type) and not is_library(getattr(value, "__module__", value.__name__)):
            homes.append(vars(value))
    for home in homes:
        yield from (home[name] for name in sorted(names & home.keys()))
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # an empty cell
            yield cell.cell_contents
    yield from (function.__defaults__, function.__kwdefaults__)
