"""Offload: the activations of a forward wait for their backward in the host's memory.

F  Hooks of autograd note each tensor that it saves. After F, a stream copies their memory to the host.
O  The rank's stream waits for the copy, and the device's memory is freed.
P  Memory is taken on the device, and another stream copies back.
B  The rank's stream waits for that copy. Autograd frees each tensor once its node has run. I and W do as B.

The host waits for none of these. Some saved tensors stay on the device: parameters, buffers and their views, and inputs
of the batch, which the caller holds. Tensors of less than ``HostCopies.least`` bytes stay, too, and tensors on another
device, and tensors without plain memory, such as sparse ones. A tensor of a subclass, such as a DTensor or a nested
tensor, leaves by its parts. The hooks do not see what a ``torch.utils.checkpoint`` keeps, nor a ``ctx``'s attributes.

Autograd does not check versions where hooks pack tensors, so this file does. If a saved tensor is written before O, its
B fails, as without offload. A later write is no error: the host has the values that autograd saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.device import DeviceBytes, HostCopies, OnHost
from fxpipe.errors import RunError
from fxpipe.stage.deferred import inputs_leave
from fxpipe.torch_compat.tensors import base_of, id_of_storage, saved_version, storage_id, version_of

_ALIGNED = 512
"""The bytes to which devices align memory. Kernels may depend on a tensor's alignment, so a copy has the same."""


@dataclass(slots=True)
class _Memory:
    """The bytes of a storage that saved tensors use, from ``begin`` to ``end``."""

    begin: int
    end: int
    storage: torch.UntypedStorage | None
    """The device's storage until O. None: it stays, or has left."""
    there: Tensor | None = None
    """The device's memory from P on, as bytes."""
    version: int = 0
    """The version of ``there`` after its copy."""


@dataclass(slots=True)
class _SavedTensor:
    """A tensor that autograd has saved, and its version then. ``tensor``: without its node, with which it would be a
    cycle; None from O on, if its memory has left."""

    tensor: Tensor | None
    version: int


@dataclass(slots=True)
class _Away(_SavedTensor):
    """A saved tensor whose memory leaves. ``layout``: its type, size, strides and offset in the storage, from O on."""

    memory: _Memory
    layout: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None


@dataclass(slots=True)
class _Wrapped(_SavedTensor):
    """A saved tensor of a subclass, by its parts: as they are saved, or a part itself that stays."""

    like: type
    parts: dict[str, Any]
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
    _away: list[_Away] = field(default_factory=list)
    _wrapped: list[_Wrapped] = field(default_factory=list)
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

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        apart = tensor if tensor.is_leaf else tensor.detach()  # which is no view any more
        base = base_of(tensor)
        # FSDP2's whole parameters are in no list. (To ask for the class of each base would take long.)
        if base is not None and base.is_leaf and isinstance(base, nn.Parameter):
            return _SavedTensor(apart, version_of(apart))
        return self._plain(apart) if type(apart) is Tensor else self._by_parts(apart)

    def _plain(self, tensor: Tensor) -> _SavedTensor:
        """Notes the memory of a tensor, if it may leave."""
        version = saved_version(tensor)
        if tensor.layout is not torch.strided or tensor.device != self.copies.device or tensor.is_quantized:
            return _SavedTensor(tensor, version)
        storage = tensor.untyped_storage()
        key = id_of_storage(storage)
        if key in self.stays:
            return _SavedTensor(tensor, version)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        end = begin + (tensor.nbytes if tensor.is_contiguous() else _span(tensor))
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = _Memory(begin, end, storage)
        else:
            memory.begin, memory.end = min(memory.begin, begin), max(memory.end, end)
        if tensor.is_conj() or tensor.is_neg():  # its bytes alone are not its numbers
            memory.storage = None
        away = _Away(tensor, version, memory)
        self._away.append(away)
        return away

    def _by_parts(self, tensor: Tensor) -> _SavedTensor:
        """Notes the parts of a tensor of a subclass."""
        version = version_of(tensor)
        if not _is_wrapper(tensor):
            return _SavedTensor(tensor, version)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: self._part(getattr(tensor, name)) for name in names}
        if not any(isinstance(part, _Away | _Wrapped) for part in parts.values()):
            return _SavedTensor(tensor, version)
        wrapped = _Wrapped(tensor, version, type(tensor), parts, context, tensor.size(), tensor.stride())
        self._wrapped.append(wrapped)
        return wrapped

    def _part(self, part: Any) -> Any:
        # An integer part, such as the offsets of a nested tensor, is compared by identity: it stays. So does a part
        # that is no tensor, such as a DTensor's mesh.
        leaves = isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex() or _is_wrapper(part))
        return self._pack(part) if leaves else part

    def _unpack(self, saved: _SavedTensor) -> Tensor:
        """Returns a saved tensor. Autograd may ask several times: I keeps the graph for W."""
        tensor = saved.tensor
        if tensor is not None:
            if version_of(tensor) != saved.version:
                raise _written(tensor.size(), version_of(tensor), saved.version)
            return tensor
        if type(saved) is _Away and saved.layout is not None:
            return self._brought_back(saved.memory, *saved.layout)
        assert isinstance(saved, _Wrapped)
        parts = {
            name: self._unpack(part) if isinstance(part, _SavedTensor) else part for name, part in saved.parts.items()
        }
        return saved.like.__tensor_unflatten__(parts, saved.context, saved.size, saved.stride)  # type: ignore[attr-defined,no-any-return]

    def _brought_back(
        self, memory: _Memory, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> Tensor:
        there = memory.there
        if there is None:
            raise RunError(
                f"the activations of stage {self.stage!r} are in the host's memory, and something differentiates its "
                "outputs before its backward; leave the stage out of offload="
            )
        # Views, unlike other tensors of the same memory, count writes together.
        if saved_version(there) != memory.version:
            raise _written(size, saved_version(there), memory.version)
        width = dtype.itemsize
        if uneven := there.nbytes % width:  # tensors of a narrower type have used more of the storage
            there = there[:-uneven]
        return there.view(dtype).as_strided(size, stride, offset - memory.begin // width)

    def leave(self, mark: Callable[[], None] | None = None) -> None:
        """After F: starts the copies to the host. ``mark``: called at the beginning and at the end of the copies."""
        for away in self._away:
            # What was written since it was saved stays, so that its version tells.
            if away.tensor is not None and saved_version(away.tensor) != away.version:
                away.memory.storage = None
        parts, memories = list[DeviceBytes](), dict[int, _Memory]()
        for key, memory in self._memories.items():
            storage, end = memory.storage, memory.end
            # Of what its owner has freed, as FSDP2 frees whole parameters, nothing is there to copy.
            if storage is None or end - memory.begin < self.copies.least or storage.nbytes() < end:
                memory.storage = None
                continue
            memory.begin = memory.begin // _ALIGNED * _ALIGNED
            parts.append(DeviceBytes(storage, memory.begin, end))
            memories[key] = memory
        self._memories, self._on_host = memories, self.copies.out(parts, mark)

    def wait(self) -> None:
        """Before O and B: the rank's stream waits for the last copies."""
        assert self._on_host is not None
        self.copies.wait(self._on_host)

    def release(self) -> None:
        """O: the device's memory is free."""
        for away in self._away:
            tensor = away.tensor
            # Of what was written meanwhile, the host may have some of the new numbers.
            if tensor is not None and away.memory.storage is not None and saved_version(tensor) == away.version:
                away.layout = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
                away.tensor = None
        for wrapped in self._wrapped:
            if wrapped.tensor is not None and version_of(wrapped.tensor) == wrapped.version:
                wrapped.tensor = None
        for memory in self._memories.values():
            memory.storage = None
        self._away, self._wrapped = [], []

    def fetch(self, mark: Callable[[], None] | None = None) -> None:
        """P: starts the copies back. ``mark`` as in ``leave``."""
        assert self._on_host is not None
        there = self.copies.back(self._on_host, mark)
        for memory, tensor in zip(self._memories.values(), there, strict=True):
            memory.there, memory.version = tensor, saved_version(tensor)

    def arrive(self) -> None:
        """Before B, after ``wait``: from now on autograd alone holds the tensors."""
        assert self._on_host is not None
        self.copies.reuse(self._on_host)
        self._memories, self._on_host = {}, None


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


def _span(tensor: Tensor) -> int:
    """The number of bytes from a tensor's first element to its last."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((count - 1) * step for count, step in steps))


def _written(size: Sequence[int], version: int, expected: int) -> RuntimeError:
    """What plain autograd says of a saved tensor that was written."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(size)} is at version {version}; expected version {expected} instead"
    )
