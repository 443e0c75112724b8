"""A rank that is killed mid-training: every other one ends with an error at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe

SECONDS = 60.0


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x))).mean()


def train(rank: int, victim: int, store: Path, told: Connection) -> None:
    """Two steps; the victim dies between them. The others tell what the second came to, and after how long."""
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=4)
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Chain(), topology, microbatches=4)
    forward_backward(torch.ones(8, 8))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        forward_backward(torch.ones(8, 8))
    except fxpipe.RunError as error:
        told.send((str(error), time.monotonic() - start))


@pytest.mark.parametrize("victim", [0, 3])
def test_the_other_ranks_end_with_an_error_at_once(tmp_path: Path, victim: int) -> None:
    context = multiprocessing.get_context("spawn")
    ends, workers = [], []
    for rank in range(4):
        end, told = context.Pipe(duplex=False)
        worker = context.Process(target=train, args=(rank, victim, tmp_path / "store", told))
        worker.start()
        told.close()
        ends.append(end)
        workers.append(worker)
    try:
        deadline = time.monotonic() + SECONDS
        for rank, end in enumerate(ends):
            assert wait([end], deadline - time.monotonic()), f"rank {rank} hangs"
            if rank != victim:
                text, seconds = end.recv()
                assert "another rank failed" in text
                assert seconds < 10
        for worker in workers:
            worker.join(deadline - time.monotonic())
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL if r == victim else 0 for r in range(4)]
    finally:
        for worker in workers:
            worker.kill()
