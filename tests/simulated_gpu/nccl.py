"""``torch.distributed``'s NCCL: a group of src/group.h over a gloo group of its own.

A CPU build of torch has no ProcessGroupNCCL; what distributed_c10d looks up under private names is named here.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from tests.simulated_gpu import _device

TIMEOUT = datetime.timedelta(minutes=10)


class _Kind(type):
    """Every group of the simulated NCCL is an instance, as the class's own would be."""

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, dist._Backend) and group.name() == "nccl"

    def __call__(cls, store: dist.Store, rank: int, size: int, options: Any = None) -> Any:
        hosts = dist.PrefixStore("simulated nccl", store)
        timeout = getattr(options, "_timeout", TIMEOUT)
        return _device.group(dist.ProcessGroupGloo(hosts, rank, size, timeout=timeout), rank, size)


class ProcessGroupNCCL(metaclass=_Kind):
    class Options:
        _timeout = TIMEOUT
        group_name = ""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.global_ranks_in_group: list[int] = []


def split_group(
    parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] = (), pg_options: Any = None, **options: Any
) -> Any:
    """This rank's part; a new group each, where NCCL splits a communicator."""
    groups = [(ranks, dist.new_group(list(ranks), **options)) for ranks in split_ranks]
    return next((group for ranks, group in groups if dist.get_rank() in ranks), None)


def patch() -> None:
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # of DDP, with a timer of CUDA's
    for module in (distributed_c10d, dist, device_mesh):
        if hasattr(module, "split_group"):
            module.split_group = split_group
