"""Buffers that forward sets, ``self.ema = 0.9 * self.ema + 0.1 * x``, which a graph writes in place instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.trace.patching import patched, refuse
from fxpipe.trace.user_line import current_line


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
    """The buffers that forward has set. Whoever watches ``__setattr__`` hands them over."""

    def __init__(self) -> None:
        self.count = 0
        """How many times forward has set one."""
        self._assigned: dict[tuple[int, str], _Assigned] = {}

    def assign(self, module: nn.Module, name: str, value: Tensor, path: str) -> None:
        """What reads the buffer from now on gets the new tensor; the old one is written at the end.

        ``path``: what the user calls the buffer. TraceError where the new tensor does not fit into the old one.
        """
        before = module._buffers[name]
        assert before is not None
        if (value.shape, value.dtype) != (before.shape, before.dtype):
            raise refuse(
                f"forward sets the buffer {path} of {before.dtype} {list(before.shape)} to a tensor of {value.dtype} "
                f"{list(value.shape)}, and a buffer keeps its memory in a pipeline",
                "keep its shape and type",
            )
        self.count += 1
        # by the table, which torch.export's stand-in for a module shares with it
        key = id(module._buffers), name
        self._assigned.setdefault(key, _Assigned(module._buffers, name, before, current_line()))
        module._buffers[name] = value

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


class WatchedAttributes:
    """Watches a model while it is recorded. ``paths``: a submodule's path by the identity of its ``__dict__``."""

    def __init__(self, paths: Mapping[int, str], is_ours: Callable[[], bool]) -> None:
        self.buffers = AssignedBuffers()
        self.lines: dict[str, str] = {}
        """Where forward has set an attribute last, by its name in the model."""
        self._paths, self._is_ours = paths, is_ours

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        original = nn.Module.__setattr__

        def guarded(module: nn.Module, name: str, value: Any) -> None:
            path = self._paths.get(id(vars(module)))
            full = f"{path}.{name}" if path else name
            if path is not None and self._is_ours():
                self.lines[full] = current_line()
            buffer = vars(module).get("_buffers", {}).get(name)
            is_set = isinstance(buffer, Tensor) and isinstance(value, Tensor) and value is not buffer
            if path is None or not is_set or not self._is_ours():
                original(module, name, value)
            else:
                self.buffers.assign(module, name, value, full)

        try:
            with patched(nn.Module, "__setattr__", guarded):
                yield
        finally:
            self.buffers.put_back()
