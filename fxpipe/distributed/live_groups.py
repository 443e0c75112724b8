"""What a topology has made in the running torch.distributed: its meshes and process groups, and what they serve."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fxpipe.distributed.grid import listed
from fxpipe.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class LiveGroups:
    """What a topology has made in torch.distributed, and under which default group."""

    world: object
    mesh: DeviceMesh | None = None
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    data_meshes: dict[str, DeviceMesh] = field(default_factory=dict)


def served_device_type() -> str:
    """The device type that the started default process group serves: ``"cuda"``, or else ``"cpu"``."""
    import torch
    import torch.distributed as dist

    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    # Gloo claims "cuda" too, but lacks most collectives there; whoever started gloo alone wants the CPU.
    if torch.cuda.is_available() and backends.get("cuda", "gloo") != "gloo":
        return "cuda"
    return "cpu"


def plays_all_ranks() -> bool:
    """Whether this process is the only one, as far as is known: of torch.distributed, or of what started it."""
    import torch.distributed as dist

    is_started = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() == 1 if is_started else not _has_company()


def _has_company() -> bool:
    """Whether torchrun or srun has started this process as one of several."""
    rank, count = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_NTASKS")
    return rank in os.environ and os.environ.get(count, "1") != "1"


def new_group(groups: list[list[int]]) -> ProcessGroup:
    """Makes all ``groups``, as every rank must, and returns the one that this rank is in."""
    import torch.distributed as dist

    rank = dist.get_rank()
    mine: ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    if mine is None:
        raise TopologyError(f"rank {rank} is in none of the groups {listed(groups)}")
    return mine
