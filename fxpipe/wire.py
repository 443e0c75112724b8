"""Wire: a value of any shape as bytes and a description of them, and back with the very same strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its numbers. ``device`` is its type only."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str


@dataclass(frozen=True)
class Meta:
    """A value without its numbers: its container, and a TensorMeta or the value itself for each leaf."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the container itself, with its leaves' descriptions in it."""
        return _meta_of, (pytree.tree_unflatten(self.leaves, self.spec),)


def _meta_of(tree: Any) -> Meta:
    leaves, spec = pytree.tree_flatten(tree)
    return Meta(spec, tuple(leaves))


def pack(value: Any) -> tuple[Meta, list[Tensor]]:
    """(description, one flat uint8 tensor per tensor that is not empty); a dense tensor is not copied."""
    leaves, spec = pytree.tree_flatten(value)
    metas, buffers = [], []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            metas.append(leaf)
            continue
        metas.append(TensorMeta(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.device.type))
        if leaf.numel():
            buffers.append(_flat(leaf.detach()))
    return Meta(spec, tuple(metas)), buffers


def allocate(meta: Meta, device: torch.device) -> list[Tensor]:
    """Buffers on ``device`` for a value that is about to arrive."""
    return [
        torch.empty(_numel(_stored_shape(leaf)) * leaf.dtype.itemsize, dtype=torch.uint8, device=device)
        for leaf in meta.leaves
        if isinstance(leaf, TensorMeta) and _numel(leaf.shape)
    ]


def unpack(meta: Meta, buffers: list[Tensor]) -> Any:
    """The value, on the device that it came from, each tensor a leaf that requires a gradient if the original did."""
    remaining = iter(buffers)
    leaves = [_rebuild(leaf, remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
    return pytree.tree_unflatten(leaves, meta.spec)


def _rebuild(meta: TensorMeta, buffers: Any) -> Tensor:
    if not _numel(meta.shape):
        tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        return tensor.requires_grad_(meta.requires_grad)
    buffer: Tensor = next(buffers)
    if buffer.device.type != meta.device:
        buffer = buffer.to(meta.device)
    flat = buffer.view(meta.dtype)
    stored = _stored_shape(meta)
    if _is_dense(stored, meta.stride):
        tensor = flat.as_strided(stored, meta.stride)
    else:
        tensor = torch.empty_strided(stored, meta.stride, dtype=meta.dtype, device=meta.device)
        tensor.copy_(flat.view(stored))
    return tensor.as_strided(meta.shape, meta.stride).requires_grad_(meta.requires_grad)


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in memory order where it is dense, in index order where it has gaps."""
    tensor = tensor.resolve_conj().resolve_neg()
    stored = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if _is_dense(stored, tensor.stride()):
        flat = tensor.as_strided((_numel(stored),), (1,))
    else:
        flat = tensor.as_strided(stored, tensor.stride()).reshape(-1)
    return flat.view(torch.uint8)


def _stored_shape(meta: TensorMeta) -> tuple[int, ...]:
    """The shape without the repetition of expanded dimensions."""
    return tuple(1 if stride == 0 else size for size, stride in zip(meta.shape, meta.stride, strict=True))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
