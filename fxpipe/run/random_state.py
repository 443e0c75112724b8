"""Random state: of all generators that a program draws from by habit, as plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from fxpipe.seeds import seed_python, seed_torch
from fxpipe.torch_compat import bytes_of


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators (the CPU's and this rank's GPU's), Python's, and NumPy's where it is there."""
    state: dict[str, Any] = {"torch": bytes_of(torch.get_rng_state()), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = bytes_of(torch.cuda.get_rng_state(device))
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, key.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets the generators that there are, and were saved."""
    torch.set_rng_state(_tensor(state["torch"]))
    random.setstate(state["python"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed_all(seed: int, device: torch.device) -> None:
    """The same generators from a seed of 63 bits, for a rank whose state nobody has saved."""
    seed_torch(seed, device)
    seed_python(seed)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
