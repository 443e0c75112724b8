"""``compile``: wires the rooms together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.agreement import Options, call_signature, modes_of, pattern_of, plan_together
from fxpipe.batch import BatchDim, describe, required_names
from fxpipe.batch import bind as bind_call
from fxpipe.broadcast import broadcast
from fxpipe.connect import connect
from fxpipe.data_axis import Way, check_ties, check_zero, data_groups, way_of
from fxpipe.engine import ForwardBackward, Holding
from fxpipe.errors import RunError, nearest
from fxpipe.ir import StageGraph, all_tensors
from fxpipe.lower import pairs
from fxpipe.metered import Metered
from fxpipe.ownership import Ownership, RankModule, ownership, release
from fxpipe.pipeline import Pass
from fxpipe.plan import Pattern, Plan, Planner
from fxpipe.precision import Precision, cast_parameters
from fxpipe.reduce import reducer_for
from fxpipe.schedule import Schedule
from fxpipe.schedules import Family
from fxpipe.stopwatch import clock_of
from fxpipe.topology import Topology
from fxpipe.trace import Request
from fxpipe.transport import Transport, failing_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module | StageGraph,
    topo: Topology | DeviceMesh,
    *,
    loss_fn: Callable[..., Any] | None = None,
    microbatches: int | None = None,
    batch_dim: BatchDim = 0,
    schedule: str | Family | Schedule = "1f1b",
    placement: Mapping[str, int] | None = None,
    tracer: str = "auto",
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    zero: int = 0,
    zero_scope: str = "node",
    bucket_cap_mb: float = 25.0,
    precision: Precision | None = None,
    loss_weight: Callable[..., Any] | None = None,
    passes: Sequence[Pass] | None = None,
) -> ForwardBackward:
    """Compiles a model into one function that replaces the forward and backward of a training loop.

    A collective call of all ranks, or one process that plays every pipe rank.

    Args:
        model: a module whose cuts are marked with ``fxpipe.stage_boundary``, or a ``StageGraph`` of callables.
        topo: the grid of ranks; a DeviceMesh whose dimension names include "pipe" or "pp" will do.
        loss_fn: called on the model's output and the call's ``target``; None: the model returns the loss.
        microbatches: how many a batch is cut into; None: 4 × the pipe ranks, or 1 where there is one.
        batch_dim: the dimension micro-batches are cut along: one for all inputs, or a dict input → dimension or
            None (given whole; 0 for inputs not in it).
        schedule: a name out of ``fxpipe.SCHEDULES``, a function of the same kind, or a ``Schedule``.
        placement: stage name → pipe rank; None: topological order, balanced by parameters.
        tracer: a name out of ``fxpipe.TRACERS``.
        example_args, example_kwargs: one batch as it will be passed in calls. Without it the capture takes the
            required inputs for tensors and the optional ones for absent; a call that differs is captured anew.
        zero: what is sharded over the data axis: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as
            well. With 1 and 2 use ``forward_backward.optimizer``.
        zero_scope: "node": sharded inside the node, replicated across nodes; "data": over the whole data axis.
        bucket_cap_mb: gradients are summed in buckets of this size, in MiB; the first is smaller.
        precision: the types of parameters, reductions and masters; None: as the model is.
        loss_weight: micro-batch → its weight, a function of the inputs in call order; None: its rows.
        passes: the pass pipeline; None: ``fxpipe.passes.default()``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError: what cannot be done, on all ranks alike.
        RunError: the ranks have compiled different models, or another rank has failed.
    """
    topology = topo if isinstance(topo, Topology) else Topology.from_mesh(topo)
    ranks = topology.size("pipe")
    count = microbatches if microbatches is not None else (4 * ranks if ranks > 1 else 1)
    if count < 1:
        raise RunError(f"microbatches={count}; at least 1 is needed")
    _check_options(model, loss_fn, batch_dim)
    check_zero(zero, zero_scope, bucket_cap_mb)
    if precision is not None and not isinstance(precision, Precision):
        raise RunError(f"precision is {precision!r}; write fxpipe.Precision(compute=torch.bfloat16)")
    connected = connect(topology)
    transport = Metered(connected, topology, clock_of(connected.device))
    notes = (
        f"batch_dim={batch_dim}, loss_weight {'given' if loss_weight else 'not given'}, zero={zero}, "
        f"zero_scope={zero_scope}, bucket_cap_mb={bucket_cap_mb}, {precision}"
    )
    planner = Planner(model, ranks, schedule, placement, tracer, loss_fn, passes, notes)
    options = Options(count, batch_dim, loss_weight, loss_fn)
    with failing_together(transport, transport.abort):
        example = partial(_first_pattern, planner, options, example_args, example_kwargs)
        plan = plan_together(transport, ("pipe", "data"), lambda: planner.plan(example()))
        owners = ownership(plan.graph)
        if transport.pipe_rank is not None:
            groups = data_groups(topology, zero, zero_scope)
            transport.open(pairs(plan.instructions), list(owners.tied), groups)
            if transport.data_size > 1:
                check_ties(topology, transport, owners)
        device = _device(plan, owners, transport)
        module = _take_part(planner, plan, owners, transport)
        if zero == 3 and transport.data_size > 1:
            holding = _sharded(planner, topology.data_mesh(zero_scope), transport, owners, precision)
        else:
            way = way_of(zero, transport, precision)
            holding = _whole(planner, module, transport, owners, precision, way, int(bucket_cap_mb * 2**20))
        base_seed = _base_seed(transport)
    return ForwardBackward(planner, topology, transport, holding, owners, options, base_seed, device)


def _check_options(model: nn.Module | StageGraph, loss_fn: Callable[..., Any] | None, batch_dim: BatchDim) -> None:
    """What would be ignored is refused."""
    if isinstance(model, StageGraph):
        if loss_fn is not None:
            raise RunError("loss_fn= is for traced models; the last of the user's own stages returns the loss")
        names = model.inputs
    else:
        parameters = Request.signature(model, loss_fn).parameters
        names = tuple(parameters)
        if loss_fn is not None and "target" in inspect.signature(model.forward).parameters:
            raise RunError("forward itself takes 'target', which loss_fn= would take from it; rename the argument")
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return  # any name may come
    for name in batch_dim if isinstance(batch_dim, Mapping) else ():
        if name not in names:
            raise RunError(f"batch_dim names {name!r}, which is no input{nearest(name, names)}")


def _first_pattern(
    planner: Planner,
    options: Options,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
) -> Pattern:
    """The pattern of the example, or of a call with the required inputs alone."""
    modes = modes_of(planner.module)
    signature = call_signature(planner, options.loss_fn)
    if example_args is not None or example_kwargs is not None:
        values = bind_call(signature, example_args or (), example_kwargs or {})
        return pattern_of(describe(values), options.microbatches, True, options.loss_fn, modes)
    return Pattern(tuple(required_names(signature)), (), options.microbatches, options.loss_fn is not None, modes)


def _device(plan: Plan, owners: Ownership, transport: Transport) -> torch.device:
    """The device that this rank computes on. All ranks must agree on its type, or messages would miss each other."""
    everything = all_tensors(plan.graph.module)
    rank = transport.pipe_rank
    held = [tensor for name, tensor in everything.items() if rank is None or name in owners.names[rank]]
    if rank is None:
        return held[0].device if held else transport.device
    mine = {tensor.device.type for tensor in held if not tensor.is_meta}
    types = {kind for scope in ("pipe", "data") for part in transport.gather(scope, mine) for kind in part}
    if len(types) > 1:
        raise RunError(f"the model's tensors are on devices of several kinds, {sorted(types)}; move all of it to one")
    return next((t.device for t in held if not t.is_meta), _default_device(types, transport))


def _default_device(types: set[str], transport: Transport) -> torch.device:
    return transport.device if not types or transport.device.type in types else torch.device(next(iter(types)))


def _take_part(planner: Planner, plan: Plan, owners: Ownership, transport: Transport) -> RankModule:
    """This rank's parameters and buffers, equal to those of the first owner and the first replica; frees the rest."""
    model = planner.module
    if transport.pipe_rank is None:
        return RankModule(model, frozenset(all_tensors(model)))
    mine = owners.names[transport.pipe_rank]
    held = {name: tensor for name, tensor in all_tensors(model).items() if name in mine}
    unmade = [name for name, tensor in held.items() if tensor.is_meta]
    if unmade:
        raise RunError(
            f"{unmade[0]} is on the meta device: the model was built there, or an earlier fxpipe.compile gave it to "
            "another rank; build the model anew, on a real device"
        )
    for holders, names in owners.tied.items():
        if transport.pipe_rank in holders:
            broadcast([held[name] for name in names], transport, holders, 0)
    if transport.data_size > 1:
        once = {id(tensor): tensor for tensor in held.values()}
        broadcast(list(once.values()), transport, "data", 0)
    kept = {id(tensor) for tensor in held.values()}  # under whatever name a stage of another rank has them
    release(model, mine)
    for stage in plan.graph:
        if plan.graph.placement[stage.index] != transport.pipe_rank and isinstance(stage.module, nn.Module):
            release(stage.module, frozenset(name for name, t in all_tensors(stage.module).items() if id(t) in kept))
    planner.let_go()
    return RankModule(model, mine)


def _sharded(
    planner: Planner, mesh: DeviceMesh, transport: Transport, owners: Ownership, precision: Precision | None
) -> Holding:
    """A rank's shards of its parameters, with ``zero=3``."""
    from fxpipe.fully_sharded import fully_sharded  # it imports FSDP2, which takes its time

    reducer = fully_sharded(planner.module, planner.first.graph, mesh, transport, owners, precision)
    planner.let_go()
    return Holding(RankModule(planner.module, owners.names[transport.pipe_rank or 0]), reducer, precision, {})


def _whole(
    planner: Planner,
    module: RankModule,
    transport: Transport,
    owners: Ownership,
    precision: Precision | None,
    way: Way,
    capacity: int,
) -> Holding:
    """A rank's whole parameters, in buckets where others have them, too."""
    originals = {} if precision is None else cast_parameters(planner.module, precision)
    plan = planner.first
    row = plan.schedule.rows[transport.pipe_rank] if transport.pipe_rank is not None else ()
    reducer = reducer_for(plan.graph, row, module, owners, transport, way, capacity)
    return Holding(module, reducer, precision, originals)


def _base_seed(transport: Transport) -> int:
    """The first rank's seed, for all."""
    seed = transport.gather("pipe", torch.initial_seed())[0]
    return int(transport.gather("data", seed)[0])
