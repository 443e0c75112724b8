"""Attributes that forward sets; the buffers among them, ``self.ema = 0.9 * self.ema + x``, a graph writes in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.trace.patching import patched, refuse
from fxpipe.trace.user_line import current_line


@contextlib.contextmanager
def watching_attributes(
    paths: Mapping[int, str], takes: Callable[[nn.Module, str, Any, str], bool], own: CallAttributes
) -> Iterator[None]:
    """While it is open, ``takes(module, name, value, path)`` hears of each attribute of the model that forward sets,
    and ``own`` of each that it reads.

    Unless that returns True, the attribute is set as ever. ``paths``: a submodule's path by the identity of its
    ``__dict__``, which torch.export's stand-in for a module shares with it.
    """
    original, get = nn.Module.__setattr__, nn.Module.__getattribute__

    def noted(module: nn.Module, name: str) -> Any:
        own.read.add((id(object.__getattribute__(module, "__dict__")), name))
        return get(module, name)

    def guarded(module: nn.Module, name: str, value: Any) -> None:
        path = paths.get(id(vars(module)))
        if path is None or not takes(module, name, value, path):
            original(module, name, value)

    with patched(nn.Module, "__setattr__", guarded), patched(nn.Module, "__getattribute__", noted):
        yield


class CallAttributes:
    """Attributes that forward sets before it reads them: values of one call, as its local variables are. Afterwards the
    model has what it had."""

    def __init__(self) -> None:
        self.read: set[tuple[int, str]] = set()
        """What was read: the identity of a module's ``__dict__``, and a name."""
        self.taken: frozenset[tuple[int, str]] = frozenset()
        """What was set before it was read."""
        self._before: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def take(self, module: nn.Module, name: str, value: Any, is_constant: bool = False) -> bool:
        """Whether this may be set. ``is_constant``: whether any call would set the same, so that forward may have
        looked whether an earlier one has."""
        table = vars(module)
        key, before = (id(table), name), table.get(name, _MISSING)
        if key in self._before:
            return True
        if any(name in table.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")):
            return False
        is_read, was_nothing = key in self.read, before is None or before is _MISSING
        if isinstance(value, (nn.Module, nn.Parameter)) or (is_read and not (is_constant and was_nothing)):
            return False
        self.taken |= frozenset() if is_read else {key}
        self._before[key] = table, before
        return True

    def put_back(self) -> None:
        """The model has what it had before the call."""
        self.read.clear()
        while self._before:
            (_, name), (table, value) = self._before.popitem()
            if value is _MISSING:
                table.pop(name, None)
            else:
                table[name] = value


_MISSING = object()


@dataclass(frozen=True)
class _Assigned:
    """A buffer that forward has set: where it is held, the tensor that it was, and the user's line."""

    table: dict[str, Any]
    name: str
    before: Tensor
    line: str


def _anywhere(line: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class AssignedBuffers:
    """The buffers that forward has set. Whoever watches attributes hands them over."""

    def __init__(self) -> None:
        self.count = 0
        """How many times forward has set one."""
        self._assigned: dict[tuple[int, str], _Assigned] = {}

    def assign(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Whether a new tensor is set as a buffer: what reads it from now on gets that; the old is written at the end.

        ``path``: what the user calls the buffer. TraceError where the new tensor does not fit into the old one.
        """
        before = vars(module).get("_buffers", {}).get(name)
        if not isinstance(before, Tensor) or not isinstance(value, Tensor) or value is before:
            return False
        if (value.shape, value.dtype) != (before.shape, before.dtype):
            raise refuse(
                f"forward sets the buffer {path} of {before.dtype} {list(before.shape)} to a tensor of {value.dtype} "
                f"{list(value.shape)}, and a buffer keeps its memory in a pipeline",
                "keep its shape and type",
            )
        self.count += 1
        key = id(module._buffers), name  # by the table, as above
        self._assigned.setdefault(key, _Assigned(module._buffers, name, before, current_line()))
        module._buffers[name] = value
        return True

    def write(self, at: Callable[[str], contextlib.AbstractContextManager[None]] = _anywhere) -> None:
        """Only now, since whoever has read the old tensor still holds it in the model. ``at``: as if on that line."""
        with torch.no_grad():
            for assigned in self._assigned.values():
                value = assigned.table[assigned.name]
                if value is not assigned.before:
                    with at(assigned.line):
                        assigned.before.copy_(value)

    def put_back(self) -> None:
        """The model holds the tensors that it held."""
        for assigned in self._assigned.values():
            assigned.table[assigned.name] = assigned.before
        self._assigned.clear()
