"""Data axis: the groups of ranks that sum gradients, the buckets, and each rank's section of the sum."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from fxpipe.dealing import dealt
from fxpipe.distributed.grid import BATCH, BATCH_AXES
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import ALONE
from fxpipe.distributed.transport import Groups, Transport
from fxpipe.errors import TopologyError
from fxpipe.parameters.ownership import Ownership
from fxpipe.precision import Precision


@dataclass(frozen=True)
class GradientSums:
    """How gradients are summed.

    ``zero``: the ZeRO stage, 0 to 3. ``shards``: the size of the shard group. ``rank``: this rank's number in the shard
    group. ``replicas``: how many ranks have the same section. ``wire``: the type that gradients travel in; None for
    the gradients' type.
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
        """The tensor in the type in which it travels; complex numbers keep theirs."""
        return tensor if self.wire in (None, tensor.dtype) or tensor.is_complex() else tensor.to(self.wire)


def data_groups(topology: Topology, zero: int, scope: str) -> Groups:
    """The groups of the data axis.

    "shard": the ranks that sum gradients first, and cut them into sections where another sum follows. If data groups
    have several ranks in each of several nodes, these are the ranks of a node. Otherwise, and with ``scope="data"``,
    they are the whole data group. "replica": the ranks with the same section. "gather" has the ranks of "shard",
    "flags" the ranks of the data group, "all" every rank. Each is a group of its own, so that no collective waits for
    another group's.
    """
    hierarchical = all(len(group) > 1 for group in (*topology.shard_groups(), *topology.replica_groups()))
    in_one_node = scope == "data" if zero else not hierarchical
    nodes = Topology(topology.axes) if in_one_node else topology
    shards = nodes.shard_groups()
    return {"shard": shards, "gather": shards, "replica": nodes.replica_groups(), "flags": topology.groups(BATCH)}


def scope_of(axes: Collection[str], topology: Topology) -> str:
    """Returns the scope of the sums over these batch axes; "" where they have a single rank."""
    over, every = ([a for a in BATCH_AXES if topology.size(a) > 1 and a in some] for some in (axes, BATCH_AXES))
    return "data" if over == every else " × ".join(over) + ALONE * bool(over)


def alone_groups(topology: Topology) -> Groups:
    """Returns the groups of each scope of ``scope_of`` but "data": groups of some of the batch axes, for parameters
    that are sharded over the others."""
    some = (axes for count in (1, 2) for axes in combinations(BATCH_AXES, count))
    return {
        scope: topology.groups_over(axes) for axes in some if (scope := scope_of(axes, topology)) not in ("", "data")
    }


def sums_of(zero: int, transport: Transport, precision: Precision | None, replicated: bool) -> GradientSums:
    """How this rank's gradients are summed. ``replicated``: whether a stage lies on several ranks, which shard it."""
    wire = precision.reduce if precision else None
    if transport.data_size == 1:
        # The ranks of a stage shard its optimizer state and gradients; zero=3 shards over the data axis alone.
        shards = replicated and transport.pipe_rank is not None and zero < 3
        return GradientSums(zero if shards else 0, 1, 0, 1, wire)
    shard = transport.ranks("shard")
    return GradientSums(zero, len(shard), shard.index(transport.rank), len(transport.ranks("replica")), wire)


def check_ties(topology: Topology, transport: Transport, owners: Ownership) -> None:
    """TopologyError, on all ranks, where owners of a tied parameter would cut it differently. A collective call."""
    everyone = transport.gather_int("all", len(transport.ranks("shard")))
    for group in topology.groups("pipe"):
        for holders, names in owners.tied.items():
            sizes = [everyone[group[rank]] for rank in holders]
            if len(set(sizes)) > 1:
                raise TopologyError(
                    f"{names[0]} is tied over the pipe ranks {list(holders)}, whose data groups have "
                    f"{sizes} ranks to a node, so that each would cut it differently: "
                    'write zero=fxpipe.Zero(..., scope="data"), or make data the innermost axis'
                )


# --- buckets: which parameters share a flat buffer, and which rank has which section of it

ALIGNMENT = 64
"""Bytes. A parameter's alignment decides which kernel runs, and so the last bit: all have torch's alignment."""


def block_bytes(parameters: int, most: int) -> int:
    """The least bytes of a block of ``zero=3``. ``parameters``: the bytes of all of a rank's parameters. Two or three
    blocks are whole at once, so that a small model has small blocks."""
    return min(most, max(2**20, parameters // 32))


@dataclass(frozen=True)
class Item:
    """A parameter to put into a bucket. Only items of the same ``kind`` share a bucket."""

    name: str
    numel: int
    kind: BucketKind


@dataclass(frozen=True)
class BucketKind:
    """``stage``: the stage whose backward completes the gradient; None where several stages use the parameter.
    ``owners``: the pipe ranks that share the parameter, if several. ``whole``: whether one rank must step all of it.
    ``element``: bytes of the smallest of its types. ``group``: its types and device; equal throughout a bucket."""

    stage: int | None
    owners: tuple[int, ...]
    whole: bool
    element: int
    group: Hashable = ()


@dataclass(frozen=True)
class Slot:
    """A parameter's first element in its bucket, and the element after its last."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """A bucket of ``size`` elements, with padding. ``root``: the shard rank that has all of it; None for equal
    sections."""

    kind: BucketKind
    slots: tuple[Slot, ...]
    size: int
    root: int | None

    def section(self, rank: int, ranks: int) -> tuple[int, int]:
        """(start, stop) of the section of shard rank ``rank`` out of ``ranks``."""
        if self.root is not None:
            return (0, self.size) if rank == self.root else (0, 0)
        length = self.size // ranks
        return rank * length, (rank + 1) * length


def lay_out(items: Sequence[Item], ranks: int, capacity: int, first: int) -> tuple[BucketLayout, ...]:
    """Buckets for items in the order in which their gradients come, over ``ranks`` shard ranks.

    A bucket is closed once it holds ``capacity`` bytes, the first bucket once it holds ``first``. Buckets of tied items
    depend on tied items alone, because their owners must agree. Items that one rank steps whole are balanced over ranks
    by size, largest first (Graham, 1969).
    """
    # An item joins the open bucket of its kind and, where one rank steps it whole, of that rank.
    owner = _owners([item for item in items if item.kind.whole], ranks)
    open_: dict[tuple[BucketKind, int | None], list[Item]] = {}
    closed: list[tuple[tuple[BucketKind, int | None], list[Item]]] = []
    for item in items:
        key = (item.kind, owner.get(item))
        content = open_.setdefault(key, [])
        content.append(item)
        # Which bucket is the first depends on the rank, so a bucket of tied items never counts as the first.
        full = capacity if closed or item.kind.owners else first
        if sum(item.numel for item in content) * item.kind.element >= full:
            closed.append((key, open_.pop(key)))
    return tuple(_bucket(*key, content, ranks) for key, content in [*closed, *open_.items()])


def _owners(items: Iterable[Item], ranks: int) -> dict[Item, int]:
    """The shard rank that steps each item: the rank with the least so far, the largest item first.

    Tied items are counted apart from all others: every rank that shares them must come to the same result.
    """
    apart: dict[tuple[int, ...], list[Item]] = {}
    for item in sorted(items, key=lambda item: item.name):
        apart.setdefault(item.kind.owners, []).append(item)
    return {
        item: rank
        for group in apart.values()
        for item, rank in zip(group, dealt([item.numel for item in group], ranks), strict=True)
    }


def _bucket(kind: BucketKind, root: int | None, items: Sequence[Item], ranks: int) -> BucketLayout:
    step = max(ALIGNMENT // kind.element, 1)
    slots, end = [], 0
    for item in items:
        slots.append(Slot(item.name, end, end + item.numel))
        end = _up(end + item.numel, step)
    # A bucket divides into a section for each shard rank, and a section into a part for each owner, all aligned.
    sections = ranks * max(len(kind.owners), 1)
    return BucketLayout(kind, tuple(slots), end if root is not None else _up(end, step * sections), root)


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
