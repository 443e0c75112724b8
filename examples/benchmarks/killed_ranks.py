"""The processes of a run that is killed and started again. Each reports through a pipe of its own."""

import multiprocessing
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Ranks:
    """``work(rank, report, *args)`` in ``count`` new processes, joined as under torchrun. ``report`` is the end of a
    pipe that the process sends to; ``reports`` has the other ends, by rank."""

    def __init__(self, count: int, work: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fxpipe.run.saving", "fxpipe.compiler", "fxpipe.trace.symbolic.tracer"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.reports, ends = zip(*(context.Pipe(duplex=False) for _ in range(count)), strict=True)
        self._processes = [
            context.Process(target=_join_and_work, args=(rank, count, port, work, end, *args), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process, end in zip(self._processes, ends, strict=True):
            process.start()
            end.close()

    def kill(self, ranks: Iterable[int]) -> None:
        """Sends SIGKILL to these ranks, and waits for none."""
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGKILL)

    def end(self) -> None:
        """Ends all ranks, and waits for them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _join_and_work(rank: int, count: int, port: int, work: Callable[..., None], report: Any, *args: object) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    work(rank, report, *args)
