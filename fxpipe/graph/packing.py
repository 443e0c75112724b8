"""Wire: converts a value of any shape into bytes and their description, and back with the very same strides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.plain_data import admitted
from fxpipe.torch_compat import pytree

_LINE = 64  # bytes of a cache line, to which torch aligns its memory


@admitted
@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor without its values. ``device`` is its type only."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str
    shift: int = field(compare=False)
    """Bytes from a cache line's start to the first element: the last bit of matrix products depends on them."""
    is_part: bool = field(compare=False)
    """Whether the tensor is a part of larger memory, at an offset that its shape does not show."""

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The shape without the repetition of expanded dimensions."""
        return tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.stride, strict=True))

    @cached_property
    def span(self) -> int:
        """Elements of memory from the first element to the last, gaps included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @cached_property
    def is_packed(self) -> bool:
        """Whether the tensor is sent without its gaps; gaps are removed only if no two elements share memory."""
        # from the smallest stride up: each dimension's stride must be at least the extent of the smaller ones
        end = 1
        for step, size in sorted((step, size) for size, step in zip(self.stored, self.stride, strict=True) if size > 1):
            if step < end:
                return False
            end += step * (size - 1)
        return math.prod(self.stored) < self.span

    @cached_property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        if 0 in self.shape:
            return 0
        return (math.prod(self.stored) if self.is_packed else self.span) * self.dtype.itemsize


@dataclass(frozen=True)
class Meta:
    """A value's description: its container, and for each leaf a TensorMeta, or the leaf itself if no tensor."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tree(self) -> Any:
        """The container itself, with the leaves' descriptions in it, as it is sent to other ranks."""
        return pytree.tree_unflatten(self.leaves, self.spec)

    @property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, TensorMeta))

    @property
    def is_of_its_place(self) -> bool:
        """Whether shapes may not describe all of it: a tensor is part of larger memory, or a leaf is no tensor."""
        return any(leaf.is_part if isinstance(leaf, TensorMeta) else leaf is not None for leaf in self.leaves)

    @staticmethod
    def from_tree(tree: Any, sender: str) -> Meta:
        """The description that ``sender``, "rank 3", has sent as a tree; RunError if the tree describes no value."""
        leaves, spec = pytree.tree_flatten(tree)
        for leaf in leaves:
            if isinstance(leaf, TensorMeta) and not _is_sound(leaf):
                raise RunError(f"{sender} has sent what describes no tensor, {leaf!r:.500}; run the same program there")
        return Meta(spec, tuple(leaves))


def _is_sound(meta: TensorMeta) -> bool:
    """Whether a tensor can have this description, which decides how many bytes are allocated."""
    sizes = (*meta.shape, *meta.stride, meta.shift) if type(meta.shape) is type(meta.stride) is tuple else (None,)
    return (
        all(type(size) is int and 0 <= size < 2**63 for size in sizes)
        and len(meta.shape) == len(meta.stride)
        and meta.shift < _LINE
        and type(meta.dtype) is torch.dtype
        and type(meta.requires_grad) is type(meta.is_part) is bool
        and type(meta.device) is str
        and meta.nbytes < 2**63
    )


class PlainMeta:
    """A single tensor that is sent unchanged, without gaps or further checks: nearly all messages."""

    __slots__ = ("_as_told", "_device", "_dtype", "_shape", "_shift", "requires_grad")

    def __init__(self, meta: TensorMeta, device: torch.device) -> None:
        self._shape, self._dtype, self._device = torch.Size(meta.shape), meta.dtype, device
        self._shift, self.requires_grad = meta.shift, meta.requires_grad
        self._as_told = (self._shape, meta.stride, meta.dtype, meta.requires_grad, False)

    @staticmethod
    def from_meta(meta: Meta, device: torch.device) -> PlainMeta | None:
        """Returns the description; None for any other value. Both ends decide the same."""
        # contiguous, and aligned to its own elements: its bytes are its memory, and both ends see the same kernel
        leaf = meta.leaves[0] if meta.spec.is_leaf() and meta.leaves else None
        if not isinstance(leaf, TensorMeta) or leaf.dtype not in _PLAIN or 0 in leaf.shape:
            return None
        is_contiguous = leaf.stride == torch.empty(leaf.shape, device="meta").stride()
        is_aligned = leaf.shift % leaf.dtype.itemsize == 0
        return PlainMeta(leaf, device) if is_contiguous and is_aligned and leaf.device == device.type else None

    def fits(self, value: Any) -> bool:
        """Whether a value is like the described tensor."""
        return (
            type(value) is Tensor
            and value.layout is torch.strided
            and (value.shape, value.stride(), value.dtype, value.requires_grad, value.is_neg()) == self._as_told
            and value.device == self._device
        )

    def allocate(self) -> Tensor:
        """Returns memory for a tensor that is about to arrive."""
        if not self._shift:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        ahead = self._shift // self._dtype.itemsize
        flat = torch.empty(ahead + self._shape.numel(), dtype=self._dtype, device=self._device)
        return flat[ahead:].view(self._shape)


_PLAIN = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}
"""The dtypes that every transport supports."""


def pack(value: Any, similar: Meta | None = None) -> tuple[Meta, list[Tensor]]:
    """Returns (description, one flat uint8 tensor per nonempty tensor); a tensor without gaps is not copied.

    ``similar``: the description of an earlier, similar value, whose sizes need not be computed again.
    """
    leaves, spec = pytree.tree_flatten(value)
    # an equal earlier description replaces the new one: it has its sizes computed already
    before = similar.leaves if similar is not None and len(similar.leaves) == len(leaves) else (None,) * len(leaves)
    metas, buffers = [], []
    for leaf, earlier in zip(leaves, before, strict=True):
        if not isinstance(leaf, Tensor):
            metas.append(leaf)
            continue
        if leaf.layout is not torch.strided:
            raise RunError(
                f"a tensor of layout {leaf.layout} cannot be sent to other ranks; send what it is made of, such as "
                "indices and values, or .to_dense()"
            )
        tensor = leaf.detach().resolve_conj().resolve_neg()
        # a view of larger memory does not show its offset there, so it is described each time
        shape, stride = tuple(tensor.shape), tensor.stride()
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        is_part = 0 not in shape and reach * tensor.itemsize < tensor.untyped_storage().nbytes()
        shift = int(tensor.storage_offset()) * tensor.itemsize % _LINE
        meta = TensorMeta(shape, stride, tensor.dtype, leaf.requires_grad, tensor.device.type, shift, is_part)
        if earlier == meta:
            meta = earlier
        metas.append(meta)
        if meta.nbytes:
            buffers.append(_flat(tensor, meta))
    return Meta(spec, tuple(metas)), buffers


def _flat(tensor: Tensor, meta: TensorMeta) -> Tensor:
    """Returns the bytes of a tensor: its memory from end to end, or, if packed, its elements in index order."""
    if meta.is_packed:
        flat = tensor.as_strided(meta.stored, meta.stride).contiguous().view(-1)
    else:
        flat = tensor.as_strided((meta.span,), (1,))
    return flat.view(torch.uint8)


def allocate(meta: Meta, device: torch.device) -> list[Tensor]:
    """Returns buffers on ``device`` for a value that is about to arrive."""
    return [_empty(leaf.nbytes, leaf, device) for leaf in meta.leaves if isinstance(leaf, TensorMeta) and leaf.nbytes]


def unpack(meta: Meta, buffers: list[Tensor]) -> Any:
    """The value, on its sender's type of device; each tensor is a leaf that requires a gradient if the original did."""
    remaining = iter(buffers)
    leaves = [_rebuild(leaf, remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
    return pytree.tree_unflatten(leaves, meta.spec)


def duplicate(tensor: Tensor) -> Tensor:
    """Returns a copy without a gradient, with the original's memory layout, so that the same kernel runs on it."""
    meta, memory = pack(tensor)
    copies = allocate(meta, tensor.device)
    for copy, original in zip(copies, memory, strict=True):
        copy.copy_(original)
    duplicated: Tensor = unpack(meta, copies)
    return duplicated.data  # no longer a view of its memory, or autograd would forbid writes


def _rebuild(meta: TensorMeta, buffers: Iterator[Tensor]) -> Tensor:
    if not meta.nbytes:
        tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        return tensor.requires_grad_(meta.requires_grad)
    flat = next(buffers)
    if flat.device.type != meta.device:
        flat = flat.to(meta.device)
    # the gaps hold arbitrary bytes, which are never read
    if meta.is_packed:
        spread = _empty(meta.span * meta.dtype.itemsize, meta, flat.device)
        _as_stored(spread, meta).copy_(flat.view(meta.dtype).view(meta.stored))
        flat = spread
    return _as_stored(flat, meta).as_strided(meta.shape, meta.stride).requires_grad_(meta.requires_grad)


def _as_stored(memory: Tensor, meta: TensorMeta) -> Tensor:
    return memory.view(meta.dtype).as_strided(meta.stored, meta.stride)


def _empty(nbytes: int, meta: TensorMeta, device: torch.device | str) -> Tensor:
    """Returns memory with the original's offset from a cache line."""
    return torch.empty(meta.shift + nbytes, dtype=torch.uint8, device=device)[meta.shift :]
