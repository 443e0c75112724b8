"""Random numbers that depend on no schedule and no placement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxpipe.device import generators_of, is_accelerator
from fxpipe.torch_compat import bytes_of


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
    # fork_rng saves the CPU's generator in any case.
    gpus = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(gpus, device_type=device.type), random_apart() if python else contextlib.nullcontext():
        seed_torch(seed, device)
        if python:
            seed_python(seed)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """The CPU's generator and the device's; ``torch.manual_seed`` would seed the GPUs of others as well."""
    for generator in generators_of([device]).values():
        generator.manual_seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds all of these generators, for a rank that has no saved state."""
    seed_torch(seed, device)
    seed_python(seed)


class RandomState:
    """Where the generators stand that programs draw from by habit: torch's of the CPU and of some GPUs, Python's, and
    NumPy's where it is imported. ``numbers``: as plain data."""

    def __init__(self, devices: Iterable[torch.device] = (), numbers: dict[str, Any] | None = None) -> None:
        self._generators = generators_of(devices)
        self.numbers = self._taken() if numbers is None else numbers

    def _taken(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {name: bytes_of(each.get_state()) for name, each in self._generators.items()}
        numbers["python"] = random.getstate()
        if numpy := sys.modules.get("numpy"):
            # As plain data: the state is saved in checkpoints, without pickle.
            kind, key, *rest = numpy.random.get_state()
            numbers["numpy"] = (kind, key.tolist(), *rest)
        return numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self.numbers == other.numbers

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Sets the generators that there are, and were taken."""
        random.setstate(self.numbers["python"])
        for name in self._generators.keys() & self.numbers:
            self._generators[name].set_state(_tensor(self.numbers[name]))
        if "numpy" in self.numbers and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(self.numbers["numpy"])

    def rewind(self) -> bool:
        """Puts the generators back to where they stood; whether they had moved."""
        if moved := self._taken() != self.numbers:
            self.restore()
        return moved


@contextlib.contextmanager
def random_apart() -> Iterator[None]:
    """Outside, the generators are as they were; not those of GPUs."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
