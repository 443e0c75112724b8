"""Processes: ``init`` joins those that torchrun or SLURM started, ``launch`` starts local ones."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import re
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

from fxpipe.distributed.topology import served_device_type
from fxpipe.errors import RunError, TopologyError

T = TypeVar("T")

# Seconds a launched process may take to exit: by itself after its result, and after it was told to.
_EXIT_SECONDS = 30.0
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Place:
    """Where this process stands among all of them, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    # srun may show each process nothing but its own GPU, whatever its local rank.
    gpu_may_be_private: bool = False


def init() -> torch.device:
    """Starts torch.distributed as torchrun's or SLURM's environment says, and returns this process's device.

    torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. SLURM, under srun with several tasks:
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; processes meet on the first host of SLURM_STEP_NODELIST (or
    SLURM_JOB_NODELIST) at a port that SLURM_JOB_ID gives, unless MASTER_ADDR and MASTER_PORT say otherwise.
    With neither, this is the only process and nothing is started. Nothing is done, either, where
    torch.distributed has been started already.

    With CUDA the device is the GPU of the local rank, made current and bound to the process group, whose
    backends are ``cpu:gloo,cuda:nccl``; without, they are ``gloo``.

    Raises:
        TopologyError: a variable is missing or malformed, or there is no GPU for the local rank.
        RunError: the processes could not meet.
    """
    if dist.is_available() and dist.is_initialized():
        return _current_device(served_device_type())
    place = torchrun_place(os.environ) or slurm_place(os.environ)
    if place is None:
        return _current_device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", _gpu(place, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    _join(place, device)
    return device


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
    if nproc < 1:
        raise TopologyError(f"launch(..., nproc={nproc}) starts no process: write 1 or more")
    task = _pickled_task(fn, args)
    # The store lives here, as torchrun's does: nobody can take its port, and no rank's end takes it away.
    # (TCPStore is documented as torch.distributed's, but not marked as exported.)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    workers = [_Worker(rank, task) for rank in range(nproc)]
    try:
        for worker in workers:
            with _environment(_variables(worker.rank, nproc, store.port)):
                worker.start()
        results: list[T] = _results(workers)
        _join_all(workers, _EXIT_SECONDS)
    finally:
        _end(workers)
    return results


# --- init ---


def torchrun_place(environ: Mapping[str, str]) -> Place | None:
    """What torchrun's variables say, or None where RANK is not set."""
    if "RANK" not in environ:
        # WORLD_SIZE alone is common in srun scripts; elsewhere it means that somebody expects company.
        if "SLURM_PROCID" not in environ and _number(environ, "WORLD_SIZE", 1, default=1) > 1:
            raise TopologyError(
                f'WORLD_SIZE is "{environ["WORLD_SIZE"]}", but RANK is not set: start the script with '
                "torchrun, or unset WORLD_SIZE to run in one process"
            )
        return None
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if not environ.get(name)]
    if missing:
        raise TopologyError(
            f'RANK is "{environ["RANK"]}", but {", ".join(missing)} has no value: start the script with '
            f"torchrun, or set {', '.join(required)}"
        )
    world_size = _number(environ, "WORLD_SIZE", 1)
    return Place(
        rank=_number(environ, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0, world_size - 1),
        address=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 1, 65535),
    )


def slurm_place(environ: Mapping[str, str]) -> Place | None:
    """What SLURM's variables say, or None where this process is not one of several srun tasks."""
    if "SLURM_PROCID" not in environ or _number(environ, "SLURM_NTASKS", 1, default=1) == 1:
        return None
    world_size = _number(environ, "SLURM_NTASKS", 1)
    address = environ.get("MASTER_ADDR")
    if not address:
        variable = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        address = first_host(environ.get(variable, ""), variable)
    if environ.get("MASTER_PORT"):
        port = _number(environ, "MASTER_PORT", 1, 65535)
    else:
        port = slurm_port(_number(environ, "SLURM_JOB_ID", 0))
    return Place(
        rank=_number(environ, "SLURM_PROCID", 0, world_size - 1),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", 0, world_size - 1),
        address=address,
        port=port,
        gpu_may_be_private=True,
    )


def first_host(nodelist: str, variable: str = "SLURM_JOB_NODELIST") -> str:
    """The first host of a SLURM host list.

    >>> first_host("node[03-05,9],login1")
    'node03'

    Raises:
        TopologyError: not a host list; ``variable`` is named in the message.
    """
    # A name with any number of [..] parts, up to the end or to the first comma outside brackets.
    match = re.match(r"((?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:,|$)", nodelist)
    if match is None:
        raise TopologyError(
            f'{variable} is "{nodelist}", which is no list of hosts such as "node[03-05,9]": '
            "set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def slurm_port(job_id: int) -> int:
    """The port at which a job's processes meet: the same for all of them, and another for the next job.

    It lies below 32768, where the ports begin that Linux hands out by itself.
    """
    return 12000 + job_id % 20000


def _number(
    environ: Mapping[str, str], name: str, least: int, most: int | None = None, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    wanted = f"a whole number from {least} " + ("up" if most is None else f"to {most}")
    if text is None:
        raise TopologyError(f"{name} is not set: it must be {wanted}")
    if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < least or (most is not None and int(text) > most):
        raise TopologyError(f'{name} is "{text}": it must be {wanted}')
    return int(text)


def _gpu(place: Place, count: int) -> int:
    if place.local_rank < count:
        return place.local_rank
    if place.gpu_may_be_private and count == 1:
        return 0
    raise TopologyError(
        f"local rank {place.local_rank} has no GPU, for this process sees {count}: start at most {count} "
        "processes per node, or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU"
    )


def _join(place: Place, device: torch.device) -> None:
    cuda = device.type == "cuda"
    host = f"[{place.address}]" if ":" in place.address else place.address  # an IPv6 address
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=f"tcp://{host}:{place.port}",
            world_size=place.world_size,
            rank=place.rank,
            device_id=device if cuda else None,
        )
    except dist.DistError as error:
        raise RunError(
            f"rank {place.rank} of {place.world_size} could not meet the others at {host}:{place.port}: "
            f"{error}; check that all of them were started, and that MASTER_ADDR and MASTER_PORT (or SLURM's "
            "node list and job id, which stand in for them) name a free port on the host of rank 0"
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    """Ends what ``init`` started, while Python still runs: the interpreter's own end can abort on gloo's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _current_device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


# --- launch ---


@dataclass(frozen=True)
class _Done:
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

    def outcome(self) -> _Done | _Failed:
        """What the process sent, once the pipe is ready: pickled here by hand, see ``_work``."""
        try:
            outcome: _Done | _Failed = pickle.loads(self.receiver.recv_bytes())
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
    outcome: _Done | _Failed
    try:
        fn, args = pickle.loads(task)
        init()
        result = fn(*args)
        if dist.is_initialized():  # fn may have done so itself
            dist.destroy_process_group()
        # Pickled here, for Connection.send would pass tensors as handles that die with this process.
        message = pickle.dumps(_Done(result))
    except BaseException:  # SystemExit, too, is an end without a result
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
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store runs already: rank 0 is not to start one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
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
        results |= {rank: outcome.result for rank, outcome in outcomes.items() if isinstance(outcome, _Done)}
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
