"""Attributes that forward sets while it is traced.

Takes: the model, and each assignment of an attribute. Gives: three watchers, which keep, undo or refuse assignments.

1. ``watching_attributes`` sees each assignment, before torch does.
2. ``AssignedBuffers``: a buffer that is assigned a new tensor. A graph writes it in place: ``self.ema = 0.9 * self.ema
   + x`` becomes ``self.ema.copy_(0.9 * self.ema + x)`` at the end of forward.
3. ``CallAttributes``: an attribute that forward sets before it reads it belongs to one call, as a local variable does.
   It may be set, and gets its earlier value back.
4. ``CaptureGuard`` refuses all others: a pipeline would see the value of an earlier call. It restores the model after a
   capture.

For example, ``self.last = x.mean()`` alone is allowed; ``self.total = self.total + x.sum()`` of a plain attribute is
refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.patches import MISSING, Replacement, put, replaced
from fxpipe.seeds import RandomState
from fxpipe.snapshots.snapshot import PLAIN_VALUE, Snapshot
from fxpipe.stage.activation_checkpoints import checkpoints_as
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.trace.export.graph_so_far import is_constant
from fxpipe.trace.patching import ONCE, refuse, refuse_changes, refuse_checkpoint
from fxpipe.trace.reads import noting
from fxpipe.trace.request import Request
from fxpipe.user_line import current_line


@contextlib.contextmanager
def watching_attributes(
    paths: Mapping[int, str], takes: Callable[[nn.Module, str, Any, str], bool], own: CallAttributes
) -> Iterator[None]:
    """While this context is open, calls ``takes(module, name, value, path)`` for each attribute of the model that
    forward sets, and adds each attribute that forward reads to ``own.read``. At the end ``own`` puts values back.

    The attribute is set as usual unless ``takes`` returns True. ``paths``: the id of a submodule's ``__dict__`` → the
    submodule's path; torch.export's stand-in for a module shares the module's ``__dict__``.
    """
    original = nn.Module.__setattr__

    def guarded(module: nn.Module, name: str, value: Any) -> None:
        path = paths.get(id(vars(module)))
        if path is None or not takes(module, name, value, path):
            original(module, name, value)

    # 1. see assignments and reads
    with replaced([(nn.Module, "__setattr__", guarded)]), noting() as own.read:
        try:
            yield
        finally:
            own.put_back()


class CallAttributes:
    """Attributes that forward sets before it reads them: values of one call, as local variables are. ``put_back``
    restores the model's earlier values."""

    def __init__(self) -> None:
        self.read: set[tuple[int, str]] = set()
        """The attributes that forward has read: (the id of a module's ``__dict__``, the name)."""
        self.taken: dict[tuple[int, str], str] = {}
        """The attributes that forward set before it read them → the user's line."""
        self._before: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def take(self, module: nn.Module, name: str, value: Any, is_constant: bool) -> bool:
        """Whether forward may set the attribute. ``is_constant``: whether any call would set the same tensor, so that
        forward may first have read whether an earlier call has set the attribute."""
        table = vars(module)
        key, before = (id(table), name), table.get(name, MISSING)
        # put_back restores the value before the first assignment
        if key in self._before:
            return True
        kinds = "_parameters", "_buffers", "_modules"
        if isinstance(value, (nn.Module, nn.Parameter)) or any(name in table.get(kind, ()) for kind in kinds):
            return False
        # An attribute that is read first carries a value from the call before. An attribute that was None, or missing,
        # may be read first if every call would set the same tensor: the attribute is a cache.
        if key not in self.read:
            self.taken[key] = current_line()
        elif not is_constant or not (before is None or before is MISSING):
            return False
        self._before[key] = table, before
        return True

    def is_memo(self, module: nn.Module, name: str, value: Any) -> bool:
        """Whether forward replaces the None that it has read in an attribute by a plain value."""
        was_read = (id(vars(module)), name) in self.read
        return was_read and vars(module).get(name, MISSING) is None and isinstance(value, PLAIN_VALUE)

    def put_back(self) -> None:
        """Restores the values from before the first assignment of each attribute, and removes attributes that were
        new."""
        while self._before:
            (_, name), (table, before) = self._before.popitem()
            put(table, name, before)


class AssignedBuffers:
    """The buffers that forward has set. The watcher of attributes calls ``assign`` for each."""

    def __init__(self) -> None:
        self._assigned: dict[tuple[int, str], tuple[dict[str, Any], Tensor, str]] = {}
        """(id of a ``_buffers`` table, name) → (the table, the buffer before, the user's line)"""

    def assign(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Whether forward sets a buffer to a new tensor. Later reads get the new tensor; ``write`` copies it back.

        ``path``: the buffer's name in messages. TraceError if the new tensor has another shape or dtype than the old.
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
        self._assigned.setdefault((id(module._buffers), name), (module._buffers, before, current_line()))
        module._buffers[name] = value
        return True

    def write(self, at: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        """Copies the new tensors into the old buffers, at the end of forward. ``at``: sets the line of a copy."""
        with torch.no_grad():
            for (_, name), (table, before, line) in self._assigned.items():
                if table[name] is not before:
                    with at(line):
                        before.copy_(table[name])

    def put_back(self) -> None:
        """Puts the old buffers back into their tables."""
        for (_, name), (table, before, _) in self._assigned.items():
            table[name] = before
        self._assigned.clear()


class CaptureGuard:
    """Watches one capture of a model, and of its loss function if that is a module. The guard refuses code that the
    capture would record wrong, and restores the model and the random state.

    Its two contexts: ``preserving`` around the whole capture, and ``forward`` around each call of the model inside of
    it. The tracers derive guards with further rules. ``has_regions``: whether the model has opaque regions, whose
    Python may read attributes that forward sets.
    """

    def __init__(self, request: Request) -> None:
        self.roots = request.roots[::-1]  # the model last, so that a module in both has its path in the model
        self.has_regions = bool(request.whole)
        self.paths = {id(vars(part)): path for root in self.roots for path, part in root.named_modules()}
        self.own, self.random = CallAttributes(), RandomState(own=request.generators)
        self.snapshots: dict[nn.Module, Snapshot] = {}

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        """A context around the whole capture."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.random.rewind)
            self.snapshots = {root: stack.enter_context(Snapshot(root)) for root in self.roots}
            yield

    @contextlib.contextmanager
    def forward(self, patches: list[Replacement]) -> Iterator[None]:
        """A context around the call of the model. TraceError if the call has changed attributes that it may not."""
        inference = torch.inference_mode, "__enter__", _no_inference_mode(torch.inference_mode.__enter__)
        attributes = watching_attributes(self.paths, self.take_attribute, self.own)
        checkpoints = checkpoints_as(refuse_checkpoint, refuse_checkpoint)
        with replaced([*patches, inference]), attributes, checkpoints:
            yield
        for root, snapshot in self.snapshots.items():
            refuse_changes(root, (name for name in snapshot.changes() if not self.may_change(name)), _RETURN_IT)

    def may_change(self, name: str) -> bool:
        """Whether forward may leave the attribute of that name changed."""
        return False

    def take_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Called for each attribute that forward sets: see ``takes`` of ``watching_attributes``."""
        # a plain Tensor is no result of a traced operation: every call would set the same one
        if not self.has_regions and self.own.take(module, name, value, type(value) is Tensor or is_constant(value)):
            return False
        now = getattr(module, name, MISSING)
        if now is value or (isinstance(value, PLAIN_LEAF) and type(now) is type(value) and now == value):
            return True
        remedy = f"write into the buffer, as self.{name}.copy_(value) does" if name in module._buffers else _RETURN_IT
        raise refuse(f"forward sets {path or type(module).__name__}.{name}, {ONCE}", remedy)


_RETURN_IT = "return the value instead, keep it in a local variable, or in a buffer (register_buffer)"


def _no_inference_mode(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    """``inference_mode.__enter__``, which refuses to enter the mode."""

    def refused(block: torch.inference_mode) -> None:
        if block.mode:  # torch itself enters inference_mode(False) here and there
            raise refuse("inference mode is entered inside forward, which is not recorded", "use torch.no_grad()")
        enter(block)

    return refused
