"""Random numbers that depend on no schedule and no placement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterator

import torch


def seed_of(base: int, step: int, stage: int, microbatch: int, replica: int) -> int:
    """The seed of one stage's forward of one micro-batch."""
    return seed_from(struct.pack("<5Q", base % 2**64, step, stage, microbatch, replica))


def seed_from(key: bytes) -> int:
    """The first 63 bits of a BLAKE2 hash."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_python(seed: int) -> None:
    """Seeds the generators that Python code draws from by habit: ``random``'s, and NumPy's global one where it is
    imported, from the lowest 32 bits. A ``torch.utils.data.DataLoader`` seeds both in its workers, too."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, python: bool = False) -> Iterator[None]:
    """Random numbers from ``seed`` inside; outside, the generators are as they were. ``python``: ``random``'s and
    NumPy's global one, too."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), _python_apart() if python else contextlib.nullcontext():
        seed_torch(seed, device)
        if python:
            seed_python(seed)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """The CPU's generator and the device's; ``torch.manual_seed`` would seed the GPUs of others as well."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def _python_apart() -> Iterator[None]:
    numpy, python = sys.modules.get("numpy"), random.getstate()
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)
