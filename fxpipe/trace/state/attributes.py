"""Attributes that forward sets; the buffers among them, ``self.ema = 0.9 * self.ema + x``, a graph writes in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.seeds import RandomState
from fxpipe.trace.patching import checkpoints_as, patched, refuse, refuse_changes, refuse_checkpoint
from fxpipe.trace.request import Request
from fxpipe.trace.state.snapshot import Snapshot
from fxpipe.trace.user_line import current_line

MISSING: Any = object()
"""Stands for an attribute that there is not."""


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

    # nn.Module.__getattr__, which finds parameters and submodules, is asked only after this
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
        key, before = (id(table), name), table.get(name, MISSING)
        # the first value that it had is the one to put back
        if key in self._before:
            return True
        if any(name in table.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules")):
            return False
        # An attribute that is read first carries a value from the call before. One that was None, or absent, may be
        # read first if every call would set the same: it is a cache.
        is_read, was_nothing = key in self.read, before is None or before is MISSING
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
            put(table, name, value)


def put(table: dict[str, Any], name: str, value: Any) -> None:
    """Gives a table the entry that it had, or none."""
    if value is MISSING:
        table.pop(name, None)
    else:
        table[name] = value


class AssignedBuffers:
    """The buffers that forward has set. Whoever watches attributes hands them over."""

    def __init__(self) -> None:
        self._assigned: dict[tuple[int, str], tuple[dict[str, Any], Tensor, str]] = {}
        """(the table that holds it, the tensor that it was, the user's line)"""

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
        self._assigned.setdefault((id(module._buffers), name), (module._buffers, before, current_line()))
        module._buffers[name] = value
        return True

    def write(self, at: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        """Only now, since whoever has read the old tensor still holds it in the model. ``at``: as if on that line."""
        with torch.no_grad():
            for (_, name), (table, before, line) in self._assigned.items():
                if table[name] is not before:
                    with at(line):
                        before.copy_(table[name])

    def put_back(self) -> None:
        """The model holds the tensors that it held."""
        for (_, name), (table, before, _) in self._assigned.items():
            table[name] = before
        self._assigned.clear()


class CaptureGuard:
    """Watches one capture of a model, and of its loss function where that is a module. It refuses what the capture
    gets wrong, and leaves the model and random state as they were.

    ``has_regions``: whether a part of it runs for real in every step, and may read what forward sets.
    """

    def __init__(self, request: Request) -> None:
        self.roots = request.roots[::-1]  # a module in both is called as in the model
        self.has_regions = bool(request.whole)
        self.paths = {id(vars(part)): path for root in self.roots for path, part in root.named_modules()}
        self.own, self.random = CallAttributes(), RandomState()
        self.snapshots: dict[nn.Module, Snapshot] = {}

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        """Around the whole capture."""
        self.snapshots = {root: Snapshot(root) for root in self.roots}
        try:
            yield
        finally:
            for snapshot in self.snapshots.values():
                snapshot.restore()
            self.random.rewind()

    @contextlib.contextmanager
    def forward(self, patches: list[tuple[Any, str, Any]], instead: str) -> Iterator[None]:
        """Around the call of the model. TraceError where it has changed attributes that it may not; ``instead``: the
        remedy."""
        try:
            inference = torch.inference_mode, "__enter__", _no_inference_mode(torch.inference_mode.__enter__)
            with contextlib.ExitStack() as stack:
                for owner, name, value in (*patches, inference):
                    stack.enter_context(patched(owner, name, value))
                stack.enter_context(watching_attributes(self.paths, self.take_attribute, self.own))
                stack.enter_context(checkpoints_as(refuse_checkpoint, refuse_checkpoint))
                yield
            # before the comparison, which would find the attributes that forward may set
            self.own.put_back()
            for root, snapshot in self.snapshots.items():
                refuse_changes(root, (name for name in snapshot.changes() if not self.may_change(name)), instead)
        finally:
            self.own.put_back()

    def may_change(self, name: str) -> bool:
        """Whether forward may leave the attribute of that name changed."""
        return False

    def take_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Hears of an attribute that forward sets: see ``watching_attributes``."""
        raise NotImplementedError


def _no_inference_mode(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    def refused(block: torch.inference_mode) -> None:
        if block.mode:  # torch itself leaves it here and there
            raise refuse("inference mode is entered inside forward, which is not recorded", "use torch.no_grad()")
        enter(block)

    return refused
