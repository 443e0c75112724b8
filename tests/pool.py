"""A pool of worker processes: started once per session, since importing torch costs seconds, and joined anew as a
torch.distributed world for every call.

``pool.run(fn, *args, ranks=4)`` calls ``fn(*args)`` in that many processes, with torchrun's variables set, and returns
the results by rank. ``pool.outcomes`` returns what each rank came to, be it an error. Every wait is bounded: on a
timeout, or where a worker dies, all workers are killed, the next call starts new ones, and the test fails with the
stacks of all ranks. A test that is ended while it waits (its own limit, Ctrl-C) ends the workers, too: an answer that
they sent later would be taken for an answer of the next call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import device

SECONDS = 400.0  # for a call, once its workers have started; with what follows, less than a test's own limit
START_SECONDS = 100.0  # for a worker to import torch
SLOW_TO_IMPORT = {"tests.hf": "tests.preloaded_hf"}  # transformers: two seconds in each worker
RARELY = 10_000
"""Objects made until Python looks for garbage; 700 by default."""
_FOR_STACKS = 2.0
_FOR_THE_END = 5.0


@dataclass(frozen=True)
class Outcome:
    """What one rank came to: a result, or an error and its traceback."""

    rank: int
    ended_at: float
    """By the machine's clock: one failure brings others down, and the first is the cause."""
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""


class RankFailed(AssertionError):
    """A rank raised; with its traceback."""


class Lost(AssertionError):
    """Workers that did not answer in time, or died; with the stacks of all."""


class Pool:
    """Worker processes, started when they are first needed."""

    def __init__(self, context: ForkServerContext | None = None) -> None:
        self._workers: list[_Worker] = []
        self._context = context

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int = 4, seconds: float = SECONDS) -> list[Any]:
        """The results by rank; RankFailed with the first rank's traceback where one raised."""
        outcomes = self.outcomes(fn, *args, ranks=ranks, seconds=seconds)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            first = min(failed, key=lambda outcome: outcome.ended_at)
            raise RankFailed(f"rank {first.rank} of {ranks} failed:\n{first.traceback}") from first.error
        return [outcome.result for outcome in outcomes]

    def outcomes(self, fn: Callable[..., Any], *args: Any, ranks: int = 4, seconds: float = SECONDS) -> list[Outcome]:
        """What each rank came to, by rank. ``fn`` is defined at the top of a module."""
        try:
            self._start(ranks)
            workers = self._workers[:ranks]
            # A store, and so a world, of its own for each call: nothing of an earlier one can be met in it.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            deadline = time.monotonic() + seconds
            for worker in workers:
                worker.send((fn, args, _variables(worker.rank, ranks, store.port)))
            outcomes = self._answers(workers, deadline)
            for worker in workers:
                worker.send(None)  # all are done: leave the world
            self._answers(workers, deadline)
        except BaseException:
            self.close(seconds=0)
            raise
        return outcomes

    def close(self, seconds: float = _FOR_THE_END) -> None:
        """Ends every worker, by force after that many seconds."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker ends by itself
        for worker in self._workers:
            worker.end(seconds)
        self._workers.clear()

    def _start(self, ranks: int) -> None:
        if not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        context = self._context or forking()
        new = [_Worker(rank, context) for rank in range(len(self._workers), ranks)]
        self._workers += new
        self._answers(new, time.monotonic() + START_SECONDS)

    def _answers(self, workers: list[_Worker], deadline: float) -> list[Any]:
        """One answer of each worker; Lost where one has none in time, or dies."""
        answers: dict[int, Any] = {}
        waiting = list(workers)
        while waiting:
            ready = wait([worker.connection for worker in waiting], max(0.0, deadline - time.monotonic()))
            late = not ready
            for worker in [worker for worker in waiting if worker.connection in ready]:
                try:
                    answers[worker.rank] = device.loads(worker.connection.recv_bytes())
                except (EOFError, OSError):
                    late = True
            if late:
                self._lose(workers, answers)
            waiting = [worker for worker in waiting if worker.rank not in answers]
        return [answers[worker.rank] for worker in workers]

    def _lose(self, workers: list[_Worker], answers: Mapping[int, Any]) -> None:
        parts = []
        for worker in workers:
            answer = answers.get(worker.rank)
            if isinstance(answer, Outcome):
                text = f"raised\n{answer.traceback}" if answer.error is not None else "was done"
            elif not worker.process.is_alive():
                text = f"died with exit code {worker.process.exitcode}"
            else:
                text = f"did not answer\n{worker.stacks()}"
            parts.append(f"--- rank {worker.rank} {text}")
        raise Lost("a call in several processes did not end:\n" + "\n".join(parts))


def preloads() -> list[str]:
    """What the server imports that workers are forked from."""
    slow = [preloaded for name, preloaded in SLOW_TO_IMPORT.items() if name in sys.modules]
    return ["tests.device", "tests.preloaded", *slow]


def forking() -> ForkServerContext:
    """Processes like spawned ones, forked from a server that has imported torch, fxpipe and what tests here have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloads())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by OpenMP when the server imports torch
    return context


class _Worker:
    def __init__(self, rank: int, context: ForkServerContext) -> None:
        self.rank = rank
        self.connection, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".txt")
        os.close(handle)
        self._stacks = Path(name)
        self.process = context.Process(target=_work, args=(theirs, name, rank), name=f"rank {rank}", daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        body = pickle.dumps(message)  # by hand, for Connection.send would pass tensors as handles
        with contextlib.suppress(OSError):  # where it has died, which shows when its answer is read
            self.connection.send_bytes(body)

    def stacks(self) -> str:
        """Its stack, which the interpreter writes even while it waits inside torch."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + _FOR_STACKS
        while not self._stacks.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return self._stacks.read_text()

    def end(self, seconds: float) -> None:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._stacks.unlink(missing_ok=True)


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set; its store runs in the test's process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **device.visible(),
    }


# --- in the worker ---


def _work(connection: Connection, stacks: str, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the test's process, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    device.place(rank)
    gc.set_threshold(RARELY)
    gc.freeze()  # what is imported; no later, or a world that is still held would never be collected
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        connection.send_bytes(pickle.dumps(None))
        while True:
            try:
                call = device.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            _serve(connection, *call)


def _serve(connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    outcome = _outcome(int(variables["RANK"]), fn, args)
    if outcome.error is not None:
        _leave()  # as if its process had ended: nobody may wait for it
    connection.send_bytes(_pickled(outcome))
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        sys.exit(1)
    _leave()
    connection.send_bytes(pickle.dumps(None))


def _outcome(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        result = fn(*args)
        device.check()
    except BaseException as error:
        text = traceback.format_exc()
        error.__traceback__ = error.__cause__ = error.__context__ = None  # frames would keep connections open
        return Outcome(rank, time.time(), error=error, traceback=text)
    return Outcome(rank, time.time(), result=result)


def _pickled(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        kept = outcome.error if outcome.error is not None else error
        stand_in = RuntimeError(f"{type(kept).__name__}: {kept}")
        text = outcome.traceback or f"the result does not pickle: {error}"
        return pickle.dumps(Outcome(outcome.rank, outcome.ended_at, None, stand_in, text))


def _leave() -> None:
    """Leaves the world. What is in a circle with one of its groups would keep the group's threads running."""
    if dist.is_initialized():
        dist.destroy_process_group()
    device.settle()
    gc.collect()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
