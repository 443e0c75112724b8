"""Where models, batches and ranks of the suite are: on ``FXPIPE_DEVICE``, "cpu" or "cuda". Imported before torch.

``cuda`` is real where torch has CUDA, and simulated (tests/simulated_gpu) under a CPU build of torch.
"""

from __future__ import annotations

import os
import pickle
from io import BytesIO
from typing import Any

DEVICE = os.environ.get("FXPIPE_DEVICE", "cpu")
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "cpu:gloo"

SIMULATED = False

if DEVICE == "cuda":
    os.environ.setdefault("FXPIPE_GPUS", "8")
    from tests import simulated_gpu
    from tests.simulated_gpu import build

    SIMULATED = simulated_gpu.is_active()
    assert SIMULATED or build.torch_has_cuda(), "torch was imported before tests.device"

import torch  # noqa: E402


class _Generator(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_Generator):
    """``torch.Generator``, by default of the default device, as tensors are: of another's, tensors cannot be drawn."""

    def __new__(cls, device: Any = DEVICE) -> Any:
        return torch._C.Generator(device)


def place(rank: int = 0) -> None:
    """What this thread makes without naming a device is made on the one of that rank of this node."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
        torch.Generator = Generator  # type: ignore[misc]


def settle() -> None:
    """Nothing is under way on the device any more, and nothing of what it has found is kept."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if SIMULATED:
        simulated_gpu.reset()


def check() -> None:
    """Fails if a simulated device has found a race or memory that was freed too early, of which none is kept."""
    if SIMULATED:
        faults = simulated_gpu.faults()
        simulated_gpu.reset()
        assert not faults, f"the simulated GPU reports\n{simulated_gpu.summary(faults)}"


def visible() -> dict[str, str]:
    """The environment of a worker: none of its code shall find a GPU that the suite does not run on."""
    return {} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}


def loads(data: bytes) -> Any:
    """What another process pickled, with its tensors on this process's device where they were on its own."""
    return _Unpickler(BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _load_storage if name == "_load_from_bytes" else super().find_class(module, name)


def _load_storage(data: bytes) -> Any:
    return torch.load(BytesIO(data), map_location=_here, weights_only=False)


def _here(storage: Any, location: str) -> Any:
    return storage if location == "cpu" else torch.serialization.default_restore_location(storage, DEVICE)
