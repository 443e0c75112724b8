"""Offload: the activations of a forward wait for their backward in the host's memory.

F  Hooks of autograd note each tensor that it saves. After F, a stream copies their memory to the host.
O  The rank's stream waits for the copy, and the device's memory is freed.
P  Memory is taken on the device, and another stream copies back.
B  The rank's stream waits for that copy. Autograd frees each tensor once its node has run. I and W do as B.

The host waits for none of these. Some saved tensors stay on the device: parameters, buffers and their views; inputs of
the batch, which the caller holds; tensors of less than ``HostCopies.least`` bytes; tensors on another device; and
tensors without plain memory, such as sparse ones. A tensor of a subclass, such as a DTensor or a nested tensor, leaves
by its parts. The hooks do not see what a ``torch.utils.checkpoint`` keeps, nor tensors in attributes of a ``ctx``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.device import HostCopies
from fxpipe.errors import RunError
from fxpipe.torch_compat.tensors import is_view_of_parameter, storage_id, version_of

_ALIGNED = 16
"""The bytes of the widest type: a part of a storage that begins at a multiple holds whole elements of every type."""


@dataclass(slots=True)
class _Memory:
    """The bytes of a storage that saved tensors use, from ``begin`` to ``end``. ``there``: the device's memory from
    ``begin`` on, as bytes; None while the bytes are on the host alone."""

    whole: Tensor | None
    """All of the device's storage, as bytes, until the copy to the host is over."""
    begin: int
    end: int
    there: Tensor | None = None
    host: Tensor | None = None


@dataclass(slots=True)
class _Away:
    """A saved tensor whose memory leaves: its shape, its place in the memory, and its version when it was saved."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int
    tensor: Tensor | None
    """The tensor itself until the copy is over. It may refer to its node, which refers to this object."""


@dataclass(slots=True)
class _Stays:
    """A saved tensor that stays on the device, and its version when it was saved."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _Wrapped:
    """A saved tensor of a subclass, by its parts."""

    like: type
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True)
class Offloaded:
    """The activations of one forward of a stage.

    Args:
        copies: the device's copies to and from the host.
        stays: the ids of the storages that stay on the device.
        stage: the stage's name, for errors.
    """

    copies: HostCopies
    stays: Collection[int]
    stage: str
    _memories: dict[int, _Memory] = field(default_factory=dict)
    _noted: list[_Away] = field(default_factory=list)
    _copied: torch.Event | None = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While the context is open, notes the tensors that autograd saves.

        Raises:
            RunError: the code inside differentiates with ``torch.func``, which refuses hooks of autograd.
        """
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise RunError(
                f"stage {self.stage!r} cannot be offloaded: it differentiates with torch.func, which refuses the hooks "
                "that note what autograd saves; leave the stage out of offload="
            ) from error

    def _pack(self, tensor: Tensor) -> Any:
        if _is_wrapper(tensor):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: self._part(getattr(tensor, name)) for name in names}
            return _Wrapped(type(tensor), parts, context, tensor.size(), tensor.stride())
        return self._note(tensor) or _Stays(_apart(tensor), version_of(tensor))

    def _part(self, tensor: Tensor) -> Any:
        # An integer part, such as the offsets of a nested tensor, is compared by identity: it stays.
        return self._pack(tensor) if tensor.is_floating_point() or _is_wrapper(tensor) else _Stays(tensor, 0)

    def _note(self, tensor: Tensor) -> _Away | None:
        """Notes a tensor whose memory will leave; returns None for a tensor that stays."""
        if not _is_plain(tensor) or tensor.device != self.copies.device:
            return None
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        width = tensor.element_size()
        last = sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        begin, end = offset * width, (offset + last + 1) * width
        if 0 in size or end - begin < self.copies.least or (own := storage_id(tensor)) in self.stays:
            return None
        memory = self._memories.get(own)
        if memory is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            memory = self._memories[own] = _Memory(whole, begin, end)
        else:
            memory.begin, memory.end = min(memory.begin, begin), max(memory.end, end)
        away = _Away(memory, tensor.dtype, size, stride, offset, version_of(tensor), tensor)
        self._noted.append(away)
        return away

    def _unpack(self, saved: Any) -> Tensor:
        """Returns a saved tensor. Autograd may ask several times: I keeps the graph for W."""
        if isinstance(saved, _Wrapped):
            parts = {name: self._unpack(part) for name, part in saved.parts.items()}
            return saved.like.__tensor_unflatten__(parts, saved.context, saved.size, saved.stride)  # type: ignore[attr-defined,no-any-return]
        if saved.tensor is not None:
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(_written(saved.tensor, saved.version))
            return saved.tensor  # type: ignore[no-any-return]
        there = saved.memory.there
        if there is None:
            raise RunError(
                f"the activations of stage {self.stage!r} are in the host's memory, and something differentiates its "
                "outputs before its backward; leave the stage out of offload="
            )
        typed: Tensor = there.view(saved.dtype)
        offset = saved.offset - saved.memory.begin // typed.element_size()
        return typed.as_strided(saved.size, saved.stride, offset)

    def leave(self) -> None:
        """After F: starts the copies to the host."""
        # What was written since it was saved stays, so that its version tells; what its owner has freed, as FSDP2 frees
        # whole parameters, has nothing to copy.
        stay = {
            id(away.memory)
            for away in self._noted
            if away.tensor is not None and (version_of(away.tensor) != away.version or not _has_bytes(away.memory))
        }
        for away in self._noted:
            if id(away.memory) in stay and away.tensor is not None:
                away.tensor = _apart(away.tensor)
        self._noted = [away for away in self._noted if id(away.memory) not in stay]
        self._memories = {own: memory for own, memory in self._memories.items() if id(memory) not in stay}
        sources = []
        for memory in self._memories.values():
            assert memory.whole is not None
            memory.begin = memory.begin // _ALIGNED * _ALIGNED
            memory.end = min(-(-memory.end // _ALIGNED) * _ALIGNED, memory.whole.numel())
            sources.append(memory.whole[memory.begin : memory.end])
        hosts, self._copied = self.copies.out(sources)
        for memory, host in zip(self._memories.values(), hosts, strict=True):
            memory.host = host

    def release(self) -> None:
        """O: the rank's stream waits for the copies; after them the device's memory is free."""
        self.copies.wait(self._copied)
        for away in self._noted:
            away.tensor = None
        for memory in self._memories.values():
            memory.whole = None
        self._noted = []

    def fetch(self) -> None:
        """P: starts the copies back."""
        memories = list(self._memories.values())
        theres, self._copied = self.copies.back([memory.host for memory in memories if memory.host is not None])
        for memory, there in zip(memories, theres, strict=True):
            memory.there = there

    def arrive(self) -> None:
        """Before B: the rank's stream waits for the copies back. From now on autograd alone holds the tensors."""
        self.copies.wait(self._copied)
        self.copies.reuse([memory.host for memory in self._memories.values() if memory.host is not None])
        for memory in self._memories.values():
            memory.host = None
        self._memories = {}


def storages(values: Iterable[Any]) -> set[int]:
    """The ids of the storages of the plain tensors among these values."""
    return {storage_id(value) for value in values if isinstance(value, Tensor) and _has_storage(value)}


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has plain memory that is not a parameter's: FSDP2's whole parameters are in no list."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return not is_view_of_parameter(tensor)


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that consists of other tensors, as DTensor and nested tensors do."""
    return type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__")


def _has_bytes(memory: _Memory) -> bool:
    return memory.whole is not None and memory.whole.untyped_storage().nbytes() > 0


def _apart(tensor: Tensor) -> Tensor:
    """The tensor without its node. An output that autograd saves would refer to its node, which holds it: a cycle."""
    return tensor.detach() if tensor.grad_fn is not None else tensor


def _written(tensor: Tensor, version: int) -> str:
    """What plain autograd says of a saved tensor that was written; its own check is off where hooks pack tensors."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(tensor.size())} is at version {version_of(tensor)}; expected version {version} instead"
    )
