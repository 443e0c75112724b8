"""``torch.distributed``'s NCCL: a group of src/group.h over a gloo group of its own.

A CPU build of torch has no ProcessGroupNCCL; what distributed_c10d looks up under private names is named here.

A group that torch makes of the world's communicator is a split, ncclCommSplit, a collective call of all ranks: each
rank names its new group, or none. ``Splits`` counts a rank's, and refuses a split that another rank makes in another
order, or does not make, where NCCL would wait for ever.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from tests.simulated_gpu import _device

TIMEOUT = datetime.timedelta(minutes=10)
SOON = datetime.timedelta(seconds=60)
"""The time in which all ranks must make a split."""


class Splits:
    """The splits of the world's communicator that this rank has made."""

    def __init__(self) -> None:
        self.count = 0

    def perform_nocolor_split(self, device: Any) -> None:
        """A split of which this rank gets no group."""
        self.split([])

    def split(self, ranks: Sequence[int]) -> None:
        store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        self.count += 1
        keys = [f"simulated split {self.count} of {rank}" for rank in range(size)]
        store.set(keys[dist.get_rank()], json.dumps(list(ranks)))
        store.wait(keys, SOON)
        asked = [json.loads(each) for each in store.multi_get(keys)]
        for wanted in asked:
            members = [rank for rank in range(size) if asked[rank] == wanted]
            if wanted and members != wanted:
                raise RuntimeError(f"simulated NCCL: split {self.count} is for {wanted} on the ranks {members} alone")


def splits_of_world() -> Splits:
    """This rank's splits in the world of now."""
    return _splits.setdefault(dist.group.WORLD, Splits())


_splits: WeakKeyDictionary[Any, Splits] = WeakKeyDictionary()


def _split_source(group: Any) -> Splits | None:
    return splits_of_world() if group.bound_device_id else None


class _Kind(type):
    """Every group of the simulated NCCL is an instance, as the class's own would be."""

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, dist._Backend) and group.name() == "nccl"

    def __call__(cls, store: dist.Store, rank: int, size: int, options: Any = None) -> Any:
        hosts = dist.PrefixStore("simulated nccl", store)
        timeout, source = getattr(options, "_timeout", TIMEOUT), getattr(options, "split_from", None)
        if source is not None:
            source.split(options.global_ranks_in_group)
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
    """This rank's part, by one split for all of them."""
    mine = next((list(ranks) for ranks in split_ranks if dist.get_rank() in ranks), [])
    splits_of_world().split(mine)
    with mock.patch.object(distributed_c10d, "_get_split_source", return_value=None):
        groups = [(ranks, dist.new_group(list(ranks), **options)) for ranks in split_ranks]
    return next((group for ranks, group in groups if dist.get_rank() in ranks), None)


def patch() -> None:
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d._get_split_source = _split_source
    dist.Logger.set_runtime_stats_and_log = lambda logger: None  # of DDP, with a timer of CUDA's
    for module in (distributed_c10d, dist, device_mesh):
        if hasattr(module, "split_group"):
            module.split_group = split_group
