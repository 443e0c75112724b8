"""Refuses code that torch.export would silently record wrong, and records assignments of buffers as in-place writes.

A graph of operators cannot hold the other effects of Python code: a set attribute, a number drawn by ``random``, the
backward of an ``autograd.Function``, a hook on a gradient, an activation checkpoint.

Takes: a ``Request``. Gives: ``TracingGuard`` with two contexts.

1. ``preserving`` is around the whole export. It takes snapshots, and restores everything at the end. The guard has
   refused backward hooks before.
2. ``tracing`` is around each traced call of the model. It replaces the functions of ``_patches``. After the call it
   writes assigned buffers, and puts the old buffers and caches back.

It does not see values, and does not refuse branches: ``decisions`` does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.patches import Replacement
from fxpipe.seeds import RandomState
from fxpipe.snapshots.snapshot import Memo, storage_of
from fxpipe.torch_compat.autograd import function_apply
from fxpipe.torch_compat.export import PythonKeyTracer
from fxpipe.torch_compat.modules import RECURRENT_CACHES
from fxpipe.trace.attributes import AssignedBuffers, CallAttributes, CaptureGuard
from fxpipe.trace.patching import DRAWN, KEEPS, UNREGISTERED, backward_hooks, refuse, refusing
from fxpipe.trace.request import Request
from fxpipe.user_line import definition, is_torchs

_HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""The attribute that transformers sets once a model's first call has registered forward hooks on its layers."""
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_CACHES = frozenset({_HOOKS_INSTALLED, *RECURRENT_CACHES})
"""Attributes in which libraries, such as torch.nn's recurrent layers, cache values, and which they can make anew."""


class TracingGuard(CaptureGuard):
    """Watches one export: refuses code that the export would record wrong, and undoes changes to the model. TraceError
    for backward hooks."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        for root in self.roots:
            _refuse_backward_hooks(root)
        self._buffers, self._caches, self.memos = AssignedBuffers(), CallAttributes(), list[Memo]()
        self._owned = {storage_of(parameter) for parameter in request.module.parameters()}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """A context around the traced call of the model."""
        # 2. around the call
        try:
            with self.forward(self._patches()):
                yield
                self.memos = [memo for snapshot in self.snapshots.values() for memo in snapshot.memos()]
                for table, name, _ in self.memos:  # as they were before the first forward
                    table[name] = None
            self._buffers.write()
        finally:
            self._buffers.put_back()
            self._caches.put_back()

    def may_change(self, name: str) -> bool:
        entry = name.rpartition(".")[2]
        if entry in {"_parameters", "_buffers", *_CACHES}:  # these tables hold fake tensors during the export
            return True
        parts = (part for root in self.roots for part in root.modules())
        return entry in _HOOKS and any(_HOOKS_INSTALLED in vars(part) for part in parts)

    def _patches(self) -> list[Replacement]:
        """The functions that are replaced while forward runs: most of them by functions that refuse."""
        return [
            (nn.Module, "register_buffer", self._guarded_register_buffer()),
            (torch.autograd.Function, "apply", classmethod(functools.partial(_guarded_apply, function_apply()))),
            (torch.autograd, "grad", _refuse_gradient),
            (torch.autograd, "backward", _refuse_gradient),
            (PythonKeyTracer, "create_arg", self._guarded_create_arg()),
            (Tensor, "register_hook", _refuse_tensor_hook),
            (Tensor, "register_post_accumulate_grad_hook", _refuse_tensor_hook),
            (Tensor, "data", _recorded_data()),
            (torch.random, "fork_rng", refuse_random_numbers),
        ]

    def take_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        """Whether the guard has dealt with an attribute that forward sets: see ``watching_attributes``. TraceError for
        one that a later call would need."""
        # a cache is set, and put back after the export, later than ``own``, since ``may_change`` looks for it: the
        # library makes the cache anew
        if name in _CACHES:
            self._caches.take(module, name, value, is_constant=True)
            return False
        # an assigned buffer becomes an in-place write to the old buffer
        if self._buffers.assign(module, name, value, f"{path or 'self'}.{name}"):
            return True
        if self.own.is_memo(module, name, value):
            return False
        return super().take_attribute(module, name, value, path)

    def _guarded_register_buffer(self) -> Callable[..., None]:
        """``register_buffer``, treated as an assignment: the model would lose a new buffer after the export."""
        original = nn.Module.register_buffer

        def guarded(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
            path = self.paths.get(id(vars(module)))
            if path is None or not self.take_attribute(module, name, tensor, path):
                original(module, name, tensor, persistent)

        return guarded

    def _guarded_create_arg(self) -> Callable[[Any, Any], Any]:
        """``create_arg``, which refuses trainable parameters from outside of the model: they would become constants."""
        original = PythonKeyTracer.create_arg

        def create_arg(tracer: Any, value: Any) -> Any:
            if isinstance(value, nn.Parameter) and value.requires_grad and storage_of(value) not in self._owned:
                raise refuse(*UNREGISTERED)
            return original(tracer, value)

        return create_arg


def _guarded_apply(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """``autograd.Function.apply``, which refuses the user's Functions and runs torch's own."""
    if function.__module__.startswith("torch."):
        return original(function, *args, **kwargs)
    raise refuse(
        f"torch.autograd.Function {function.__name__} is applied in forward, and its backward would be lost", KEEPS
    )


_refuse_gradient = refusing(
    "gradients are computed inside forward, and what depends on them would get none",
    "write them as differentiable operations, or give the stages as callables (StageGraph.from_callables)",
)
_refuse_tensor_hook = refusing("a hook on a tensor's gradient is registered in forward, and it would never run", KEEPS)


def _recorded_data() -> property:
    """``x.data`` as ``x.detach()``: torch.export records neither ``x.data`` nor the operations on it."""
    original: Any = Tensor.data

    def get(tensor: Tensor) -> Any:
        is_theirs = is_torchs(sys._getframe(1).f_code.co_filename)
        return original.__get__(tensor) if is_theirs else tensor.detach()

    def set_to(tensor: Tensor, value: Tensor) -> None:
        if not is_torchs(sys._getframe(1).f_code.co_filename):
            raise refuse("forward sets .data of a tensor, which is not recorded", "write into it in place")
        original.__set__(tensor, value)

    return property(get, set_to)


def _refuse_backward_hooks(root: nn.Module) -> None:
    """TraceError for a module with hooks on its gradients, with the line of the hook's definition."""
    for path, module in root.named_modules():
        if hooks := backward_hooks(module):
            raise TraceError(
                f"{path or type(module).__name__} has backward hooks, and they would never run; {KEEPS}"
                f"\n{definition(hooks[0])}"
            )


class RandomWatch(TorchFunctionMode):
    """TraceError at the first operation after code drew random numbers outside of traced operations.

    Comparing random states before each operation is slow. So the export runs without this mode, and runs once more with
    it only if a state has changed at the end.
    """

    def __init__(self, random: RandomState) -> None:
        super().__init__()
        self._random = random

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._random.rewind():
            refuse_random_numbers()
        return function(*args, **(kwargs or {}))


refuse_random_numbers = refusing(
    DRAWN.format(where="outside of torch's operations"),
    "draw with torch (torch.rand(4)), or pass the number in as an input",
)
