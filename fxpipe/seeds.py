"""Seeds: random numbers that depend neither on the schedule nor on the placement."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from fxpipe.device import bytes_of, generators_of, is_accelerator
from fxpipe.torch_compat import pytree


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


Generators = Mapping[str, Any]
"""Random generators of a model's own, by name: of Python's ``random.Random``, torch or NumPy."""
_NONE: Generators = MappingProxyType({})


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, python: bool = False, own: Generators = _NONE) -> Iterator[None]:
    """Seeds torch's generators with ``seed`` inside the context, and restores them afterwards. ``python``: includes
    Python's ``random``, NumPy's global generator, and the generators ``own``, each with a seed made of its name."""
    # fork_rng always saves the CPU's generator.
    gpus = [device] if is_accelerator(device) else []
    apart = random_apart(own) if python else contextlib.nullcontext()
    with torch.random.fork_rng(gpus, device_type=device.type), apart:
        seed_torch(seed, device)
        if python:
            seed_python(seed)
            for name, generator in own.items():
                _seed(generator, seed_from(f"{seed} {name}".encode()) % 2**32)
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds the CPU's and the device's generator; ``torch.manual_seed`` would also seed all other GPUs'."""
    for generator in generators_of([device]).values():
        generator.manual_seed(seed)


class RandomState:
    """The state of the global generators, torch's of the CPU and of some GPUs, Python's ``random`` and, if imported,
    NumPy's, and of the generators ``own``. ``numbers``: the states as plain data, by the generators' names."""

    def __init__(
        self, devices: Iterable[torch.device] = (), numbers: dict[str, Any] | None = None, own: Generators = _NONE
    ) -> None:
        self._generators: dict[str, Any] = {**generators_of(devices), "python": random, **own}
        if numpy := sys.modules.get("numpy"):
            self._generators["numpy"] = numpy.random
        taken = {name: state_of(each) for name, each in self._generators.items()} if numbers is None else numbers
        self.numbers = taken

    def moved(self) -> frozenset[str]:
        """The names of the generators whose state has changed."""
        return frozenset(name for name, each in self._generators.items() if state_of(each) != self.numbers[name])

    def restore(self) -> None:
        """Restores each existing generator whose state is in ``numbers``."""
        for name in self._generators.keys() & self.numbers:
            set_state(self._generators[name], self.numbers[name])

    def rewind(self) -> bool:
        """Restores the generators if their state has changed; returns whether it had."""
        if moved := self.moved():
            self.restore()
        return bool(moved)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator whose state can be read."""
    numpy = sys.modules.get("numpy")
    numpys = () if numpy is None else (numpy.random.RandomState, numpy.random.Generator)
    kind = type(value)
    return issubclass(kind, (random.Random, torch.Generator, *numpys)) and not issubclass(kind, random.SystemRandom)


# The modules ``random`` and ``numpy.random`` have the methods of the generators ``random.Random`` and ``RandomState``.


def state_of(generator: Any) -> Any:
    """A generator's state as plain data, since checkpoints save it without pickle."""
    if isinstance(generator, torch.Generator):
        return bytes_of(generator.get_state())
    if hasattr(generator, "getstate"):
        return generator.getstate()
    is_old = hasattr(generator, "get_state")  # NumPy's RandomState, which Generator superseded
    state = generator.get_state(legacy=False) if is_old else generator.bit_generator.state
    return pytree.tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, state)


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif hasattr(generator, "seed"):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


@contextlib.contextmanager
def random_apart(own: Generators = _NONE) -> Iterator[None]:
    """Restores the CPU's, Python's, NumPy's and the ``own`` generators after the context, but not the GPUs'."""
    state = RandomState(own=own)
    try:
        yield
    finally:
        state.restore()
