"""Device: the device of this process. This file wraps torch's functions that differ between accelerators; no other file
names CUDA."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.torch_compat.operators import COPY_ALL, function_modes


@functools.cache
def kinds() -> tuple[str, ...]:
    """The types of device that this process can compute on: "cpu", and "cuda", "xpu", … if an accelerator exists."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Metal lacks float64, in which losses are summed, and a backend of torch.distributed.
    return ("cpu",) if accelerator is None or accelerator.type == "mps" else ("cpu", accelerator.type)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that this process has had so far: torch's tensors on an accelerator, or resident memory on the
    CPU."""
    if is_accelerator(device):
        return int(torch.accelerator.max_memory_allocated(device))
    import resource  # not on Windows

    kibibyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kibibyte


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def allocated(device: torch.device) -> int:
    """The bytes that tensors of this process have on an accelerator now, by the host's order of work."""
    return int(torch.get_device_module(device).memory_allocated(device))


def default_device() -> str:
    """The name of ``torch.get_default_device()``, with a fast path: a default other than CPU is a function mode."""
    return shared_name(torch.get_default_device()) if function_modes() else "cpu"


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


Layouts = tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], ...]
"""The types, shapes and strides of tensors whose elements fill their memory."""
_WIDEST = 16
"""The bytes of an element of the widest type. The host aligns each tensor to them."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(slots=True)
class OnHost:
    """Memory of the host for tensors of the device.

    Args:
        layouts: of the tensors.
        pages: the memory.
        pieces: its parts, in order. A tensor has one part of its own type and shape, or one in each of several pages.
        cuts: for the index of a tensor that is in several pages, the elements of each part.
        copied: the event behind the last copy; None where the host itself copies.
    """

    layouts: Layouts
    pages: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    copied: torch.Event | None = None

    def parts(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts of tensors of these layouts, one for each of ``pieces``."""
        if not self.cuts:
            return tensors
        parts = [torch.split(_flat(t), self.cuts[i]) if i in self.cuts else (t,) for i, t in enumerate(tensors)]
        return [part for of_tensor in parts for part in of_tensor]


class HostCopies:
    """Copies between a device and the host's pinned memory, on a stream of their own each way.

    The host waits for no copy. On the CPU they are plain copies to other memory, which save nothing.

    Pinned memory is taken in pages, and pages are used again: there are never more than were in use at once. A page has
    ``page`` bytes; the last of a copy has the power of two that is enough, which is what torch would take for it.
    Pieces of pages are kept for tensors of the same layouts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._is_beside = device, is_accelerator(device)
        self._unused: dict[Layouts, list[OnHost]] = {}  # memory for tensors of these layouts
        self._pages: dict[int, list[Tensor]] = {}  # bytes → unused pages
        self._streams: dict[bool, torch.Stream] = {}  # whether to the host → stream
        self.least = 2**16 if self._is_beside else 1
        """The fewest bytes of a tensor that are worth a copy."""
        self.page = 2**25

    def out(self, sources: Sequence[Tensor], mark: Callable[[], None] | None = None) -> OnHost:
        """Starts copies of such tensors to the host. After them, the memory of the sources may be freed. ``mark``:
        called before and after the copies, on their stream."""
        layouts = tuple([(source.dtype, source.shape, source.stride()) for source in sources])
        unused = self._unused.get(layouts)
        on_host = unused.pop() if unused else self._laid_out(layouts)
        with self._beside(on_host, True, mark):
            if sources:
                COPY_ALL(on_host.pieces, on_host.parts(sources), non_blocking=True)
        return on_host

    def back(self, on_host: OnHost, mark: Callable[[], None] | None = None) -> list[Tensor]:
        """Starts copies to new memory of the device. After them, the memory may be used. ``mark`` as in ``out``."""
        there = [
            torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
            for dtype, shape, stride in on_host.layouts
        ]
        with self._beside(on_host, False, mark):
            if there:
                COPY_ALL(on_host.parts(there), on_host.pieces, non_blocking=True)
        return there

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
        self._unused.setdefault(on_host.layouts, []).append(on_host)

    def _laid_out(self, layouts: Layouts) -> OnHost:
        """Takes memory of the host for such tensors, one behind the other."""
        on_host, used = OnHost(layouts), [shape.numel() * dtype.itemsize for dtype, shape, _ in layouts]
        sizes = [-(-count // _WIDEST) * _WIDEST for count in used]
        left, begin, end = sum(sizes), 0, 0
        for index, ((dtype, shape, stride), size) in enumerate(zip(layouts, sizes, strict=True)):
            parts = list[Tensor]()
            while size:
                if begin == end:
                    page = self._page(left)
                    on_host.pages.append(page)
                    begin, end = 0, page.nbytes
                part = min(size, end - begin)
                parts.append(page[begin : begin + min(part, used[index])].view(dtype))
                begin, size, left, used[index] = begin + part, size - part, left - part, used[index] - part
            if len(parts) == 1:
                parts = [parts[0].as_strided(shape, stride)]
            else:
                on_host.cuts[index] = [part.numel() for part in parts]
            on_host.pieces += parts
        return on_host

    def _page(self, least: int) -> Tensor:
        size = min(self.page, 1 << (least - 1).bit_length())
        while not self._pages.get(size) and self._unused:
            unused = self._unused.pop(next(iter(self._unused)))  # the layouts that came first
            for page in (page for on_host in unused for page in on_host.pages):
                self._pages.setdefault(page.nbytes, []).append(page)
        pages = self._pages.get(size)
        return pages.pop() if pages else torch.empty(size, dtype=torch.uint8, pin_memory=self._is_beside)
