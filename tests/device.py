"""Where models, batches and ranks of the suite are: on ``FXPIPE_DEVICE``, "cpu" or "cuda". Imported before torch.

``cuda`` is real where torch has CUDA, and simulated (tests/simulated_gpu) under a CPU build of torch.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("FXPIPE_DEVICE", "cpu")

if DEVICE == "cuda":
    from tests.simulated_gpu import build

    if not build.torch_has_cuda():
        from tests import simulated_gpu

        assert simulated_gpu.is_active(), "torch was imported before tests.device"

import torch  # noqa: E402


def place(rank: int = 0) -> None:
    """What this process makes without naming a device is made on the one of that rank of this node."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")


def visible() -> dict[str, str]:
    """The environment of a worker: none of its code shall find a GPU that the suite does not run on."""
    return {} if DEVICE == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
