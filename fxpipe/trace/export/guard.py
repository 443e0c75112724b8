"""What an export would silently get wrong, refused where it happens, and the writes to buffers that it would lose.

A graph of operators has no place for what Python does beside them: an attribute set, a number drawn by ``random``, the
backward of an ``autograd.Function``, a hook on a gradient, a block that is to be recomputed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import (
    AUTOCAST_CACHE,
    RECURRENT_CACHES,
    PythonKeyTracer,
    function_apply,
    import_dynamo,
    is_constant,
)
from fxpipe.trace.patching import DRAWN, KEEPS, ONCE, no_checkpoints, patched, refuse, refuse_changes
from fxpipe.trace.state.attributes import AssignedBuffers, CallAttributes, watching_attributes
from fxpipe.trace.state.snapshot import Snapshot, storage_of
from fxpipe.trace.user_line import definition, is_librarys, is_torchs

_ASKED = "_cache_asked"
"""Where a region of autocast learns whether its caller wants a weight to be cast once in it."""
PLAIN = (str, int, float, bool, complex, torch.dtype, torch.device, type(None))
_HOOKS_INSTALLED = "_output_capturing_hooks_installed"
"""Where transformers notes that it has put forward hooks on its layers, which it does in a model's first call."""
_RETURN_IT = "return the value instead, or keep it in a buffer (register_buffer)"
_CACHES = frozenset({_HOOKS_INSTALLED, *RECURRENT_CACHES})
"""What libraries keep in a module for speed, and make anew where it does not fit: torch.nn's recurrent layers too."""


class TracingGuard:
    """Watches the capture of a model, and of its loss function where that is a module. ``has_regions``: whether a part
    of it runs for real in every step."""

    def __init__(self, module: nn.Module, loss: nn.Module | None = None, has_regions: bool = False) -> None:
        self._roots = [module] if loss is None else [loss, module]  # what is in both is called as in the model
        self._paths = {id(vars(part)): name for root in self._roots for name, part in root.named_modules()}
        self._buffers, self.own, self._has_regions = AssignedBuffers(), CallAttributes(), has_regions
        self._undo: list[Callable[[], None]] = []
        self._snapshots: dict[nn.Module, Snapshot] = {}
        self._owned = {storage_of(parameter) for parameter in module.parameters()}
        self.random = RandomState()
        self.cached_regions: list[bool] = []
        """Of each region of autocast that forward has entered: whether a weight is cast once in it."""

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        """Leaves the model and the random state as they were."""
        for root in self._roots:
            _refuse_backward_hooks(root)
        import_dynamo()
        self._snapshots = {root: Snapshot(root) for root in self._roots}
        try:
            yield
        finally:
            for snapshot in self._snapshots.values():
                snapshot.restore()
            self.random.rewind()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the call of the model while it is traced."""
        self.cached_regions.clear()
        try:
            with contextlib.ExitStack() as stack:
                for owner, name, value in self._patches():
                    stack.enter_context(patched(owner, name, value))
                stack.enter_context(watching_attributes(self._paths, self._take_attribute, self.own))
                stack.enter_context(no_checkpoints())
                yield
            self.own.put_back()
            for root, snapshot in self._snapshots.items():
                refuse_changes(root, _unexpected(root, snapshot), _RETURN_IT)
            self._buffers.write()
        finally:
            self._buffers.put_back()
            self.own.put_back()
            while self._undo:
                self._undo.pop()()

    def _patches(self) -> list[tuple[Any, str, Any]]:
        return [
            (nn.Module, "__delattr__", self._guarded_delattr()),
            (nn.Module, "register_buffer", self._guarded_register_buffer()),
            (torch.autocast, "__init__", _noting_cache(torch.autocast.__init__)),
            (torch.autocast, "__enter__", self._noting_region(torch.autocast.__enter__)),
            (torch.autograd.Function, "apply", classmethod(_guarded_apply())),
            (torch.autograd, "grad", _refuse_gradient),
            (torch.autograd, "backward", _refuse_gradient),
            (PythonKeyTracer, "create_arg", self._guarded_create_arg()),
            (Tensor, "register_hook", _refuse_tensor_hook),
            (Tensor, "register_post_accumulate_grad_hook", _refuse_tensor_hook),
            (Tensor, "data", _recorded_data()),
            (Tensor, "storage_offset", _refused_to_users(Tensor.storage_offset, _place_in_memory)),
            (torch.autograd.graph.saved_tensors_hooks, "__enter__", _refuse_saved_tensors_hooks),
            (torch.inference_mode, "__enter__", _guarded_inference_mode()),
            (torch.random, "fork_rng", _refused_to_users(torch.random.fork_rng, random_numbers_drawn)),
            *(
                (owner, name, _refused_to_users(getattr(owner, name), random_numbers_drawn))
                for owner in (torch, torch.random)
                for name in ("manual_seed", "set_rng_state")
            ),
        ]

    # attributes

    def _take_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        if name in _CACHES:
            self._undo.append(_putting_back(vars(module), name))
            return False
        if self._buffers.assign(module, name, value, _joined(path, name)):
            return True
        if not self._has_regions and self.own.take(module, name, value, is_constant(value)):
            return False
        if not _is_unchanged(module, name, value):
            raise refuse(f"forward sets {_joined(path, name)}, {ONCE}", _RETURN_IT)
        return True

    def _guarded_delattr(self) -> Callable[[nn.Module, str], None]:
        original = nn.Module.__delattr__

        def guarded(module: nn.Module, name: str) -> None:
            path = self._paths.get(id(vars(module)))
            if path is not None:
                raise refuse(f"forward deletes {_joined(path, name)}, {ONCE}", "delete it outside of forward")
            original(module, name)

        return guarded

    def _guarded_register_buffer(self) -> Callable[..., None]:
        """As if it were set; of one that is new, and of its ``persistent``, the model would know nothing later."""
        original = nn.Module.register_buffer

        def guarded(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
            path = self._paths.get(id(vars(module)))
            if path is None or not self._take_attribute(module, name, tensor, path):
                original(module, name, tensor, persistent)

        return guarded

    # constants

    def _guarded_create_arg(self) -> Callable[[Any, Any], Any]:
        """What is no tensor of the traced program becomes a constant of it, a parameter too."""
        original = PythonKeyTracer.create_arg

        def create_arg(tracer: Any, value: Any) -> Any:
            if isinstance(value, nn.Parameter) and value.requires_grad and storage_of(value) not in self._owned:
                raise refuse(
                    "forward, or loss_fn, uses a parameter that is not the model's, and it would not be trained",
                    "make it, or the module that holds it, a submodule of the model, so that it has an owner and is "
                    "saved",
                )
            return original(tracer, value)

        return create_arg

    # autocast

    def _noting_region(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(region: Any) -> Any:
            self.cached_regions.append(getattr(region, _ASKED, getattr(region, AUTOCAST_CACHE)))
            return original(region)

        return enter


def _noting_cache(original: Callable[..., None]) -> Callable[..., None]:
    """A trace runs without autocast's cache of weights, and a region made in it would be one without."""

    def init(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *args, **kwargs)
        asked = kwargs.get("cache_enabled", args[3] if len(args) > 3 else None)
        setattr(region, _ASKED, True if asked is None else asked)

    return init


def _is_unchanged(module: nn.Module, name: str, value: Any) -> bool:
    missing = object()
    now = getattr(module, name, missing)
    return now is value or (isinstance(value, PLAIN) and type(now) is type(value) and now == value)


def _putting_back(table: dict[str, Any], name: str) -> Callable[[], None]:
    """What puts a table's entry back as it is now."""
    had, before = name in table, table.get(name)

    def put_back() -> None:
        if had:
            table[name] = before
        else:
            table.pop(name, None)

    return put_back


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else f"self.{name}"


def _guarded_apply() -> Callable[..., Any]:
    original = function_apply()

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__module__.startswith("torch."):
            return original(function, *args, **kwargs)
        raise refuse(
            f"torch.autograd.Function {function.__name__} is applied in forward, and its backward would be lost", KEEPS
        )

    return apply


def _refuse_gradient(*args: Any, **kwargs: Any) -> Any:
    raise refuse(
        "gradients are computed inside forward, and what depends on them would get none",
        "write them as differentiable operations, or give the stages as callables (StageGraph.from_callables)",
    )


def _refuse_tensor_hook(*args: Any, **kwargs: Any) -> Any:
    raise refuse("a hook on a tensor's gradient is registered in forward, and it would never run", KEEPS)


def _refuse_saved_tensors_hooks(*args: Any) -> Any:
    raise refuse("forward changes how tensors are saved for backward, and they would be saved as ever", KEEPS)


def _guarded_inference_mode() -> Callable[[Any], None]:
    original = torch.inference_mode.__enter__

    def enter(region: Any) -> None:
        if region.mode:  # torch itself leaves it here and there
            raise refuse("inference mode is entered inside forward, which is not recorded", "use torch.no_grad()")
        original(region)

    return enter


def _refused_to_users(original: Callable[..., Any], refusal: Callable[[], TraceError]) -> Callable[..., Any]:
    """The function for torch's own calls, be it through a mode of fxpipe's, and an error for the user's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_librarys(sys._getframe(1).f_code.co_filename):
            raise refusal()
        return original(*args, **kwargs)

    return call


def _place_in_memory() -> TraceError:
    return refuse(
        "forward asks where in its memory a tensor begins, which is another place for each micro-batch",
        "compute from shapes and strides",
    )


def _recorded_data() -> property:
    """``x.data`` as the detached alias that it is; by itself neither it nor what is computed from it is recorded."""
    original = Tensor.data

    def get(tensor: Tensor) -> Tensor:
        if not is_torchs(sys._getframe(1).f_code.co_filename):
            return tensor.detach()
        return original.__get__(tensor)  # type: ignore[no-any-return, attr-defined]

    def set_to(tensor: Tensor, value: Tensor) -> None:
        if not is_torchs(sys._getframe(1).f_code.co_filename):
            raise refuse("forward sets .data of a tensor, which is not recorded", "write into it in place")
        original.__set__(tensor, value)  # type: ignore[attr-defined]

    return property(get, set_to)


def _refuse_backward_hooks(root: nn.Module) -> None:
    for path, module in root.named_modules():
        hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        if hooks:
            raise TraceError(
                f"{path or type(module).__name__} has backward hooks, and they would never run; {KEEPS}"
                f"\n{definition(hooks[0])}"
            )


def _unexpected(root: nn.Module, snapshot: Snapshot) -> Iterator[str]:
    """What forward has changed, and must not."""
    expected = ["_parameters", "_buffers", *_CACHES]  # fake tensors are in the tables now
    if any(_HOOKS_INSTALLED in vars(part) for part in root.modules()):
        expected += ["_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"]
    return (name for name in snapshot.changes() if name.rpartition(".")[2] not in expected)


class RandomWatch(TorchFunctionMode):
    """Refuses at the first operation after random numbers were drawn outside of traced operations."""

    def __init__(self, random: RandomState) -> None:
        super().__init__()
        self._random = random

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._random.rewind():
            raise random_numbers_drawn()
        return function(*args, **(kwargs or {}))


def random_numbers_drawn() -> TraceError:
    return refuse(
        DRAWN.format(where="outside of torch's operations"),
        "draw with torch (torch.rand(4)), or pass the number in as an input",
    )
