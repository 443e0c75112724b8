"""``launch``: a function in new local processes, which end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fxpipe.distributed.processes import TCPStore, init
from fxpipe.distributed.watchdog import end_with
from fxpipe.errors import RunError, TopologyError
from fxpipe.validation import is_whole, shown

T = TypeVar("T")


# Seconds a launched process may take to exit: by itself after its result, and after it was asked to.
_EXIT_SECONDS = 30.0


_END_SECONDS = 5.0

LOOPBACK = "127.0.0.1"


def launch(fn: Callable[..., T], nproc: int, *args: object) -> list[T]:
    """Runs ``fn(*args)`` in ``nproc`` new local processes, joined as under torchrun; results are by rank.

    Each process is spawned, has one thread (unless OMP_NUM_THREADS is set), calls ``init()`` and then ``fn``,
    and destroys the process group at the end. With fewer GPUs than processes all of them run on the CPU.
    ``fn``, its arguments and results are pickled; tensors travel by value. When ``launch`` returns or raises,
    none of the processes is left; when the calling process is killed, they end as well.

    Raises:
        TopologyError: ``nproc`` is below 1.
        RunError: ``fn`` cannot be pickled, or a process failed: with its rank and traceback, and without
            waiting for the others, which are ended.
    """
    if not callable(fn):
        raise RunError(f"fn is {shown(fn)}; it is a function, defined at the top of a module")
    if not is_whole(nproc) or nproc < 1:
        raise TopologyError(f"nproc is {shown(nproc)}; it is a whole number, 1 or more")
    try:
        task = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to other processes: "
            f"{error}; define the function at the top of a module, and pass values that pickle"
        ) from error
    # The store lives here, as torchrun's does: nobody can take its port, and no rank's end takes it away.
    store, port = local_store()
    workers = [_Worker(rank, task) for rank in range(nproc)]
    try:
        for worker in workers:
            # OpenMP reads its variables before the new process could set them.
            with mock.patch.dict(os.environ, _variables(worker.rank, nproc, port)):
                worker.start()
        results: list[T] = _results(workers)
        _join_all(workers, _EXIT_SECONDS)
    finally:
        _end(workers)
        del store  # until here it must live
    return results


class _Outcome(NamedTuple):
    """What ``fn`` returned, or why it failed and when: one failure brings others down, and the first is the cause."""

    result: Any = None
    reason: str = ""
    at: float = float("-inf")
    """By the machine's clock, in seconds."""


class _Worker:
    """One launched process and the pipe that brings its outcome."""

    def __init__(self, rank: int, task: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.receiver, self.sender = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(target=_work, args=(self.sender, task), name=f"rank {rank}")

    def start(self) -> None:
        self.process.start()
        # The process holds the only sending end now, so that its death is the end of the pipe.
        self.sender.close()

    def outcome(self) -> _Outcome:
        """What the process sent, once the pipe is ready: pickled here by hand, see ``_work``."""
        try:
            outcome: _Outcome = pickle.loads(self.receiver.recv_bytes())
        except EOFError:
            self.process.join(_END_SECONDS)
            code = self.process.exitcode
            end = f"with exit status {code}"
            if code is not None and code < 0:
                end = f"killed by signal {-code} ({signal.strsignal(-code)})"
            return _Outcome(reason=f"ended without a result, {end}")
        return outcome

    def started(self) -> bool:
        return self.process.pid is not None


def _work(sender: Connection, task: bytes) -> None:
    """What a launched process does."""
    # Ctrl-C reaches the launching process as well, and that one ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        fn, args = pickle.loads(task)
        init()
        result = fn(*args)
        if dist.is_initialized():  # fn may have done so itself
            dist.destroy_process_group()
        # Pickled here, for Connection.send would pass tensors as handles that die with this process.
        message = pickle.dumps(_Outcome(result))
    except BaseException as error:  # SystemExit, too, is an end without a result
        end_with(error)
        outcome = _Outcome(None, f"failed:\n{traceback.format_exc()}", time.time())
        sender.send_bytes(pickle.dumps(outcome))
        sys.exit(1)
    sender.send_bytes(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store runs already: rank 0 is not to start one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)  # of LOOPBACK
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface  # nobody but these processes is to reach them
    if torch.cuda.device_count() < nproc:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def _results(workers: list[_Worker]) -> list[Any]:
    """All results by rank, or the first failure as a RunError."""
    results: dict[int, Any] = {}
    while pending := [worker for worker in workers if worker.rank not in results]:
        ready = wait([worker.receiver for worker in pending])
        outcomes = {worker.rank: worker.outcome() for worker in pending if worker.receiver in ready}
        failures = [(outcome.at, rank, outcome.reason) for rank, outcome in outcomes.items() if outcome.reason]
        if failures:
            _, rank, reason = min(failures)
            raise RunError(f"rank {rank} of {len(workers)} {reason}")
        results |= {rank: outcome.result for rank, outcome in outcomes.items()}
    return [results[worker.rank] for worker in workers]


def _join_all(workers: list[_Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for worker in workers:
        if worker.started():
            worker.process.join(max(0.0, deadline - time.monotonic()))


def _end(workers: list[_Worker]) -> None:
    """Ends what still runs, by force if need be."""
    for stop in (SpawnProcess.terminate, SpawnProcess.kill):
        running = [worker for worker in workers if worker.started() and worker.process.is_alive()]
        for worker in running:
            stop(worker.process)
        _join_all(running, _END_SECONDS)
    for worker in workers:
        worker.receiver.close()
        worker.sender.close()


def local_store() -> tuple[Store, int]:
    """A store for processes of this machine alone, and its port; by itself a TCPStore listens on all interfaces."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store closes it
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port
