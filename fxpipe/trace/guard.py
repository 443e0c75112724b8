"""What a symbolic capture would silently get wrong, refused where it happens.

torch.fx records operations on proxies. Whatever the model does to real state while it is traced happens once, at
capture, and never again: a buffer written, an attribute set, a random number drawn. Modes that change how recorded
operations run (autocast, no_grad) leave no trace in the graph, and an ``autograd.Function`` loses its backward.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.errors import TraceError
from fxpipe.trace.source import current_line

_CONTAINERS = (list, dict, set)


def refuse(fact: str, instead: str) -> TraceError:
    """The error for something that happens at the user's current line."""
    line = current_line()
    return TraceError(f"{fact}; {instead}" + (f"\n{line}" if line else ""))


class Guard:
    """Watches one capture of ``module``. ``check()`` is called as each node is recorded."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = {id(m): name or type(m).__name__ for name, m in module.named_modules()}
        self._module = module
        self._modes = _modes()
        self._random = _python_random_state()
        self._attributes = _attributes(module)
        self._storages = {
            tensor.untyped_storage()._cdata: name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with (
            _StateMode(self._storages),
            patched(nn.Module, "__setattr__", self._guarded_setattr()),
            patched(torch.autograd.Function, "apply", classmethod(_refuse_function)),
        ):
            yield
            self.check()
            self._check_attributes()

    def check(self) -> None:
        """Refuses a mode that changed, and a draw from Python's or NumPy's random numbers."""
        for (name, instead), now in _modes().items():
            if now != self._modes[name, instead]:
                raise refuse(f"{name} is changed inside forward, which a symbolic trace cannot record", instead)
        if _python_random_state() != self._random:
            raise refuse(
                "Python's or NumPy's random numbers are drawn while tracing and would be the same ever after",
                "draw with torch from a traced tensor (torch.rand_like(x)), or pass the number in as an input",
            )

    def _guarded_setattr(self) -> Callable[[nn.Module, str, Any], None]:
        original = nn.Module.__setattr__

        def guarded(module: nn.Module, name: str, value: Any) -> None:
            if id(module) in self._modules:
                raise refuse(
                    f"forward sets {self._modules[id(module)]}.{name}, which would happen once, while tracing",
                    "return the value instead, or write into a buffer in place",
                )
            original(module, name, value)

        return guarded

    def _check_attributes(self) -> None:
        for (module, name), value in _attributes(self._module).items():
            before = self._attributes.get((module, name))
            if value is not before and (type(value) not in _CONTAINERS or not _same(value, before)):
                raise TraceError(
                    f"forward changes {module or 'the model'}.{name}, which would happen once, while tracing; "
                    "return the value instead, or write into a buffer in place"
                )


class _StateMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on real tensors: refuses random ones, and writes to parameters and buffers."""

    def __init__(self, storages: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise refuse(
                f"{func} draws random numbers while tracing, and they would be the same ever after",
                "draw from a traced tensor (torch.randn_like(x), x.new_empty(4, 8).normal_())",
            )
        if func._schema.is_mutable:
            self._check_writes(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                name = self._storages.get(value.untyped_storage()._cdata)
                if name is not None:
                    raise refuse(
                        f"forward writes {name} while tracing, which would happen once",
                        "write it as self.<name>.add_(...), which is recorded, or outside of forward",
                    )


def _refuse_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    raise refuse(
        f"torch.autograd.Function {function.__name__} is applied in forward, and its backward would be lost",
        "write it with differentiable operations, or give the stages as callables (StageGraph.from_callables)",
    )


_OUTSIDE = "enter it around the call of forward_backward instead"
_FREEZE = "use .detach(), or requires_grad_(False) on the parameters"


def _modes() -> dict[tuple[str, str], Any]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = [
        (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        for device in devices
    ]
    return {
        ("grad mode", _FREEZE): torch.is_grad_enabled(),
        ("inference mode", _FREEZE): torch.is_inference_mode_enabled(),
        ("autocast", _OUTSIDE): autocast,
    }


def _python_random_state() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        name, keys, position, *rest = numpy.random.get_state()
        drawn = (name, keys.tobytes(), position, rest)
    return random.getstate(), drawn


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Every attribute of every submodule; containers as shallow copies, so that a change shows."""
    found = {}
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            found[path, name] = value.copy() if type(value) in _CONTAINERS else value
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    if type(one) is not type(other) or len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and value is other[key] for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
