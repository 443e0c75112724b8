"""Rank state: what a rank has of the model, and how it comes by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fxpipe.batch.group_inputs import SCOPE
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport, broadcast
from fxpipe.errors import RunError
from fxpipe.graph.ranks import replicated
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.materialise import InitFn, check_no_meta, materialise
from fxpipe.parameters.ownership import Ownership, RankModule, ownership, release, replace_tensors, why_elsewhere
from fxpipe.parameters.weights import Weights
from fxpipe.plan.planner import Planner
from fxpipe.precision import cast_parameters
from fxpipe.schedules.lower import pairs
from fxpipe.sharding.data_axis import check_ties, data_groups, sums_of
from fxpipe.sharding.gradients import Gradients
from fxpipe.sharding.parallelise import ParallelGradients, parallelise_stages, tensor_groups
from fxpipe.sharding.reducer import Reducer, reducer_for


@dataclass(frozen=True)
class RankState:
    """What a rank has of the model. ``planner``: its plans hold these very tensors."""

    planner: Planner
    module: RankModule
    reducer: Gradients
    originals: dict[str, Tensor]
    """Parameters as they were before ``precision`` rounded them, by name."""
    owners: Ownership
    device: torch.device
    """Where this rank computes."""
    seed: int
    """The first rank's, for all; what random numbers come from."""


def _base_seed(topology: Topology, transport: Transport) -> int:
    """The first rank's seed, for all. A collective call of all ranks."""
    seed = torch.initial_seed()
    # The first of each group decides, one axis after another: behind the last all ranks have the first rank's.
    for scope in ("pipe", "data", *tensor_groups(topology)):
        seed = transport.gather(scope, seed)[0]
    return int(seed)


def _open_groups(planner: Planner, topology: Topology, transport: Transport, owners: Ownership) -> None:
    """Connects the ranks that the plan lets meet. A collective call of all ranks."""
    if transport.pipe_rank is None:
        return
    plan, options = planner.first, planner.options
    groups = {**data_groups(topology, options.zero, options.zero_scope), **tensor_groups(topology)}
    if plan.graph.sees_replicas:
        groups[SCOPE] = topology.groups("data")
    # Gradients of tied parameters are summed over their owners, losses over the ranks that make some.
    sums = dict.fromkeys([*owners.tied, *[plan.output_ranks] * (len(plan.output_ranks) > 1)])
    transport.open(pairs(plan.instructions), list(sums), groups)
    if transport.data_size > 1:
        check_ties(topology, transport, owners)


def _take_own_part(
    planner: Planner,
    topology: Topology,
    transport: Transport,
    owners: Ownership,
    init_fn: InitFn | None,
    weights: Weights | None,
    seed: int,
) -> Planner:
    """The planner, once this rank's parameters and buffers have values, equal wherever they are held, and those of
    others are gone. A collective call of all ranks."""
    rank, device = transport.pipe_rank, _device_of(planner, owners, transport)
    names = _own_names(planner, owners, transport)
    held = all_tensors(planner.module)
    unmade = sorted(name for name in names if held[name].is_meta)
    if unmade and weights is None and init_fn is None:
        raise RunError(
            f"{unmade[0]} is on the meta device; pass init_fn=, or checkpoint=, and this rank's part is made there. "
            "Where an earlier fxpipe.compile gave it to another rank, build the model anew"
        )
    if unmade or weights is not None:
        made = materialise(planner.module, names, device, init_fn, weights, seed)
        for name, module, ranks in _stages_with_modules(planner):
            if rank in (None, *ranks):
                replace_tensors(module, made)
                check_no_meta(module, name)
    if rank is not None:
        held = {name: tensor for name, tensor in all_tensors(planner.module).items() if name in names}
        _make_equal(held, topology, transport, owners)
        # frees the memory of what other ranks hold
        own = set(map(id, held.values()))
        release(planner.module, names, why_elsewhere(planner.first.graph, owners), device)
        for _, module, ranks in _stages_with_modules(planner):
            if rank not in ranks:  # what it shares with this rank's may have another name there
                release(module, frozenset(name for name, tensor in all_tensors(module).items() if id(tensor) in own))
    return planner.with_tensors_of_module()


def _stages_with_modules(planner: Planner) -> Iterator[tuple[str, nn.Module, Collection[int]]]:
    """(name, module, the ranks that run it)"""
    for graph in planner.graphs:
        for stage in graph:
            if isinstance(stage.module, nn.Module):
                yield stage.name, stage.module, graph.ranks(stage.index)


def _make_equal(held: Mapping[str, Tensor], topology: Topology, transport: Transport, owners: Ownership) -> None:
    """The same values with all that hold a tensor: the first owner's, of the first replica."""
    for holders, names in owners.tied.items():
        if transport.pipe_rank in holders:
            broadcast([held[name] for name in names], transport, holders, 0)
    # A tied parameter is one tensor under several names, and is sent once.
    once = list({id(tensor): tensor for tensor in held.values()}.values())
    if transport.data_size > 1:
        broadcast(once, transport, "data", 0)
    if tensor_groups(topology):
        broadcast(once, transport, "tensor", 0)


def _own_names(planner: Planner, owners: Ownership, transport: Transport) -> frozenset[str]:
    rank = transport.pipe_rank
    return frozenset(all_tensors(planner.module)) if rank is None else owners.names[rank]


def _device_of(planner: Planner, owners: Ownership, transport: Transport) -> torch.device:
    """The device that this rank computes on. All ranks must agree on its type, or messages would miss each other."""
    names, everything = _own_names(planner, owners, transport), all_tensors(planner.module).items()
    held = [tensor.device for name, tensor in everything if name in names and not tensor.is_meta]
    if transport.pipe_rank is None:
        return transport.device
    mine = {device.type for device in held}
    # Over both axes: a replica may hold on CPU what another holds on a GPU.
    types = {kind for scope in ("pipe", "data") for part in transport.gather(scope, mine) for kind in part}
    if len(types) > 1:
        raise RunError(f"the model's tensors are on devices of several kinds, {sorted(types)}; move all of it to one")
    if held:
        return held[0]
    return torch.device(next(iter(types))) if types - {transport.device.type} else transport.device


def make_rank_state(
    planner: Planner, topology: Topology, transport: Transport, init_fn: InitFn | None, weights: Weights | None
) -> RankState:
    """This rank's parameters and buffers, with values, sharded, wrapped and rounded as asked for. A collective call of
    all ranks, once all have the same plan."""
    # Groups are opened in one order on all ranks, and before any rank lets go of the parameters of others.
    owners, options, parallel = ownership(planner.first.graph), planner.options, None
    _open_groups(planner, topology, transport, owners)
    seed = _base_seed(topology, transport)
    planner = _take_own_part(planner, topology, transport, owners, init_fn, weights, seed)
    gradients: Gradients | None = None
    if options.zero == 3 and transport.data_size > 1:
        from fxpipe.sharding.fsdp import FullyShardedGradients  # it imports FSDP2, which takes its time

        mesh = topology.data_mesh(options.zero_scope)
        gradients = FullyShardedGradients(
            planner.module, planner.graphs, mesh, transport, owners, options.precision, options.bucket_bytes
        )
        planner = planner.with_tensors_of_module()
    elif options.parallelize is not None:
        parallel = parallelise_stages(planner.first.graph, topology, transport, options.parallelize, owners)
        planner = planner.with_tensors_of_module(parallel.adopt)
    originals = dict[str, Tensor]()
    if gradients is None and options.precision is not None:  # FSDP2 keeps the masters itself
        originals = cast_parameters(planner.module, options.precision)
    module = RankModule(planner.module, _own_names(planner, owners, transport), transport.data_rank)
    if gradients is None:
        graph, rows, rank = planner.first.graph, planner.first.schedule.rows, transport.pipe_rank
        row = rows[rank] if rank is not None else ()
        sums = sums_of(options.zero, transport, options.precision, bool(replicated(graph.placement)))
        make = Reducer if parallel is None else partial(ParallelGradients, parallel=parallel)
        gradients = reducer_for(graph, row, module, owners, transport, sums, options.bucket_bytes, make)
    device = _device_of(planner, owners, transport)
    return RankState(planner, module, gradients, originals, owners, device, seed)
