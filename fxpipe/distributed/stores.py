"""Stores: where processes meet, and nobody else: one for this machine alone, and that of a SLURM job."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from fxpipe.errors import RunError

LOOPBACK = "127.0.0.1"
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # documented, but not marked as exported
_KEY = "fxpipe's job"
_SECONDS_TO_SAY_WHOSE = 60.0  # once its store is there, rank 0 says so at once


def local_store() -> tuple[Store, int]:
    """A store for processes of this machine alone, and its port; by itself a TCPStore listens on all interfaces."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()  # the store closes it
    return _TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def loopback_interface() -> str | None:
    """The name of the interface of 127.0.0.1; None where it has none of its usual names."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def restarted_store(host: str, port: int, restarts: int, timeout: float) -> Store:
    """The launcher's store for what it has started again.

    A static rendezvous, torchrun's own where no other is named, keeps one store over its restarts, in which the
    addresses of processes that have died still are.
    """
    store: Store = _TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
    return PrefixStore(f"restart {restarts}", store)


def job_store(host: str, port: int, rank: int, job: str, timeout: float = 300.0) -> Store:
    """The store of a job's step, at a port that its number gives, which another job's may give too.

    ``timeout``: seconds until it must be there, and of each wait on it.

    Raises:
        RunError: rank 0 cannot listen there, or what is there belongs to others.
    """
    remedy = f"set MASTER_PORT to a port that is free on {host}, the same for all tasks, as in export MASTER_PORT=29500"
    at = f"port {port} of {host}, which SLURM's job and step {job} give,"
    most, soon = (datetime.timedelta(seconds=seconds) for seconds in (timeout, min(timeout, _SECONDS_TO_SAY_WHOSE)))
    try:
        store: Store = _TCPStore(host, port, is_master=rank == 0, timeout=most, wait_for_workers=False)
    except dist.DistError as error:
        what = "is not free to listen on" if rank == 0 else "did not answer"
        raise RunError(f"rank {rank}: {at} {what}: {error}; {remedy}") from None
    if rank == 0:
        store.set(_KEY, job)
        return store
    try:
        store.wait([_KEY], soon)
        owner = store.get(_KEY).decode(errors="replace")
    except dist.DistError as error:
        raise RunError(f"rank {rank}: {at} is somebody's who does not say whose job's: {error}; {remedy}") from None
    if owner != job:
        raise RunError(f"rank {rank}: {at} is in use by job and step {owner:.100}; {remedy}")
    return store
