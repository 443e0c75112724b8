"""Device: the device of this process. This file wraps torch's functions that differ between accelerators; no other file
names CUDA."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


@functools.cache
def kinds() -> tuple[str, ...]:
    """The types of device that this process can compute on: "cpu", and "cuda", "xpu", … if an accelerator exists."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Metal lacks float64, in which losses are summed, and a backend of torch.distributed.
    return ("cpu",) if accelerator is None or accelerator.type == "mps" else ("cpu", accelerator.type)


def is_accelerator(device: torch.device) -> bool:
    """Whether the device runs work asynchronously to the host, on streams."""
    return device.type in kinds()[1:]


def current() -> torch.device:
    """The device that this process computes on, with the device's index; the CPU has no index."""
    kind = kinds()[-1]
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Starts copies to the host and returns at once. The returned function waits for the copies, and for no later work
    of their devices, and returns them."""
    # into pinned memory: only such a copy is asynchronous to the host
    copies = [tensor.detach().to("cpu", copy=True, non_blocking=True) for tensor in tensors]
    devices = filter(is_accelerator, {tensor.device for tensor in tensors})
    copied = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def wait() -> list[Tensor]:
        for event in copied:
            event.synchronize()
        return copies

    return wait


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU; ``.numpy()`` would need NumPy and run an operator under modes."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def device_of(tensors: Iterable[Tensor], otherwise: torch.device) -> torch.device:
    """The device of the first tensor that has memory; ``otherwise`` if all tensors are on the meta device."""
    return next((tensor.device for tensor in tensors if not tensor.is_meta), otherwise)


def generators_of(devices: Iterable[torch.device]) -> dict[str, torch.Generator]:
    """torch's default generators by name: the CPU's and the generators of the accelerators among ``devices``. All ranks
    use the same names."""
    generators = {"torch": torch.default_generator}
    for number, device in enumerate(filter(is_accelerator, devices)):
        module = torch.get_device_module(device)
        module.init()  # makes the generators
        index = current().index if device.index is None else device.index
        generators[f"{device.type}{number or ''}"] = module.default_generators[index]
    return generators


def shared_name(device: torch.device) -> str:
    """The name of a device for other ranks: the name of this process's own device has no index."""
    return device.type if device == current() else str(device)


def by_shared_name(name: str) -> torch.device:
    """The device with this shared name; a name without an index is this process's own device."""
    return current() if name == current().type else torch.device(name)


def with_shared_names(text: str) -> str:
    """A program's text with shared names for devices, also for an index alone: ``arange(8, device=1)``."""
    own = current()
    return re.sub(rf"\b({own}|(?<=device: ){own.index})\b", own.type, text)


def versions() -> dict[str, str]:
    """The versions of CUDA and ROCm in torch's build, and of NCCL and the driver if these exist."""
    by_name = {"CUDA": str(torch.version.cuda), "ROCm": str(torch.version.hip)}
    with suppress(AttributeError):  # a build without it
        by_name["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with suppress(OSError):
        by_name["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return by_name


_KERNELS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")
ATTENTION = {f"torch.backends.cuda.{name}()": getattr(torch.backends.cuda, name) for name in _KERNELS}
"""Source text of a call that asks whether torch may choose a kernel of attention → the function."""
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that hide all accelerators from a process."""


class DeviceBytes(NamedTuple):
    """Bytes of a storage of the device, from ``begin`` to ``end``."""

    storage: torch.UntypedStorage
    begin: int
    end: int


@dataclass(slots=True)
class OnHost:
    """Memory of the host for bytes of the device. ``sizes``: the bytes of each source. ``pieces``: where each source
    is, in one page or in several. ``copied``: the event behind the last copy; None where the host itself copies."""

    sizes: tuple[int, ...]
    pages: list[Tensor] = field(default_factory=list)
    pieces: list[list[Tensor]] = field(default_factory=list)
    copied: torch.Event | None = None


class HostCopies:
    """Copies between a device and the host's pinned memory, on a stream of their own each way.

    The host waits for no copy. On the CPU they are plain copies to other memory, which save nothing.

    Pinned memory is taken in pages, and pages are used again: there are never more than were in use at once. A page has
    ``page`` bytes; the last of a copy has the power of two that is enough, which is what torch would take for it.
    Pieces of pages are kept for sources of the same sizes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_beside = device, is_accelerator(device)
        self._unused: dict[tuple[int, ...], list[OnHost]] = {}  # sizes → memory for them
        self._pages: dict[int, list[Tensor]] = {}  # bytes → unused pages
        self._streams: dict[bool, torch.Stream] = {}  # whether to the host → stream
        self.least = 2**16 if self._is_beside else 1
        """The fewest bytes of a tensor that are worth a copy."""
        self.page = 2**25

    def out(self, sources: Sequence[DeviceBytes], mark: Callable[[], None] | None = None) -> OnHost:
        """Starts copies to the host. After them, the memory of the sources may be freed. ``mark``: called before and
        after the copies, on their stream."""
        sizes = tuple([end - begin for _, begin, end in sources])
        unused = self._unused.get(sizes)
        on_host = unused.pop() if unused else self._laid_out(sizes)
        with self._beside(on_host, True, mark):
            window = self._bytes.new_empty(0)
            for (storage, begin, _), pieces in zip(sources, on_host.pieces, strict=True):
                for piece in pieces:
                    size = piece.nbytes
                    window.set_(storage, begin, (size,), (1,))
                    piece.copy_(window, non_blocking=True)
                    begin += size
        return on_host

    def back(self, on_host: OnHost, mark: Callable[[], None] | None = None) -> list[Tensor]:
        """Starts copies to new memory of the device. After them, the memory may be used. ``mark`` as in ``out``."""
        new = self._bytes.new_empty
        there = [new(size) for size in on_host.sizes]
        with self._beside(on_host, False, mark):
            for tensor, pieces in zip(there, on_host.pieces, strict=True):
                parts = (tensor,) if len(pieces) == 1 else torch.split(tensor, [piece.nbytes for piece in pieces])
                for part, piece in zip(parts, pieces, strict=True):
                    part.copy_(piece, non_blocking=True)
        return there

    @functools.cached_property
    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    @contextmanager
    def _beside(self, on_host: OnHost, to_host: bool, mark: Callable[[], None] | None) -> Iterator[None]:
        """Copies inside run on the stream of their direction."""
        mark = mark or (lambda: None)
        if not self._is_beside:
            mark()
            yield
            mark()
            return
        # The rank's stream has made the sources, and has ended with what had the targets' memory before.
        stream = self._streams.get(to_host) or self._streams.setdefault(to_host, torch.Stream(self.device))
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            mark()
            yield
            mark()
        on_host.copied = stream.record_event()

    def wait(self, on_host: OnHost) -> None:
        """Lets the device's current stream wait for the last copies."""
        if on_host.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(on_host.copied)

    def wait_for_all(self) -> None:
        """Lets the device's current stream wait for all copies, whose memory may then be freed."""
        for stream in self._streams.values():
            torch.accelerator.current_stream(self.device).wait_stream(stream)

    def reuse(self, on_host: OnHost) -> None:
        """Takes memory back. The device's current stream has waited for its last copies."""
        self._unused.setdefault(on_host.sizes, []).append(on_host)

    def _laid_out(self, sizes: tuple[int, ...]) -> OnHost:
        """Takes memory of the host for so many bytes each, one behind the other."""
        on_host, left, begin, end = OnHost(sizes), sum(sizes), 0, 0
        for size in sizes:
            pieces = list[Tensor]()
            while size:
                if begin == end:
                    page = self._page(left)
                    on_host.pages.append(page)
                    begin, end = 0, page.nbytes
                part = min(size, end - begin)
                pieces.append(page[begin : begin + part])
                begin, size, left = begin + part, size - part, left - part
            on_host.pieces.append(pieces)
        return on_host

    def _page(self, least: int) -> Tensor:
        size = min(self.page, 1 << (least - 1).bit_length())
        while not self._pages.get(size) and self._unused:
            unused = self._unused.pop(next(iter(self._unused)))  # the sizes that came first
            for page in (page for on_host in unused for page in on_host.pages):
                self._pages.setdefault(page.nbytes, []).append(page)
        pages = self._pages.get(size)
        return pages.pop() if pages else torch.empty(size, dtype=torch.uint8, pin_memory=self._is_beside)
