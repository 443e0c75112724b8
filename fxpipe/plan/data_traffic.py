"""Data traffic: what a rank sends over the data axis in a step, by the formulas of a ring. Arithmetic.

Of gradients of w bytes and parameters of p, over S ranks that shard and R that hold the same shard:

  zero=0    all-reduce 2 (D-1)/D w; where a node has several of several nodes: reduce-scatter (S-1)/S w inside it,
            all-reduce 2 (R-1)/R w/S between nodes, all-gather (S-1)/S w inside
  zero=1    reduce-scatter, all-reduce between nodes, all-gather (S-1)/S p;   zero=2: a reduce-scatter a micro-batch
  zero=3    all-gather (S-1)/S p, reduce-scatter, all-reduce between nodes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fxpipe.distributed.topology import Topology
from fxpipe.hardware import Hardware
from fxpipe.options import Options
from fxpipe.plan.memory import Account


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends on groups of one kind. ``crossing``: which part of them leaves its node, on average over
    the ranks of a group, of which some stand at its node's end."""

    size: float
    crossing: float

    def seconds(self, hardware: Hardware) -> float:
        """A ring is as fast as its slowest link."""
        return hardware.latency + self.size / hardware.wire(self.crossing > 0) if self.size else 0.0


@dataclass(frozen=True)
class DataTraffic:
    """For ranks that hold so many bytes of parameters, and of gradients as they travel."""

    options: Options
    topology: Topology
    parameters: float
    gradients: float
    microbatches: int

    @cached_property
    def _shards(self) -> int:
        if self.options.zero:
            return Account.of(self.options, self.topology).shards
        data, node = self.topology.size("data"), min(map(len, self.topology.shard_groups()))
        return node if 1 < node < data else data

    @cached_property
    def _inner(self) -> float:
        """Which part of the links of the ring of a shard group leave a node, of the group that has most."""
        if self._shards < self.topology.size("data"):
            return 0.0
        return max(_leaving(group, self.topology.ranks_per_node) for group in self.topology.groups("data"))

    @property
    def sums(self) -> tuple[Sent, ...]:
        """Of the gradients' sums."""
        data, shards = self.topology.size("data"), self._shards
        replicas = data // shards
        scatter = (shards - 1) / shards * self.gradients
        if self.options.zero == 0 and replicas == 1:
            return (Sent(2 * scatter, self._inner),)
        across = Sent(2 * (replicas - 1) / replicas * self.gradients / shards, 1.0)
        times = {0: 2, 2: self.microbatches}.get(self.options.zero, 1)
        return Sent(times * scatter, self._inner), across

    @property
    def gathers(self) -> tuple[Sent, ...]:
        """Of the all-gathers of parameters."""
        if not self.options.zero:
            return ()
        return (Sent((self._shards - 1) / self._shards * self.parameters, self._inner),)

    @property
    def between_nodes(self) -> float:
        """Bytes that leave a node for another, of all ranks of one data group together."""
        return self.topology.size("data") * sum(one.size * one.crossing for one in (*self.sums, *self.gathers))


def _leaving(group: list[int], per_node: int | None) -> float:
    """The part of a ring's links that leads from one node to another."""
    if per_node is None:
        return 0.0
    nodes = [rank // per_node for rank in group]
    return sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True)) / len(group)
