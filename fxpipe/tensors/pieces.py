"""Pieces: converts a rank's tensors to the pieces that a checkpoint stores by name, and back.

A tensor subclass is saved as its inner tensors, a run of a tensor's elements as a few boxes, and a DTensor as the box
of its placement.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError
from fxpipe.tensors.dtensors import description_of, is_dtensor, local
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.operators import TO_COPY
from fxpipe.torch_compat.tensors import plain_results, tensors_in, wrapper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# --- tensor subclasses, as their inner tensors

_METADATA = bool | int | float | str | torch.dtype | torch.layout | enum.Enum | None


def plain_of(tensor: Tensor, what: str) -> Tensor:
    """Returns the tensor as a plain dense tensor on the same memory; CheckpointError if a file cannot hold its kind."""
    kinds = (Tensor, torch.nn.Parameter)
    if type(tensor) not in kinds and not {"__tensor_flatten__", "__create_chunk_list__"} & set(dir(tensor)):
        tensor = tensor.view(tensor.shape)  # a plain tensor, of a subclass that adds nothing
    if type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized):
        return tensor
    raise CheckpointError(
        f"{what} is a {type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout}, {tensor.device}): a checkpoint "
        "holds plain tensors, and subclasses whose __tensor_flatten__ gives these and plain values; convert it"
    )


def in_parts(value: Any, what: str, piece: str = "") -> Any:
    """A value, in dicts and lists, in the form that a checkpoint saves and fills.

    A tensor subclass becomes ``{"<Class metadata piece>": {name: inner tensor}}``, so that only the same form loads it.
    ``piece``: names this part of the tensor; a DTensor has its own name. CheckpointError if no load could read a value.
    """
    if isinstance(value, Mapping):
        return {key: in_parts(inner, f"{what}.{key}".removeprefix("."), piece) for key, inner in value.items()}
    if type(value) is list:
        return [in_parts(inner, f"{what}.{index}", piece) for index, inner in enumerate(value)]
    if not isinstance(value, Tensor):
        for inner in tensors_in(value):  # a tuple is saved as a single value
            plain_of(inner, what)
        return value
    with torch.no_grad():
        shard = local(value)
    if hasattr(shard, "__create_write_items__"):  # a Slice makes its own write items
        return value
    names, metadata = getattr(shard, "__tensor_flatten__", lambda: ((), None))()
    words = pytree.tree_map(lambda leaf: "device" if isinstance(leaf, torch.device) else leaf, metadata)
    if not names or not all(isinstance(leaf, _METADATA) for leaf in pytree.tree_leaves(words)):
        plain = plain_of(shard, what)
        return value if is_dtensor(value) else plain
    if is_dtensor(value):
        piece = f" {description_of(value)}, at {value.device_mesh.get_coordinate()}"
    inside = {name: in_parts(getattr(shard, name), f"{what}.{name}") for name in names}
    return {f"<{type(shard).__qualname__} {words}{piece}>": inside}


def is_parts(value: Any) -> bool:
    """Whether a value is the dict that ``in_parts`` makes of a tensor subclass."""
    return isinstance(value, dict) and any(str(key)[:1] == "<" and " " in str(key) for key in value)


def out_of_parts(like: Any, parts: Any, what: str) -> Any:
    """A new tensor of the form of ``like``, with the values ``parts`` of ``in_parts``."""
    if not hasattr(like, "layout"):  # a DTensor's mesh
        return like
    if not hasattr(like, "__tensor_flatten__"):
        if parts.shape != like.shape:
            raise CheckpointError(f"{what} has shape {list(like.shape)}, the state dict has {list(parts.shape)}")
        return torch.empty_like(like).copy_(parts)
    names, metadata = like.__tensor_flatten__()
    saved = dict.fromkeys(names, parts) if is_dtensor(like) else next(iter(parts.values()))
    inner = {name: out_of_parts(getattr(like, name), saved[name], what) for name in names}
    return like.__tensor_unflatten__(inner, metadata, like.shape, like.stride())


def pairs(into: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The pairs (into, source) to copy so that ``into`` equals ``source`` bit by bit: the inner tensors, if both are
    tensor subclasses of the same form, otherwise the two tensors."""
    form, other = (getattr(tensor, "__tensor_flatten__", lambda: ((), None))() for tensor in (into, source))
    if type(into) is not type(source) or not form[0] or form != other:
        return [(into, source)]
    return [pair for name in form[0] for pair in pairs(getattr(into, name), getattr(source, name))]


# --- slices: runs of a tensor's elements


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements ``start`` to ``stop`` of a row-major tensor as boxes, (offsets, sizes), each contiguous, in order.

    >>> boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if not shape:
        return [((), ())] * (start < stop)
    lengths = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements per row
    run = []
    while start < stop:
        # Whole rows of the outermost dimension in which a row begins at ``start``: as many as end by ``stop``, within
        # the same row of the next outer dimension.
        offsets = tuple(start // length % size for length, size in zip(lengths, shape, strict=True))
        dim, length = next(each for each in enumerate(lengths) if start % each[1] == 0 and start + each[1] <= stop)
        rows = min((stop - start) // length, shape[dim] - offsets[dim])
        run.append((offsets, (*[1] * dim, rows, *shape[dim + 1 :])))
        start += rows * length
    return run


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """A dense tensor's dimensions from the outermost in memory to the innermost."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))


class Slice(Tensor):
    """One rank's run of elements of a tensor whose full shape is ``shape``.

    ``local``: the elements from ``start`` on, 1-dimensional. Elements count in the order of memory: ``order`` lists the
    dimensions from the outermost in memory to the innermost, (0, 1, …) for a contiguous tensor.

    torch.distributed.checkpoint saves and loads a Slice by its boxes, so that ranks that split the tensor otherwise, or
    not at all, read their own part. A Slice supports copies and moves only; calculate with ``local``.
    """

    local: Tensor
    start: int
    order: tuple[int, ...]

    def __new__(cls, local: Tensor, start: int, shape: Sequence[int], order: Sequence[int]) -> Slice:
        part: Slice = wrapper(cls, shape, local.dtype, local.device)
        part.local, part.start, part.order = local, start, tuple(order)
        return part

    __torch_function__ = plain_results

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs the operators that a checkpoint needs on its way to a file."""
        # Only copies of the local part: any other operator would need the full tensor, and raises.
        part, *others = args
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        if func in _COPIES:
            return part.alike(func(part.local, **kwargs))
        if func is torch.ops.aten.new_empty.default and tuple(others[0]) == tuple(part.shape):
            return part.alike(part.local.new_empty(part.local.shape, **kwargs))  # torch's staging fills it
        source = others[0] if func is torch.ops.aten.copy_.default else None
        if not isinstance(source, Slice) or (source.start, source.shape) != (part.start, part.shape):
            raise NotImplementedError(f"{func} on {part!r}, a part of a tensor; write .local")
        part.local.copy_(source.local, *others[1:])
        return part

    def alike(self, local: Tensor) -> Slice:
        """A Slice of the same elements, with the values ``local``."""
        return Slice(local, self.start, self.shape, self.order)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Slice({list(self.shape)}, elements {self.start} to {self.start + len(self.local)}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Slice, (self.local, self.start, tuple(self.shape), self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        return self.alike(self.local.clone())

    def _boxes(self) -> dict[torch.Size, Tensor]:
        """Offsets → values of each box, in the tensor's own order of dimensions."""
        # Boxes follow each other in memory, so that each box is a view of the next elements.
        stored, back = [self.shape[dim] for dim in self.order], [self.order.index(dim) for dim in range(self.ndim)]
        views, begin = {}, 0
        for offsets, sizes in boxes(stored, self.start, self.start + len(self.local)):
            end = begin + math.prod(sizes)
            views[torch.Size(offsets[dim] for dim in back)] = self.local[begin:end].view(sizes).permute(back)
            begin = end
        return views

    # The methods of torch.distributed.checkpoint's _Checkpointable: the boxes to save and to fill.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, values.shape) for offsets, values in self._boxes().items()]

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
        return self._boxes()[torch.Size(index.offset or ())]


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.empty_like.default,
    TO_COPY,
}

# so that torch.load reads what torch.save has written, also where this class was in another module
_FORMER = ("fxpipe.sharding.optimizer_state.Slice", "fxpipe.checkpoint.files.pieces.Slice")
torch.serialization.add_safe_globals([Slice, *((Slice, name) for name in _FORMER)])
