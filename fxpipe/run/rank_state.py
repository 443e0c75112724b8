"""Holding: what a rank has of the model, and how it comes by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.distributed.broadcast import broadcast
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.parameters.materialise import check_no_meta, materialise
from fxpipe.parameters.ownership import Ownership, RankModule, release
from fxpipe.parameters.weights import Weights
from fxpipe.plan.planner import Plan, Planner
from fxpipe.precision import Precision, cast_parameters
from fxpipe.sharding.data_axis import way_of
from fxpipe.sharding.gradients import Gradients
from fxpipe.sharding.parallelize.apply import parallelise_stages, tensor_groups
from fxpipe.sharding.reducer import reducer_for


@dataclass(frozen=True)
class Holding:
    """What a rank has of the model."""

    module: RankModule
    reducer: Gradients
    precision: Precision | None
    originals: dict[str, Tensor]
    """Parameters as they were before ``precision`` rounded them, by name."""


@dataclass(frozen=True)
class Wish:
    """What ``compile`` was asked to make of a rank's parameters; see its options."""

    zero: int
    zero_scope: str
    capacity: int
    """Bytes of a gradient bucket."""
    precision: Precision | None
    init_fn: Callable[[nn.Module], None] | None
    weights: Weights | None
    parallelize: Callable[..., None] | None


def take_hold(
    planner: Planner, topology: Topology, transport: Transport, owners: Ownership, wish: Wish, seed: int
) -> Holding:
    """This rank's parameters and buffers, made, shared and wrapped as wished. A collective call of all ranks."""
    device = device_of(planner.first, owners, transport)
    _make_own(planner, owners, transport, device, wish, seed)
    _make_equal(planner, topology, transport, owners)
    _let_go_of_others(planner, owners, transport)
    if wish.zero == 3 and transport.data_size > 1:
        return _sharded(planner, topology, transport, owners, wish)
    return _whole(planner, topology, transport, owners, wish)


def device_of(plan: Plan, owners: Ownership, transport: Transport) -> torch.device:
    """The device that this rank computes on. All ranks must agree on its type, or messages would miss each other."""
    everything = all_tensors(plan.graph.module)
    rank = transport.pipe_rank
    held = [t for name, t in everything.items() if not t.is_meta and (rank is None or name in owners.names[rank])]
    if rank is None:
        return held[0].device if held else transport.device
    mine = {tensor.device.type for tensor in held}
    types = {kind for scope in ("pipe", "data") for part in transport.gather(scope, mine) for kind in part}
    if len(types) > 1:
        raise RunError(f"the model's tensors are on devices of several kinds, {sorted(types)}; move all of it to one")
    return next((tensor.device for tensor in held), _default_device(types, transport))


def _default_device(types: set[str], transport: Transport) -> torch.device:
    return transport.device if not types or transport.device.type in types else torch.device(next(iter(types)))


def _own_names(planner: Planner, owners: Ownership, transport: Transport) -> frozenset[str]:
    rank = transport.pipe_rank
    return frozenset(all_tensors(planner.module)) if rank is None else owners.names[rank]


def _own_stages(planner: Planner, transport: Transport) -> list[Any]:
    """The stages that this rank runs, as every capture so far has them."""
    rank = transport.pipe_rank
    return [
        stage for graph in planner.graphs for stage in graph if rank is None or graph.placement[stage.index] == rank
    ]


def _make_own(
    planner: Planner, owners: Ownership, transport: Transport, device: torch.device, wish: Wish, seed: int
) -> None:
    """Puts numbers into what is on the meta device, or comes from a checkpoint."""
    names = _own_names(planner, owners, transport)
    held = all_tensors(planner.module)
    unmade = sorted(name for name in names if held[name].is_meta)
    if not unmade and wish.weights is None:
        return
    if unmade and wish.weights is None and wish.init_fn is None:
        raise RunError(
            f"{unmade[0]} is on the meta device; pass init_fn=, or checkpoint=, and this rank's part is made there. "
            "Where an earlier fxpipe.compile gave it to another rank, build the model anew"
        )
    made = materialise(planner.module, names, device, wish.init_fn, wish.weights, seed)
    for stage in _own_stages(planner, transport):
        if isinstance(stage.module, nn.Module):
            made.replace_in(stage.module)
            check_no_meta(stage.module, stage.name)
    planner.let_go()


def _make_equal(planner: Planner, topology: Topology, transport: Transport, owners: Ownership) -> None:
    """The same values with all that hold a tensor: the first owner's, of the first replica."""
    if transport.pipe_rank is None:
        return
    mine = owners.names[transport.pipe_rank]
    held = {name: tensor for name, tensor in all_tensors(planner.module).items() if name in mine}
    for holders, names in owners.tied.items():
        if transport.pipe_rank in holders:
            broadcast([held[name] for name in names], transport, holders, 0)
    once = list({id(tensor): tensor for tensor in held.values()}.values())
    if transport.data_size > 1:
        broadcast(once, transport, "data", 0)
    if tensor_groups(topology):
        broadcast(once, transport, "tensor", 0)


def _let_go_of_others(planner: Planner, owners: Ownership, transport: Transport) -> None:
    """Frees the memory of what other ranks hold."""
    rank = transport.pipe_rank
    if rank is None:
        return
    held = all_tensors(planner.module)
    kept = {id(tensor) for name, tensor in held.items() if name in owners.names[rank]}  # under whatever name
    release(planner.module, owners.names[rank])
    for graph in planner.graphs:
        for stage in graph:
            if graph.placement[stage.index] != rank and isinstance(stage.module, nn.Module):
                release(stage.module, frozenset(n for n, t in all_tensors(stage.module).items() if id(t) in kept))
    planner.let_go()


def _sharded(planner: Planner, topology: Topology, transport: Transport, owners: Ownership, wish: Wish) -> Holding:
    """A rank's shards of its parameters, with ``zero=3``."""
    from fxpipe.sharding.fsdp_gradients import fully_sharded  # it imports FSDP2, which takes its time

    mesh = topology.data_mesh(wish.zero_scope)
    reducer = fully_sharded(planner.module, planner.graphs, mesh, transport, owners, wish.precision)
    planner.let_go()
    return Holding(RankModule(planner.module, owners.names[transport.pipe_rank or 0]), reducer, wish.precision, {})


def _whole(planner: Planner, topology: Topology, transport: Transport, owners: Ownership, wish: Wish) -> Holding:
    """A rank's whole parameters, or what ``parallelize`` makes of them; in buckets where others have them, too."""
    parallel = None
    if wish.parallelize is not None:
        parallel = parallelise_stages(planner.first.graph, topology, transport, wish.parallelize, owners)
        planner.adopt = parallel.adopt
        planner.let_go()
    originals = {} if wish.precision is None else cast_parameters(planner.module, wish.precision)
    module = RankModule(planner.module, _own_names(planner, owners, transport))
    plan = planner.first
    row = plan.schedule.rows[transport.pipe_rank] if transport.pipe_rank is not None else ()
    way = way_of(wish.zero, transport, wish.precision)
    reducer = reducer_for(plan.graph, row, module, owners, transport, way, wish.capacity)
    gradients: Gradients = (
        reducer if parallel is None else parallel.gradients(reducer, transport, owners, planner.module)
    )
    return Holding(module, gradients, wish.precision, originals)
