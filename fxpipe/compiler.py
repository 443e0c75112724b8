"""``compile`` and ``preview``, which call the other packages."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fxpipe.device import current, device_of
from fxpipe.distributed.activity import announced
from fxpipe.distributed.forward_collectives import check_sync_batch_norms
from fxpipe.distributed.grid import BATCH, ROLES
from fxpipe.distributed.processes import connect
from fxpipe.distributed.stopwatch import clock_of
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Metered
from fxpipe.distributed.transport import failing_together
from fxpipe.errors import DoesNotFit, RunError, TopologyError
from fxpipe.forecast.figures import Stepping, over_the_limit, preview_of
from fxpipe.forecast.preview import Preview
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.hardware import Hardware
from fxpipe.no_gc import paused
from fxpipe.options import Options, Recompute
from fxpipe.packed import BatchDim
from fxpipe.parameters.materialise import weights_of
from fxpipe.parameters.weights import Weights
from fxpipe.passes.chain import Pass
from fxpipe.plan.example import check_model, previewed
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import first_plan_together
from fxpipe.policies import CHECKS, Checks, TracerName, Tracing, Zero, ZeroLevel, naming_replaced
from fxpipe.precision import Precision
from fxpipe.progress import log, warn
from fxpipe.run.forward_backward import ForwardBackward
from fxpipe.run.rank_state import make_rank_state
from fxpipe.schedules import Family, ScheduleName
from fxpipe.schedules.schedule import Schedule
from fxpipe.sharding.optimizer_class import check_class, is_elementwise, named_class, states_of
from fxpipe.sharding.parallelise import parts_of
from fxpipe.stage.with_loss import with_loss
from fxpipe.torch_compat import IS_TESTED, TESTED
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.cuts.cuts_by_name import Boundaries
from fxpipe.validation import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if not IS_TESTED:
    log(
        f"fxpipe: torch {torch.__version__} is not among the tested versions, {TESTED[0]} to {TESTED[-1]}; it has all "
        f"the private names that fxpipe uses"
    )


@naming_replaced
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
    tracer: TracerName | Tracing = "auto",
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    zero: ZeroLevel | Zero = 0,
    precision: Precision | None = None,
    loss_weight: Callable[..., Any] | None = None,
    recompute: Recompute = False,
    memory_per_rank: float | None = None,
    hardware: Hardware | str | None = None,
    init_fn: Callable[[nn.Module], None] | None = None,
    checkpoint: str | os.PathLike[str] | Weights | None = None,
    parallelize: Callable[..., None] | None = None,
    stage_compiler: Callable[..., Any] | None = None,
    checks: Checks = CHECKS,
    passes: Sequence[Pass] | None = None,
) -> ForwardBackward:
    """Compiles a model into one function that replaces the forward and backward of a training loop.

    A collective call of all ranks, or one process that plays every pipe rank.

    Args:
        model: a module whose cuts are marked with ``fxpipe.stage_boundary``, or a ``StageGraph`` of callables.
        topo: the grid of ranks, or a DeviceMesh whose dimension names include "pipe" or "pp".
        loss_fn: called on the model's output and the call's ``target``, or, with one argument, on the output alone
            (``lambda out: out[1]``); None: the model returns the loss. A module may have parameters, which are
            trained as ``loss_fn.…`` of the model.
        boundaries: submodules to cut at, without marks in the model: names or patterns, each cut before the submodule;
            a dict name → "before", "after", "both", {"every": n}, {"cut": "after", "gather": "batch"} or, for a method,
            too, "whole" (its Python runs for real, as one call in one stage) or {"whole": the value it returns}; or a
            function of dict(model.named_modules()) that returns either.
            "auto": the cut and placement with the lowest simulated step time; with opaque regions,
            {"*": "auto", name: "whole"}.
        microbatches: the number of micro-batches per batch; None: 4 × the pipe ranks, or 1 with a single pipe rank.
        batch_dim: the dimension to split micro-batches along: a number for all inputs, or a dict input → dimension,
            None (not split), ``fxpipe.Packed`` (a number of rows or list entries per row of the batch),
            ``fxpipe.Offsets`` (start positions of packed sequences), or such a dict for a dict input; other inputs: 0.
        schedule: a name out of ``fxpipe.SCHEDULES``, a function of the same kind, or a ``Schedule``.
        placement: stage name → pipe rank, or several, as (0, 1, 2) or "all": micro-batch i of the stage runs on the
            (i mod r)-th of its r ranks, which all hold its parameters. None, with more stages than ranks: the lowest
            simulated step time at costs by shapes; without an example, topological order, balanced by parameters.
        tracer: a name out of ``fxpipe.TRACERS``, or ``fxpipe.Tracing(name, opaque=, check=)``. "auto" tries the tracers
            in turn, keeps a part opaque that none can capture, and runs the stages once against the model.
        example_args: a batch, passed as in later calls. Without an example the capture takes required inputs for
            tensors and optional inputs for absent; a call that differs is captured anew.
        example_kwargs: the batch's inputs that are passed by name.
        zero: the state that is sharded over the data axis, 0 to 3, or ``fxpipe.Zero(level, scope=, bucket_mb=)``. With
            1 and 2 use ``forward_backward.optimizer``.
        precision: the types of parameters, reductions and masters; None: the model's types.
        loss_weight: a function of a micro-batch's inputs in call order that returns its weight; None: its rows.
        recompute: stages that keep only their inputs, and run their forward again (R in the table) shortly before their
            backward. A list of names; True: all stages but those whose backward follows their forward at once; "auto":
            as few as fit ``memory_per_rank``. The model's own checkpoints keep their activations in the second run, so
            nothing runs a third time. ``preview`` prints the bytes that this saves.
        memory_per_rank: the limit, in bytes, for "auto", ``placement=None`` and ``recompute="auto"``. Parameters,
            buffers, gradients and AdamW's state count, as ``zero``, ``precision`` and the data axis have them, as do
            activations and the batch. Parameters that ``parallelize`` shards count in full. fxpipe warns if a part
            that no search chooses, or messages, exceed the limit.
        hardware: the costs that balance and ``preview`` use: a GPU's name, such as "h100", or ``fxpipe.Hardware``.
        init_fn: called with each submodule of this rank that holds parameters or buffers on the meta device, once these
            have memory. The seed depends on the submodule's name, so that values depend on no placement.
        checkpoint: a file or folder, safetensors or torch's; this rank reads its own part.
        parallelize: ``(stage_module, mesh) -> None``, applied to this rank's stages: FSDP2, tensor parallelism, ...
        stage_compiler: applied to each stage's callable before its first use, such as ``torch.compile``; under a table
            with I and W to its forward, I and W, as graphs of operators.
        checks: what every step checks, and how long it waits: ``fxpipe.Checks(batches=, nonfinite=, timeout=)``.
        passes: the pass pipeline, functions of a ``fxpipe.graph.Program``; None: ``fxpipe.passes.default()``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError: fxpipe cannot compile the model; on all ranks.
        RunError: the ranks run different versions, or have different options or models; or another rank has failed or
            does not call ``compile``.
    """
    options = Options.of(locals())
    check_model(model, options)
    topology = topo if isinstance(topo, Topology) else Topology.from_mesh(topo)
    connected = connect(topology, options.checks.timeout, options.facts)
    if connected.pipe_rank is None:  # a single process computes on its model's device
        connected.device = device_of(_tensors_of(model), current())
    left = [f"{name} {size}" for name, size in topology.axes if size > 1 and ROLES[name] != "pipe"]
    if connected.pipe_rank is None and left:
        warn(
            f"one process plays every pipe rank, of one replica: {', '.join(left)} of the topology is left out; start "
            f"{topology.world_size} processes, with torchrun or fxpipe.launch, for all of it",
            UserWarning,
        )
    # on a CPU, taking a time costs almost nothing
    transport = Metered(connected, topology, clock_of(connected.device), timed=connected.device.type == "cpu")
    model = model if isinstance(model, StageGraph) else with_loss(model, loss_fn)
    plans = Plans.empty(model, options, topology, connected.device)
    weights = weights_of(checkpoint)
    # From here on, if a rank fails, all ranks raise, and no rank waits for the failed rank.
    with failing_together(transport, transport.abort), announced("compile", extends=True):
        check_sync_batch_norms(model, topology)
        plans = first_plan_together(transport, plans, options)
        if over := over_the_limit(plans):
            log(f"fxpipe: {over}")
        plans, rank_state = make_rank_state(plans, transport, init_fn, weights)
    return ForwardBackward(transport, plans, rank_state)


@naming_replaced
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
    tracer: TracerName | Tracing = "auto",
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    zero: ZeroLevel | Zero = 0,
    precision: Precision | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    recompute: Recompute = False,
    memory_per_rank: float | None = None,
    hardware: Hardware | str | None = None,
    passes: Sequence[Pass] | None = None,
    parallelize: Callable[..., None] | None = None,
) -> Preview:
    """The plan that ``compile`` would run, with the same options, on the ranks of ``topo``, and whether it fits memory.

    ``preview`` runs in a single process, without process groups and without memory for the model: the model and the
    example's tensors may be on the meta device. A meta tensor counts as on the device of the other tensors, or on the
    CPU without any. ``preview`` runs no model, with one exception: a model with an opaque region whose result
    ``boundaries`` does not say runs once on a micro-batch, if both have numbers. Print the preview or read its figures.

    ``optimizer`` is the later argument of ``forward_backward.optimizer``: the name of a class of torch.optim, in upper
    or lower case, or a class (``functools.partial(torch.optim.SGD, momentum=0.9)``). Searches within
    ``memory_per_rank`` count AdamW's state, as in ``compile``.

    ``parallelize`` gets copies of the stages, and the mesh of ranks that have no processes, so that parameters count as
    it spreads them; it must not read values or wait for other ranks.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError, RunError: as ``compile``; but where no plan fits
            ``memory_per_rank``, the nearest plan is returned, and ``fits`` is False. RunError if torch has no such
            optimizer, or the plan needs a figure that ``hardware`` lacks.
    """
    options = Options.of(locals())
    options = dataclasses.replace(options, tracer=dataclasses.replace(options.tracing, check=False))
    # The optimizer determines the state's numbers per parameter, and whether ranks may step parts of a parameter.
    make = named_class(optimizer)
    check_class(make, copies=options.sharding.level > 0 or options.precision is not None)
    stepping = Stepping(states_of(make), whole=not is_elementwise(make))
    check_model(model, options)
    if not isinstance(topo, Topology):
        raise TopologyError(f'topo is {shown(topo)}; write fxpipe.Topology([("pipe", 2), ("data", 4)])')
    if stepping.whole and options.sharding.level == 3 and topo.size(BATCH) > 1:
        raise RunError(
            f"optimizer={shown(optimizer)} steps whole parameters, which zero=3 shards; write zero=2, or take an "
            "element-wise optimizer such as AdamW"
        )
    model = model if isinstance(model, StageGraph) else with_loss(model, loss_fn)
    device = device_of([*_tensors_of(model), *tensors_in((example_args, example_kwargs))], torch.device("cpu"))

    @paused()
    def preview_at(options: Options) -> Preview:
        plans = previewed(Plans.empty(model, options, topo, device), options)
        parts = {} if parallelize is None else parts_of(plans.first.graph, topo, parallelize)
        return preview_of(plans, stepping, parts)

    try:
        return preview_at(options)
    except DoesNotFit as error:  # the table of the nearest plan says which rank has too much, and of what
        nearest = dataclasses.replace(options, memory_per_rank=error.least_bytes)
        return dataclasses.replace(preview_at(nearest), memory=options.memory_per_rank)


def _tensors_of(model: nn.Module | StageGraph) -> Iterable[Tensor]:
    return all_tensors(model.module if isinstance(model, StageGraph) else model).values()
