"""Process groups: their store, groups made by their members alone, and a world without processes.

The names are the same in 2.13 to 2.15.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fxpipe.patches import replaced
from fxpipe.torch_compat.operators import schema_of

default_store: Callable[[], dist.distributed_c10d.Store] = dist.distributed_c10d._get_default_store
"""Returns the store of the default process group."""


def connection_of(store: Any) -> socket.socket | None:
    """A duplicate of a TCPStore client's socket, for the caller to close; its ``shutdown`` ends a call that waits for
    the store. None for another kind of store."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    match = re.search(r"client=TCPClient\(SocketImpl\(fd=(\d+)", repr(store))  # torch shows the fd nowhere else
    return socket.socket(fileno=os.dup(int(match[1]))) if match is not None else None


def groups_of_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dist.ProcessGroup]:
    """The process groups that a call of an operator communicates over; empty unless the operator is a collective."""
    if getattr(operator, "namespace", "") not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return []
    home: Any = dist.distributed_c10d
    declared = schema_of(operator).arguments
    # A collective takes its group as an object or by name; the schema shows in which argument.
    arguments = {**dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}
    groups = []
    for argument in declared:
        if str(argument.type).endswith("c10d.ProcessGroup"):
            groups.append(dist.ProcessGroup.unbox(arguments[argument.name]))
        elif argument.name == "group_name":
            groups.append(home._resolve_process_group(arguments[argument.name]))
    return groups


def group_of_members(ranks: Sequence[int], name: str, **options: Any) -> dist.ProcessGroup:
    """Makes a process group by calls of its members alone; ``name``: unique among groups, and equal on all members.

    ``new_group(use_local_synchronization=True)`` takes no name. It names a group by the process's number of groups,
    which differs by process. On NCCL it would also split a communicator of all ranks, and all ranks must call it.
    transformers' LLaVA needs a group of members if only one replica gets a batch without images. That replica then has
    a link between two ranks that the other replicas never have.
    """
    home: Any = dist.distributed_c10d
    # While new_group runs, torch takes the name and the source of a split from these functions.
    named, split = (home, "_process_group_name", lambda *_, **__: name), (home, "_get_split_source", lambda _: None)
    with replaced([named, split]):
        created: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **options)
        return created


@contextlib.contextmanager
def ranks_without_processes(count: int) -> Iterator[None]:
    """In this context, torch.distributed runs as rank 0 of ``count`` ranks, whose collectives move nothing."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor would take these groups for those of equal meshes in a later world.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
