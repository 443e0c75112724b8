"""Data axis: in which groups of ranks gradients are summed, and what each rank has of the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Groups, Transport
from fxpipe.errors import TopologyError
from fxpipe.parameters.ownership import Ownership
from fxpipe.precision import Precision


@dataclass(frozen=True)
class GradientSums:
    """How gradients are summed.

    ``zero``: what is sharded. ``shards``: the size of the shard group; ``rank``: this rank's place in it.
    ``replicas``: how many ranks hold the same section. ``wire``: the type that gradients travel in; None: their own.
    """

    zero: int
    shards: int
    rank: int
    replicas: int
    wire: torch.dtype | None = None

    @property
    def sharded(self) -> bool:
        return self.zero > 0

    def on_wire(self, tensor: Tensor) -> Tensor:
        """As it travels; complex numbers as they are."""
        return tensor if self.wire in (None, tensor.dtype) or tensor.is_complex() else tensor.to(self.wire)


def data_groups(topology: Topology, zero: int, zero_scope: str) -> Groups:
    """The groups of the data axis.

    "shard": among which gradients are summed first, and cut into sections where there is another sum to come. It is
    the node's ranks where data groups have several in several nodes, the whole data group otherwise and with
    ``zero_scope="data"``. "replica": the ranks with the same section. "gather" is "shard" once more, "flags" the data
    group, "all" everybody: groups of their own, on which nothing waits for what is under way on another.
    """
    shards: list[list[int]] = []
    replicas: list[list[int]] = []
    nodes = topology.shard_groups()
    cut = [[part for part in nodes if part[0] in group] for group in topology.groups("data")]
    hierarchical = all(len(parts) > 1 and len(parts[0]) > 1 for parts in cut)
    flat = zero_scope == "data" if zero else not hierarchical
    for group, parts in zip(topology.groups("data"), cut, strict=True):
        shards += [group] if flat else parts
        replicas += [[rank] for rank in group] if flat else [list(ranks) for ranks in zip(*parts, strict=True)]
    everyone = [list(range(topology.world_size))]
    return {
        "shard": shards,
        "gather": shards,
        "replica": replicas,
        "flags": topology.groups("data"),
        "all": everyone,
    }


def way_of(zero: int, transport: Transport, precision: Precision | None, replicated: bool) -> GradientSums:
    """How this rank's gradients are summed. ``replicated``: whether a stage is on several ranks, which shard it."""
    wire = precision.reduce if precision is not None else None
    if transport.data_size == 1:
        return GradientSums(zero if replicated and transport.pipe_rank is not None else 0, 1, 0, 1, wire)
    shard = transport.ranks("shard")
    return GradientSums(zero, len(shard), shard.index(transport.rank), len(transport.ranks("replica")), wire)


def check_ties(topology: Topology, transport: Transport, owners: Ownership) -> None:
    """TopologyError where owners of a tied parameter would cut it differently. A collective call of all ranks, so that
    all of them raise it."""
    everyone = transport.gather_int("all", len(transport.ranks("shard")))
    for group in topology.groups("pipe"):
        for holders, names in owners.tied.items():
            sizes = [everyone[group[rank]] for rank in holders]
            if len(set(sizes)) > 1:
                raise TopologyError(
                    f"{names[0]} is tied over the pipe ranks {list(holders)}, whose data groups have "
                    f"{sizes} ranks to a node, so that each would cut it differently: "
                    'write zero_scope="data", or make data the innermost axis'
                )
