"""Slices: runs of a tensor's elements, such as ZeRO gives a rank, for torch.distributed.checkpoint to reshard.

A checkpoint knows tensors by boxes, offsets and sizes in every dimension. A run of elements in the order of memory is a
few boxes: of a matrix at most three, what is left of its first row, whole rows, and a part of the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.torch_compat import TO_COPY, plain_results, wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how long it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of a row-major tensor as boxes, each of them a run, in this order.

    >>> boxes((4, 3), 2, 10)
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 3)), Box(offsets=(3, 0), sizes=(1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    length = math.prod(shape[1:])
    first, last = -(-start // length), stop // length  # the whole rows
    if first > last:
        return _in_row(shape, last, start - last * length, stop - last * length)
    found = _in_row(shape, first - 1, start - (first - 1) * length, length) if start < first * length else []
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(shape, last, 0, stop - last * length)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes(shape[1:], start, stop)]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """A dense tensor's dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


class Slice(Tensor):
    """One rank's run of elements of a tensor that has the shape ``shape`` as a whole.

    ``local``: the elements from ``start`` on, 1-dimensional. They count in the order of memory: ``order`` names the
    dimensions from the outermost in memory to the innermost, (0, 1, …) for a contiguous tensor.

    torch.distributed.checkpoint saves and loads it by its boxes, so that ranks that cut the tensor otherwise, or not
    at all, read their own part of it. Beyond that it can be copied and moved; calculate with ``local``.
    """

    local: Tensor
    start: int
    order: tuple[int, ...]

    def __new__(cls, local: Tensor, start: int, shape: Sequence[int], order: Sequence[int]) -> Slice:
        made: Slice = wrapper(cls, shape, local.dtype, local.device)
        made.local, made.start, made.order = local, start, tuple(order)
        return made

    __torch_function__ = plain_results

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        copied = _COPIES.get(func)
        if copied is None:
            raise NotImplementedError(
                f"{func} on a slice of a tensor of shape {list(args[0].shape)}, of which this rank has only a part; "
                "write .local"
            )
        return copied(*args, **(kwargs or {}))

    def alike(self, local: Tensor) -> Slice:
        """The same elements with other values."""
        return Slice(local, self.start, self.shape, self.order)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({list(self.shape)}, elements {self.start} to {self.start + len(self.local)}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Slice, (self.local, self.start, tuple(self.shape), self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        return self.alike(self.local.clone())

    # what torch.distributed.checkpoint asks of a tensor that it does not know

    def _boxes(self) -> list[Box]:
        stored = [self.shape[dim] for dim in self.order]
        return boxes(stored, self.start, self.start + len(self.local))

    def _logical(self, numbers: Sequence[int]) -> torch.Size:
        """Offsets or sizes of a box, by the tensor's own dimensions."""
        return torch.Size(numbers[self.order.index(dim)] for dim in range(self.ndim))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(self._logical(box.offsets), self._logical(box.sizes)) for box in self._boxes()]

    def __create_write_items__(self, fqn: str, obj: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        begin = 0
        for box in self._boxes():
            end = begin + math.prod(box.sizes)
            if index.offset is not None and self._logical(box.offsets) == index.offset:
                stored = self.local[begin:end].view(box.sizes)
                return stored.permute([self.order.index(dim) for dim in range(self.ndim)])
            begin = end
        raise ValueError(f"{index} is no box of {self!r}")


def _copy_into(target: Slice, source: Slice, non_blocking: bool = False) -> Slice:
    if not isinstance(source, Slice) or (source.start, source.shape) != (target.start, target.shape):
        raise NotImplementedError(f"{target!r} takes the values of the same slice alone; write .local")
    target.local.copy_(source.local, non_blocking=non_blocking)
    return target


def _new_empty(one: Slice, size: Sequence[int], **kwargs: Any) -> Tensor:
    """A place for a copy, where it has the same shape; torch's staging fills it by its attributes."""
    if tuple(size) == tuple(one.shape):
        return one.alike(one.local.new_empty(one.local.shape, **kwargs))
    return one.local.new_empty(size, **kwargs)


_COPIES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.detach.default: lambda one: one.alike(one.local.detach()),
    torch.ops.aten.clone.default: lambda one, **kwargs: one.alike(one.local.clone()),
    TO_COPY: lambda one, **kwargs: one.alike(
        one.local.to(**{key: value for key, value in kwargs.items() if key != "memory_format"}, copy=True)
    ),
    torch.ops.aten.empty_like.default: lambda one, **kwargs: one.alike(
        torch.empty_like(one.local, **{key: value for key, value in kwargs.items() if key != "memory_format"})
    ),
    torch.ops.aten.new_empty.default: _new_empty,
    torch.ops.aten.copy_.default: _copy_into,
}
"""What a checkpoint does with tensors on its way to a file."""

torch.serialization.add_safe_globals([Slice])  # so that torch.load reads what torch.save has written
