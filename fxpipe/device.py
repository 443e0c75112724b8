"""Device: where this process computes. What torch offers for one kind of accelerator alone is named here, and in no
other file."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch


@functools.cache
def kind() -> str:
    """The type of the devices of this machine that ranks compute on: "cuda", "xpu", …, or "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # Metal has neither float64, of which sums of losses are, nor a backend of torch.distributed.
    return "cpu" if found is None or found.type == "mps" else found.type


def current() -> torch.device:
    """The device that this process computes on, with its number; the CPU has none."""
    return torch.device(kind(), torch.accelerator.current_device_index()) if kind() != "cpu" else torch.device("cpu")


def use(device: torch.device) -> None:
    """Makes it the one that this thread computes on; a new thread begins with the first."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


@functools.cache
def kinds() -> tuple[str, ...]:
    """The types of device that this process has."""
    return tuple(dict.fromkeys(["cpu", kind()]))


def is_accelerator(device: torch.device) -> bool:
    """Whether work on it runs beside the host, on streams."""
    return device.type == kind() != "cpu"


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Those that torch draws from by habit: the CPU's, and those of the accelerators among ``devices``."""
    generators = [torch.default_generator]
    for device in filter(is_accelerator, devices):
        module = torch.get_device_module(device)
        module.init()  # which makes them
        generators.append(module.default_generators[current().index if device.index is None else device.index])
    return generators


# --- of CUDA alone

ATTENTIONS: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {
        "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
        "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
        "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    }
)
"""Which kernels of attention may be chosen, by the call that asks."""
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment of a process that is to see no accelerator."""


# --- names: ranks compare, send and save what names devices, and each has another one


def shared_name(device: torch.device) -> str:
    """What a device is called where other ranks read it: this process's own one has no number."""
    return device.type if device == current() else str(device)


def by_shared_name(name: str) -> torch.device:
    """The device that another rank calls so: its own one is this process's."""
    own = current()
    return own if name == own.type else torch.device(name)


def with_shared_names(text: str) -> str:
    """The text of a program in which devices are called so, also by a number alone: ``arange(8, device=1)``."""
    own = current()
    return re.sub(rf"\b({own}|(?<=device: ){own.index})\b", own.type, text)
