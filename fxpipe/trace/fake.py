"""Fake tensors: a model and a micro-batch with shapes and without values, for tracers that need shapes.

Takes: a module, and an example whose tensors are ``TensorSpec`` (shape, strides, dtype, device). Gives: ``fake_model``,
a context in which fake tensors are in the place of the module's parameters and buffers, and ``FakeModel``, which makes
further fake tensors.

1. Each parameter and buffer gets one fake tensor of its shape and strides; tied tensors share it. A parameter has the
   dtype of a step.
2. The tables ``_parameters`` and ``_buffers`` of all submodules get the fake tensors.
3. Afterwards the tables get their tensors back, and caches of users' modules that keep a fake tensor are emptied.

No memory is allocated for the fake tensors, and no number is computed. It does not find fake tensors that forward keeps
in a global or a class: the check of a capture finds these (``LEAKED``).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.patches import Replacement, replaced
from fxpipe.snapshots.contents import users_modules, walk
from fxpipe.specs import ITEMS, WORD, ObjectSpec, TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.autograd import is_functorch
from fxpipe.torch_compat.fakes import CAPTURE_LOGS, NEED_VALUES, FakeTensor, FakeTensorMode
from fxpipe.torch_compat.operators import no_dispatch_modes, no_function_modes

_META = torch.device("meta")


@dataclass(frozen=True)
class FakeModel:
    """The fake tensors that replace the model's during a capture. ``names``: a fake tensor's id → its first name."""

    mode: FakeTensorMode
    device: torch.device
    """The device of the fake tensors that replace tensors on the meta device."""
    compute: torch.dtype | None = None
    """The dtype of floating-point parameters and inputs; None: their own dtypes."""
    names: dict[int, str] = field(default_factory=dict)

    def inputs(self, example: Mapping[str, Any], any_words: bool = False) -> dict[str, Any]:
        """The example's inputs, with a fake tensor for each ``TensorSpec``, and, if ``any_words``, for each string.

        A floating-point input has the dtype ``compute``, as the step casts it; the count of labels (``ITEMS``) keeps
        its own.
        """
        if any_words:
            example = pytree.tree_map_only(str, lambda _: WORD, dict(example))
        return {
            name: pytree.tree_map_only(TensorSpec, self.leaf if name == ITEMS else self._input, value)
            for name, value in example.items()
        }

    def bare(self, value: Any) -> Any:
        """The value with each tensor replaced by a similar fake tensor without an autograd graph."""
        return pytree.tree_map_only(Tensor, lambda tensor: self.leaf(TensorSpec.from_tensor(tensor)), value)

    def result_of(self, spec: TensorSpec) -> Tensor:
        """A fake tensor that is no leaf if it requires a gradient, as if an operation returned it."""
        fake = self.leaf(spec)
        if not spec.requires_grad:
            return fake
        with torch.enable_grad():
            copy = fake.clone()  # autograd forbids in-place writes to a leaf, and to a view of a leaf
            return copy if copy.stride() == fake.stride() else fake.view_as(fake)

    def _input(self, spec: TensorSpec) -> Tensor:
        dtype = self.compute if self.compute is not None and spec.dtype.is_floating_point else spec.dtype
        return self.leaf(replace(spec, dtype=dtype))

    def leaf(self, spec: TensorSpec) -> Tensor:
        """A fake tensor that is an autograd leaf, as an input is."""
        # a fake tensor is a meta tensor that reports another device
        memory = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=_META)
        device = self.device if spec.device == "meta" else torch.device(spec.device)
        return FakeTensor(self.mode, memory, device).requires_grad_(spec.requires_grad)


@contextlib.contextmanager
def fake_model(module: nn.Module, device: torch.device, compute: torch.dtype | None = None) -> Iterator[FakeModel]:
    """While this context is open, fake tensors replace the module's parameters and buffers; tied tensors stay tied.

    Args:
        module: whose tables are changed, and restored also after an exception.
        device: the device of fake tensors for tensors on the meta device.
        compute: the dtype of floating-point parameters and inputs (not buffers) in a run of the module; None: their
            own.
    """
    fake = FakeModel(FakeTensorMode(allow_non_fake_inputs=True), device, compute)
    # 1. by id: a tied parameter gets a single fake tensor for all of its names
    stand_ins: dict[int, Tensor] = {}
    rows: list[Replacement] = []
    for prefix, submodule in module.named_modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    stand_in = stand_ins[id(tensor)] = _stand_in(fake, tensor)
                    fake.names[id(stand_in)] = f"{prefix}.{name}".lstrip(".")
                rows.append((table, name, stand_ins[id(tensor)]))
    # 2. and 3. Torch also logs no failures of operations on fake tensors, which the tracer handles.
    rows += ((logging.getLogger(name), "disabled", True) for name in CAPTURE_LOGS)
    try:
        with replaced(rows):
            yield fake
    finally:
        _empty_caches()


def refuse_objects(example: Mapping[str, Any]) -> None:
    """TraceError for an object among the inputs that holds tensors: every micro-batch would use the same tensors."""
    for name, value in example.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, ObjectSpec):
                raise TraceError(
                    f"input {name!r} holds a {leaf.kind}, which is neither a tensor nor a plain value, and a graph "
                    "would keep the one of this call; pass its tensors in a tuple, a list or a dict, or keep the "
                    'submodules that are given it whole: boundaries={"the submodule": "whole"}'
                )


_CACHE = type(functools.lru_cache(int))
_SEEN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""A searched cache → the number of its misses (calls of its function) at that time."""
_FOUND: WeakKeyDictionary[ModuleType, tuple[list[int], list[Any]]] = WeakKeyDictionary()
"""A searched module → (the ids of its values at that time, the caches in it)."""


def _empty_caches() -> None:
    """Empties each ``functools.lru_cache`` in users' modules, and in their classes, that holds a fake tensor."""
    # a cache with a fake tensor would return that tensor in the first real step
    for cache in chain(*map(_caches, users_modules())):
        # most caches have not called their functions since the last capture
        if _SEEN.get(cache, 0) != cache.cache_info().misses:
            inside = map(walk, gc.get_referents(cache))
            if any(isinstance(part.value, FakeTensor) for part in chain(*inside)):
                cache.cache_clear()
            _SEEN[cache] = cache.cache_info().misses


def _caches(module: ModuleType) -> list[Any]:
    """The ``functools.lru_cache`` objects among a module's values, in its classes, and in the closures of functions,
    as a decorator makes; searched again only if the module's values have changed."""
    values = [*vars(module).values()]
    ids = [*map(id, values)]
    # a search of every class takes longer than the capture of a small model
    if _FOUND.get(module, ((), ()))[0] != ids:
        for cls in [value for value in values if isinstance(value, type)]:
            values += vars(cls).values()
        values += [value.__func__ for value in values if isinstance(value, staticmethod | classmethod)]
        cells = [value.__closure__ or () for value in values if isinstance(value, FunctionType)]
        values += gc.get_referents(*chain(*cells))
        _FOUND[module] = ids, [*filter(_CACHE.__instancecheck__, values)]
    return _FOUND[module][1]


def _stand_in(fake: FakeModel, tensor: Tensor) -> Tensor:
    """The fake tensor of a parameter or buffer: a Parameter for a Parameter, of its strides and ``requires_grad``."""
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = fake.compute if is_parameter and tensor.is_floating_point() and fake.compute else tensor.dtype
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META)
    stand_in = FakeTensor(fake.mode, memory, fake.device if tensor.is_meta else tensor.device)
    if is_parameter:
        return nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    return stand_in.requires_grad_(tensor.requires_grad)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values: a fake tensor, or a functorch wrapper, as ``torch.vmap`` makes."""
    return isinstance(tensor, FakeTensor) or is_functorch(tensor)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """While this context is open, no function mode or dispatch mode sees operations: for real tensors in a capture."""
    with no_function_modes(), no_dispatch_modes():
        yield


def needs_values(error: BaseException) -> bool:
    """Whether an operation on fake tensors failed as it needs their values: for a branch, a size or a kernel."""
    return isinstance(error, NEED_VALUES) or (
        isinstance(error, (RuntimeError, TypeError)) and any(words in str(error) for words in _WITHOUT_NUMBERS)
    )


_WITHOUT_NUMBERS = (
    "FakeTensor",
    "data pointer",
    "meta tensor",
    "Meta tensor",
    "tensor subclasses",
    "not allocated yet",
)
"""Words in the errors of operations that access a tensor's memory: ``.numpy()``, the user's own kernels."""
