"""``compile``: wires the rooms together."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxpipe.distributed.connect import connect
from fxpipe.distributed.metered_transport import Metered
from fxpipe.distributed.stopwatch import clock_of
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.transport import Transport, failing_together
from fxpipe.errors import RunError, nearest
from fxpipe.graph.modes import ambient_autocast
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.parameters.materialise import weights_of
from fxpipe.parameters.ownership import ownership
from fxpipe.parameters.weights import Weights
from fxpipe.passes.chain import Pass
from fxpipe.plan.agreement import Options, call_signature, first_plan_together, flags_of, pattern_of
from fxpipe.plan.batch import (
    BatchDim,
    Description,
    cut_description,
    describe,
    required_names,
    row_count,
    split,
    split_rows,
)
from fxpipe.plan.batch import bind as bind_call
from fxpipe.plan.capture_check import Sample
from fxpipe.plan.captures import Captures, Pattern, Search
from fxpipe.plan.label_count import Items, with_number
from fxpipe.plan.planner import Plan, Planner
from fxpipe.precision import Precision
from fxpipe.run.forward_backward import ForwardBackward
from fxpipe.run.rank_state import Wish, device_of, take_hold
from fxpipe.schedules import Family
from fxpipe.schedules.lower import pairs
from fxpipe.schedules.schedule import Schedule
from fxpipe.sharding.data_axis import check_ties, check_zero, data_groups
from fxpipe.sharding.parallelize.apply import check_parallelize, tensor_groups
from fxpipe.trace import Request
from fxpipe.trace.cuts_by_name import AUTO, Boundaries, resolve

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module | StageGraph,
    topo: Topology | DeviceMesh,
    *,
    loss_fn: Callable[..., Any] | None = None,
    boundaries: Boundaries = (),
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
    memory_per_rank: float | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    checkpoint: str | os.PathLike[str] | Weights | None = None,
    parallelize: Callable[..., None] | None = None,
    stage_compiler: Callable[..., Any] | None = None,
    check_batches: bool = True,
    check_capture: bool = True,
    error_if_nonfinite: bool = False,
    passes: Sequence[Pass] | None = None,
) -> ForwardBackward:
    """Compiles a model into one function that replaces the forward and backward of a training loop.

    A collective call of all ranks, or one process that plays every pipe rank.

    Args:
        model: a module whose cuts are marked with ``fxpipe.stage_boundary``, or a ``StageGraph`` of callables.
        topo: the grid of ranks; a DeviceMesh whose dimension names include "pipe" or "pp" will do.
        loss_fn: called on the model's output and the call's ``target``; None: the model returns the loss.
        boundaries: submodules that are cut, from outside: names or patterns, of which each is cut before; a dict name →
            "before", "after", "both" or {"every": n}; or a function of dict(model.named_modules()) that returns either.
            "auto": the cut and the placement that simulate best.
        microbatches: how many a batch is cut into; None: 4 × the pipe ranks, or 1 where there is one.
        batch_dim: the dimension micro-batches are cut along: one for all inputs, or a dict input → dimension or
            None (given whole; 0 for inputs not in it).
        schedule: a name out of ``fxpipe.SCHEDULES``, a function of the same kind, or a ``Schedule``.
        placement: stage name → pipe rank; None: where stages outnumber ranks, what simulates best at costs by shapes;
            without an example, topological order, balanced by parameters.
        tracer: a name out of ``fxpipe.TRACERS``.
        example_args: one batch as it will be passed in calls. Without it the capture takes the required inputs for
            tensors and the optional ones for absent; a call that differs is captured anew.
        example_kwargs: its inputs that are given by name.
        zero: what is sharded over the data axis: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as
            well. With 1 and 2 use ``forward_backward.optimizer``.
        zero_scope: "node": sharded inside the node, replicated across nodes; "data": over the whole data axis.
        bucket_cap_mb: gradients are summed in buckets of this size, in MiB; the first is smaller.
        precision: the types of parameters, reductions and masters; None: as the model is.
        loss_weight: micro-batch → its weight, a function of the inputs in call order; None: its rows.
        memory_per_rank: bytes that "auto" and ``placement=None`` keep within.
        init_fn: called with each submodule of this rank that holds parameters or buffers on the meta device, once they
            have memory; with a seed by the submodule's name, so that values depend on no placement.
        checkpoint: a file or folder, safetensors or torch's, of which this rank reads its own part.
        parallelize: ``(stage_module, mesh) -> None``, applied to this rank's stages: FSDP2, tensor parallelism, ...
        stage_compiler: applied to each stage's callable before its first use, such as ``torch.compile``.
        check_batches: in the first 3 calls with each kind of batch, and in every 100th of them, the inputs that two or
            more ranks of a pipe group were given are compared by a digest, one call later: what differs is a RunError.
            So are those of a tensor group, in the first 3 steps and every 100th; equal batches of replicas are warned
            of. False: nothing is compared.
        check_capture: whether the stages are run once against the model, forward and backward, on two micro-batches of
            the example, and losses, gradients and buffers compared; "auto" goes on to the next tracer where they
            differ. Forward hooks of the model run then, too; module attributes and containers in them, buffers and
            random state are put back, Python values elsewhere are not. It is left out, as ``print`` of ``.stages``
            tells: without an example's numbers, on the meta device, with rows that are all alike, for kinds of batch
            that come later, and where it would not be cheap: from 2^28 numbers in parameters, or from 1e10 (1e12 on a
            GPU) for these times the tokens, steps or pixels of a micro-batch.
        error_if_nonfinite: a loss that is inf or nan is a RunError in the call itself, on all ranks alike and before
            an optimizer steps; each call then waits for its loss. False: one warning, one call late. Either names
            step, micro-batch and stage.
        passes: the pass pipeline; None: ``fxpipe.passes.default()``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError: what cannot be done, on all ranks alike.
        RunError: the ranks have compiled different models, or another rank has failed.
    """
    topology = topo if isinstance(topo, Topology) else Topology.from_mesh(topo)
    _check_options(model, loss_fn, batch_dim, boundaries)
    check_zero(zero, zero_scope, bucket_cap_mb)
    if precision is not None and not isinstance(precision, Precision):
        raise RunError(f"precision is {precision!r}; write fxpipe.Precision(compute=torch.bfloat16)")
    check_parallelize(parallelize, zero, precision, tracer, stage_compiler)
    connected = connect(topology)
    transport = Metered(connected, topology, clock_of(connected.device))
    planner = Planner(
        model,
        topology.size("pipe"),
        schedule,
        placement,
        notes=(
            f"batch_dim={batch_dim}, loss_weight {'given' if loss_weight else 'not given'}, zero={zero}, "
            f"zero_scope={zero_scope}, bucket_cap_mb={bucket_cap_mb}, {precision}, check_batches={check_batches}, "
            f"error_if_nonfinite={error_if_nonfinite}"
        ),
        stage_compiler=stage_compiler,
    )
    if isinstance(model, nn.Module):
        search = _search(planner, boundaries, memory_per_rank)
        name = tracer if parallelize is None else "record"  # which leaves modules whole, with their hooks
        cuts = resolve(model, boundaries)
        compute = None if precision is None else precision.compute
        planner.captures = Captures(model, name, loss_fn, passes, cuts, connected.device, compute, search)
    options = _options(model, topology, microbatches, batch_dim, loss_weight, loss_fn)
    wish = Wish(zero, zero_scope, int(bucket_cap_mb * 2**20), precision, init_fn, weights_of(checkpoint), parallelize)
    with failing_together(transport, transport.abort):

        def first() -> Plan:
            pattern = _first_pattern(planner, options, example_args, example_kwargs)
            if planner.captures is not None:
                planner.captures.sample = _sample(planner, options, example_args, example_kwargs, check_capture)
            return planner.plan(pattern)

        plan = first_plan_together(transport, ("pipe", "data"), first, planner)
        if planner.captures is not None:
            planner.captures.sample = "this kind of batch came after compile"
        owners = ownership(plan.graph)
        if transport.pipe_rank is not None:
            groups = {**data_groups(topology, zero, zero_scope), **tensor_groups(topology)}
            transport.open(pairs(plan.instructions), list(owners.tied), groups)
            if transport.data_size > 1:
                check_ties(topology, transport, owners)
        seed = _base_seed(topology, transport)
        holding = take_hold(planner, topology, transport, owners, wish, seed)
        device = device_of(planner.first, owners, transport)
    return ForwardBackward(
        planner, topology, transport, holding, owners, options, seed, device, check_batches, error_if_nonfinite
    )


def preview(
    model: nn.Module | StageGraph,
    topo: Topology,
    *,
    loss_fn: Callable[..., Any] | None = None,
    boundaries: Boundaries = (),
    microbatches: int | None = None,
    batch_dim: BatchDim = 0,
    schedule: str | Family | Schedule = "1f1b",
    placement: Mapping[str, int] | None = None,
    tracer: str = "auto",
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    memory_per_rank: float | None = None,
    passes: Sequence[Pass] | None = None,
) -> Plan:
    """What ``compile`` would run, with the same options, on as many ranks as ``topo`` has: print it.

    In one process, without process groups and without memory: the model may be on the meta device. The example's
    tensors may be, too, and then count as being on the CPU.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError, RunError: as ``compile`` would.
    """
    _check_options(model, loss_fn, batch_dim, boundaries)
    planner = Planner(model, topo.size("pipe"), schedule, placement)
    if isinstance(model, nn.Module):
        search = _search(planner, boundaries, memory_per_rank)
        planner.captures = Captures(model, tracer, loss_fn, passes, resolve(model, boundaries), search=search)
    options = _options(model, topo, microbatches, batch_dim, None, loss_fn)
    return planner.plan(_first_pattern(planner, options, example_args, example_kwargs))


def _search(planner: Planner, boundaries: Boundaries, memory_per_rank: float | None) -> Search | None:
    """What the user has left open: cuts and placement, or placement alone; None where it is all said."""
    auto = isinstance(boundaries, str) and boundaries == AUTO
    if isinstance(planner.schedule, Schedule) or (planner.placement is not None and not auto):
        if auto:
            raise RunError('boundaries="auto" finds its own cuts, and the schedule given is for others; name a family')
        return None
    if planner.placement is not None:
        raise RunError('boundaries="auto" finds its own stages and places them; leave placement= out')
    return Search(planner.ranks, planner.schedule, memory_per_rank, auto)


def _options(
    model: nn.Module | StageGraph,
    topology: Topology,
    microbatches: int | None,
    batch_dim: BatchDim,
    loss_weight: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
) -> Options:
    """What a call needs to know. Micro-batches: 4 for each pipe rank, or 1 where there is one rank."""
    ranks = topology.size("pipe")
    count = microbatches if microbatches is not None else (4 * ranks if ranks > 1 else 1)
    if count < 1:
        raise RunError(f"microbatches={count}; at least 1 is needed")
    return Options(count, batch_dim, loss_weight, loss_fn, Items.of(model, loss_fn, loss_weight is None))


def _check_options(
    model: nn.Module | StageGraph, loss_fn: Callable[..., Any] | None, batch_dim: BatchDim, boundaries: Boundaries
) -> None:
    """What would be ignored is refused."""
    if isinstance(model, StageGraph):
        if loss_fn is not None:
            raise RunError("loss_fn= is for traced models; the last of the user's own stages returns the loss")
        if boundaries:
            raise RunError("boundaries= is for traced models; the user's own stages are cut already")
        names = model.inputs
    else:
        lazy = next((name for name, tensor in all_tensors(model).items() if is_lazy(tensor)), None)
        if lazy is not None:
            raise RunError(f"{lazy} has no shape yet; call the model once on a batch before compiling it")
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
    flags = flags_of(planner.module)
    signature = call_signature(planner, options.loss_fn)
    if example_args is not None or example_kwargs is not None:
        inputs = bind_call(signature, example_args or (), example_kwargs or {})
        given = describe(inputs if options.items is None else with_number(inputs), exact=True)
        parts = _microbatches(given, options)
        if options.items is not None:
            parts = [options.items.described(part) for part in parts]
        return pattern_of(parts, True, options.loss_fn, flags, ambient_autocast())
    return Pattern(tuple(required_names(signature)), (), options.microbatches, options.loss_fn is not None, flags)


def _sample(
    planner: Planner,
    options: Options,
    example_args: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    wanted: bool,
) -> Sample | str:
    """The example's micro-batches with their numbers; or why none are run."""
    if not wanted:
        return "check_capture=False"
    if example_args is None and example_kwargs is None:
        return "no example batch"
    given = bind_call(call_signature(planner, options.loss_fn), example_args or (), example_kwargs or {})
    rows = row_count(describe(given), options.batch_dim)
    if rows is None or rows < options.microbatches:
        parts = [given] * options.microbatches
    else:
        parts = split(given, options.batch_dim, split_rows(rows, options.microbatches))
    if options.items is not None:
        parts = options.items.given(parts)
    return Sample(parts, options.batch_dim)


def _microbatches(example: Description, options: Options) -> list[Description]:
    """The micro-batches of an example: what a call would make of it; or, of a smaller one, itself each time."""
    rows = row_count(example, options.batch_dim)
    if rows is None or rows < options.microbatches:
        return [example] * options.microbatches
    sizes = split_rows(rows, options.microbatches)
    return [cut_description(example, options.batch_dim, size) for size in sizes]


def _base_seed(topology: Topology, transport: Transport) -> int:
    """The first rank's seed, for all."""
    seed = torch.initial_seed()
    for scope in ("pipe", "data", *tensor_groups(topology)):
        seed = transport.gather(scope, seed)[0]
    return int(seed)
