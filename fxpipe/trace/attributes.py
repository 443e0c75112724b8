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
def watching_attributes(paths: Mapping[int, str], takes: Callable[[nn.Module, str, Any, str], bool]) -> Iterator[None]:
    """While it is open, ``takes(module, name, value, path)`` hears of each attribute of the model that forward sets.

    Unless that returns True, the attribute is set as ever. ``paths``: a submodule's path by the identity of its
    ``__dict__``, which torch.export's stand-in for a module shares with it.
    """
    original = nn.Module.__setattr__

    def guarded(module: nn.Module, name: str, value: Any) -> None:
        path = paths.get(id(vars(module)))
        if path is None or not takes(module, name, value, path):
            original(module, name, value)

    with patched(nn.Module, "__setattr__", guarded):
        yield


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
