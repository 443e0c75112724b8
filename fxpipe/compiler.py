"""``compile``: wires the rooms together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxpipe.agreement import Options, call_signature, modes_of, pattern_of
from fxpipe.batch import BatchDim, describe
from fxpipe.batch import bind as bind_call
from fxpipe.connect import connect
from fxpipe.engine import ForwardBackward
from fxpipe.errors import RunError, TopologyError
from fxpipe.ir import StageGraph
from fxpipe.lower import pairs
from fxpipe.ownership import Ownership, RankModule, all_tensors, ownership, release
from fxpipe.pipeline import Pass
from fxpipe.plan import Pattern, Plan, Planner
from fxpipe.reduce import broadcast
from fxpipe.schedule import Schedule
from fxpipe.topology import Topology
from fxpipe.transport import PeerLost, Transport

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module | StageGraph,
    topo: Topology | DeviceMesh,
    *,
    loss_fn: Callable[..., Any] | None = None,
    microbatches: int | None = None,
    batch_dim: BatchDim = 0,
    schedule: str | Schedule = "1f1b",
    placement: Mapping[str, int] | None = None,
    tracer: str = "auto",
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
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
        schedule: a name out of ``fxpipe.SCHEDULES``, or a ``Schedule``.
        placement: stage name → pipe rank; None: topological order, balanced by parameters.
        tracer: a name out of ``fxpipe.TRACERS``.
        example_args, example_kwargs: one batch as it will be passed in calls. Without it the capture takes the
            required inputs for tensors and the optional ones for absent; a call that differs is captured anew.
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
    transport = connect(topology)
    planner = Planner(model, ranks, schedule, placement, tracer, loss_fn, passes)
    options = Options(count, batch_dim, loss_weight, loss_fn)
    try:
        plan = _plan_together(
            transport, lambda: planner.plan(_first_pattern(planner, options, example_args, example_kwargs))
        )
        owners = ownership(plan.graph)
        if transport.pipe_rank is not None:
            transport.open(pairs(plan.instructions), list(owners.tied))
        module = _take_part(planner.module, owners, transport)
        base_seed = _base_seed(transport)
    except PeerLost as error:
        lost = str(error)
    except BaseException as error:
        transport.abort(f"{type(error).__name__}: {error}")
        raise
    else:
        return ForwardBackward(planner, plan, topology, transport, module, owners, options, base_seed)
    reason = transport.explain(PeerLost(lost))
    transport.abort(reason)
    raise RunError(f"another rank failed: {reason}")


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
    required = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return Pattern(tuple(required), (), options.microbatches, options.loss_fn is not None, modes)


def _plan_together(transport: Transport, make: Callable[[], Plan]) -> Plan:
    """The plan, the same on every rank; where one rank has none, or another, every rank raises."""
    plan, failure = None, None
    try:
        plan = make()
    except Exception as error:
        failure = error
    mine = (plan.digest, None) if plan is not None else ("", f"{type(failure).__name__}: {failure}")
    for scope in ("pipe", "data"):
        everyone = transport.gather(scope, mine)
        if failure is not None:
            raise failure
        for rank, (_, other) in enumerate(everyone):
            if other is not None:
                raise RunError(f"{scope} rank {rank} could not compile: {other}")
        assert plan is not None
        digests = [digest for digest, _ in everyone]
        if len(set(digests)) > 1:
            texts = transport.gather(scope, plan.description)
            odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise RunError(_difference(scope, odd, digests, texts))
    assert plan is not None
    return plan


def _difference(scope: str, odd: int, digests: Sequence[str], texts: Sequence[str]) -> str:
    ours, theirs = texts[0].splitlines(), texts[odd].splitlines()
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(ours), len(theirs))
    lines = [text[place] if place < len(text) else "(ends)" for text in (ours, theirs)]
    return (
        f"{scope} ranks 0 and {odd} have compiled different programs ({digests[0]} and {digests[odd]}); they first "
        f"differ in\n  rank 0: {lines[0]}\n  rank {odd}: {lines[1]}\nbuild the same model on every rank"
    )


def _take_part(model: nn.Module, owners: Ownership, transport: Transport) -> RankModule:
    """This rank's parameters and buffers, equal to those of the first owner and the first replica."""
    if transport.pipe_rank is None:
        return RankModule(model, frozenset(all_tensors(model)))
    mine = owners.names[transport.pipe_rank]
    held = {name: tensor for name, tensor in all_tensors(model).items() if name in mine}
    unmade = [name for name, tensor in held.items() if tensor.is_meta]
    if unmade:
        raise TopologyError(f"{unmade[0]} is on the meta device; build the model on a real one")
    for holders, names in owners.tied.items():
        if transport.pipe_rank in holders:
            broadcast([held[name] for name in names], transport, holders, 0)
    if transport.data_size > 1:
        once = {id(tensor): tensor for tensor in held.values()}
        broadcast(list(once.values()), transport, "data", 0)
    release(model, mine)
    return RankModule(model, mine)


def _base_seed(transport: Transport) -> int:
    """The first rank's seed, for all."""
    seed = transport.gather("pipe", torch.initial_seed())[0]
    return int(transport.gather("data", seed)[0])
