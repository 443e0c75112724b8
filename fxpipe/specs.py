"""Descriptions of a batch's tensors, without their values, and of objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.plain_data import admitted
from fxpipe.torch_compat import pytree

ITEMS = "num_items_in_batch"
"""The input that Hugging Face's losses divide by instead of a micro-batch's own labels; float32, 0-dimensional."""


@admitted
@dataclass(frozen=True)
class TensorSpec:
    """A tensor's description, without values. ``device``: its type only. ``stride``: of the whole batch's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorSpec:
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
            raise RunError(
                f"an input is a {kind}, which cannot be cut into rows; pass its values padded, with a mask or lengths, "
                "or packed, with batch_dim={name: fxpipe.Packed(counts)}, or indices and values, and make it in forward"
            )
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device.type, tensor.requires_grad)

    def of_size(self, dim: int, size: int) -> TensorSpec:
        """A view with another size in a dimension, as ``Tensor.narrow`` makes it; a 0-dimensional tensor: itself."""
        own = range(len(self.shape))[dim] if self.shape else None
        return replace(self, shape=tuple(size if i == own else old for i, old in enumerate(self.shape)))

    def resized(self, dim: int, size: int) -> TensorSpec:
        """A tensor with another size in a dimension, dense if this one is; a 0-dimensional tensor: itself."""
        if not self.shape:
            return self
        # If the new size reaches the stride of an outer dimension, outer strides grow, or elements would overlap.
        inside, old = self.stride[dim], max(self.shape[dim], 1)
        larger = any(inside < step < inside * size for step in self.stride)
        grown = tuple(step * size if step % old else step // old * size for step in self.stride)
        stride = tuple(new if larger and step > inside else step for step, new in zip(self.stride, grown, strict=True))
        return replace(self.of_size(dim, size), stride=stride)


@admitted
@dataclass(frozen=True, repr=False)
class ObjectSpec:
    """Represents an object that holds tensors, or whose value is unknown. ``kind``: the name of its class."""

    kind: str
    is_data: bool = True
    """Whether the object holds tensors, or modules that hold tensors."""
    absent: tuple[str, ...] = ()
    """The names of the object's attributes that are None. fairseq2's models ask this of the ``padding_mask`` of their
    dataclass ``SequenceBatch``."""

    def __repr__(self) -> str:
        return f"an object of class {self.kind}"


@admitted
@dataclass(frozen=True, repr=False)
class ObjectValue:
    """Represents an object that forward may branch on: objects of equal ``text`` are equal, on any rank."""

    text: str

    def __repr__(self) -> str:
        return self.text


WORD = TensorSpec((), torch.bool, (), "cpu", False)
"""Represents a string of the inputs in a program for any strings: code that looks for a string finds none."""


def cast_batch(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``batch`` with its floating-point tensors in ``dtype``; other values, and a count of items, unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return {
        name: value if name == ITEMS else pytree.tree_map_only(Tensor, cast, value) for name, value in batch.items()
    }
