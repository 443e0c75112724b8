"""Offload: the activations of a forward wait for their backward in the host's memory.

F  Hooks of autograd note each tensor that it saves. After F, a stream copies their memory to the host.
O  The rank's stream waits for the copy, and the device's memory is freed.
P  Memory is taken on the device, and another stream copies back.
B  The rank's stream waits for that copy. Autograd frees each tensor once its node has run. I and W do as B.

Between I and W the same steps move what W needs: the saved tensors that autograd has not freed after I, and the
gradients that W begins with.

The host waits for none of these. Some saved tensors stay on the device: parameters, buffers and their views, and inputs
of the batch, which the caller holds. Tensors of less than ``HostCopies.least`` bytes stay, too, and tensors on another
device, and tensors without plain memory, such as sparse ones. A tensor of a subclass, such as a DTensor or a nested
tensor, leaves by its parts. The hooks do not see what a ``torch.utils.checkpoint`` keeps, nor a ``ctx``'s attributes.

Autograd does not check versions where hooks pack tensors, so this file does. If a saved tensor is written before O, its
B fails, as without offload. A later write is no error: the host has the values that autograd saved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.device import HostCopies, OnHost
from fxpipe.errors import RunError
from fxpipe.stage.deferred import Deferred, inputs_leave
from fxpipe.stage.saved_tensors import SavedTensor, unwritten, written
from fxpipe.torch_compat.tensors import base_of, id_of_storage, saved_version, storage_id, version_of

_ALIGNED = 512
"""The bytes to which devices align memory. Kernels may depend on a tensor's alignment, so a copy has the same."""
_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""A tensor's type, size, strides and offset in its storage."""


@dataclass(slots=True)
class _Memory:
    """The bytes of a storage that saved tensors use, from ``begin`` to ``end``."""

    begin: int
    end: int
    source: Tensor | None
    """A tensor of the device's memory until O. None: the memory stays, or has left."""
    is_whole: bool
    """Whether ``source`` has all these bytes, so that its copies have its type, shape and strides."""
    there: Tensor | None = None
    """The device's memory from P on: like ``source``, or as bytes."""
    version: int = 0
    """The version of ``there`` after its copy."""


@dataclass(slots=True)
class _Away(SavedTensor):
    """A saved tensor whose memory may leave. ``layout``: from O on; None for a tensor like the source of the copy."""

    memory: _Memory | None = None
    """None: the tensor stays."""
    layout: _Layout | None = None

    def on_device(self) -> Sequence[Tensor]:
        there = self.memory.there if self.tensor is None and self.memory is not None else self.tensor
        return [] if there is None else [there]


@dataclass(slots=True)
class _Wrapped(SavedTensor):
    """A saved tensor of a subclass, by its parts: as they are saved, or a part itself that stays."""

    like: type
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def on_device(self) -> Sequence[Tensor]:
        if self.tensor is not None:
            return [self.tensor]
        parts = (part.on_device() if isinstance(part, SavedTensor) else [part] for part in self.parts.values())
        return [part for each in parts for part in each if isinstance(part, Tensor)]


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
    _memories: list[_Memory] = field(default_factory=list)
    _away: list[_Away] = field(default_factory=list)
    _wrapped: list[_Wrapped] = field(default_factory=list)
    _for_weights: list[weakref.ref[SavedTensor]] = field(default_factory=list)
    """What a forward has saved, as far as autograd still holds it."""
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

    def _pack(self, tensor: Tensor) -> SavedTensor:
        """Notes a saved tensor. ``leave`` finds the memory that leaves."""
        kind, base = type(tensor), base_of(tensor)
        apart = tensor if kind is not Tensor and tensor.is_leaf else tensor.detach()  # which is no view any more
        # FSDP2's whole parameters are in no list. (To ask for the class of each base would take long.)
        if kind is nn.Parameter or (base is not None and base.is_leaf and isinstance(base, nn.Parameter)):
            return SavedTensor(apart, saved_version(apart))
        if kind is not Tensor:
            return self._by_parts(apart)
        away = _Away(apart, saved_version(apart))
        self._away.append(away)
        return away

    def _by_parts(self, tensor: Tensor) -> SavedTensor:
        """Notes the parts of a tensor of a subclass."""
        version = version_of(tensor)
        if not _is_wrapper(tensor):
            return SavedTensor(tensor, version)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: self._part(getattr(tensor, name)) for name in names}
        wrapped = _Wrapped(tensor, version, type(tensor), parts, context, tensor.size(), tensor.stride())
        self._wrapped.append(wrapped)
        return wrapped

    def _part(self, part: Any) -> Any:
        # An integer part, such as the offsets of a nested tensor, is compared by identity: it stays. So does a part
        # that is no tensor, such as a DTensor's mesh.
        leaves = isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex() or _is_wrapper(part))
        return self._pack(part) if leaves else part

    def _unpack(self, saved: SavedTensor) -> Tensor:
        """Returns a saved tensor. Autograd may ask several times: I keeps the graph for W."""
        if saved.tensor is not None:
            return unwritten(saved.tensor, saved.version)
        if type(saved) is _Away and saved.memory is not None:
            return self._brought_back(saved.memory, saved.layout)
        assert isinstance(saved, _Wrapped)
        parts = {
            name: self._unpack(part) if isinstance(part, SavedTensor) else part for name, part in saved.parts.items()
        }
        return saved.like.__tensor_unflatten__(parts, saved.context, saved.size, saved.stride)  # type: ignore[attr-defined,no-any-return]

    def _brought_back(self, memory: _Memory, layout: _Layout | None) -> Tensor:
        there = memory.there
        if there is None:
            raise RunError(
                f"the activations of stage {self.stage!r} are in the host's memory, and something differentiates its "
                "outputs before its backward; leave the stage out of offload="
            )
        # Views, unlike other tensors of the same memory, count writes together.
        if (version := saved_version(there)) != memory.version:
            raise written(layout[1] if layout else there.size(), version, memory.version)
        if layout is None:
            return there
        dtype, size, stride, offset = layout
        width = dtype.itemsize
        if there.dtype is not dtype:
            there = there.as_strided((there.numel(),), (1,)).view(torch.uint8)
            if uneven := there.nbytes % width:  # tensors of a narrower type have used more of the storage
                there = there[:-uneven]
            there = there.view(dtype)
        return there.as_strided(size, stride, offset - memory.begin // width)

    def stay(self) -> None:
        """After F, in place of ``leave``: autograd alone holds the tensors."""
        self._away, self._wrapped = [], []

    def note_for_weights(self) -> None:
        """After F, before ``leave`` or ``stay``, if what W needs leaves after I."""
        self._for_weights = [weakref.ref(saved) for saved in (*self._away, *self._wrapped)]

    def leave_for_weights(self, deferred: Deferred | None, mark: Callable[[], None] | None = None) -> None:
        """After I: starts the copies to the host of what W needs. ``deferred``: I's data for W, if W has work.
        ``mark`` as in ``leave``."""
        alive = [] if deferred is None else [saved for ref in self._for_weights if (saved := ref()) is not None]
        self._away = [saved for saved in alive if isinstance(saved, _Away)]
        self._wrapped = [saved for saved in alive if isinstance(saved, _Wrapped)]
        for away in self._away:
            if away.tensor is None:  # it has been on the host before I
                tensor = self._unpack(away)
                away.tensor, away.version, away.memory, away.layout = tensor, saved_version(tensor), None, None
        if deferred is not None:
            deferred.change_tensors(self._pack)
        self.leave(mark)

    def arrive_for_weights(self, deferred: Deferred | None) -> None:
        """Before W, after ``wait``: as ``arrive``; and W's gradients are tensors again."""
        if deferred is not None:
            deferred.change_tensors(self._unpack)
        self.arrive()

    def leave(self, mark: Callable[[], None] | None = None) -> None:
        """After F: starts the copies to the host. ``mark``: called at the beginning and at the end of the copies."""
        self._find_memories()
        sources, memories, least = list[Tensor](), list[_Memory](), self.copies.least
        for memory in self._memories:
            source, end = memory.source, memory.end
            # Of what its owner has freed, as FSDP2 frees whole parameters, nothing is there to copy.
            if source is None or end - memory.begin < least or (bytes_ := source.untyped_storage()).nbytes() < end:
                memory.source = None
                continue
            if not memory.is_whole:
                begin = memory.begin = memory.begin // _ALIGNED * _ALIGNED
                new = source.new_empty(0, dtype=torch.uint8)
                source = memory.source = new.set_(bytes_, begin, (end - begin,), (1,))
            sources.append(source)
            memories.append(memory)
        self._memories, self._on_host = memories, self.copies.out(sources, mark)

    def _find_memories(self) -> None:
        """Finds the memory of each saved tensor that may leave."""
        memories, stays, device, strided = dict[int, _Memory](), self.stays, self.copies.device, torch.strided
        for away in self._away:
            tensor = away.tensor
            assert tensor is not None
            if tensor.layout is not strided or (key := id_of_storage(tensor.untyped_storage())) in stays:
                continue
            begin = int(tensor.storage_offset()) * tensor.element_size()
            is_dense = tensor.is_contiguous() or _is_dense(tensor)
            end = begin + (tensor.nbytes if is_dense else _span(tensor))
            memory = memories.get(key)
            if memory is None:
                source = tensor if tensor.device == device and not tensor.is_quantized else None
                memory = memories[key] = _Memory(begin, end, source, is_dense and begin % _ALIGNED == 0)
            elif begin < memory.begin or end > memory.end:
                memory.begin, memory.end, memory.is_whole = min(memory.begin, begin), max(memory.end, end), False
            # The bytes of a conjugate alone are not its numbers. A tensor written since it was saved stays, so that its
            # version tells.
            if tensor.is_conj() or tensor.is_neg() or saved_version(tensor) != away.version:
                memory.source = None
            away.memory = memory
        self._memories = list(memories.values())

    def wait(self) -> None:
        """Before O and B: the rank's stream waits for the last copies."""
        assert self._on_host is not None
        self.copies.wait(self._on_host)

    def release(self) -> None:
        """O: the device's memory is free."""
        for away in self._away:
            tensor, source = away.tensor, away.memory.source if away.memory is not None else None
            # Of what was written meanwhile, the host may have some of the new numbers.
            if tensor is not None and source is not None and saved_version(tensor) == away.version:
                away.tensor = None
                if tensor is not source:
                    layout = tensor.dtype, tensor.size(), tensor.stride()
                    if layout != (source.dtype, source.size(), source.stride()):
                        away.layout = *layout, int(tensor.storage_offset())
        for wrapped in self._wrapped:
            has_left = any(isinstance(part, SavedTensor) and part.tensor is None for part in wrapped.parts.values())
            if has_left and wrapped.tensor is not None and version_of(wrapped.tensor) == wrapped.version:
                wrapped.tensor = None
        for memory in self._memories:
            memory.source = None
        self._away, self._wrapped = [], []

    def fetch(self, mark: Callable[[], None] | None = None) -> None:
        """P: starts the copies back. ``mark`` as in ``leave``."""
        assert self._on_host is not None
        there = self.copies.back(self._on_host, mark)
        for memory, tensor in zip(self._memories, there, strict=True):
            memory.there, memory.version = tensor, saved_version(tensor)

    def arrive(self) -> None:
        """Before B, after ``wait``: from now on autograd alone holds the tensors."""
        assert self._on_host is not None
        self.copies.reuse(self._on_host)
        self._memories, self._on_host = [], None


def storages(values: Iterable[Any]) -> dict[int, int]:
    """The ids and bytes of the storages of the tensors among these values; of a subclass, the storages of its parts."""
    found: dict[int, int] = {}
    for value in values:
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter):
                if value.layout is torch.strided and not value.is_meta:
                    found[storage_id(value)] = value.untyped_storage().nbytes()
            elif _is_wrapper(value):
                found |= storages(getattr(value, name) for name in value.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return found


def _is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that consists of other tensors, as DTensor and nested tensors do."""
    return type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__")


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, and no two share bytes, as in a permuted contiguous tensor."""
    count = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != count:
            return False
        count *= size
    return True


def _span(tensor: Tensor) -> int:
    """The number of bytes from a tensor's first element to its last."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((count - 1) * step for count, step in steps))
