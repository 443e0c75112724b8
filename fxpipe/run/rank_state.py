"""Rank state: a rank's parameters, buffers and gradients, and the functions that make them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from fxpipe.batch.group_inputs import SCOPE
from fxpipe.distributed.grid import BATCH
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport, broadcast
from fxpipe.errors import RunError, TopologyError
from fxpipe.graph.ranks import replicated
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.parameters.materialise import InitFn, check_no_meta, materialise_parts
from fxpipe.parameters.ownership import Ownership, RankModule, ownership, release, replace_tensors, why_elsewhere
from fxpipe.parameters.weights import Weights
from fxpipe.plan.plans import Plans
from fxpipe.precision import cast_parameters
from fxpipe.schedules.lower import pairs
from fxpipe.sharding.data_axis import alone_groups, check_ties, data_groups, sums_of
from fxpipe.sharding.gradients import Gradients
from fxpipe.sharding.parallelise import (
    ChangedStages,
    ParallelGradients,
    changed_stages,
    layer_groups,
    parallelise_stages,
)
from fxpipe.sharding.reducer import Reducer, reducer_for
from fxpipe.tensors.dtensors import is_dtensor


@dataclass(frozen=True)
class RankState:
    """A rank's part of the model."""

    module: RankModule
    reducer: Gradients
    originals: dict[str, Tensor]
    """Name → the parameter's values before ``precision`` rounded them."""
    owners: Ownership
    device: torch.device
    """The device that this rank computes on."""
    seed: int
    """The first rank's seed, used on all ranks; all random numbers derive from it."""


def _base_seed(topology: Topology, transport: Transport) -> int:
    """Returns the first rank's seed on every rank. A collective call of all ranks."""
    seed = torch.initial_seed()
    # Each axis in turn takes the seed of its group's first rank: after the last axis all ranks have rank 0's seed.
    for scope in ("pipe", "data", *layer_groups(topology)):
        seed = transport.gather(scope, seed)[0]
    return int(seed)


def _open_groups(plans: Plans, transport: Transport, owners: Ownership) -> None:
    """Opens the connections and groups that the plan uses. A collective call of all ranks."""
    if transport.pipe_rank is None:
        return
    plan, options, topology = plans.first, plans.options, plans.topology
    groups = {**data_groups(topology, options.sharding.level, options.sharding.scope), **layer_groups(topology)}
    if options.parallelize is not None:
        groups |= alone_groups(topology)
    if topology.size("context") > 1:
        _check_positions(plan.graph, options.parallelize is not None)
    if plan.graph.sees_replicas:
        groups[SCOPE] = topology.groups(BATCH)
    # Tied parameters' gradients are summed over their owners, losses over the ranks that compute some of them.
    sums = dict.fromkeys([*owners.tied, *[plan.output_ranks] * (len(plan.output_ranks) > 1)])
    transport.open(pairs(plan.instructions), list(sums), groups)
    if transport.data_size > 1:
        check_ties(topology, transport, owners)


def _check_positions(graph: StageGraph, is_parallelized: bool) -> None:
    """TopologyError for what would be wrong where a rank has some positions of a row alone."""
    if graph.sees_replicas:
        raise TopologyError(
            'gather="global" joins the rows of all replicas, but context ranks have other positions of the same rows; '
            "leave the context axis out, or the gather"
        )
    for stage in graph:
        nodes = stage.module.graph.nodes if isinstance(stage.module, fx.GraphModule) else ()
        calls = [str(node.target) for node in nodes if node.op in ("call_function", "call_method")]
        if any("dot_product" in call for call in calls):
            raise TopologyError(
                f"stage {stage.name} computes attention in code of its own, which sees the positions of this rank "
                "alone; keep attention in a module that parallelize= changes, for which a Hugging Face model needs "
                "use_cache=False"
            )
    if not is_parallelized:
        raise TopologyError(
            "on a context axis a module's attention sees the positions of this rank alone; pass parallelize=, which "
            "makes it see all, or parallelize=lambda stage, mesh: None where forward does so itself or has no attention"
        )


def _take_own_part(
    plans: Plans,
    transport: Transport,
    owners: Ownership,
    init_fn: InitFn | None,
    weights: Weights | None,
    seed: int,
    device: torch.device,
    stages: ChangedStages | None,
) -> Plans:
    """Gives this rank's parameters and buffers their values, equal on all ranks that hold them, and releases the other
    ranks' tensors; returns the plans with these tensors. ``stages``: those that ``parallelize`` has changed while they
    are on the meta device. A collective call of all ranks."""
    rank = transport.pipe_rank
    names, tensors = owners.of(rank), all_tensors(plans.module)
    unmade = sorted(name for name in names if tensors[name].is_meta)
    if unmade and weights is None and init_fn is None:
        raise RunError(
            f"{unmade[0]} is on the meta device; pass init_fn=, or checkpoint=, and this rank's part is made there. "
            "Where an earlier fxpipe.compile gave it to another rank, build the model anew"
        )
    if unmade or weights is not None:
        new = materialise_parts(plans.module, names, device, init_fn, weights, seed)
        if stages is not None:
            new |= stages.take(new)
        for name, module, ranks in _stages_with_modules(plans):
            if rank in (None, *ranks):
                replace_tensors(module, new)
                check_no_meta(module, name)
    if rank is not None:
        tensors = {name: tensor for name, tensor in all_tensors(plans.module).items() if name in names}
        _make_equal(tensors, plans.topology, transport, owners)
        # frees the memory of the tensors that only other ranks hold
        own = set(map(id, tensors.values()))
        release(plans.module, names, why_elsewhere(plans.first.graph, owners), device)
        for _, module, ranks in _stages_with_modules(plans):
            if rank not in ranks:  # tensors shared with this rank's stages may have other names in this module
                release(module, frozenset(name for name, tensor in all_tensors(module).items() if id(tensor) in own))
    return plans.with_tensors_of_module()


def _stages_with_modules(plans: Plans) -> Iterator[tuple[str, nn.Module, Collection[int]]]:
    """Yields (stage name, module, the pipe ranks that run the stage)."""
    for graph in plans.graphs:
        for stage in graph:
            if isinstance(stage.module, nn.Module):
                yield stage.name, stage.module, graph.ranks(stage.index)


def _make_equal(tensors: Mapping[str, Tensor], topology: Topology, transport: Transport, owners: Ownership) -> None:
    """Broadcasts each tensor from its first owner in the first replica to all ranks that hold the tensor."""
    for holders, names in owners.tied.items():
        if transport.pipe_rank in holders:
            broadcast([tensors[name] for name in names], transport, holders, 0)
    # A tied parameter is a single tensor under several names, and is broadcast once.
    once = list({id(tensor): tensor for tensor in tensors.values() if not is_dtensor(tensor)}.values())
    if transport.data_size > 1:
        broadcast(once, transport, "data", 0)
    if topology.size("tensor") > 1:
        broadcast(once, transport, "tensor", 0)


def _device_of(plans: Plans, owners: Ownership, transport: Transport) -> torch.device:
    """Returns the device that this rank computes on. RunError if ranks have different device types."""
    if transport.pipe_rank is None:
        return transport.device
    names, everything = owners.of(transport.pipe_rank), all_tensors(plans.module).items()
    devices = [tensor.device for name, tensor in everything if name in names and not tensor.is_meta]
    mine = {device.type for device in devices}
    # Over both axes: a replica may have its tensors on the CPU while another has them on a GPU.
    types = {kind for scope in ("pipe", "data") for part in transport.gather(scope, mine) for kind in part}
    if len(types) > 1:
        raise RunError(f"the model's tensors are on devices of several kinds, {sorted(types)}; move all of it to one")
    if devices:
        return devices[0]
    return torch.device(next(iter(types))) if types - {transport.device.type} else transport.device


def _is_meta(plans: Plans, owners: Ownership, transport: Transport) -> bool:
    """Whether this rank, one of several processes, has all of its parameters on the meta device."""
    names, parameters = owners.of(transport.pipe_rank), plans.module.named_parameters(remove_duplicate=False)
    return transport.pipe_rank is not None and all(p.is_meta for name, p in parameters if name in names)


def make_rank_state(
    plans: Plans, transport: Transport, init_fn: InitFn | None, weights: Weights | None
) -> tuple[Plans, RankState]:
    """Returns the plans and this rank's state: parameters and buffers with values, sharded, wrapped and rounded as the
    options say; the plans hold these same tensors. A collective call of all ranks, after all have the same plan."""
    # All ranks open groups in the same order, before any rank releases the parameters of other ranks.
    owners, options, topology = ownership(plans.first.graph), plans.options, plans.topology
    _open_groups(plans, transport, owners)
    seed, device = _base_seed(topology, transport), _device_of(plans, owners, transport)
    stages = None
    if options.parallelize is not None and topology.size("expert") > 1 and _is_meta(plans, owners, transport):
        # Experts are made where they will live alone, so that they are spread first.
        stages = changed_stages(plans.first.graph, topology, transport, options.parallelize)
    plans = _take_own_part(plans, transport, owners, init_fn, weights, seed, device, stages)
    gradients: Gradients | None = None
    parallel = None
    if options.sharding.level == 3 and transport.data_size > 1:
        from fxpipe.sharding.fully_sharded import FullyShardedGradients  # importing FSDP2 is slow

        mesh = topology.data_mesh(options.sharding.scope)
        gradients = FullyShardedGradients(
            plans.module, plans.graphs, mesh, transport, owners, options.precision, options.sharding.bucket_bytes
        )
        plans = plans.with_tensors_of_module()
    elif options.parallelize is not None:
        stages = stages or changed_stages(plans.first.graph, topology, transport, options.parallelize)
        parallel = parallelise_stages(plans.first.graph, topology, transport, owners, stages)
        plans = plans.with_tensors_of_module(parallel.adopt)
    originals = dict[str, Tensor]()
    if gradients is None and options.precision is not None:  # FSDP2 keeps its own master copies
        originals = cast_parameters(plans.module, options.precision)
    module = RankModule(plans.module, owners.of(transport.pipe_rank), transport.data_rank)
    if gradients is None:
        graph, rows, rank = plans.first.graph, plans.first.schedule.rows, transport.pipe_rank
        row = rows[rank] if rank is not None else ()
        sums = sums_of(options.sharding.level, transport, options.precision, bool(replicated(graph.placement)))
        make = Reducer if parallel is None else partial(ParallelGradients, parallel=parallel)
        gradients = reducer_for(graph, row, module, owners, transport, sums, options.sharding.bucket_bytes, make)
    gradients.meets = transport.pipe_rank is not None and topology.size("expert") * topology.size("context") > 1
    return plans, RankState(module, gradients, originals, owners, device, seed)
