"""Hardware: a device's figures, from which costs in seconds are computed."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxpipe.device import current, is_accelerator
from fxpipe.errors import RunError, nearest
from fxpipe.small_file import read_small, write_whole
from fxpipe.validation import is_number, is_text, shown

_MOST_BYTES = 10_000_000
_MOST = 1e100
"""The largest value of a figure: sums and products of figures stay finite."""


class FigureMissing(RunError):
    """A plan needs a figure that the hardware lacks."""


@dataclass(frozen=True)
class Hardware:
    """A rank's device and its links, in operations, bytes and seconds: ``fxpipe.preview(..., hardware="h100")``.

    ``Hardware.named`` has the data sheets of common GPUs, ``Hardware.measured`` measures this process's device. A plan
    may not exceed ``memory``; None is no limit. Other figures that are None are ``REFERENCE``'s, with an exception:
    beside a ``link``, a ``link_between`` of None is not known, and raises an error at its first use.

    Raises:
        RunError: a figure is no number, or below 0, or equal to 0 (only ``launch`` and ``latency`` may be 0).
    """

    flops: float | None = None
    """Operations per second of matrix products in types of 4 bytes and more."""
    flops_16: float | None = None
    """Operations per second of matrix products in types of 2 bytes."""
    bandwidth: float | None = None
    """Bytes per second of the device's memory."""
    link: float | None = None
    """Bytes per second between two ranks of a node, one way."""
    link_between: float | None = None
    """Bytes per second between nodes, one way, for each rank."""
    memory: float | None = None
    """The most bytes that a plan may keep on a rank: the device's memory, or less of it."""
    host_link: float | None = None
    """Bytes per second between the device and the host's memory, one way, while all ranks of a node copy."""
    host_memory: float | None = None
    """Bytes of the host's memory on a node, which the ranks of the node share."""
    reached: float = 1.0
    """The fraction of ``flops``, ``flops_16`` and ``bandwidth`` that programs reach: of a data sheet's about a half."""
    launch: float = 4e-6
    """Seconds that the smallest operation takes."""
    latency: float = 20e-6
    """Seconds that the smallest message takes."""

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            value, may_be_zero = getattr(self, name), name in ("launch", "latency")
            if value is None and getattr(Hardware, name) is None:
                continue
            if not (is_number(value) and 0 <= float(value) <= _MOST and (value or may_be_zero)):
                raise RunError(f"Hardware({name}={shown(value)}) is no number above 0, {unit}")
            object.__setattr__(self, name, float(value))  # json writes no numpy numbers
        if self.reached > 1:
            raise RunError(f"Hardware(reached={self.reached:g}) is a part of the peak, at most 1; write 0.5 for a half")

    @staticmethod
    def named(name: str, **figures: float | None) -> Hardware:
        """A GPU's hardware by the GPU's name: the data sheet's figures for dense products, with ``reached`` at a half.

        ``figures`` replace the sheet's: ``Hardware.named("h100", memory=60e9)``. ``memory=None`` is no limit.

        ``flops`` is the figure of TF32 if the GPU supports TF32, which torch uses after
        ``torch.set_float32_matmul_precision("high")``. ``link_between`` is the figure of the maker's node of eight GPUs
        (DGX), and None for a GPU without such a node.

        Raises:
            RunError: the name is unknown, or an argument is no figure.
        """
        _check_names(figures, "Hardware.named(...)")
        key = re.sub("[-_ ]", "", name.lower()) if is_text(name) else ""
        if key not in _SHEETS:
            raise RunError(
                f"hardware is {shown(name)}; write one of {', '.join(_SHEETS)}, or fxpipe.Hardware(flops=..., "
                "flops_16=..., bandwidth=..., link=..., link_between=...)"
            )
        # A sheet's figures are in the order of the fields.
        columns = zip(_UNITS, _SHEETS[key], (1e12, 1e12, 1e9, 1e9, 1e9, 1e9, 1e9), strict=False)
        sheet: dict[str, Any] = {column: unit * figure for column, figure, unit in columns if figure is not None}
        return Hardware(**{"reached": 0.5} | sheet | figures)

    @staticmethod
    def measured(path: str | os.PathLike[str], **figures: float) -> Hardware:
        """The hardware of this process's device. The first call measures for some seconds and writes a file; later
        calls read the file.

        The call measures products, memory and launches, on a GPU if the process has one. To measure links takes two
        processes: pass these, as in ``measured("here.json", link=450e9, link_between=50e9)``. Random state is kept.

        Raises:
            RunError: the file holds no figures, or was measured on another device; or an argument is no figure.
            OSError: the file cannot be read or written.
        """
        _check_names(figures, "Hardware.measured(...)")
        file, here = Path(path), name_of_this_device()
        if not file.exists():
            write_whole(file, json.dumps({DEVICE: here, **measure()}, indent=1) + "\n")
        stored = _figures_in(file)
        there = stored.pop(DEVICE, here)
        if there != here:
            raise RunError(
                f"{os.fspath(path)} was measured on {shown(there)}, and this is {here}; name another file, or write "
                "fxpipe.Hardware.read(path) for that one's figures"
            )
        return Hardware(**{**stored, **figures})

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Hardware:
        """The hardware of a JSON file: figure → number, as ``measured`` or ``python -m fxpipe doctor`` writes it.

        Raises:
            RunError: the file holds no figures.
            OSError: the file cannot be read.
        """
        figures = _figures_in(path)
        figures.pop(DEVICE, None)
        return Hardware(**figures)

    @staticmethod
    def of(given: Hardware | str | None) -> Hardware:
        """The hardware of the argument ``hardware=``; without a figure for None."""
        if given is None:
            return Hardware()
        return given if isinstance(given, Hardware) else Hardware.named(given)

    @property
    def missing(self) -> list[str]:
        """The speeds that are ``REFERENCE``'s, since they are not given."""
        # The reference's network may be faster than the user's links.
        names = SPEEDS if self.link is None else SPEEDS[:-1]
        return [name for name in names if getattr(self, name) is None]

    @property
    def has_speeds(self) -> bool:
        """Whether seconds are seconds of this device."""
        return len(self.missing) < len(SPEEDS)

    @property
    def completed(self) -> Hardware:
        """The hardware with ``REFERENCE``'s speeds for its missing speeds."""
        names = [*self.missing, *["host_link"] * (self.host_link is None)]
        return replace(self, **{name: getattr(REFERENCE, name) for name in names})

    @property
    def is_of_sheet(self) -> bool:
        """Whether the figures are a GPU's data sheet, but for the memory; ``source`` is then the GPU's name."""
        return self.source in _SHEETS

    @property
    def source(self) -> str:
        """The device whose speeds ``completed`` has, in words."""
        if not self.has_speeds:
            return f"an A100 ({'no hardware= given' if self == Hardware() else 'hardware= has no speeds'})"
        names = (name for name in _SHEETS if replace(self, memory=None) == Hardware.named(name, memory=None))
        name = next(names, "the hardware given")
        return f"{name} ({', '.join(self.missing)} of an A100)" if self.missing else name

    def figure(self, name: str, why: str) -> float:
        """Returns a figure. Raises FigureMissing if the figure is None; ``why`` names the computation that needs it."""
        value: float | None = getattr(self, name)
        if value is None:
            raise FigureMissing(
                f"hardware has no {name}, {_UNITS[name]}, which {why} needs; write Hardware({name}=...), or "
                f"Hardware.named(..., {name}=...)"
            )
        return value

    def peak(self, itemsize: int) -> float:
        """Operations per second of products in types of ``itemsize`` bytes."""
        small = itemsize <= 2
        return self.figure("flops_16" if small else "flops", f"a product in a type of {itemsize} bytes")

    def seconds(self, flops: float, moved: float, itemsize: int) -> float:
        """Seconds: max(operations / peak, bytes moved / bandwidth), the roofline model, and at least ``launch``."""
        # The slower of arithmetic and memory hides the faster.
        computing = flops / (self.reached * self.peak(itemsize)) if flops else 0.0
        return max(computing, moved / (self.reached * self.figure("bandwidth", "every operation")), self.launch)

    def wire(self, crosses: bool) -> float:
        """Bytes per second of a link. ``crosses``: whether the link connects two nodes."""
        if crosses:
            return self.figure("link_between", "a message between nodes")
        return self.figure("link", "a message between ranks")

    def copy(self, size: float) -> float:
        """Seconds that a copy of ``size`` bytes to the host takes, and a copy back."""
        return self.launch + size / self.figure("host_link", "a copy to the host") if size else 0.0

    def hop(self, size: float) -> float:
        """Seconds that a message of ``size`` bytes takes to another pipe rank of the node."""
        return self.latency + size / self.wire(crosses=False)


SPEEDS = "flops", "flops_16", "bandwidth", "link", "link_between"
"""The figures of which ``REFERENCE`` has a value for hardware that has none."""

_UNITS = {
    **dict.fromkeys(SPEEDS[:2], "operations a second"),
    **dict.fromkeys(SPEEDS[2:], "bytes a second"),
    "memory": "bytes",
    "host_link": "bytes a second",
    "host_memory": "bytes",
    "reached": "a part",
    **dict.fromkeys(("launch", "latency"), "seconds"),
}

REFERENCE = Hardware(flops=75e12, flops_16=150e12, bandwidth=1.2e12, link=20e9, link_between=20e9, host_link=20e9)
"""The speeds of hardware that gives none: figures that an NVIDIA A100 reaches in practice, and a 200 Gbit/s network.

A balance depends only on the figures' ratios: on other hardware with similar ratios, the cut is the same.
"""

_SHEETS: Mapping[str, tuple[float, float, float, float, float | None, float, float]] = {
    "v100": (15.7, 125, 900, 150, 6.25, 32, 16),
    "a100": (156, 312, 2039, 300, 25, 80, 32),
    "a10040gb": (156, 312, 1555, 300, 25, 40, 32),
    "h100": (494.5, 989, 3350, 450, 50, 80, 64),
    "h200": (494.5, 989, 4800, 450, 50, 141, 64),
    "b200": (1125, 2250, 8000, 900, 50, 180, 64),
    "l40s": (183, 362, 864, 32, None, 48, 32),
    "l4": (60.5, 121, 300, 32, None, 24, 32),
    "rtx4090": (82.6, 165.2, 1008, 32, None, 24, 32),
    "mi300x": (653.7, 1307.4, 5300, 448, 50, 192, 64),
}
"""Name → seven figures:

- two speeds in 10^12 dense operations a second: TF32 (V100: float32), and bfloat16 (V100: float16);
- three speeds in 10^9 bytes a second: memory, to neighbours one way (NVLink, Infinity Fabric; else PCIe), and the GPU's
  share of a node's network;
- 10^9 bytes of memory;
- 10^9 bytes a second over PCIe to the host, one way (16 lanes of PCIe 3: 16, 4: 32, 5: 64).

From the makers' data sheets: V100 SXM2, A100 SXM (80 and 40 GB), H100 SXM, H200 SXM, B200 (HGX),
L40S, L4, GeForce RTX 4090, Instinct MI300X. Networks: DGX-1 4 × 100 Gbit/s, DGX A100 8 × 200, DGX H100, H200, B200 and
MI300X's platform 8 × 400.
"""


def sheet_of(device: str) -> str | None:
    """The key of a device's data sheet, by the name that torch gives the device; None if there is no sheet."""
    words = re.findall("[a-z0-9]+", device.lower())
    names = {before + word for before in ["", *words] for word in words}
    known = [key for key in _SHEETS if key in names and names.isdisjoint(_OTHERS)]
    return max(known, key=len, default=None)


_OTHERS = "pcie", "nvl", "laptop"
"""Devices with other figures than the sheet that has their name."""

# --- files ---

DEVICE = "device"
"""The key of the measured device's name."""


def _figures_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a file's figures and, if the file has it, the device's name."""
    try:
        content: Any = json.loads(read_small(path, _MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{os.fspath(path)} is no JSON: {error}") from None
    content = content.get("hardware", content) if isinstance(content, dict) else content  # in the doctor's file
    if not isinstance(content, dict):
        raise RunError(f"{os.fspath(path)} holds {shown(content)}; it is a dict figure -> number")
    _check_names(content.keys() - {DEVICE}, os.fspath(path))
    return content


def _check_names(names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in _UNITS:
            raise RunError(f"{what} has {name!r}, which is no figure{nearest(name, _UNITS)}")


# --- measuring ---


def name_of_this_device() -> str:
    """The device's name, as files hold it: a GPU's name, or the processor with its number of threads."""
    if is_accelerator(device := current()):
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{platform.machine()} with {torch.get_num_threads()} threads"


ON_A_GPU, ON_A_CPU = (8192, 2**28), (512, 2**24)
"""The width of the matrices, and the elements that are copied."""


def measure() -> dict[str, float]:
    """Measures this process's device: the GPU, or else the CPU with torch's threads."""
    device = current()
    size, count = ON_A_GPU if is_accelerator(device) else ON_A_CPU
    figures = {}
    # Arithmetic bounds a large product, memory bounds a copy, and the launch bounds an addition to a single element.
    for name, dtype in (("flops", torch.float32), ("flops_16", torch.bfloat16)):
        numbers = torch.Generator(device).manual_seed(0)  # leaves the user's random state unchanged
        matrix, other = (torch.randn(size, size, device=device, generator=numbers).to(dtype) for _ in range(2))
        figures[name] = 2 * size**3 / _seconds_of(partial(torch.matmul, matrix, other))
    # A copy reads each byte once and writes it once.
    source, target = (torch.ones(count, device=device) for _ in range(2))
    figures["bandwidth"] = 2 * source.nbytes / _seconds_of(partial(target.copy_, source))
    figures["launch"] = _seconds_of(partial(target[:1].add_, 1.0))
    host = torch.empty(count, pin_memory=is_accelerator(device))
    figures["host_link"] = source.nbytes / _seconds_of(partial(host.copy_, source, non_blocking=True))
    figures["host_memory"] = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if is_accelerator(device):
        figures["memory"] = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    return figures


def _seconds_of(call: Callable[[], object]) -> float:
    """The median seconds of a call, behind warm-up calls; of so many calls at once that the clock does not count."""
    from torch.utils.benchmark import Timer  # its import takes long

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange().median)
