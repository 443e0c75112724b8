"""What the device has found: races, faults of lifetime, waits of the host, each with the place in the program."""

from __future__ import annotations

import atexit
import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tests.simulated_gpu import _device, clock

FAULTS = ("race", "lifetime")
OWN = ("tests.simulated_gpu.clock", "tests.simulated_gpu.cuda", "tests.simulated_gpu.nccl", __name__)
FRAMES = 6
ERROR = 2  # the debug mode


class Report(NamedTuple):
    """Something that was found; ``where`` holds the innermost frames that are not torch's."""

    kind: str
    text: str
    where: str


reports: list[Report] = []
_debug_mode = 0


@contextlib.contextmanager
def watched() -> Iterator[list[Report]]:
    """What its block found, there when the block is over; ``reports`` is without it."""
    start = len(reports)
    found: list[Report] = []
    try:
        yield found
    finally:
        found += reports[start:]
        del reports[start:]


def faults(found: Sequence[Report] = reports) -> list[Report]:
    return [report for report in found if report.kind in FAULTS]


def summary(found: Sequence[Report] = reports) -> str:
    """Each report with its number, the most frequent first."""
    counted = Counter(found).most_common()
    return "\n".join(f"{count:5} {kind:8} {text}\n        {where}" for (kind, text, where), count in counted)


def reset() -> None:
    """As when the process began, but for the clocks, which go on."""
    reports.clear()
    clock.trace(False)
    clock.fix({})
    clock.costs(**clock.DEFAULTS)
    set_debug_mode(0)


def set_debug_mode(mode: int) -> None:
    """``torch.cuda.set_sync_debug_mode``: waits of the host warn, or raise."""
    global _debug_mode
    _debug_mode = mode


def debug_mode() -> int:
    return _debug_mode


def _take(kind: str, text: str) -> None:
    where = _place()
    reports.append(Report(kind, text, where))
    if kind == "sync" and _debug_mode and not text.startswith(("synchronize", "barrier")):
        if _debug_mode == ERROR:
            raise RuntimeError(f"called a synchronizing CUDA operation: {text} at {where}")
        warnings.warn(f"called a synchronizing CUDA operation: {text}", stacklevel=2)


def _place() -> str:
    frame, places = sys._getframe(), list[str]()
    while frame is not None and len(places) < FRAMES:
        module = frame.f_globals.get("__name__", "")
        if module not in OWN and module.partition(".")[0] != "torch":
            places.append(f"{frame.f_code.co_filename.split('site-packages/')[-1]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places)


@atexit.register
def end() -> None:
    """No thread needs Python any more: for an interpreter that ends."""
    _device.end([index for index in range(_device.device_count()) if torch.accelerator.memory_reserved(index)])


_device.report_to(_take)
