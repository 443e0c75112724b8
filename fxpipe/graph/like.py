"""What stands for tensors of a batch, without their numbers, and for objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.graph.plain_data import admitted
from fxpipe.torch_compat import pytree

ITEMS = "num_items_in_batch"
"""The input that Hugging Face's losses divide by in place of a micro-batch's own labels; float32, 0-dimensional."""


@admitted
@dataclass(frozen=True)
class TensorLike:
    """What a tensor is, without its numbers. ``device``: its type only. ``stride``: of the whole batch's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorLike:
        if tensor.layout not in (torch.strided, torch.jagged):
            raise RunError(
                f"an input of shape {list(tensor.shape)} is of layout {tensor.layout}, which cannot be cut into rows; "
                "pass what it is made of, such as indices and values, and make it in forward"
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise RunError(
                f"an input is a nested tensor of {tensor.size(0)}, which has no shape; pass its values padded, with a "
                "mask or lengths, or packed, with batch_dim={name: fxpipe.Packed(counts)}, and make it in forward"
            )
        return TensorLike(tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device.type, tensor.requires_grad)

    def of_size(self, dim: int, size: int) -> TensorLike:
        """A view of that size in a dimension, as ``Tensor.narrow`` makes it; of no dimension, the same."""
        own = range(len(self.shape))[dim] if self.shape else None
        return replace(self, shape=tuple(size if i == own else old for i, old in enumerate(self.shape)))

    def resized(self, dim: int, size: int) -> TensorLike:
        """A tensor of that size in a dimension, dense if this one is; of no dimension, the same."""
        if not self.shape:
            return self
        # Where the new size reaches the stride of an outer dimension, outer strides grow, or entries would overlap.
        inside = self.stride[dim]
        larger = any(inside < step < inside * size for step in self.stride)
        stride = tuple(step * size if larger and step > inside else step for step in self.stride)
        return replace(self.of_size(dim, size), stride=stride)


@admitted
@dataclass(frozen=True, repr=False)
class ObjectLike:
    """Stands for an object that holds tensors, or of whose value nothing is known. ``kind``: the name of its class."""

    kind: str
    is_data: bool = True
    """Whether it holds tensors, or modules that do."""
    absent: tuple[str, ...] = ()
    """The names of its attributes that are None, which code may ask for."""

    def __repr__(self) -> str:
        return f"an object of class {self.kind}"


@admitted
@dataclass(frozen=True, repr=False)
class ObjectValue:
    """Stands for an object that forward may branch on: objects of equal ``text`` are equal, on any rank."""

    text: str

    def __repr__(self) -> str:
        return self.text


WORD = TensorLike((), torch.bool, (), "cpu", False)
"""Stands for a string of the inputs in a program for any strings: code that looks at one finds none."""


def cast_batch(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``batch`` with its floating-point tensors in ``dtype``; everything else, a count of items too, unchanged."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return {
        name: value if name == ITEMS else pytree.tree_map_only(Tensor, cast, value) for name, value in batch.items()
    }
