"""Device: the device of this process. This file wraps torch's functions that differ between accelerators; no other file
names CUDA."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(slots=True)
class OnHost:
    """Bytes that were copied to the host. ``pieces``: where each source is, in one page or in several. ``copied``: the
    event behind the last copy; None where the host itself copies."""

    pages: list[Tensor]
    pieces: list[list[Tensor]]
    copied: torch.Event | None = None


class HostCopies:
    """Copies between a device and the host's pinned memory, on a stream of their own each way.

    The host waits for no copy. On the CPU they are plain copies to other memory, which save nothing.

    Pinned memory is taken in pages, and pages are used again: there are never more than were in use at once. A page has
    ``page`` bytes; the last of a copy has the power of two that is enough, which is what torch would take for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_beside = device, is_accelerator(device)
        self._unused: dict[int, list[Tensor]] = {}  # bytes → pages
        self._streams: dict[bool, torch.Stream] = {}  # whether to the host → stream
        self.least = 2**16 if self._is_beside else 1
        """The fewest bytes of a tensor that are worth a copy."""
        self.page = 2**25

    def out(self, sources: Sequence[Tensor]) -> OnHost:
        """Starts copies of bytes to the host. After them, the memory of the sources may be freed."""
        on_host = self._laid_out([source.numel() for source in sources])
        on_host.copied = self._copied(on_host.pieces, sources, to_host=True)
        return on_host

    def back(self, on_host: OnHost) -> list[Tensor]:
        """Starts copies to new memory of the device. After them, the memory may be used."""
        sizes = [sum(piece.numel() for piece in pieces) for pieces in on_host.pieces]
        there = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        on_host.copied = self._copied(on_host.pieces, there, to_host=False)
        return there

    def _copied(self, hosts: Sequence[list[Tensor]], there: Sequence[Tensor], to_host: bool) -> torch.Event | None:
        parts = [
            [tensor] if len(pieces) == 1 else tensor.split([piece.numel() for piece in pieces])
            for pieces, tensor in zip(hosts, there, strict=True)
        ]
        if not self._is_beside:
            _copy(hosts, parts, to_host)
            return None
        # The rank's stream has made the sources, and has ended with what had the targets' memory before.
        stream = self._streams.get(to_host) or self._streams.setdefault(to_host, torch.Stream(self.device))
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            _copy(hosts, parts, to_host)
        return stream.record_event()

    def wait(self, on_host: OnHost) -> None:
        """Lets the device's current stream wait for the last copies."""
        if on_host.copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(on_host.copied)

    def wait_for_all(self) -> None:
        """Lets the device's current stream wait for all copies, whose memory may then be freed."""
        for stream in self._streams.values():
            torch.accelerator.current_stream(self.device).wait_stream(stream)

    def reuse(self, on_host: OnHost) -> None:
        """Takes pages back. The device's current stream has waited for their last copies."""
        for page in on_host.pages:
            self._unused.setdefault(page.numel(), []).append(page)

    def _laid_out(self, sizes: Sequence[int]) -> OnHost:
        """Takes memory of the host for so many bytes each, one behind the other."""
        on_host, left = OnHost([], []), sum(sizes)
        place = end = 0
        for size in sizes:
            pieces = list[Tensor]()
            while size:
                if place == end:
                    on_host.pages.append(self._page(left))
                    place, end = 0, on_host.pages[-1].numel()
                part = min(size, end - place)
                pieces.append(on_host.pages[-1][place : place + part])
                place, size, left = place + part, size - part, left - part
            on_host.pieces.append(pieces)
        return on_host

    def _page(self, least: int) -> Tensor:
        size = min(self.page, 1 << (least - 1).bit_length())
        unused = self._unused.get(size)
        return unused.pop() if unused else torch.empty(size, dtype=torch.uint8, pin_memory=self._is_beside)


def _copy(hosts: Sequence[Sequence[Tensor]], there: Sequence[Sequence[Tensor]], to_host: bool) -> None:
    for pieces, parts in zip(hosts, there, strict=True):
        for piece, part in zip(pieces, parts, strict=True):
            target, source = (piece, part) if to_host else (part, piece)
            target.copy_(source, non_blocking=True)
