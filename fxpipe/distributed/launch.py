"""``launch``: a function in new local processes, which end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxpipe.distributed.processes import init
from fxpipe.distributed.stores import LOOPBACK, local_store, loopback_interface
from fxpipe.distributed.watchdog import end_with
from fxpipe.errors import RunError, TopologyError
from fxpipe.kinds import is_whole, shown

T = TypeVar("T")


# Seconds a launched process may take to exit: by itself after its result, and after it was told to.
_EXIT_SECONDS = 30.0


_END_SECONDS = 5.0


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
    task = _pickled_task(fn, args)
    # The store lives here, as torchrun's does: nobody can take its port, and no rank's end takes it away.
    store, port = local_store()
    workers = [_Worker(rank, task) for rank in range(nproc)]
    try:
        for worker in workers:
            with _environment(_variables(worker.rank, nproc, port)):
                worker.start()
        results: list[T] = _results(workers)
        _join_all(workers, _EXIT_SECONDS)
    finally:
        _end(workers)
        del store  # until here it must live
    return results


@dataclass(frozen=True)
class _Returned:
    result: Any


@dataclass(frozen=True)
class _Failed:
    # By the machine's clock, in seconds: one failure brings others down, and the first is the cause.
    at: float
    reason: str


class _Worker:
    """One launched process and the pipe that brings its outcome."""

    def __init__(self, rank: int, task: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.receiver, self._sender = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(target=_work, args=(self._sender, task), name=f"rank {rank}")

    def start(self) -> None:
        self.process.start()
        # The process holds the only sending end now, so that its death is the end of the pipe.
        self._sender.close()

    def outcome(self) -> _Returned | _Failed:
        """What the process sent, once the pipe is ready: pickled here by hand, see ``_work``."""
        try:
            outcome: _Returned | _Failed = pickle.loads(self.receiver.recv_bytes())
        except EOFError:
            self.process.join(_END_SECONDS)
            return _Failed(float("-inf"), f"ended without a result, {_exit(self.process.exitcode)}")
        return outcome

    def started(self) -> bool:
        return self.process.pid is not None

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


def _work(sender: Connection, task: bytes) -> None:
    """What a launched process does."""
    # Ctrl-C reaches the launching process as well, and that one ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome: _Returned | _Failed
    try:
        fn, args = pickle.loads(task)
        init()
        result = fn(*args)
        if dist.is_initialized():  # fn may have done so itself
            dist.destroy_process_group()
        # Pickled here, for Connection.send would pass tensors as handles that die with this process.
        message = pickle.dumps(_Returned(result))
    except BaseException as error:  # SystemExit, too, is an end without a result
        end_with(error)
        outcome = _Failed(time.time(), f"failed:\n{traceback.format_exc()}")
        sender.send_bytes(pickle.dumps(outcome))
        sys.exit(1)
    sender.send_bytes(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _pickled_task(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to other processes: "
            f"{error}; define the function at the top of a module, and pass values that pickle"
        ) from error


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
    interface = loopback_interface()
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface  # nobody but these processes is to reach them
    if torch.cuda.device_count() < nproc:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets ``variables`` while a process starts: OpenMP reads its own before that process could set them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _results(workers: list[_Worker]) -> list[Any]:
    """All results by rank, or the first failure as a RunError."""
    results: dict[int, Any] = {}
    pending = list(workers)
    while pending:
        ready = wait([worker.receiver for worker in pending])
        outcomes = {worker.rank: worker.outcome() for worker in pending if worker.receiver in ready}
        failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, _Failed)}
        if failures:
            rank = min(failures, key=lambda rank: failures[rank].at)
            raise RunError(f"rank {rank} of {len(workers)} {failures[rank].reason}")
        results |= {rank: outcome.result for rank, outcome in outcomes.items() if isinstance(outcome, _Returned)}
        pending = [worker for worker in pending if worker.rank not in outcomes]
    return [results[worker.rank] for worker in workers]


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"with exit status {code}"


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
        worker.close()
