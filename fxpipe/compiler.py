"""``compile``: wires the packages together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fxpipe.device import current, device_of
from fxpipe.distributed.activity import announced
from fxpipe.distributed.forward_collectives import check_sync_batch_norms
from fxpipe.distributed.grid import ROLES
from fxpipe.distributed.processes import connect
from fxpipe.distributed.stopwatch import clock_of
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Metered
from fxpipe.distributed.transport import failing_together
from fxpipe.errors import RunError, TopologyError
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.graph.with_loss import with_loss
from fxpipe.hardware import Hardware
from fxpipe.options import Options, Recompute, TracerName, Zero, ZeroScope
from fxpipe.packed import BatchDim
from fxpipe.parameters.materialise import weights_of
from fxpipe.parameters.weights import Weights
from fxpipe.passes.chain import Pass
from fxpipe.plan.example import check_model, previewed
from fxpipe.plan.forecast import Stepping, over_the_limit, preview_of
from fxpipe.plan.plan_state import PlanState
from fxpipe.plan.preview import Preview
from fxpipe.plan.together import first_plan_together
from fxpipe.precision import Precision
from fxpipe.progress import log, warn
from fxpipe.run.forward_backward import ForwardBackward
from fxpipe.run.rank_state import make_rank_state
from fxpipe.schedules import Family, ScheduleName
from fxpipe.schedules.schedule import Schedule
from fxpipe.sharding.optimizer_class import check_class, is_elementwise, named_class, states_of
from fxpipe.torch_compat import tensors_in
from fxpipe.trace.cuts.cuts_by_name import Boundaries
from fxpipe.validation import shown

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
    schedule: ScheduleName | Family | Schedule = "1f1b",
    placement: Mapping[str, int | Sequence[int] | Literal["all"]] | None = None,
    tracer: TracerName = "auto",
    auto_opaque: bool = True,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    zero: Zero = 0,
    zero_scope: ZeroScope = "node",
    bucket_cap_mb: float = 25.0,
    precision: Precision | None = None,
    loss_weight: Callable[..., Any] | None = None,
    recompute: Recompute = False,
    memory_per_rank: float | None = None,
    hardware: Hardware | str | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    checkpoint: str | os.PathLike[str] | Weights | None = None,
    parallelize: Callable[..., None] | None = None,
    stage_compiler: Callable[..., Any] | None = None,
    check_batches: bool = True,
    check_capture: bool = True,
    error_if_nonfinite: bool = False,
    timeout: float = 300.0,
    passes: Sequence[Pass] | None = None,
) -> ForwardBackward:
    """Compiles a model into one function that replaces the forward and backward of a training loop.

    A collective call of all ranks, or one process that plays every pipe rank.

    Args:
        model: a module whose cuts are marked with ``fxpipe.stage_boundary``, or a ``StageGraph`` of callables.
        topo: the grid of ranks; a DeviceMesh whose dimension names include "pipe" or "pp" serves, too.
        loss_fn: called on the model's output and the call's ``target``, or, with one argument, on the output alone
            (``lambda out: out[1]``); None: the model returns the loss. A module may have parameters, which are
            trained as ``loss_fn.…`` of the model.
        boundaries: submodules that are cut, from outside: names or patterns, each cut before it; a dict name →
            "before", "after", "both", {"every": n}, {"cut": "after", "gather": "batch"} or, of a method, too, "whole"
            (its Python runs for real, as one call in one stage) or {"whole": what it returns}; or a function of
            dict(model.named_modules()) that returns either.
            "auto": the cut and placement with the lowest simulated step time; beside opaque regions,
            {"*": "auto", name: "whole"}.
        microbatches: how many a batch is cut into; None: 4 × the pipe ranks, or 1 where there is one.
        batch_dim: the dimension micro-batches are cut along: one for all inputs, or a dict input → dimension, None
            (not split), ``fxpipe.Packed`` (so many rows or list entries for each row of the batch),
            ``fxpipe.Offsets`` (where packed sequences begin), or such a dict for a dict input; 0 for inputs not in it.
        schedule: a name out of ``fxpipe.SCHEDULES``, a function of the same kind, or a ``Schedule``.
        placement: stage name → pipe rank, or several, as (0, 1, 2) or "all": micro-batch i of the stage runs on the
            (i mod r)-th of its r ranks, which all hold its parameters; None: where stages outnumber ranks, the lowest
            simulated step time at costs by shapes; without an example, topological order, balanced by parameters.
        tracer: a name out of ``fxpipe.TRACERS``. "auto" tries them in turn, and keeps opaque what none can capture.
        auto_opaque: False: what no tracer can capture is refused, with the rule for ``boundaries`` that keeps it
            opaque. Else "auto" keeps up to 8 parts opaque by itself, of at most half of a step's FLOPs: ``.stages``
            says which, and why.
        example_args: one batch as it will be passed in calls. Without it the capture takes the required inputs for
            tensors and the optional ones for absent; a call that differs is captured anew.
        example_kwargs: its inputs that are given by name.
        zero: what is sharded over the data axis: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as
            well. With 1 and 2 use ``forward_backward.optimizer``.
        zero_scope: "node": sharded inside the node, replicated across nodes; "data": over the whole data axis.
        bucket_cap_mb: gradients are summed in buckets of this size, in MiB; the first is smaller. With zero=3, what is
            gathered together has at least this size.
        precision: the types of parameters, reductions and masters; None: as the model is.
        loss_weight: micro-batch → its weight, a function of the inputs in call order; None: its rows.
        recompute: stages that keep only their inputs, and run their forward again (R in the table) shortly before their
            backward. A list of names; True: all stages but those whose backward follows their forward at once; "auto":
            as few as fit ``memory_per_rank``. The model's own checkpoints keep their activations in the second run, so
            nothing runs a third time. ``preview`` prints what it saves.
        memory_per_rank: bytes that "auto", ``placement=None`` and ``recompute="auto"`` keep within: parameters,
            buffers, gradients and AdamW's state, as ``zero``, ``precision`` and the data axis have them, activations
            and the batch. What ``parallelize`` spreads counts in full. fxpipe warns where a part that no search
            chooses, or messages, exceed it.
        hardware: the costs that balance and ``preview`` use: a GPU's name, such as "h100", or ``fxpipe.Hardware``.
        init_fn: called with each submodule of this rank that holds parameters or buffers on the meta device, once they
            have memory; with a seed by the submodule's name, so that values depend on no placement.
        checkpoint: a file or folder, safetensors or torch's; this rank reads its own part.
        parallelize: ``(stage_module, mesh) -> None``, applied to this rank's stages: FSDP2, tensor parallelism, ...
        stage_compiler: applied to each stage's callable before its first use, such as ``torch.compile``; under a table
            with I and W to its forward, I and W, as graphs of operators.
        check_batches: compare the inputs that two or more ranks of a pipe group were given, by digest, one call later:
            in the first 3 calls of each capture and every 100th, and in the first 3 calls with each of the first 8
            kinds of batch. A difference is a RunError. Ranks of a tensor group compare in the first 3 steps and every
            100th; there fxpipe also warns of replicas with equal batches. False: nothing is compared.
        check_capture: run the stages once against the model, forward and backward, on two micro-batches of the
            example, the second with every third floating-point number changed, and compare losses, gradients and
            buffers; where they differ, "auto" goes on to the next tracer. Outputs of evaluation are compared where
            evaluation is captured at compile: by "symbolic", or where training leaves parameters or buffers unused. In
            one process each later kind of batch is checked on its own numbers. The model's forward hooks run in a
            check, too. fxpipe restores module attributes, containers in them, buffers and random state, and no Python
            values elsewhere. ``.stages`` says where the check is left out: without an example's numbers, on the meta
            device, with rows that are all equal, where a rank holds a part of the model, and where it costs much: from
            2^28 numbers in parameters, or from 1e10 (1e12 on a GPU) for these times the tokens, steps or pixels of a
            micro-batch.
        error_if_nonfinite: a loss that is inf or nan is a RunError in the call itself, on all ranks and before
            an optimizer steps; each call then waits for its loss. False: one warning, one call late. Both name
            step, micro-batch and stage.
        timeout: seconds that a wait may take, on the CPU, before this rank says what it waits for, warns all others,
            and raises. While other ranks capture, compile or save, a wait may last 12 times as long. A rank that is
            lost, or in another call, ends it within seconds. After 30 s a line on stderr names the rank waited for.
        passes: the pass pipeline; None: ``fxpipe.passes.default()``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError: what cannot be done, on all ranks.
        RunError: the ranks run different versions, or were given different options or models; or another rank has
            failed, or does not come.
    """
    options = Options.of(locals())
    check_model(model, options)
    topology = topo if isinstance(topo, Topology) else Topology.from_mesh(topo)
    connected = connect(topology, options.timeout, options.facts)
    if connected.pipe_rank is None:  # one process computes where its model is
        connected.device = device_of(_tensors_of(model), current())
    left = [f"{name} {size}" for name, size in topology.axes if size > 1 and ROLES[name] != "pipe"]
    if connected.pipe_rank is None and left:
        warn(
            f"one process plays every pipe rank, of one replica: {', '.join(left)} of the topology is left out; start "
            f"{topology.world_size} processes, with torchrun or fxpipe.launch, for all of it",
            UserWarning,
        )
    # on a CPU a mark takes no time to speak of
    transport = Metered(connected, topology, clock_of(connected.device), timed=connected.device.type == "cpu")
    model = model if isinstance(model, StageGraph) else with_loss(model, loss_fn)
    planning = PlanState.empty(model, options, topology, connected.device)
    weights = weights_of(checkpoint)
    # From here on a rank that fails takes all others along: each raises, and none waits for it.
    with failing_together(transport, transport.abort), announced("compile", extends=True):
        check_sync_batch_norms(model, topology)
        planning = first_plan_together(transport, planning, options)
        if over := over_the_limit(planning):
            log(f"fxpipe: {over}")
        planning, state = make_rank_state(planning, transport, init_fn, weights)
    return ForwardBackward(transport, planning, state)


def preview(
    model: nn.Module | StageGraph,
    topo: Topology,
    *,
    loss_fn: Callable[..., Any] | None = None,
    boundaries: Boundaries = (),
    microbatches: int | None = None,
    batch_dim: BatchDim = 0,
    schedule: ScheduleName | Family | Schedule = "1f1b",
    placement: Mapping[str, int | Sequence[int] | Literal["all"]] | None = None,
    tracer: TracerName = "auto",
    auto_opaque: bool = True,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    zero: Zero = 0,
    zero_scope: ZeroScope = "node",
    precision: Precision | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    recompute: Recompute = False,
    memory_per_rank: float | None = None,
    hardware: Hardware | str | None = None,
    passes: Sequence[Pass] | None = None,
) -> Preview:
    """What ``compile`` would run, with the same options, on as many ranks as ``topo`` has, and whether it fits.

    In one process, without process groups and without memory: the model may be on the meta device. The example's
    tensors may be, too. What is on meta counts as being on the device of the other tensors, or on the CPU if there are
    none. Nothing is run, with one exception: a model runs once on a micro-batch, if both have numbers, where it has an
    opaque region and ``boundaries`` does not say what that returns. Print the preview, or read its figures.

    ``optimizer`` is what ``forward_backward.optimizer`` will be given: a class of torch.optim by its name, in any case,
    or as such (``functools.partial(torch.optim.SGD, momentum=0.9)``). Searches within ``memory_per_rank`` count AdamW's
    state, here as in ``compile``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError, RunError: as ``compile`` would; RunError, too, where
            there is no such optimizer, or a figure of the hardware is needed and not given.
    """
    options = Options.of(locals(), check_capture=False)
    # The optimizer decides how many numbers a parameter has beside it, and whether ranks may step parts of one.
    make = named_class(optimizer)
    check_class(make, copies=options.zero > 0 or options.precision is not None)
    stepping = Stepping(states_of(make), whole=not is_elementwise(make))
    check_model(model, options)
    if not isinstance(topo, Topology):
        raise TopologyError(f'topo is {shown(topo)}; write fxpipe.Topology([("pipe", 2), ("data", 4)])')
    if stepping.whole and options.zero == 3 and topo.size("data") > 1:
        raise RunError(
            f"optimizer={shown(optimizer)} steps whole parameters, which zero=3 shards; write zero=2, or take an "
            "element-wise optimizer such as AdamW"
        )
    model = model if isinstance(model, StageGraph) else with_loss(model, loss_fn)
    device = device_of([*_tensors_of(model), *tensors_in((example_args, example_kwargs))], torch.device("cpu"))
    planning = previewed(PlanState.empty(model, options, topo, device), options)
    return preview_of(planning, stepping)


def _tensors_of(model: nn.Module | StageGraph) -> Iterable[Tensor]:
    return all_tensors(model.module if isinstance(model, StageGraph) else model).values()
