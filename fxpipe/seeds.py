"""Random numbers that depend on no schedule and no placement."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator

import torch


def seed_of(base: int, step: int, stage: int, microbatch: int, replica: int) -> int:
    """The seed of one stage's forward of one micro-batch."""
    return seed_from(struct.pack("<5Q", base % 2**64, step, stage, microbatch, replica))


def seed_from(key: bytes) -> int:
    """The first 63 bits of a BLAKE2 hash."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from ``seed`` inside; outside, the generators are as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        seed_torch(seed, device)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """The CPU's generator and the device's; ``torch.manual_seed`` would seed the GPUs of others as well."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
