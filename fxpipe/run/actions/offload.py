"""Offload: the activations of a forward wait for their backward in the host's memory.

F  Hooks of autograd note each tensor that it saves. After F, a stream copies their memory to the host.
O  The rank's stream waits for the copy, and the device's memory is freed.
P  Memory is taken on the device, and another stream copies back.
B  The rank's stream waits for that copy. Autograd frees each tensor once its node has run. I and W do as B.

The host waits for none of these. Some saved tensors stay on the device: parameters, buffers and their views; inputs of
the batch, which the caller holds; tensors of less than ``HostCopies.least`` bytes; tensors on another device; and
tensors without plain memory, such as sparse ones. A tensor of a subclass, such as a DTensor or a nested tensor, leaves
by its parts. The hooks do not see what a ``torch.utils.checkpoint`` keeps, nor tensors in attributes of a ``ctx``.

Autograd does not check versions where hooks pack tensors, so ``_SavedTensor`` does. A tensor that is written before O is an
error in B, as without offload. A write after O is none: the host has the values that autograd saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.device import HostCopies, OnHost
from fxpipe.errors import RunError
from fxpipe.stage.deferred import inputs_leave
from fxpipe.torch_compat.tensors import is_view_of_parameter, storage_id, version_of

_ALIGNED = 512
"""The bytes to which devices align memory. Kernels may depend on a tensor's alignment, so a copy has the same."""


@dataclass(slots=True)
class _Memory:
    """The bytes of a storage that saved tensors use, from ``begin`` to ``end``."""

    begin: int
    end: int
    storage: torch.UntypedStorage | None
    """The device's storage until O."""
    leaves: bool = True
    there: Tensor | None = None
    """The device's memory from P on, as bytes."""
    version: int = 0
    """The version of ``there`` after its copy."""

    def bytes(self) -> Tensor:
        """The bytes to copy."""
        assert self.storage is not None
        self.begin = self.begin // _ALIGNED * _ALIGNED
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(
            self.storage, self.begin, (self.end - self.begin,), (1,)
        )


@dataclass(slots=True)
class _SavedTensor:
    """A tensor that autograd has saved, and its version then. ``tensor``: without its node, with which it would be a
    cycle; None from O on, if its memory has left."""

    tensor: Tensor | None
    version: int

    @property
    def is_written(self) -> bool:
        return self.tensor is not None and version_of(self.tensor) != self.version


@dataclass(slots=True)
class _Away(_SavedTensor):
    """A saved tensor whose memory leaves, and its place in the memory."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Wrapped(_SavedTensor):
    """A saved tensor of a subclass, by its parts."""

    like: type
    parts: dict[str, _SavedTensor]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
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
    _noted: list[_Away | _Wrapped] = field(default_factory=list)
    _on_host: OnHost | None = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While the context is open, notes the tensors that autograd saves.

        Raises:
            RunError: the code inside differentiates with ``torch.func``, which refuses hooks of autograd.
        """
        try:
            with inputs_leave(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise RunError(
                f"stage {self.stage!r} cannot be offloaded: it differentiates with torch.func, which refuses the hooks "
                "that note what autograd saves; leave the stage out of offload="
            ) from error

    @property
    def left(self) -> tuple[int, int]:
        """The number of storages that leave, and their bytes."""
        return len(self._memories), sum(memory.end - memory.begin for memory in self._memories.values())

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        saved = None
        apart = tensor if tensor.grad_fn is None else tensor.detach()  # which is no view any more
        if not is_view_of_parameter(tensor):  # FSDP2's whole parameters are in no list
            saved = self._away(apart) if type(apart) is Tensor else self._wrapped(apart)
        if saved is None:
            return _SavedTensor(apart, version_of(apart))
        self._noted.append(saved)
        return saved

    def _wrapped(self, tensor: Tensor) -> _Wrapped | None:
        """A tensor of a subclass by its parts; None if all of it stays."""
        if not _is_wrapper(tensor):
            return None
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: self._part(getattr(tensor, name)) for name in names}
        if all(type(part) is _SavedTensor for part in parts.values()):
            return None
        return _Wrapped(tensor, version_of(tensor), type(tensor), parts, context, tensor.size(), tensor.stride())

    def _part(self, tensor: Tensor) -> _SavedTensor:
        # An integer part, such as the offsets of a nested tensor, is compared by identity: it stays.
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or _is_wrapper(tensor))
        return _SavedTensor(tensor, version_of(tensor)) if is_whole else self._pack(tensor)

    def _away(self, tensor: Tensor) -> _Away | None:
        """Notes a plain tensor whose memory will leave; returns None for a tensor that stays."""
        is_plain = tensor.layout is torch.strided and tensor.device == self.copies.device and not tensor.is_quantized
        if not is_plain or (own := storage_id(tensor)) in self.stays:
            return None
        size, stride, offset, width = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.element_size()
        begin = offset * width
        end = begin + (tensor.nbytes if tensor.is_contiguous() else _span(size, stride) * width)
        memory = self._memories.get(own)
        if memory is None:
            memory = self._memories[own] = _Memory(begin, end, tensor.untyped_storage())
        else:
            memory.begin, memory.end = min(memory.begin, begin), max(memory.end, end)
        if tensor.is_conj() or tensor.is_neg():  # its bytes alone are not its numbers
            memory.leaves = False
        return _Away(tensor, version_of(tensor), memory, tensor.dtype, size, stride, offset)

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        """Returns a saved tensor. Autograd may ask several times: I keeps the graph for W."""
        if saved.tensor is not None:
            if saved.is_written:
                raise _written(saved.tensor.size(), version_of(saved.tensor), saved.version)
            return saved.tensor
        if isinstance(saved, _Wrapped):
            parts = {name: self._unpack(part) for name, part in saved.parts.items()}
            return saved.like.__tensor_unflatten__(parts, saved.context, saved.size, saved.stride)  # type: ignore[attr-defined,no-any-return]
        assert isinstance(saved, _Away)
        memory, there = saved.memory, saved.memory.there
        if there is None:
            raise RunError(
                f"the activations of stage {self.stage!r} are in the host's memory, and something differentiates its "
                "outputs before its backward; leave the stage out of offload="
            )
        # Views, unlike other tensors of the same memory, count writes together.
        if version_of(there) != memory.version:
            raise _written(saved.size, version_of(there), memory.version)
        width = saved.dtype.itemsize
        if uneven := there.numel() % width:  # tensors of a narrower type have used more of the storage
            there = there[:-uneven]
        return there.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset - memory.begin // width)

    def leave(self) -> None:
        """After F: starts the copies to the host."""
        for saved in self._noted:
            # What was written since it was saved stays, so that its version tells.
            if isinstance(saved, _Away) and saved.is_written:
                saved.memory.leaves = False
        for memory in self._memories.values():
            # Of what its owner has freed, as FSDP2 frees whole parameters, nothing is there to copy.
            if memory.end - memory.begin < self.copies.least or memory.storage.nbytes() < memory.end:
                memory.leaves = False
        self._noted = [
            saved
            for saved in self._noted
            if not saved.is_written and (isinstance(saved, _Wrapped) or saved.memory.leaves)
        ]
        self._memories = {own: memory for own, memory in self._memories.items() if memory.leaves}
        self._on_host = self.copies.out([memory.bytes() for memory in self._memories.values()])

    def release(self) -> None:
        """O: the rank's stream waits for the copies; after them the device's memory is free."""
        assert self._on_host is not None
        self.copies.wait(self._on_host)
        for saved in self._noted:
            if not saved.is_written:  # else the host may have some of the new numbers
                saved.tensor = None
        for memory in self._memories.values():
            memory.storage = None
        self._noted = []

    def fetch(self) -> None:
        """P: starts the copies back."""
        assert self._on_host is not None
        there = self.copies.back(self._on_host)
        for memory, tensor in zip(self._memories.values(), there, strict=True):
            memory.there, memory.version = tensor, version_of(tensor)

    def arrive(self) -> None:
        """Before B: the rank's stream waits for the copies back. From now on autograd alone holds the tensors."""
        assert self._on_host is not None
        self.copies.wait(self._on_host)
        self.copies.reuse(self._on_host)
        self._noted, self._memories, self._on_host = [], {}, None


def storages(values: Iterable[Any]) -> set[int]:
    """The ids of the storages of the tensors among these values; of a subclass, the storages of its parts."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter):
                if value.layout is torch.strided and not value.is_meta:
                    found.add(storage_id(value))
            elif _is_wrapper(value):
                found |= storages(getattr(value, name) for name in value.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return found


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that consists of other tensors, as DTensor and nested tensors do."""
    return type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__")


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last in memory."""
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def _written(size: Sequence[int], version: int, expected: int) -> RuntimeError:
    """What plain autograd says of a saved tensor that was written."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(size)} is at version {version}; expected version {expected} instead"
    )
