"""``init`` joins torchrun's or SLURM's processes, ``connect`` makes the transport, ``launch`` starts new processes."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.device import HIDDEN, current, is_accelerator
from fxpipe.distributed.grid import shape
from fxpipe.distributed.topology import Topology, served_device
from fxpipe.distributed.torch_transport import NO_OPTIONS, DistributedTransport, in_thread
from fxpipe.distributed.transport import LocalTransport, Transport
from fxpipe.distributed.watchdog import end_with, watchdog
from fxpipe.errors import RunError, TopologyError
from fxpipe.validation import is_number, is_whole, shown

TIMEOUT = 300.0
"""The default timeout of a wait, in seconds."""
_MAX_SECONDS = 10.0**7
_GRACE = 5.0  # seconds by which torch's client may overrun its limit
LOOPBACK = "127.0.0.1"
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # documented, but not marked as exported

T = TypeVar("T")


class ProcessPlace(NamedTuple):
    """This process's ranks, and the address at which all processes meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    # Whether srun may expose only this process's own GPU, whatever its local rank.
    gpu_may_be_private: bool = False
    # SLURM's job and step, if the port is derived from them, so that another job may have the same port.
    job: str = ""
    # The number of torchrun's restarts of all processes; 0 on several nodes, which count restarts separately.
    restarts: int = 0


def init(timeout: float = TIMEOUT, device: Literal["cpu"] | None = None) -> torch.device:
    """Starts torch.distributed from torchrun's or SLURM's environment, and returns this process's device.

    torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. SLURM, under srun with several tasks:
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID. If MASTER_ADDR and MASTER_PORT are not set, SLURM's processes meet on the
    first host of SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST). Their port is derived from SLURM_JOB_ID and
    SLURM_STEP_ID. Processes of another job with the same port do not join.
    Without either environment, this is the only process and ``init`` starts nothing. If torch.distributed is
    started already, ``init`` only returns the device.

    With GPUs, the device is the local rank's GPU; ``init`` makes it current and binds the process group to it, with
    the backends ``cpu:gloo,cuda:nccl``. Without GPUs, or with ``device="cpu"``, the backend is ``gloo``.

    After ``init`` an exception that ends this process is reported to the other processes, which then end, too.

    Args:
        timeout: seconds that the processes may take to meet, and that any wait of torch.distributed itself may take.
        device: ``"cpu"`` to train on the CPU even if there are GPUs. The caller puts the model and its batches on
            the returned device: ``fxpipe.compile`` refuses a model on the CPU in a job that runs on GPUs.

    Raises:
        TopologyError: a variable is missing or malformed, or there is no GPU for the local rank.
        RunError: the processes could not meet, ``timeout`` is no number above 0, or ``device="cpu"`` is passed after
            torch.distributed was started for GPUs.
    """
    if not is_number(timeout) or not 0 < timeout < _MAX_SECONDS:
        raise RunError(f"timeout is {timeout!r}; write a number of seconds, such as timeout=300")
    if device not in (None, "cpu"):
        raise RunError(f'device is {shown(device)}; write device="cpu", or leave it out for the GPU of the local rank')
    own = torch.device("cpu") if device == "cpu" else current()
    if dist.is_available() and dist.is_initialized():
        served = served_device()
        if device == "cpu" != served.type:
            raise RunError(f'torch.distributed was started for {served.type}; call fxpipe.init(device="cpu") first')
        return served
    process = process_place()
    if process is None:
        return own
    # Select the GPU first: the process group is bound to the GPU, and otherwise all ranks would work on GPU 0.
    if is_accelerator(own):
        own = torch.device(own.type, _gpu(process, torch.accelerator.device_count()))
        torch.accelerator.set_device_index(own)
    _join(process, own, timeout)
    if process.world_size > 1:
        watchdog()
    return own


def process_place() -> ProcessPlace | None:
    """This process's place among those that torchrun or srun has started; None if neither has started it."""
    return torchrun_place(os.environ) or slurm_place(os.environ)


def torchrun_place(environ: Mapping[str, str]) -> ProcessPlace | None:
    """Reads torchrun's variables; None if RANK is not set."""
    if "RANK" not in environ:
        # srun scripts often set WORLD_SIZE alone; outside srun the user expects several processes.
        if "SLURM_PROCID" not in environ and _number(environ, "WORLD_SIZE", 1, default=1) > 1:
            raise TopologyError(
                f'WORLD_SIZE is "{environ["WORLD_SIZE"]}", but RANK is not set: start the script with '
                "torchrun, or unset WORLD_SIZE to run in one process"
            )
        return None
    number = partial(_number, environ)
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in required if not environ.get(name)]
    if missing:
        raise TopologyError(
            f'RANK is "{environ["RANK"]}", but {", ".join(missing)} has no value: start the script with '
            f"torchrun, or set {', '.join(required)}"
        )
    world_size = number("WORLD_SIZE", 1)
    # On a single node, the same agent counts the restarts; its store keeps the keys of dead processes over restarts.
    is_alone = environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    one_agent = is_alone and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ProcessPlace(
        rank=number("RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=number("LOCAL_RANK", 0, world_size - 1),
        address=environ["MASTER_ADDR"],
        port=number("MASTER_PORT", 1, 65535),
        restarts=number("TORCHELASTIC_RESTART_COUNT", 0, default=0) if one_agent else 0,
    )


def slurm_place(environ: Mapping[str, str]) -> ProcessPlace | None:
    """Reads SLURM's variables; None unless this process belongs to several srun tasks."""
    number = partial(_number, environ)
    if "SLURM_PROCID" not in environ or (world_size := number("SLURM_NTASKS", 1, default=1)) == 1:
        return None
    address = environ.get("MASTER_ADDR")
    if not address:
        variable = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
        address = first_host(environ.get(variable, ""), variable)
    if environ.get("MASTER_PORT"):
        port, job = number("MASTER_PORT", 1, 65535), ""
    else:
        job_id, step = number("SLURM_JOB_ID", 0), number("SLURM_STEP_ID", 0, default=0)
        port, job = slurm_port(job_id, step), f"{job_id}.{step}"
    return ProcessPlace(
        rank=number("SLURM_PROCID", 0, world_size - 1),
        world_size=world_size,
        local_rank=number("SLURM_LOCALID", 0, world_size - 1),
        address=address,
        port=port,
        gpu_may_be_private=True,
        job=job,
    )


def first_host(nodelist: str, variable: str = "SLURM_JOB_NODELIST") -> str:
    """Returns the first host of a SLURM host list.

    >>> first_host("node[03-05,9],login1")
    'node03'

    Raises:
        TopologyError: ``nodelist`` is not a host list; the message names ``variable``.
    """
    # Matches a name with any number of [..] parts, up to the end or to the first comma outside brackets.
    match = re.match(r"((?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:,|$)", nodelist)
    if match is None:
        raise TopologyError(
            f'{variable} is "{nodelist}", which is no list of hosts such as "node[03-05,9]": '
            "set MASTER_ADDR to the host of rank 0"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def slurm_port(job_id: int, step: int = 0) -> int:
    """Returns the port at which the processes of a job's step meet; the next job or step has another port.

    The port is below 32768, the start of Linux's ephemeral ports. Jobs whose ids differ by 20,000 share a port.
    """
    return 12000 + (job_id + 7919 * step) % 20000


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


def _gpu(process: ProcessPlace, count: int) -> int:
    if process.local_rank < count:
        return process.local_rank
    if process.gpu_may_be_private and count == 1:
        return 0
    raise TopologyError(
        f"local rank {process.local_rank} has no GPU, for this process sees {count}: start at most {count} "
        'processes per node, or call fxpipe.init(device="cpu") first to run on the CPU'
    )


def _join(process: ProcessPlace, device: torch.device, timeout: float) -> None:
    kind = device.type
    backends = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    host = f"[{process.address}]" if ":" in process.address else process.address  # an IPv6 address
    try:
        # torch's client waits for an answer from the port without a limit.
        store = in_thread(partial(_store, process, timeout)).result(timeout + _GRACE)
        _check_world_size(store, process, timeout)
        dist.init_process_group(
            backends,
            store=store,
            world_size=process.world_size,
            rank=process.rank,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=None if kind == "cpu" else device,
        )
    except (RuntimeError, TimeoutError) as error:  # torch's own error types, and gloo's plain RuntimeError
        reason = str(error) or "nobody has answered"
        raise RunError(
            f"rank {process.rank} of {process.world_size} could not meet the others at {host}:{process.port}: "
            f"{reason}; check that all of them were started, and that MASTER_ADDR and MASTER_PORT (or SLURM's "
            "node list and job id, which stand in for them) name a free port on the host of rank 0"
        ) from error
    atexit.register(_leave)


def _store(process: ProcessPlace, timeout: float) -> Store:
    """Opens the store at which the processes meet, with a key prefix that no other job, restart or start uses.

    torchrun's default store outlives restarts and ``destroy_process_group``, and still holds the addresses of dead
    processes. Another SLURM job may have the same port.
    """
    is_master = process.rank == 0 and not process.restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        process.address,
        process.port,
        is_master=is_master,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=not process.job,
    )
    own = PrefixStore(f"job {process.job}" if process.job else f"restart {process.restarts}", store)
    return PrefixStore(f"start {own.add(f'starts of rank {process.rank}', 1)}", own)


def _check_world_size(store: Store, process: ProcessPlace, timeout: float) -> None:
    """RuntimeError if a process's world size differs from the first process's, or a process does not come in time."""
    sizes: Any = PrefixStore("world size", store)  # the store's values are bytes, unlike its annotations
    is_first = process.rank == 0
    ranks = range(1, process.world_size) if is_first else [0]
    if is_first:
        sizes.set("0", str(process.world_size))
    with contextlib.suppress(RuntimeError):  # raised at the timeout
        sizes.wait([str(rank) for rank in ranks], datetime.timedelta(seconds=timeout))
    size_of = {rank: int(sizes.get(str(rank))) for rank in ranks if sizes.check([str(rank)])}
    if not is_first:  # set after reading: the first process may then end at once, and the store with it
        sizes.set(str(process.rank), str(process.world_size))
    for rank, size in size_of.items():
        if size != process.world_size:
            raise RuntimeError(f"WORLD_SIZE (or SLURM_NTASKS) is {process.world_size} here, and {size} on rank {rank}")
    if late := [rank for rank in ranks if rank not in size_of]:
        raise RuntimeError(f"{len(late)} of them have not come within {timeout:g} s, first rank {late[0]}")


def _leave() -> None:
    """Destroys the process group while Python still runs: interpreter shutdown can abort on gloo's threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


# --- the transport ---


def connect(topology: Topology, timeout: float = TIMEOUT, options: Mapping[str, str] = NO_OPTIONS) -> Transport:
    """Returns the transport of this process; starts torch.distributed if necessary.

    A single process plays every pipe rank. ``timeout``: seconds that any wait may take. ``options``: texts that must
    be the same on all ranks.

    Raises:
        TopologyError: the number of processes is not the topology's, or the process group sends nothing.
    """
    init(timeout)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalTransport()
    if "fake" in dist.get_backend():
        raise TopologyError(
            'torch.distributed was started with the backend "fake", which sends nothing; for a dry run, call '
            "fxpipe.preview(model, topo, ...), which needs no processes"
        )
    processes = dist.get_world_size()
    if topology.world_size != processes:
        raise TopologyError(
            f"the topology has {topology.world_size} ranks ({shape(topology.axes)}), but "
            f"{processes} processes run; start {topology.world_size}, or change an axis"
        )
    return DistributedTransport(topology, timeout=timeout, options=options)


# --- launch ---

# Seconds that a launched process may take to exit: after it has sent its result, and after a signal.
_EXIT_SECONDS, _END_SECONDS = 30.0, 5.0


def launch(fn: Callable[..., T], nproc: int, *args: object) -> list[T]:
    """Runs ``fn(*args)`` in ``nproc`` new local processes, joined as under torchrun; results are by rank.

    Each process is spawned, has one thread (unless OMP_NUM_THREADS is set), calls ``init()`` and then ``fn``,
    and destroys the process group at the end. With fewer GPUs than processes all of them run on the CPU.
    ``fn``, its arguments and results are pickled; tensors travel by value. In a notebook, cloudpickle pickles the
    functions and classes of its cells. When ``launch`` returns or raises, none of the processes is left; when the
    calling process is killed, they end as well.

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
        task = _pickled(fn, args)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to other processes: "
            f"{error}; define the function at the top of a module, and pass values that pickle"
        ) from error
    # This process holds the store, as torchrun does: no other program can take its port, and no rank's end closes it.
    store, port = local_store()
    workers: list[_Worker] = []
    try:
        for rank in range(nproc):
            # OpenMP reads its variables before the new process can set them.
            with mock.patch.dict(os.environ, _variables(rank, nproc, port)):
                workers.append(_Worker(rank, task))
        results: list[T] = _results(workers)
        _join_all(workers, _EXIT_SECONDS)
    finally:
        _end(workers)
        del store  # must live until here
    return results


def _pickled(fn: Callable[..., Any], args: tuple[object, ...]) -> bytes:
    """The pickle of a call. New processes import a script's ``__main__``, and cannot import a notebook's."""
    if getattr(fn, "__module__", "") != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
        return pickle.dumps((fn, args))
    try:
        by_value: bytes = importlib.import_module("cloudpickle").dumps((fn, args))
    except ImportError as error:
        raise RunError(
            f"{fn.__qualname__} is defined in a notebook's cell or at a prompt, and new processes cannot import it; "
            "pip install cloudpickle, or write the cell to a module with %%writefile my_module.py, and import it"
        ) from error
    return by_value


class _Outcome(NamedTuple):
    """The result of ``fn``, or why and when ``fn`` failed: the earliest failure causes the others."""

    result: Any = None
    reason: str = ""
    at: float = float("-inf")
    """Seconds on the machine's clock."""


class _Worker:
    """A launched process and the pipe that receives its outcome."""

    def __init__(self, rank: int, task: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.receiver, sender = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(target=_work, args=(sender, task), name=f"rank {rank}")
        self.process.start()
        # Now only the process holds the sending end, so that its death closes the pipe.
        sender.close()

    def outcome(self) -> _Outcome:
        """Returns the outcome that the process sent, once the pipe is ready. ``_work`` pickles the outcome itself."""
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


def _work(sender: Connection, task: bytes) -> None:
    """The main function of a launched process."""
    # Ctrl-C reaches the launching process as well, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        fn, args = pickle.loads(task)
        init()
        result = fn(*args)
        if dist.is_initialized():  # fn may have destroyed the group itself
            dist.destroy_process_group()
        # Pickle here, since Connection.send would pass tensors as handles that die with this process.
        message = pickle.dumps(_Outcome(result))
    except BaseException as error:  # also SystemExit, which ends fn without a result
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
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store runs already: rank 0 must not start a store
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)  # LOOPBACK's interface
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface  # other machines must not reach these processes
    if torch.accelerator.device_count() < nproc:
        variables |= HIDDEN
    return variables


def _results(workers: list[_Worker]) -> list[Any]:
    """Returns all results by rank; raises the first failure as a RunError."""
    results: dict[int, Any] = {}
    # Read outcomes in the order in which they arrive: a failure must be seen at once, while other ranks wait.
    while pending := [worker for worker in workers if worker.rank not in results]:
        ready = wait([worker.receiver for worker in pending])
        outcomes = {worker.rank: worker.outcome() for worker in pending if worker.receiver in ready}
        failures = [(outcome.at, rank, outcome.reason) for rank, outcome in outcomes.items() if outcome.reason]
        # Other ranks fail within moments of the first failure, so the earliest by the clock is the cause.
        if failures:
            _, rank, reason = min(failures)
            raise RunError(f"rank {rank} of {len(workers)} {reason}")
        results |= {rank: outcome.result for rank, outcome in outcomes.items()}
    return [results[worker.rank] for worker in workers]


def _join_all(workers: list[_Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _end(workers: list[_Worker]) -> None:
    """Ends all processes that still run."""
    # SIGTERM first, so that Python can clean up; SIGKILL after some seconds.
    for stop in (SpawnProcess.terminate, SpawnProcess.kill):
        running = [worker for worker in workers if worker.process.is_alive()]
        for worker in running:
            stop(worker.process)
        _join_all(running, _END_SECONDS)
    for worker in workers:
        worker.receiver.close()


def local_store() -> tuple[Store, int]:
    """Returns a store that only processes of this machine can reach, and its port."""
    # By default a TCPStore listens on all interfaces; here it takes over a socket that listens on loopback only.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store closes it
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port
