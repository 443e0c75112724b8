"""``Topology``: the coordinates of ranks in the grid, and the groups of ranks.

Plain arithmetic: a laptop can make, query and print a topology of 16,384 ranks. Only ``.mesh``, ``.group``,
``.data_mesh``, ``from_mesh``, ``.rank``, ``.pipe_rank``, ``.data_rank``, ``.data_size``, ``.is_first``, ``.sampler``
and ``.context_part`` use torch.distributed, and only these import it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakKeyDictionary

from tabulate import tabulate

from fxpipe.distributed.grid import (
    BATCH,
    BATCH_AXES,
    MODEL,
    ROLES,
    ROW_AXES,
    abbreviated,
    axis_groups,
    by_node,
    checked_axes,
    checked_node,
    listed,
    positive,
    role_of,
    shape,
    whole,
)
from fxpipe.errors import TopologyError
from fxpipe.notebook import Tabular
from fxpipe.validation import is_flag, shown

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DistributedSampler


class _OwnRank(int):
    """``Topology.rank``: a number, whose call says which method finds the rank at a coordinate."""

    def __call__(self, **coordinate: int) -> NoReturn:
        given = ", ".join(f"{name}={index}" for name, index in coordinate.items())
        raise TypeError(f"topo.rank is this process's number, {self}; write topo.rank_at({given or 'pipe=0'})")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class _Axes(tuple[tuple[str, int], ...]):
    """``Topology.axes``; ``"data" in topo.axes`` looks an axis up by either of its names."""

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item) or ROLES.get(str(item)) in {ROLES[name] for name, _ in self}


@dataclass
class _LiveGroups:
    """The meshes and groups that a topology has made in torch.distributed, and the default group they belong to."""

    world: object
    mesh: DeviceMesh | None = None
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    data_meshes: dict[str, DeviceMesh] = field(default_factory=dict)


def served_device() -> torch.device:
    """Returns the device of this process that the default process group serves: its accelerator, or else the CPU."""
    import torch
    import torch.distributed as dist

    from fxpipe.device import current

    own, backends = current(), dict(part.split(":") for part in dist.get_backend_config().split(","))
    # Gloo claims to serve accelerators, but lacks most collectives there; a group with gloo alone means the CPU.
    return own if backends.get(own.type, "gloo") != "gloo" else torch.device("cpu")


class Topology(Tabular):
    """A grid of ranks with named axes; immutable, hashable, and picklable (without its process groups).

    Args:
        axes: ``(name, size)`` pairs, outermost first; a rank is the row-major index. Names are ``pipe``, ``tensor``,
            and the *batch axes* ``data``, ``expert`` and ``context``, or ``pp``, ``tp``, ``dp``, ``ep`` and ``cp``;
            every method that takes an axis accepts either name. Rows are dealt over data and expert ranks, positions of
            the same rows over context ranks, and a gradient is summed over the batch axes on which its parameter is not
            sharded.
        ranks_per_node: the number of consecutive ranks with fast links (a machine, or an NVLink domain).
            None: all ranks.

    Raises:
        TopologyError: unknown, repeated or no axes; a size below 1; ``ranks_per_node`` that does not divide the number
            of ranks, or that leaves a group of the batch axes with more ranks in one node than in another.

    >>> topo = Topology([("pipe", 2), ("tensor", 2), ("data", 4)])
    >>> topo.coordinate(13)
    {'pipe': 1, 'tensor': 1, 'data': 1}
    >>> topo.groups("tensor")[:3]
    [[0, 4], [8, 12], [1, 5]]
    """

    has_sampler = False
    """Whether ``sampler`` was called in this process."""

    def __init__(self, axes: Iterable[tuple[str, int]], ranks_per_node: int | None = None) -> None:
        self._axes = _Axes(checked_axes(axes))
        self._sizes = tuple(size for _, size in self._axes)
        self._index = {ROLES[name]: index for index, (name, _) in enumerate(self._axes)}
        self._world_size = math.prod(self._sizes)
        self._ranks_per_node = None if ranks_per_node is None else checked_node(self._axes, ranks_per_node)
        self._node = self._ranks_per_node or self._world_size
        self._live: _LiveGroups | None = None
        self.cut = deque[Any](maxlen=8)
        """The last tensors that ``context_part`` was given, until a step compares them with other ranks'."""

    @classmethod
    def fit(
        cls,
        world_size: int,
        *,
        pipe: int,
        tensor: int = 1,
        expert: int | None = None,
        context: int | None = None,
        rows: int | None = None,
        ranks_per_node: int | None = None,
    ) -> Topology:
        """Returns a topology of ``world_size`` ranks, for a restart with fewer or more ranks: computes the data size.

        >>> Topology.fit(8, pipe=2, rows=256), Topology.fit(4, pipe=2, rows=256)
        (Topology([('pipe', 2), ('data', 4)]), Topology([('pipe', 2), ('data', 2)]))

        Args:
            world_size: how many processes run, such as ``int(os.environ["WORLD_SIZE"])``.
            pipe: how many ranks a pipeline has.
            tensor: how many ranks share a stage.
            expert: how many ranks experts are spread over; None: no such axis. 1: an axis of one rank, for a
                ``parallelize`` that names it.
            context: how many ranks the positions of a row are spread over, likewise.
            rows: the rows of a whole step, over all replicas; each replica then takes
                ``rows // topology.data_size`` rows, so that a step stays the same. None: rows are not checked.
            ranks_per_node: as in the constructor.

        Raises:
            TopologyError: the number of ranks is no multiple of the other axes' sizes, or ``rows`` no multiple of
                replicas.
        """
        others = {"expert": expert, "context": context}
        fixed = {"pipe": pipe, "tensor": tensor} | {name: size for name, size in others.items() if size is not None}
        model = math.prod(positive(size, name) for name, size in fixed.items())
        data, left = divmod(positive(world_size, "world_size"), model)
        if left:
            raise TopologyError(
                f"{world_size} ranks are no multiple of {shape(tuple(fixed.items()))}: start a multiple of {model}, or "
                "write another pipe="
            )
        replicas = data * (expert or 1)
        if rows is not None and positive(rows, "rows") % replicas:
            raise TopologyError(
                f"{rows} rows of a step are no multiple of {replicas} replicas, and a step would be another one: "
                "start a number of replicas that divides them, or write another pipe= or rows="
            )
        axes = {"pipe": pipe, "tensor": tensor, "data": data} | fixed
        return cls([(name, size) for name, size in axes.items() if name != "tensor" or size > 1], ranks_per_node)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The ``(name, size)`` pairs, outermost first, with the caller's names; also ``"data" in topo.axes``."""
        return self._axes

    @property
    def ranks_per_node(self) -> int | None:
        """The number of ranks per node; None if all ranks count as a single node."""
        return self._ranks_per_node

    @property
    def world_size(self) -> int:
        """The number of ranks, the product of the sizes."""
        return self._world_size

    def size(self, axis: str) -> int:
        """Returns the number of ranks in a group of ``axis``; 1 for a known axis that this topology lacks."""
        if axis == MODEL:
            return self._world_size // math.prod(map(self.size, ROW_AXES))
        if axis == BATCH:
            return math.prod(map(self.size, BATCH_AXES))
        index = self._index.get(role_of(axis))
        return 1 if index is None else self._sizes[index]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the index of ``rank`` along each axis, outermost first.

        Raises:
            TopologyError: ``rank`` is not in the topology.
        """
        rest = whole(rank, "a rank")
        if not 0 <= rest < self._world_size:
            raise TopologyError(
                f"rank {rank} is outside {shape(self._axes)}: its ranks are 0 to {self._world_size - 1}"
            )
        # The innermost axis varies fastest, so its index is the first remainder.
        innermost_first: dict[str, int] = {}
        for name, size in reversed(self._axes):
            rest, innermost_first[name] = divmod(rest, size)
        return dict(reversed(innermost_first.items()))

    def rank_at(self, **coordinate: int) -> int:
        """Returns the rank at an index along every axis: ``topo.rank_at(pipe=1, data=0)``; inverse of ``coordinate``.

        A known axis that this topology lacks may be passed with index 0.

        Raises:
            TopologyError: an axis is unknown or missing, or an index is outside its axis.
        """
        index_of: dict[str, int] = {}
        for name, value in coordinate.items():
            role, index, size = role_of(name), whole(value, f"the index {name}"), self.size(name)
            if not 0 <= index < size:
                raise TopologyError(
                    f"{name}={index} is outside {shape(self._axes)}: "
                    + (f"indices along {name} are 0 to {size - 1}" if size > 1 else "the only index there is 0")
                )
            index_of[role] = index
        missing = {name: 0 for name, _ in self._axes if ROLES[name] not in index_of}
        if missing:
            every = ", ".join(f"{name}={index}" for name, index in (coordinate | missing).items())
            raise TopologyError(f"rank_at() lacks {', '.join(missing)}: write every axis, as in rank_at({every})")
        # The row-major index, by Horner's rule.
        rank = 0
        for role, index in self._index.items():
            rank = rank * self._sizes[index] + index_of[role]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """Returns the groups of ``axis``: ascending lists of ranks that differ in that coordinate alone.

        Groups are sorted by the coordinates of the axes inside ``axis``, then of the axes outside.
        ``"model"``: the ranks that work on the same replica's data, so that all coordinates except data and expert
        vary. ``"batch"``: the ranks over which gradients are summed, so that data, expert and context vary.
        A known axis that this topology lacks has groups of a single rank each.
        """
        if axis == MODEL:
            # The i-th ranks of all groups that draw rows work on the same replica's data.
            return [sorted(ranks) for ranks in zip(*self.groups_over(ROW_AXES), strict=True)]
        return self.groups_over(BATCH_AXES if axis == BATCH else [axis])

    def groups_over(self, axes: Iterable[str]) -> list[list[int]]:
        """Returns the groups of ranks that differ along any of ``axes`` alone, sorted as ``groups`` sorts."""
        indices = {self._index[role] for role in map(role_of, axes) if role in self._index}
        return axis_groups(self._sizes, sorted(indices))

    def shard_groups(self) -> list[list[int]]:
        """Returns each batch group's ranks in each node: the groups over which ZeRO shards."""
        return [shard for group in self.groups(BATCH) for shard in by_node(group, self._node)]

    def replica_groups(self) -> list[list[int]]:
        """Returns each batch group's ranks at the same position in their nodes: the groups that hold the same shard."""
        return [list(ranks) for group in self.groups(BATCH) for ranks in zip(*by_node(group, self._node), strict=True)]

    def crosses_nodes(self, axis: str) -> bool:
        """Returns whether any group of ``axis`` (or of ``"model"`` or ``"batch"``) has ranks in more than one node."""
        return self._cross_nodes(self.groups(axis))

    def _cross_nodes(self, groups: list[list[int]]) -> bool:
        return any(group[0] // self._node != group[-1] // self._node for group in groups)

    @property
    def mesh(self) -> DeviceMesh:
        """These ranks as a torch ``DeviceMesh`` with these axis names; beside an expert axis always with ``tensor``.

        The first access, which every rank must make, makes the mesh; on the accelerator if the process group serves it.

        Raises:
            TopologyError: torch.distributed is not started, or runs another number of processes.
        """
        live = self._distributed()
        if live.mesh is None:
            import torch
            from torch.distributed.device_mesh import DeviceMesh

            # Libraries that spread experts take the mesh of the tensor axis, too, also where that is a single rank.
            axes = dict(self._axes)
            if "expert" in self._index and "tensor" not in self._index:
                axes["tensor"] = 1
            with_tensor = Topology(axes.items())
            groups = [_new_group(with_tensor.groups(name)) for name in axes]
            ranks = torch.arange(self._world_size, device="cpu").view(*axes.values())
            group = groups if len(groups) > 1 else groups[0]
            live.mesh = DeviceMesh.from_group(group, served_device().type, ranks, mesh_dim_names=tuple(axes))
        return live.mesh

    def group(self, axis: str) -> ProcessGroup:
        """This rank's process group along ``axis``, or of ``"model"`` or ``"batch"``.

        The first call makes the group; every rank must make this call, and calls for several axes in the same order.

        Raises:
            TopologyError: as for ``mesh``, or ``axis`` is unknown.
        """
        key = axis if axis in (MODEL, BATCH) else role_of(axis)
        live = self._distributed()
        if key not in live.groups:
            index = self._index.get(key)
            live.groups[key] = (
                _new_group(self.groups(key)) if index is None else self.mesh.get_group(self._axes[index][0])
            )
        return live.groups[key]

    def data_mesh(self, zero_scope: Literal["node", "data"] = "node") -> DeviceMesh:
        """This rank's batch group as a 2-dimensional ``DeviceMesh``, (replica, shard).

        The first call makes the mesh; every rank must make this call, and calls for both scopes in the same order. The
        mesh covers this rank's batch group only, since groups that straddle nodes do not fit a mesh over all ranks.

        Args:
            zero_scope: "node": a row of ranks for each node; "data": a single row with the whole group.

        Raises:
            TopologyError: as for ``mesh``, or ``zero_scope`` is unknown.
        """
        if zero_scope not in ("node", "data"):
            raise TopologyError(f'zero_scope is {zero_scope!r}; it is "node" or "data"')
        live = self._distributed()
        if zero_scope not in live.data_meshes:
            from torch.distributed.device_mesh import DeviceMesh

            # The mesh holds this rank's batch group alone.
            nodes = self if zero_scope == "node" else Topology(self._axes)  # as if all ranks were in a single node
            groups = [_new_group(nodes.replica_groups()), _new_group(nodes.shard_groups())]
            rows = by_node(self._mine(*BATCH_AXES), nodes._node)
            live.data_meshes[zero_scope] = DeviceMesh.from_group(
                groups, served_device().type, rows, mesh_dim_names=("replica", "shard")
            )
        return live.data_meshes[zero_scope]

    @property
    def data_size(self) -> int:
        """The number of replicas that draw data: data × expert ranks, or 1 if a single process plays every rank.

        Raises:
            TopologyError: torch.distributed runs another number of processes, or has yet to be started.
        """
        return 1 if self._is_alone() else math.prod(map(self.size, ROW_AXES))

    @property
    def data_rank(self) -> int:
        """The replica that this process draws data for: its number among the data × expert ranks, or 0 if a process
        plays every rank.

        Raises:
            TopologyError: as for ``data_size``.
        """
        return 0 if self._is_alone() else self._mine(*ROW_AXES).index(self.rank)

    @property
    def pipe_rank(self) -> int:
        """This process's number in its pipe group, or 0 if a process plays every rank.

        Raises:
            TopologyError: as for ``data_size``.
        """
        return 0 if self._is_alone() else self._mine("pipe").index(self.rank)

    @property
    def rank(self) -> int:
        """This process's number: torch.distributed's; before ``init`` the launcher's (RANK, SLURM_PROCID), or 0."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return _OwnRank(dist.get_rank())
        return _OwnRank(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all: it is rank 0, or plays every rank."""
        return self.rank == 0

    def sampler(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        costs: Sequence[float] | Callable[[int], float] | None = None,
        batch_size: int | None = None,
    ) -> DistributedSampler[Any]:
        """Returns a sampler for a ``DataLoader`` that draws the same rows on all ranks of the same replica.

        With ``costs``, the samples of each global batch are dealt over the replicas, so that the replicas' batches cost
        nearly the same. A global batch has the samples that it has without ``costs``, and each replica draws as many.
        The draws depend on the arguments, the epoch and the number of replicas alone, so that a run can be resumed.

        Args:
            dataset: the dataset to draw from; must have a length.
            shuffle: whether rows are in an order drawn from ``seed`` and the epoch; if so, call
                ``sampler.set_epoch(epoch)`` before each epoch.
            seed: the seed of the order, the same on all ranks.
            drop_last: drop rows so that all replicas draw equally many; otherwise some rows are drawn twice.
            costs: the cost of each sample, such as its images or its tokens, the same on all ranks: a number for each
                sample of the dataset, or a function of a sample's number. The sampler calls the function for all
                samples of a global batch when it draws the batch.
            batch_size: with ``costs``, the samples of a batch of one replica, as the ``DataLoader`` has it.

        Raises:
            TopologyError: as for ``data_size``; the dataset has no length; or ``costs`` does not have a number from 0
                on for each sample. If ``costs`` is a function, the sampler raises the error when it draws.
        """
        from torch.utils.data import DistributedSampler

        if not hasattr(dataset, "__len__"):
            raise TopologyError(
                f"{type(dataset).__name__} has no length, so that no sampler can draw from it: in its __iter__ give "
                "every topo.data_size-th row from number topo.data_rank on"
            )
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not is_flag(flag):
                raise TopologyError(f"{name} is {shown(flag)}; it is True or False")
        seed = whole(seed, "the sampler's seed")
        if (costs is None) != (batch_size is None):
            raise TopologyError(
                "costs= and batch_size= of a sampler need each other, because it deals the samples of a batch: write "
                "both, and the DataLoader's batch_size"
            )
        self.has_sampler = True
        arguments = (self.data_size, self.data_rank, shuffle, seed, drop_last)
        if costs is None or batch_size is None:
            return DistributedSampler(dataset, *arguments)  # type: ignore[arg-type]
        from fxpipe.distributed.dealt_sampler import DealtSampler

        return DealtSampler(dataset, costs, positive(batch_size, "batch_size"), *arguments)

    def context_part(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Returns this rank's positions of a tensor that has all positions along ``dim``.

        The tensor is cut into 2c equal chunks. The r-th of c context ranks gets the r-th chunk and the r-th from the
        end, so that causal attention costs all ranks the same.
        A process that plays every rank gets the tensor itself.

        Raises:
            TopologyError: the number of positions is no multiple of 2c; or as for ``data_size``.
        """
        count = self._context_size()
        if count == 1:
            return tensor
        import torch

        self.cut.append(tensor)
        mine, chunks = self._mine("context").index(self.rank), self._chunks(tensor, dim, count)
        return torch.cat([chunks[mine], chunks[-1 - mine]], dim)

    def context_whole(self, parts: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Returns the tensor in the order of its positions, from the concatenation along ``dim`` of what
        ``context_part`` returned on each context rank, in their order; no communication.

        Raises:
            TopologyError: as for ``context_part``.
        """
        count = self._context_size()
        if count == 1:
            return parts
        import torch

        chunks = self._chunks(parts, dim, count)
        return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim)

    def _context_size(self) -> int:
        return 1 if self._is_alone() else self.size("context")

    def _chunks(self, tensor: torch.Tensor, dim: int, count: int) -> tuple[torch.Tensor, ...]:
        """Returns the tensor in two chunks for each of ``count`` context ranks."""
        if tensor.shape[dim] % (2 * count):
            raise TopologyError(
                f"{tensor.shape[dim]} positions, dimension {dim} of {list(tensor.shape)}, are no multiple of "
                f"2 × context {count}: pad them to a multiple of {2 * count}"
            )
        return tensor.chunk(2 * count, dim)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, ranks_per_node: int | None = None) -> Topology:
        """Returns the topology of a ``DeviceMesh`` over all processes; its ``.mesh`` is the same mesh object.

        Raises:
            TopologyError: the mesh names no dimensions or unknown dimensions, covers only some of the processes,
                or orders its ranks otherwise than row-major.
        """
        names = getattr(mesh, "mesh_dim_names", "")
        if names == "":
            raise TopologyError(
                f'{shown(mesh)} is no Topology, and no DeviceMesh: write fxpipe.Topology([("pipe", 2), ("data", 4)])'
            )
        if names is None:
            raise TopologyError(
                f"a DeviceMesh of shape {tuple(mesh.shape)} names no dimensions: "
                'write init_device_mesh(..., mesh_dim_names=("pipe", "data"))'
            )
        topology = cls(zip(names, mesh.shape, strict=True), ranks_per_node)
        # Topology computes groups row-major; a mesh in another order would have different groups.
        live = topology._distributed()
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(topology.world_size)):
            raise TopologyError(
                f"the mesh orders its ranks as {abbreviated(ranks)}, but a topology counts them row-major: "
                "build the mesh with init_device_mesh, and reorder its dimensions instead"
            )
        live.mesh = mesh
        return topology

    def __str__(self) -> str:
        groups = {name: self.groups(name) for name, _ in self._axes} | {MODEL: self.groups(MODEL)}
        if len(set(self._index) & set(BATCH_AXES)) > 1:
            groups[BATCH] = self.groups(BATCH)
        nodes = "one node"
        if self._ranks_per_node is not None:
            nodes = f"{self._ranks_per_node} to a node"
            groups |= {"shard": self.shard_groups(), "replica": self.replica_groups()}
        rows = []
        for name, members in groups.items():
            # Shard and replica groups can differ in size: a data group may fit into a node, and the next straddle two.
            lengths = " or ".join(map(str, sorted(set(map(len, members)))))
            rows.append((name, lengths, listed(members), "yes" if self._cross_nodes(members) else "no"))
        table = tabulate(rows, headers=("axis", "size", "groups", "crosses nodes"), colalign=("left", "right"))
        return f"{self._world_size} ranks, {nodes}\n{table}"

    def __repr__(self) -> str:
        node = "" if self._ranks_per_node is None else f", ranks_per_node={self._ranks_per_node}"
        return f"Topology({list(self._axes)!r}{node})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return (self._axes, self._ranks_per_node) == (other._axes, other._ranks_per_node)

    def __hash__(self) -> int:
        return hash((self._axes, self._ranks_per_node))

    def __reduce__(self) -> tuple[type[Topology], tuple[tuple[tuple[str, int], ...], int | None]]:
        # Process groups belong to a single process; an unpickled copy makes its own.
        return Topology, (tuple(self._axes), self._ranks_per_node)

    def _is_alone(self) -> bool:
        """Whether a single process plays every rank; TopologyError if that is not known yet."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            alone = dist.get_world_size() == 1
        else:  # decide by the environment: whether torchrun or srun has started several processes
            rank, count = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("SLURM_PROCID", "SLURM_NTASKS")
            alone = rank not in os.environ or os.environ.get(count, "1") == "1"
        if not alone:
            self._distributed()
        return alone

    def _mine(self, *axes: str) -> list[int]:
        """Returns the ranks of this process's group over ``axes``."""
        return next(group for group in self.groups_over(axes) if self.rank in group)

    def _distributed(self) -> _LiveGroups:
        """Returns this topology's meshes and groups; TopologyError unless torch.distributed runs with as many ranks."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise TopologyError(
                "torch.distributed is not started, so there are no process groups: call fxpipe.init() first, "
                "under torchrun, srun or fxpipe.launch"
            )
        running = dist.get_world_size()
        if running != self._world_size:
            raise TopologyError(
                f"torch.distributed runs {running} processes, but {shape(self._axes)} makes {self._world_size}: "
                f"start {self._world_size}, or write sizes whose product is {running}"
            )
        # Meshes and groups of a destroyed default process group are invalid: start anew.
        if self._live is None or self._live.world is not dist.group.WORLD:
            self._live = _LiveGroups(dist.group.WORLD)
        return self._live


def _new_group(groups: list[list[int]]) -> ProcessGroup:
    """Makes the one of ``groups`` that this rank is in, by a call of every rank."""
    import torch.distributed as dist

    from fxpipe.torch_compat.groups import group_of_members

    world = dist.group.WORLD
    number = _made[world] = _made.get(world, 0) + 1
    ranks = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return group_of_members(ranks, f"fxpipe, group {number} of a topology, of {ranks[0]}")


_made: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""World → the number of calls of ``_new_group`` in it: all its ranks make them in the same order."""
