"""Fake tensors: a model and a micro-batch without numbers, for tracers that need shapes."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.graph.like import ITEMS, WORD, ObjectLike, TensorLike
from fxpipe.torch_compat import (
    CAPTURE_LOGS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    is_functorch,
    no_dispatch_modes,
    no_function_modes,
    pytree,
)
from fxpipe.trace.patching import patched
from fxpipe.trace.state.contents import is_library, walk

_META = torch.device("meta")


@dataclass
class FakeModel:
    """What stands for the model's tensors during a capture. ``names``: a fake tensor's id → its first name."""

    mode: FakeTensorMode
    device: torch.device
    """What stands for the meta device."""
    compute: torch.dtype | None = None
    """The type of floating-point parameters and inputs; None: as they are."""
    names: dict[int, str] = field(default_factory=dict)

    def inputs(self, example: Mapping[str, Any], any_words: bool = False) -> dict[str, Any]:
        """The example's inputs, with a fake tensor for each ``TensorLike``; ``any_words``: and for each string."""
        if any_words:
            example = pytree.tree_map_only(str, lambda _: WORD, dict(example))
        return {
            name: pytree.tree_map_only(TensorLike, self.leaf if name == ITEMS else self._input, value)
            for name, value in example.items()
        }

    def bare(self, value: Any) -> Any:
        """A value with each tensor replaced by one like it, without the autograd graph behind it."""
        return pytree.tree_map_only(Tensor, lambda tensor: self.leaf(TensorLike.of(tensor)), value)

    def made(self, like: TensorLike) -> Tensor:
        """A fake tensor as an operation would return it."""
        fake = self.leaf(like)
        if not like.requires_grad:
            return fake
        with torch.enable_grad():
            copy = fake.clone()  # no leaf, nor a view of one, which autograd lets nobody write in place
            return copy if copy.stride() == fake.stride() else fake.view_as(fake)

    def _input(self, like: TensorLike) -> Tensor:
        dtype = self.compute if self.compute is not None and like.dtype.is_floating_point else like.dtype
        return self.leaf(replace(like, dtype=dtype))

    def leaf(self, like: TensorLike) -> Tensor:
        """A fake tensor as an input."""
        # a fake tensor is a meta tensor that says it is on a device
        memory = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=_META)
        device = self.device if like.device == "meta" else torch.device(like.device)
        return FakeTensor(self.mode, memory, device).requires_grad_(like.requires_grad)


@contextlib.contextmanager
def fake_model(module: nn.Module, device: torch.device, compute: torch.dtype | None = None) -> Iterator[FakeModel]:
    """While it is open, fake tensors stand in for the module's parameters and buffers, tied ones for tied ones.

    ``compute``: the type that floating-point parameters, not buffers, and inputs will have when it runs. Tensors on the
    meta device are taken to be on ``device``. Afterwards the module holds the very tensors that it held, none of which
    has been touched. Nothing is allocated.
    """
    fake = FakeModel(FakeTensorMode(allow_non_fake_inputs=True), device, compute)
    # by identity: a tied parameter gets one stand-in, under all of its names
    stand_ins: dict[int, Tensor] = {}
    held: list[tuple[dict[str, Any], str, Tensor]] = []
    for prefix, submodule in module.named_modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                held.append((table, name, tensor))
                if id(tensor) not in stand_ins:
                    stand_in = stand_ins[id(tensor)] = _stand_in(fake, tensor)
                    fake.names[id(stand_in)] = f"{prefix}.{name}".lstrip(".")
    try:
        for table, name, tensor in held:
            table[name] = stand_ins[id(tensor)]
        with quiet():
            yield fake
    finally:
        for table, name, tensor in held:
            table[name] = tensor
        _empty_caches()


def refuse_objects(example: Mapping[str, Any]) -> None:
    """TraceError for an object that holds tensors: they would be the same in every micro-batch."""
    for name, value in example.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, ObjectLike):
                raise TraceError(
                    f"input {name!r} holds a {leaf.kind}, which is neither a tensor nor a plain value, and a graph "
                    "would keep the one of this call; pass its tensors in a tuple, a list or a dict, or keep the "
                    'submodules that are given it whole: boundaries={"the submodule": "whole"}'
                )


_CACHE = type(functools.lru_cache(int))
_SEEN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Caches that were looked into, and how often each had called its function by then."""
_FOUND: WeakKeyDictionary[ModuleType, tuple[list[int], list[Any]]] = WeakKeyDictionary()
"""What each module held, by identity, when it was last looked through, and the caches in it."""


def _empty_caches() -> None:
    """Empties each ``functools.lru_cache`` of a user's module, or class in it, where forward left a fake tensor."""
    named = [(name, module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)]
    modules = [module for name, module in named if not is_library(name)]
    # a cache that has kept a fake tensor would hand it to the first real step
    for cache in chain(*map(_caches, modules)):
        # most have not called their functions since the last capture
        if _SEEN.get(cache, 0) != cache.cache_info().misses:
            inside = map(walk, gc.get_referents(cache))
            if any(isinstance(part.value, FakeTensor) for part in chain(*inside)):
                cache.cache_clear()
            _SEEN[cache] = cache.cache_info().misses


def _caches(module: ModuleType) -> list[Any]:
    found = [*vars(module).values()]
    held = [*map(id, found)]
    # looking through every class takes longer than the capture of a small model
    if _FOUND.get(module, ((), ()))[0] != held:
        for cls in [value for value in found if isinstance(value, type)]:
            found += vars(cls).values()
        _FOUND[module] = held, [*filter(_CACHE.__instancecheck__, found)]
    return _FOUND[module][1]


def _stand_in(fake: FakeModel, tensor: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = fake.compute if is_parameter and tensor.is_floating_point() and fake.compute else tensor.dtype
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META)
    stand_in = FakeTensor(fake.mode, memory, fake.device if tensor.is_meta else tensor.device)
    if is_parameter:
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    return stand_in.requires_grad_(tensor.requires_grad)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers; so for what ``torch.vmap`` and its like make of one, too."""
    return isinstance(tensor, FakeTensor) or is_functorch(tensor)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Real tensors inside of a capture: no mode of any kind sees what is computed."""
    with no_function_modes(), no_dispatch_modes():
        yield


def needs_values(error: BaseException) -> bool:
    """Whether an operation on fake tensors failed for want of numbers: to branch on, to size a result, to hand on."""
    kinds = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    return isinstance(error, kinds) or (
        isinstance(error, (RuntimeError, TypeError)) and any(words in str(error) for words in _WITHOUT_NUMBERS)
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch logs where an operation fails on fake tensors: whoever makes them decides what follows."""
    with contextlib.ExitStack() as stack:
        for name in CAPTURE_LOGS:
            stack.enter_context(patched(logging.getLogger(name), "disabled", True))
        yield


_WITHOUT_NUMBERS = (
    "FakeTensor",
    "data pointer",
    "meta tensor",
    "Meta tensor",
    "tensor subclasses",
    "not allocated yet",
)
"""In the messages of operations that reach for a tensor's memory: ``.numpy()``, kernels of the user's own."""
