"""Worker processes on simulated GPUs, as tests/pool.py has them on the CPU, one device for each rank.

``gpus.run(fn, *args, ranks=2)`` calls ``fn(*args)`` in that many processes, whose current device is that of their rank,
and fails if the device has found a race or a fault of lifetime that no ``simulated_gpu.watched()`` has taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import pytest
import torch

from tests import simulated_gpu
from tests.pool import SECONDS, Outcome, Pool, preloads
from tests.simulated_gpu import build

_server = forkserver.ForkServer()  # beside Python's own, whose processes have no simulated device


class Gpus(Pool):
    def __init__(self) -> None:
        super().__init__(GpuContext())

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = SECONDS) -> list[Any]:
        return super().run(fn, *args, ranks=ranks, seconds=seconds)

    def outcomes(self, fn: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = SECONDS) -> list[Outcome]:
        return super().outcomes(_checked, fn, *args, ranks=ranks, seconds=seconds)


class GpuProcess(context.ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> popen_forkserver.Popen:
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            return popen_forkserver.Popen(process)


class GpuContext(context.ForkServerContext):
    """Processes forked from a server that has imported the simulated device before torch."""

    Process = GpuProcess

    def __init__(self) -> None:
        _server.set_forkserver_preload(["tests.simulated_gpu", *preloads()])
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def require() -> None:
    """Skips where the simulated device cannot be built; fails there with FXPIPE_GPU_REQUIRED=1, as in ``.ci/run``."""
    if reason := build.reason():
        (pytest.fail if os.environ.get("FXPIPE_GPU_REQUIRED") == "1" else pytest.skip)(reason)


def _checked(fn: Callable[..., Any], *args: Any) -> Any:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_default_device(None)  # where FXPIPE_DEVICE has set one
    torch.cuda.synchronize()  # nothing of an earlier call is under way
    simulated_gpu.reset()
    result = fn(*args)
    if faults := simulated_gpu.faults():
        raise AssertionError(f"the simulated GPU reports\n{simulated_gpu.summary(faults)}")
    return result
