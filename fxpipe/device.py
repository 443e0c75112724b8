"""Device: the device of this process. This file wraps torch's functions that differ between accelerators; no other file
names CUDA."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
