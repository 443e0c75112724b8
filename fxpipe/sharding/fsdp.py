"""FSDP: runs torch's FSDP2 in a pipeline: for ``zero=3``, and for modules that ``parallelize`` has ``fully_shard``-ed.

A pipeline runs a stage's forward and backward for each micro-batch, in the order of a schedule. By default FSDP2 would
gather parameters for each run. Here, whatever ``reshard_after_forward`` says, a stage's first forward gathers the
parameters, they stay unsharded until its last backward, and this backward reduces the gradients. All replicas run the
same collectives in the same order, even if a replica has other micro-batches, or leaves a backward out.

  FsdpUnit    zero=3: parameters in a shell module; collectives go through fxpipe's transport
  FsdpStage   modules that the user has sharded in ``parallelize``; torch runs the collectives

With ``zero=3`` the model holds shards between steps, as DTensors. A *unit* is the parameters of a dtype that the same
blocks of a stage of this rank use, in a shell: a module that holds only these parameters, and is never called. So the
user's modules keep their classes and hooks, and the rank's row alone determines the collectives and their order. The
first forward waits for a unit when it reads its parameters, while the next unit is gathered; the last backward starts
a unit's reduction as soon as the unit's gradients are complete.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.parameters.ownership import Ownership, replace_tensors
from fxpipe.precision import Precision
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import FORWARD
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, Piece, Use
from fxpipe.stage.awaiting import Waits
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat.fsdp import fsdp_end_backward, fsdp_groups, fsdp_set_up, fsdp_state, fsdp_without_hooks
from fxpipe.torch_compat.modules import hook_tables
from fxpipe.torch_compat.tensors import holders_of, share_hooks, version_of


class _FsdpModules:
    """FSDP modules that are gathered, reduced and freed together. ``parameters``: their shards, which are DTensors."""

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._modules = list(modules)
        for module in self._modules:
            # Losses are weighted by shares of the whole batch, so gradients are summed; gloo supports only the sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        groups = [group for module in self._modules for group in fsdp_groups(module)]
        self._managed = [managed for group in groups for managed in group.fsdp_params]
        self.parameters: list[nn.Parameter] = [managed.sharded_param for managed in self._managed]

    @property
    def gathered(self) -> list[nn.Parameter]:
        """The whole parameters, after the first gather."""
        return [managed.unsharded_param for managed in self._managed if hasattr(managed, "unsharded_param")]

    def _post_backward(self) -> list[nn.Parameter]:
        """Starts the reduction of the gradients that the backwards have made.

        Returns the shards whose parameters this replica has used.
        """
        used = []
        # FSDP2 reduces all gradients in a single buffer. Zeros for missing gradients make the replicas' buffers match.
        for managed in self._managed:
            whole: nn.Parameter = managed.unsharded_param
            if whole.grad is not None or managed.unsharded_accumulated_grad is not None:
                used.append(managed.sharded_param)
            elif whole.requires_grad:
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        for module in reversed(self._modules):
            for group in fsdp_groups(module):
                group.post_backward()
        return used


# --- modules that parallelize has sharded


class FsdpStage(_FsdpModules):
    """The FSDP modules of a stage: ``roots``, and the FSDP modules inside them."""

    def __init__(self, roots: Sequence[FSDPModule]) -> None:
        self._roots = list(roots)
        self._gathered = False
        for root in self._roots:
            fsdp_set_up(root)
            if isinstance(root, fx.GraphModule):  # a captured stage may return views: nothing writes into them
                name = re.escape(type(root).__name__)
                warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view tensor")
        together: dict[int, FSDPModule] = {}
        for part in (part for root in roots for part in cast(nn.Module, root).modules()):
            if isinstance(part, FSDPModule):  # modules that were sharded together share a state: take the first
                together.setdefault(id(fsdp_state(part)), part)
        super().__init__(list(together.values()))
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            # Unsharded modules need no prefetch; torch's default prefetch uses indices that another stage has cleared.
            module.set_modules_to_backward_prefetch([module])

    def gather(self) -> None:
        """Gathers the parameters into the modules before a forward."""
        if self._gathered:
            return
        self._set_gathered(True)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()

    def reduce(self) -> list[nn.Parameter]:
        """Starts summing gradients into the shards' ``.grad`` after the last backward; frees the unsharded parameters.

        Returns the shards whose parameters this replica has used.
        """
        self._set_gathered(False)
        used = self._post_backward()
        for root in self._roots:
            fsdp_end_backward(root)
        return used

    def _set_gathered(self, gathered: bool) -> None:
        """Sets whether parameters stay unsharded and gradients accumulate."""
        self._gathered = gathered
        # FSDP2 would reduce and free in each micro-batch's backward. While gathered, no backward counts as the last.
        for root in self._roots:
            root.set_is_last_backward(not gathered)
        for module in self._modules:
            module.set_requires_gradient_sync(not gathered, recurse=False)
            module.set_reshard_after_backward(not gathered, recurse=False)

    def free(self) -> None:
        """Frees the unsharded parameters of a stage that runs no backward."""
        if self._gathered:
            for root in self._roots:
                root.reset_iter_state()
        self._gathered = False


def sharded_stages(modules: Mapping[int, nn.Module]) -> dict[int, FsdpStage]:
    """Returns stage → its ``FsdpStage``, for a rank's stages that have FSDP modules. All share their streams."""
    roots = {stage: inner for stage, module in modules.items() if (inner := list(_roots_in(module)))}
    if roots:
        share_comm_ctx([root for inner in roots.values() for root in inner])
    return {stage: FsdpStage(inner) for stage, inner in roots.items()}


def summed_by_fsdp(module: nn.Module) -> Iterator[tuple[nn.Parameter, set[int]]]:
    """Yields each shard of the FSDP modules inside ``module``, and the ranks over which FSDP2 sums its gradient."""
    for part in module.modules():
        for group in fsdp_groups(part) if isinstance(part, FSDPModule) else ():
            for managed in group.fsdp_params:
                yield managed.sharded_param, set(managed.mesh_info.mesh.mesh.flatten().tolist())


def _roots_in(module: nn.Module) -> Iterator[FSDPModule]:
    """Yields the FSDP modules that are not inside another FSDP module."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots_in(child)


# --- zero=3


class FsdpUnit(_FsdpModules):
    """Parameters in a shell. ``stages``: the stages that use them. ``shards``: name → the shard in the model."""

    def __init__(
        self,
        stages: frozenset[int],
        parameters: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        transport: Transport,
        precision: Precision | None,
    ) -> None:
        self.stages, self._precision = stages, precision
        shell = nn.Module()
        for index, parameter in enumerate(parameters.values()):
            shell.register_parameter(str(index), parameter)
        what = next(iter(parameters)) + f" and {len(parameters) - 1} more" * (len(parameters) > 1)
        policy = MixedPrecisionPolicy()
        if precision is not None and parameter.is_floating_point():  # all parameters of the unit have the same dtype
            policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.reduce)
        self.shell: FSDPModule = fully_shard(shell, mesh=mesh["shard"], reshard_after_forward=False, mp_policy=policy)
        self._all_gather = _Through(transport, "all_gather", "gather", f"parameters {what}", waits=False)
        self.shell.set_custom_all_gather(cast(Any, self._all_gather))
        scatter = _Through(transport, "reduce_scatter", "shard", f"gradients {what}")
        self.shell.set_custom_reduce_scatter(cast(Any, scatter))
        super().__init__([self.shell])
        if mesh.size(0) > 1:
            # sums a shard over the nodes; FSDP2 calls the hook after its reduce-scatter
            self.shell.set_all_reduce_hook(_Through(transport, "all_reduce", "replica", f"gradients {what}"))
        self.shards = dict(zip(parameters, self.parameters, strict=True))
        for shard, old in zip(self.parameters, parameters.values(), strict=True):
            vars(shard).update(vars(old))
            share_hooks(old, shard)
        self.shell.set_reshard_after_backward(False)  # an earlier block may read the same parameters in its backward
        self._handle: Any = None
        self.used: set[str] | None = None  # the parameters this replica used in this call; None before the reduction
        self.whole: dict[str, nn.Parameter] = {}  # unsharded parameters: the same objects in every call
        self.awaited: set[str] = set()  # the parameters whose gradients the running backward has yet to compute

    def gather(self) -> None:
        self._handle = self.shell.unshard(async_op=True)

    def wait(self) -> None:
        """Waits for the unsharded parameters."""
        self._all_gather.wait()
        self._handle.wait()
        pairs = [(managed.unsharded_param, managed.sharded_param) for managed in self._managed]
        whole = [_accumulating(parameter, self._precision, shard) for parameter, shard in pairs]
        self.whole, self._versions = dict(zip(self.shards, whole, strict=True)), list(map(version_of, whole))
        self._holders = list(map(holders_of, whole))

    def is_unread(self) -> bool:
        """Whether what the forwards have saved of the parameters is gone, so that no backward reads them."""
        return list(map(holders_of, self.whole.values())) == self._holders

    def free(self) -> None:
        self.shell.reshard()

    def reduce(self) -> None:
        """Starts the reduction of the gradients that the backwards have made."""
        self.used = {name for name, parameter in self.whole.items() if parameter.grad is not None}
        for (name, parameter), version in zip(self.whole.items(), self._versions, strict=True):
            if version_of(parameter) != version:
                raise RunError(
                    f"forward or a hook has written {name}; zero=3 gathers parameters for a call, and the write would "
                    "be lost: pass zero=2, or write the parameter behind forward_backward(...)"
                )
        with fsdp_without_hooks(self.parameters):
            self._post_backward()

    def finish(self) -> None:
        """Makes the shards' ``.grad`` usable."""
        if self.used is not None:
            fsdp_end_backward(self.shell)
        self.used = None


@dataclass(eq=False)
class _Through:
    """Runs an FSDP2 collective through the transport, which orders, counts and aborts it like all other collectives.

    ``waits``: FSDP2 uses the result at once; otherwise the collective is asynchronous, and ``wait`` waits for it.
    """

    transport: Transport
    operation: str
    scope: str
    what: str
    waits: bool = True
    work: Work | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor | None = None, **options: Any) -> None:
        """Ignores ``options`` (group, reduction operation, async_op), which the transport determines."""
        step = Collective(self.operation, self.scope, output_tensor, input_tensor)
        self.work = self.transport.start([step], self.what)
        if self.waits:
            self.wait()

    def wait(self) -> None:
        if self.work is not None:  # None if a shard group is a single rank
            self.work.wait()
        self.work = None


def _accumulating(parameter: nn.Parameter, precision: Precision | None, shard: nn.Parameter) -> nn.Parameter:
    """Returns the parameter, with the hooks of ``shard``, which FSDP2 would not call, and with gradients that
    accumulate over micro-batches in at least float32."""
    share_hooks(shard, parameter)
    if precision is not None and parameter.requires_grad and parameter.is_floating_point():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if parameter.grad_dtype != wide:
            parameter.grad_dtype = wide
    return parameter


class FullyShardedGradients(Gradients):
    """``Gradients`` of a rank whose parameters are sharded, in ``model`` and in the stage modules of all ``graphs``.

    The constructor is a collective call of all ranks, after the initial broadcast. ``mesh``: ``Topology.data_mesh``.
    ``transport`` has the scopes "shard", "gather", "replica" and "flags" open. Parameters without dimensions, and those
    that no stage uses, stay unsharded. The constructor replaces the model's parameters everywhere: an optimizer must
    take the new parameters.
    """

    shards_parameters = True

    def __init__(
        self,
        model: nn.Module,
        graphs: Sequence[StageGraph],
        mesh: DeviceMesh,
        transport: Transport,
        owners: Ownership,
        precision: Precision | None = None,
        least_bytes: int = 0,
    ) -> None:
        assert transport.pipe_rank is not None
        every, own_names = dict(model.named_parameters(remove_duplicate=False)), owners.names[transport.pipe_rank]
        names = {id(parameter): name for name, parameter in reversed(every.items())}
        for name in own_names & every.keys():
            data = every[name].detach()
            if precision is not None and data.is_floating_point():
                data = data.to(precision.master)
            every[name].data = data.contiguous()  # FSDP2 can shard contiguous tensors only
        # The same stages use a unit's parameters, so they share their first and last action.
        users: dict[nn.Parameter, set[int]] = {}
        for stage in _stages_of(graphs[0], transport.pipe_rank):
            for parameter in stage.parameters.values():
                users.setdefault(parameter, set()).add(stage.index)
        grouped: dict[tuple[frozenset[int], torch.dtype], dict[str, nn.Parameter]] = {}  # in order of use
        for parameter, stages in users.items():
            if parameter.ndim:
                group = grouped.setdefault((frozenset(stages), parameter.dtype), {})
                group[names[id(parameter)]] = parameter
        # Two or three units are there at once: a small model has small ones.
        least = min(least_bytes, max(2**20, sum(parameter.nbytes for parameter in users) // 32))
        units = [
            FsdpUnit(stages, unit, mesh, transport, precision)
            for (stages, _), group in grouped.items()
            for unit in in_blocks(group, least)
        ]
        # All units share their streams; fsdp_set_up does FSDP2's work of a first forward, which a shell never runs.
        share_comm_ctx([unit.shell for unit in units])
        for unit in units:
            fsdp_set_up(unit.shell)
        shards = {id(every[name]): shard for unit in units for name, shard in unit.shards.items()}
        for module in [model, *_modules_of(graphs, transport.pipe_rank)]:
            replace_tensors(module, shards)
        own = {name: parameter for name, parameter in model.named_parameters() if name in own_names}
        sums = GradientSums(3, mesh.size(1), mesh.get_local_rank("shard"), mesh.size(0))
        super().__init__(own, transport, sums, owners.tied)
        self._units, self._precision = units, precision
        self._home = {name: unit for unit in units for name in unit.shards}
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._whole = {name: p for name, p in own.items() if not isinstance(p, DTensor)}
        self._call = _CallState()

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        """Begins a call. Every call reduces, whatever ``sync`` is, so that a rank keeps only gradient shards. Earlier
        gradients are always set aside, whatever ``scales`` is."""
        self._set_earlier_aside()
        self._start(graphs, row, _CallState(training=True))

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._start(graphs, [action for action in row if action.kind.part_of is FORWARD], _CallState())
        yield
        self.flush()
        self._stop()

    def _start(self, graphs: Sequence[StageGraph], row: Sequence[Action], call: _CallState) -> None:
        """Begins a call that runs this row, or only its forwards."""
        self._call = call
        for module in _modules_of(graphs, self._transport.pipe_rank):
            for submodule in module.modules():
                call.frees &= _saves_all(submodule)
                for leaf, parameter in submodule._parameters.items():
                    if id(parameter) in self._names:
                        call.homes.setdefault(self._names[id(parameter)], []).append((submodule, leaf))
        # A dict keeps the position of a key's first assignment, and the value of its last: units are in the order of
        # their first use, each with its last action.
        for action in row:
            call.last |= dict.fromkeys(self._of(action), action)
        call.waiting = list(call.last)
        copies = {}  # replace unsharded parameters in this call, so that their gradients are this call's alone
        for name, parameter in self._whole.items():
            data = parameter.detach()
            if self._precision is not None and data.is_floating_point():
                data = data.to(self._precision.compute)
            copies[name] = _accumulating(nn.Parameter(data, parameter.requires_grad), self._precision, parameter)
        self._put_in(copies)
        self._gather_next()

    def awaited(self, stage: int) -> Waits:
        units = [unit for unit in self._call.last if stage in unit.stages and unit not in self._call.ready]
        for unit in units:
            if not unit.whole:  # FSDP2 makes the unsharded parameters in the first gather
                self._wait_for(unit)
            self._put_in(unit.whole)
        waits = {unit: partial(self._wait_for, unit) for unit in units}
        return {id(parameter): waits[unit] for unit in units for parameter in unit.whole.values()}

    def _wait_for(self, unit: FsdpUnit) -> None:
        if unit in self._call.ready:
            return
        self._call.ready.add(unit)
        # All replicas gather in the order of first use, even if this replica needs a unit earlier.
        while unit in self._call.waiting:
            self._gather_next()
        unit.wait()
        self._gather_next()

    def in_call(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return [self._call.now.get(self._names.get(id(parameter), ""), parameter) for parameter in parameters]

    def gathered(self) -> Iterable[Tensor]:
        return self._call.now.values()

    def before(self, action: Action) -> None:
        # This action reduces the units that no later action needs, in the same order on all replicas.
        self._call.ending = [unit for unit, last in reversed(self._call.last.items()) if last == action]
        for unit in self._call.ending:
            trained = {name: parameter for name, parameter in unit.whole.items() if parameter.requires_grad}
            unit.awaited = set(trained)
            for name, parameter in trained.items():
                self._watch(name, parameter)

    def _collect(self, name: str) -> bool:
        unit = self._home[name]
        unit.awaited.discard(name)
        return unit.used is None

    def _reduce_complete(self) -> None:
        complete = list(takewhile(lambda unit: not unit.awaited, self._call.ending))
        new = [unit for unit in complete if unit.used is None]
        for unit in new:
            unit.reduce()
        for unit in complete if new and self._call.frees else ():
            if unit.is_unread():
                self._call.ending.remove(unit)
                self._let_go(unit)

    def after(self, action: Action) -> None:
        """Reduces and frees the units that no later action needs."""
        for unit in self._call.ending:
            self._let_go(unit)
        self._call.ending = []

    def flush(self) -> None:
        """Reduces and frees the remaining units, of stages that ran no backward."""
        for unit in list(self._call.last):
            self._wait_for(unit)
            self._let_go(unit)

    def end(self, factor: Tensor | None) -> None:
        """Sums this call's gradients over the data axis and the owners; None if no rank used a parameter."""
        self._stop()
        for unit in self._units:
            unit.finish()
        self._sum_used({"data": self._whole}, factor)
        self._leave_gradients()

    def _whether_used(self) -> dict[str, Use]:
        used = {name for unit in self._units for name in unit.used or ()}
        used |= {name for name in self._whole if self._call.now[name].grad is not None}
        return self._whether_own_used(used)

    def _stop(self) -> None:
        """Restores the modules' parameters from before the call; unsharded parameters get their copies' gradients."""
        for name, parameter in self._whole.items():
            gradient = self._call.now[name].grad
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)
        self._put_in(self._whole)
        self._call = _CallState()

    def _of(self, action: Action) -> list[FsdpUnit]:
        return [unit for unit in self._units if action.stage in unit.stages]

    def _gather_next(self) -> None:
        """Starts the next unit's all-gather in the order of first use: only one unit ahead, to limit the buffers."""
        if self._call.waiting:
            self._call.waiting.pop(0).gather()

    def _put_in(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Puts parameters into the modules of this call's stages."""
        for name, parameter in parameters.items():
            self._call.now[name] = parameter
            for module, leaf in self._call.homes.get(name, ()):
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[leaf] = parameter
                else:  # such as nn.LSTM, which keeps its own list of parameters
                    setattr(module, leaf, parameter)

    def _let_go(self, unit: FsdpUnit) -> None:
        del self._call.last[unit]
        if self._call.training and unit.used is None:
            unit.reduce()
        self._put_in(unit.shards)
        unit.free()

    # the pieces for an optimizer

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        """Returns this rank's shard of a parameter."""
        if name in self._whole:
            piece = super()._piece(name, parameter)
            return replace(piece, counts=piece.counts and self.sums.rank == 0)

        def gradient() -> Tensor | None:
            return None if parameter.grad is None else local(parameter.grad).view(-1)

        # FSDP2 shards dimension 0 into chunks of equal length; the last chunks may be shorter, or empty.
        data = local(parameter).detach().view(-1)
        rows, length = parameter.shape[0], math.prod(parameter.shape[1:])
        chunk, rank = -(-rows // self.sums.shards), self.sums.rank
        start, stop = (min(row, rows) * length for row in (rank * chunk, (rank + 1) * chunk))
        return Piece(name, parameter, start, stop, data, self._is_first_owner(name), gradient)

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """Returns this rank's pieces of ``names``; RunError if ``whole``, and some of the parameters are sharded."""
        wanted = set(names)
        sharded = [name for name in self._own if name in wanted and name not in self._whole]
        if whole and sharded:
            raise RunError(
                f"the optimizer steps {sharded[0]} as a whole, which zero=3 shards; write zero=2, or take an "
                "element-wise optimizer such as AdamW"
            )
        return OptimizerPieces(0, tuple(piece for piece in self.pieces() if piece.name in wanted))


@dataclass
class _CallState:
    """The state of a call."""

    training: bool = False
    homes: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Parameter name → the (module, attribute) pairs that register the parameter."""
    last: dict[FsdpUnit, Action] = field(default_factory=dict)
    """The units that later actions need, in the order of their first use, each with its last action."""
    waiting: list[FsdpUnit] = field(default_factory=list)
    ready: set[FsdpUnit] = field(default_factory=set)
    ending: list[FsdpUnit] = field(default_factory=list)
    """The units whose last user is the running backward, in the order of their reductions."""
    now: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameter name → the parameter that the modules hold at present."""
    frees: bool = True
    """Whether a backward reads only parameters that its forward has saved."""


def in_blocks(parameters: Mapping[str, nn.Parameter], least: int) -> list[dict[str, nn.Parameter]]:
    """Groups parameters, which are in the order of use, into whole blocks with at least ``least`` bytes per group.

    A block is an entry of the outermost module list, such as ``layers.3``; outside lists each parameter is a block.
    """
    groups = [dict[str, nn.Parameter]()]
    for _, block in groupby(parameters, lambda name: (re.match(r"(.*?\.)?\d+\.", name) or [name])[0]):
        if groups[-1] and sum(parameter.nbytes for parameter in groups[-1].values()) >= least:
            groups.append({})
        groups[-1].update((name, parameters[name]) for name in block)
    return groups


_SAVING = {*"_operator builtins math torch torch._C._nn torch._ops.aten torch.functional torch.nn.functional".split()}
"""Modules of functions whose backward reads only what C++ has saved in forward. An ``autograd.Function``, a custom
operator or an activation checkpoint may read parameters that Python holds."""


def _saves_all(module: nn.Module) -> bool:
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    homes = {getattr(node.target, "__module__", "torch") for node in nodes if node.op == "call_function"}
    is_torchs = type(module).__module__.startswith(("torch.nn.modules.", "torch.fx."))
    return is_torchs and homes <= _SAVING and not any(hook_tables(module))


def _stages_of(graph: StageGraph, rank: int | None) -> list[Stage]:
    return [stage for stage in graph if rank in graph.ranks(stage.index)]


def _modules_of(graphs: Sequence[StageGraph], rank: int | None) -> list[nn.Module]:
    """Returns the modules that a rank's stages run, each once, including the owners of opaque calls."""
    modules = [stage.module for graph in graphs for stage in _stages_of(graph, rank)]
    modules += [call.owner for module in modules for call in opaque_calls(module)]
    return list({id(module): module for module in modules if isinstance(module, nn.Module)}.values())
