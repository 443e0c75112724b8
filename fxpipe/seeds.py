"""Seeds: random numbers that depend neither on the schedule nor on the placement."""

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
    """The seed of a stage's forward of a micro-batch."""
    return seed_from(struct.pack("<5Q", base % 2**64, step, stage, microbatch, replica))


def seed_from(key: bytes) -> int:
    """63 bits of the BLAKE2 hash of ``key``."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_python(seed: int) -> None:
    """Seeds Python's ``random`` and, if NumPy is imported, NumPy's global generator, from the lowest 32 bits. A
    ``torch.utils.data.DataLoader`` seeds both in its workers, too."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, python: bool = False) -> Iterator[None]:
    """Seeds torch's generators with ``seed`` inside the context, and restores them afterwards. ``python``: includes
    Python's ``random`` and NumPy's global generator."""
    # fork_rng always saves the CPU's generator.
    gpus = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(gpus, device_type=device.type), random_apart() if python else contextlib.nullcontext():
        seed_torch(seed, device)
        if python:
            seed_python(seed)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds the CPU's and the device's generator; ``torch.manual_seed`` would also seed all other GPUs'."""
    for generator in generators_of([device]).values():
        generator.manual_seed(seed)


class RandomState:
    """The state of the global generators: torch's of the CPU and of some GPUs, Python's ``random`` and, if imported,
    NumPy's. ``numbers``: the states as plain data."""

    def __init__(self, devices: Iterable[torch.device] = (), numbers: dict[str, Any] | None = None) -> None:
        self._generators = generators_of(devices)
        self.numbers = self._taken() if numbers is None else numbers

    def _taken(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {name: bytes_of(each.get_state()) for name, each in self._generators.items()}
        numbers["python"] = random.getstate()
        if numpy := sys.modules.get("numpy"):
            # Plain data, since checkpoints save the state without pickle.
            kind, key, *rest = numpy.random.get_state()
            numbers["numpy"] = (kind, key.tolist(), *rest)
        return numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and self.numbers == other.numbers

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Restores each existing generator whose state is in ``numbers``."""
        random.setstate(self.numbers["python"])
        for name in self._generators.keys() & self.numbers:
            self._generators[name].set_state(torch.frombuffer(bytearray(self.numbers[name]), dtype=torch.uint8))
        if "numpy" in self.numbers and (numpy := sys.modules.get("numpy")):
            numpy.random.set_state(self.numbers["numpy"])

    def rewind(self) -> bool:
        """Restores the generators if their state has changed; returns whether it had."""
        if moved := self._taken() != self.numbers:
            self.restore()
        return moved


@contextlib.contextmanager
def random_apart() -> Iterator[None]:
    """Restores the CPU's, Python's and NumPy's generators after the context; the GPUs' generators are not restored."""
    state = RandomState()
    try:
        yield
    finally:
        state.restore()
