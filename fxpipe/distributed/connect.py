"""Which transport a process uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from fxpipe.distributed.grid import shape
from fxpipe.distributed.processes import TIMEOUT, init
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.torch_transport import NO_OPTIONS, DistributedTransport
from fxpipe.distributed.transport import LocalTransport, Transport
from fxpipe.errors import TopologyError

_thread = threading.local()


def seat_thread(processes: int, transport: Callable[[Topology], Transport]) -> None:
    """Makes this thread a rank by itself, of that many: ``connect`` in it is ``transport``. For a test's transport."""
    _thread.seat = processes, transport


def connect(topology: Topology, timeout: float = TIMEOUT, options: Mapping[str, str] = NO_OPTIONS) -> Transport:
    """The transport of this process, or of a thread that is a rank by itself. Starts torch.distributed where it must.

    One process alone plays every pipe rank. ``timeout``: seconds that any wait may take. ``options``: what, in words,
    must be the same on all ranks. TopologyError where the number of processes is another than the topology's.
    """
    seat: tuple[int, Callable[[Topology], Transport]] | None = getattr(_thread, "seat", None)
    if seat is not None:
        processes, transport = seat
        _check_size(topology, processes)
        return transport(topology)
    init(timeout)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LocalTransport()
    _check_size(topology, dist.get_world_size())
    return DistributedTransport(topology, timeout, options)


def _check_size(topology: Topology, processes: int) -> None:
    if topology.world_size != processes:
        raise TopologyError(
            f"the topology has {topology.world_size} ranks ({shape(topology.axes)}), but "
            f"{processes} processes run; start {topology.world_size}, or change an axis"
        )
