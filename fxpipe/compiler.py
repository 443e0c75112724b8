"""``compile`` and ``preview``, which call the other packages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
from fxpipe.errors import RunError, TopologyError
from fxpipe.forecast.figures import Stepping, over_the_limit, preview_of
from fxpipe.forecast.preview import Preview
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.no_gc import paused
from fxpipe.options import Options, taking
from fxpipe.parameters.weights import Weights
from fxpipe.plan.example import check_model, previewed
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import first_plan_together
from fxpipe.progress import log, warn
from fxpipe.run.forward_backward import ForwardBackward
from fxpipe.run.rank_state import make_rank_state
from fxpipe.search.memory import ParameterPart
from fxpipe.sharding.optimizer_class import check_class, is_elementwise, named_class, states_of
from fxpipe.sharding.parallelise import parts_of
from fxpipe.stage.with_loss import with_loss
from fxpipe.torch_compat import IS_TESTED, TESTED
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.validation import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

if not IS_TESTED:
    log(
        f"fxpipe: torch {torch.__version__} is not among the tested versions, {TESTED[0]} to {TESTED[-1]}; it has all "
        f"the private names that fxpipe uses"
    )


@dataclass(frozen=True, eq=False)
class CompileArguments(Options):
    """The parameters of ``compile``."""

    model: nn.Module | StageGraph
    topo: Topology | DeviceMesh


@dataclass(frozen=True, eq=False)
class PreviewArguments(CompileArguments):
    """The parameters of ``preview``."""

    topo: Topology
    optimizer: str | Callable[..., torch.optim.Optimizer] = field(default="adamw", kw_only=True)
    costs: Sequence[Sequence[float | Mapping[str, float]]] | None = field(default=None, kw_only=True)
    shows_nearest = True  # its table says which rank has too much, and of what


@taking(CompileArguments)
def compile(given: CompileArguments) -> ForwardBackward:  # noqa: D417  (the parameters are the fields of its class)
    """Compiles a model into one function that replaces the forward and backward of a training loop.

    A collective call of all ranks, or one process that plays every pipe rank.

    Args:
        model: a module whose cuts are marked with ``fxpipe.stage_boundary``, or a ``StageGraph`` of callables.
        topo: the grid of ranks, or a DeviceMesh whose dimension names include "pipe" or "pp".
        loss_fn: called on the model's output and the call's ``target``, or, with one argument, on the output alone
            (``lambda out: out[1]``). None: the model returns the loss. A module may have parameters, which are trained
            as ``loss_fn.…`` of the model.
        boundaries: submodules to cut at, without marks in the model. Write names, patterns, a dict name → rule, a
            function of dict(model.named_modules()) that returns one of these, or a ``fxpipe.Cuts``. "auto": the cut and
            placement with the lowest simulated step time. All rules: examples/real_models.md#where-to-cut.
        microbatches: the number of micro-batches per batch. None: 4 × the pipe ranks, or 1 with a single pipe rank.
        example_args: a batch, passed as in later calls. Without an example the capture takes required inputs for
            tensors and optional inputs for absent; a call that differs is captured anew.
        example_kwargs: the batch's inputs that are passed by name.
        batch_dim: the dimension to split micro-batches along, for all inputs. Or a dict input → a dimension, None (not
            split), ``fxpipe.Packed`` (rows of another number), ``fxpipe.Offsets`` (packed sequences), or such a dict
            for a dict input. Other inputs: 0. All rules: examples/inputs.md.
        loss_weight: a function of a micro-batch's inputs in call order that returns its weight. None: its rows.
        schedule: a name out of ``fxpipe.SCHEDULES``, a function of the same kind, a ``Schedule``, or the path of its
            table, "table.csv". Names and classes of torch.distributed.pipelining that mean the same will do.
        in_flight: the most micro-batches at a stage: a number, one for each stage, or "2x" (twice as many as without
            it); micro-batches of different costs then wait less for each other. None, with ``microbatch_cost`` and
            ``offload="auto"``: up to "2x", as far as memory allows. See examples/schedules_uneven.md.
        microbatch_cost: a function of a micro-batch's inputs in call order that returns its cost: a number, or a dict
            stage name → number. A step then runs small micro-batches first and last, and the largest in the
            middle. None: in the order of the batch. See examples/schedules_uneven.md.
        placement: stage name → pipe rank, or several, as (0, 1, 2) or "all" (examples/stages_on_ranks.md). None, with
            more stages than ranks or a limit of memory: the lowest simulated step time at costs by shapes; without an
            example, topological order, balanced by parameters.
        recompute: stages that keep only their inputs, and run their forward again (R in the table) for their backward:
            True (where this saves memory), names, or "auto" (as few as fit ``hardware``, whole or by layers). "layers",
            or names of submodules: each call of a layer does so by itself. See examples/recomputation.md.
        offload: stages whose activations wait in the host's memory for their backward: True (where this saves memory
            and a step takes at most 0.1 % longer), a list of names, or "auto" (as few as fit the memory of
            ``hardware``). See examples/memory.md.
        hardware: a GPU's name, such as "h100", or ``fxpipe.Hardware(memory=80e9)``. Its memory is the limit of a rank,
            for "auto", ``placement=None``, ``recompute="auto"`` and ``offload="auto"``; its speeds are the costs of a
            plan. See examples/preview.md#a-memory-limit.
        zero: the state that is sharded over the data axis, 0 to 3, or ``fxpipe.Zero(level, scope=, bucket_mb=)``. With
            1 and 2 use ``forward_backward.optimizer``.
        precision: the types of parameters, reductions and masters. None: the model's types.
        checkpoint: a file or folder, safetensors or torch's; this rank reads its own part.
        init_fn: called with each submodule of this rank that holds parameters or buffers on the meta device, once these
            have memory. The seed depends on the submodule's name, so that values depend on no placement.
        parallelize: ``(stage_module, mesh) -> None``, applied to this rank's stages: FSDP2, tensor parallelism, ...
        tracer: a name out of ``fxpipe.TRACERS``, or ``fxpipe.Tracing(name, opaque=, check=)``. "auto" tries the tracers
            in turn, keeps a part opaque that none can capture, and runs the stages once against the model.
        checks: what every step checks, and how long it waits: ``fxpipe.Checks(batches=, nonfinite=, timeout=)``.
        stage_compiler: applied to each stage's callable before its first use, such as ``torch.compile``; under a table
            with I and W to its forward, I and W, as graphs of operators.
        passes: the pass pipeline, functions of a ``fxpipe.graph.Program``. None: ``fxpipe.passes.default()``.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError: fxpipe cannot compile the model; on all ranks.
        RunError: the ranks run different versions, or have different options or models; or another rank has failed or
            does not call ``compile``.
    """
    check_model(given.model, given)
    topology = given.topo if isinstance(given.topo, Topology) else Topology.from_mesh(given.topo)
    connected = connect(topology, given.checks.timeout, given.facts)
    if connected.pipe_rank is None:  # a single process computes on its model's device
        connected.device = device_of(_tensors_of(given.model), current())
    left = [f"{name} {size}" for name, size in topology.axes if size > 1 and ROLES[name] != "pipe"]
    if connected.pipe_rank is None and left:
        warn(
            f"one process plays every pipe rank, of one replica: {', '.join(left)} of the topology is left out; start "
            f"{topology.world_size} processes, with torchrun or fxpipe.launch, for all of it",
            UserWarning,
        )
    # on a CPU, taking a time costs almost nothing
    transport = Metered(connected, topology, clock_of(connected.device), timed=connected.device.type == "cpu")
    model = _with_loss(given)
    plans = Plans.empty(model, given, topology, connected.device)
    checkpoint = given.checkpoint
    weights = checkpoint if checkpoint is None or isinstance(checkpoint, Weights) else Weights.open(checkpoint)
    # From here on, if a rank fails, all ranks raise, and no rank waits for the failed rank.
    with failing_together(transport, transport.abort), announced("compile", extends=True):
        check_sync_batch_norms(model, topology)
        plans = first_plan_together(transport, plans, given)
        if over := over_the_limit(plans):
            log(f"fxpipe: {over}")
        plans, rank_state = make_rank_state(plans, transport, given.init_fn, weights)
    return ForwardBackward(transport, plans, rank_state)


@taking(PreviewArguments)
def preview(given: PreviewArguments) -> Preview:
    """The plan that ``compile`` would run, with the same options, on the ranks of ``topo``, and whether it fits memory.

    ``preview`` runs in a single process, without process groups and without memory for the model: the model and the
    example's tensors may be on the meta device. A meta tensor counts as on the device of the other tensors, or on the
    CPU without any. ``preview`` runs no model, with one exception: a model with an opaque region whose result
    ``boundaries`` does not say runs once on a micro-batch, if both have numbers. Print the preview or read its figures.

    ``optimizer`` is the later argument of ``forward_backward.optimizer``: the name of a class of torch.optim, in upper
    or lower case, or a class (``functools.partial(torch.optim.SGD, momentum=0.9)``). Searches within
    the memory of ``hardware`` count AdamW's state, as in ``compile``.

    ``costs`` has, for each of some real batches, a list with the cost of each of its samples: a number, or a dict stage
    name → number. ``Preview.uneven`` then says how long their steps would take as samples come, dealt by
    ``fxpipe.deal``, in order, and with more micro-batches in flight. See examples/schedules_uneven.md.

    ``parallelize`` gets copies of the stages, and the mesh of ranks that have no processes, so that parameters count as
    it spreads them; it must not read values or wait for other ranks.

    Raises:
        TraceError, PartitionError, ScheduleError, TopologyError, RunError: as ``compile``; but where no plan fits
            the memory of ``hardware``, the nearest plan is returned, and ``fits`` is False. RunError if torch has no
            such optimizer, or the plan needs a figure that ``hardware`` lacks.
    """
    with paused():
        return preview_of(*previewed_plans(given), given.costs)


def previewed_plans(
    given: PreviewArguments, known: dict[Hashable, Any] | None = None
) -> tuple[Plans, Stepping, Mapping[int, ParameterPart]]:
    """The plans of ``preview``, with the optimizer's states, and the parts of parameters that ``parallelize`` spreads.

    ``known``: what earlier plans of the same model found, to which this call adds."""
    # The optimizer determines the state's numbers per parameter, and whether ranks may step parts of a parameter.
    make = named_class(given.optimizer)
    check_class(make, copies=given.sharding.level > 0 or given.precision is not None)
    stepping = Stepping(states_of(make), whole=not is_elementwise(make))
    check_model(given.model, given)
    topo = given.topo
    if not isinstance(topo, Topology):
        raise TopologyError(f'topo is {shown(topo)}; write fxpipe.Topology([("pipe", 2), ("data", 4)])')
    if stepping.whole and given.sharding.level == 3 and topo.size(BATCH) > 1:
        raise RunError(
            f"optimizer={shown(given.optimizer)} steps whole parameters, which zero=3 shards; write zero=2, or take an "
            "element-wise optimizer such as AdamW"
        )
    example = given.example_args, given.example_kwargs
    # A loss function is wrapped once: results belong to a model by its identity.
    model = _with_loss(given) if known is None or "model" not in known else known["model"]
    if known is not None:
        known["model"] = model
    device = device_of([*_tensors_of(model), *tensors_in(example)], torch.device("cpu"))
    options = replace(given, tracer=replace(given.tracing, check=False))
    plans = previewed(Plans.empty(model, options, topo, device, known), options)
    parts = {} if options.parallelize is None else parts_of(plans.first.graph, topo, options.parallelize)
    return plans, stepping, parts


def _with_loss(given: CompileArguments) -> nn.Module | StageGraph:
    return given.model if isinstance(given.model, StageGraph) else with_loss(given.model, given.loss_fn)


def _tensors_of(model: nn.Module | StageGraph) -> Iterable[Tensor]:
    return all_tensors(model.module if isinstance(model, StageGraph) else model).values()
