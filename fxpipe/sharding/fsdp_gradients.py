"""FSDP gradients: ``zero=3``, parameters, gradients and optimizer state sharded, with torch's FSDP2 underneath.

Between steps the model holds shards, as DTensors. A *unit* is the parameters of one type that the same stages of this
rank use: it is gathered before its first action in the row, lies whole in the modules until its last one, and is then
reduced and freed. A unit is FSDP2 on a shell, a module that holds these parameters and nothing else and is never
called. So the user's modules keep their classes and hooks, raw parameters are as good as those of modules, and which
collectives run, and in which order, follows from the row alone: not from what autograd does, what the data takes part
in, or which micro-batches have no weight. On every replica it is the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.parameters.dtensors import local
from fxpipe.parameters.ownership import Ownership, replace_tensors
from fxpipe.precision import Precision
from fxpipe.schedules.action import Action, Op
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.sharding.fsdp import FsdpUnit, accumulating, finish_setup
from fxpipe.sharding.gradients import Gradients, OptimizerPieces


def fully_sharded(
    model: nn.Module,
    graphs: Sequence[StageGraph],
    mesh: DeviceMesh,
    transport: Transport,
    owners: Ownership,
    precision: Precision | None = None,
) -> FullyShardedGradients:
    """Shards the parameters of this rank's stages, in ``model`` and in the modules of all ``graphs``' stages alike.

    A collective call of all ranks, after the broadcast at the start. ``mesh``: ``Topology.data_mesh``. ``transport``
    has the scopes "shard", "gather", "replica" and "flags" open. What has no dimension, and what no stage uses, stays
    whole. Afterwards, the model's old parameters are in use nowhere, and an optimizer must be made of the new ones.
    """
    assert transport.pipe_rank is not None
    every, kept = dict(model.named_parameters(remove_duplicate=False)), owners.names[transport.pipe_rank]
    names = {id(parameter): name for name, parameter in reversed(every.items())}
    for parameter in [parameter for name, parameter in every.items() if name in kept]:
        if precision is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.master)
        parameter.data = parameter.data.contiguous()  # plain strides are all that FSDP2 can shard
    users: dict[nn.Parameter, set[int]] = {}
    for stage in _stages_of(graphs[0], transport.pipe_rank):
        for parameter in stage.parameters.values():
            users.setdefault(parameter, set()).add(stage.index)
    grouped: dict[tuple[frozenset[int], torch.dtype], dict[str, nn.Parameter]] = {}  # in order of use
    for parameter, stages in users.items():
        if parameter.ndim:
            group = grouped.setdefault((frozenset(stages), parameter.dtype), {})
            group[names[id(parameter)]] = parameter
    units = [FsdpUnit(stages, parameters, mesh, transport, precision) for (stages, _), parameters in grouped.items()]
    finish_setup(units)
    shards = {id(every[name]): shard for unit in units for name, shard in unit.shards.items()}
    for module in [model, *_modules_of(graphs, transport.pipe_rank)]:
        replace_tensors(module, shards)
    held = {name: parameter for name, parameter in model.named_parameters() if name in kept}
    return FullyShardedGradients(held, units, mesh, transport, owners, precision)


class FullyShardedGradients(Gradients):
    """``Gradients`` of a rank whose parameters are sharded."""

    def __init__(
        self,
        held: dict[str, nn.Parameter],
        units: Sequence[FsdpUnit],
        mesh: DeviceMesh,
        transport: Transport,
        owners: Ownership,
        precision: Precision | None,
    ) -> None:
        way = GradientSums(3, mesh.size(1), mesh.get_local_rank("shard"), mesh.size(0))
        super().__init__(held, transport, way, owners.tied)
        self._units, self._precision = units, precision
        self._names = {id(parameter): name for name, parameter in held.items()}
        self._whole = {name: p for name, p in held.items() if not isinstance(p, DTensor)}
        self._kept: dict[str, Tensor] = {}  # unreduced gradients of calls without synchronisation, by name
        self._behind = False  # whether there has been such a call, on whatever replica it left gradients
        self._call = _CallState()

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        """``scales`` changes nothing here: earlier gradients are always kept out."""
        for name in [name for name in self._kept if self._own[name].grad is None]:  # what was cleared
            del self._kept[name]
        self._set_earlier_aside()
        self._start(graphs, row, _CallState(training=True, sync=sync, deferred=self._behind or not sync))

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._start(graphs, [action for action in row if action.op is Op.F], _CallState())
        yield
        self.flush()
        self._stop()

    def _start(self, graphs: Sequence[StageGraph], row: Sequence[Action], call: _CallState) -> None:
        """A call begins that runs this row, all of it or its forwards."""
        self._call = call
        for module in _modules_of(graphs, self._transport.pipe_rank):
            for submodule in module.modules():
                for leaf, parameter in submodule._parameters.items():
                    if id(parameter) in self._names:
                        call.homes.setdefault(self._names[id(parameter)], []).append((submodule, leaf))
        for action in row:
            call.last |= dict.fromkeys(self._of(action), action)
        call.waiting = list(call.last)  # in the order of first use
        for name, parameter in self._whole.items():  # a copy stands in its place, whose gradient is this call's alone
            data = parameter.detach()
            if self._precision is not None and data.is_floating_point():
                data = data.to(self._precision.compute)
            self._swap(name, accumulating(nn.Parameter(data, parameter.requires_grad), self._precision))
        self._gather_next()

    def settle(self, stage: int | None = None) -> None:
        """In a call: what a stage needs lies whole in its modules. Between calls nothing is under way."""
        for unit in self._units if stage is not None else ():
            if stage not in unit.stages or unit not in self._call.last or unit in self._call.ready:
                continue
            self._call.ready.add(unit)
            while unit in self._call.waiting:
                self._gather_next()
            for name, parameter in unit.gathered().items():
                self._swap(name, parameter)
            self._gather_next()

    def in_call(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return [self._call.now.get(self._names.get(id(one), ""), one) for one in parameters]

    def before(self, action: Action) -> None:
        self.settle(action.stage)

    def after(self, action: Action) -> None:
        """What no later action needs is reduced and freed."""
        for unit in self._of(action):
            if self._call.last[unit] == action:
                self._let_go(unit)

    def flush(self) -> None:
        """A stage without backward still has its parameters whole."""
        for unit in [unit for unit in self._units if unit in self._call.last and unit not in self._call.over]:
            self.settle(min(unit.stages))
            self._let_go(unit)

    def end(self, factor: Tensor | None) -> None:
        """This call's gradients, summed over the data axis and the owners; None where no rank used a parameter."""
        call = self._call
        self._stop()
        if call.deferred:
            self._settle_local(call, factor)
        if call.sync:
            for unit in self._units:
                unit.finish()
            for name, parameter in self._whole.items():
                parameter.grad = call.local.get(name)
            used = self._ask_who_used(call.used | call.local.keys()).wait()
            self._sum_used(used, self._whole, None if call.deferred else factor)
        self._leave_gradients()

    def _stop(self) -> None:
        """The modules hold what they held before the call, and ``local`` the gradients of what was never sharded."""
        for name, parameter in self._whole.items():
            gradient = self._call.now[name].grad
            if gradient is not None:
                self._call.local[name] = gradient.to(parameter.dtype)
            self._swap(name, parameter)
        self._call = _CallState()

    def _of(self, action: Action) -> list[FsdpUnit]:
        return [unit for unit in self._units if action.stage in unit.stages]

    def _gather_next(self) -> None:
        """Starts the next unit's all-gather, in the order of first use: one ahead, to keep few buffers."""
        if self._call.waiting:
            self._call.waiting.pop(0).gather()

    def _swap(self, name: str, parameter: nn.Parameter) -> None:
        """Puts a parameter into the modules of this call's stages."""
        self._call.now[name] = parameter
        for module, leaf in self._call.homes.get(name, ()):
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[leaf] = parameter
            else:  # such as nn.LSTM's, which keeps a list of its own
                setattr(module, leaf, parameter)

    def _let_go(self, unit: FsdpUnit) -> None:
        call = self._call
        call.over.add(unit)
        found = {name: p.grad for name in unit.names if (p := call.now[name]).grad is not None}
        if call.deferred:
            call.local |= found
            for name in found:
                call.now[name].grad = None
        for name, shard in unit.shards.items():
            self._swap(name, shard)
        if not call.training or call.deferred:
            unit.free()
        else:
            call.used |= found.keys()
            unit.reduce()

    def _settle_local(self, call: _CallState, factor: Tensor | None) -> None:
        """The unreduced gradients of this call, scaled, and those of the calls before it."""
        for name, gradient in call.local.items():
            if factor is not None:
                gradient.mul_(factor)
            if name in self._kept:
                gradient.copy_(self._kept.pop(name).add_(gradient))
        self._kept |= call.local
        self._behind = True
        if not call.sync:
            for name in call.local:  # where it is gone, the next call knows that gradients were cleared
                self._earlier.setdefault(name, torch.zeros_like(self._own[name]))
            return
        call.local, self._kept, self._behind = self._kept, {}, False
        call.used = {name for name in call.local if name not in self._whole}
        for unit in self._units:
            if unit in call.last:
                unit.reduce({name: call.local[name] for name in unit.names if name in call.local})

    # what an optimizer sees

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        """This rank's shard of a parameter."""
        if name in self._whole:
            piece = super()._piece(name, parameter)
            return dataclasses.replace(piece, counts=piece.counts and self.way.rank == 0)

        def gradient() -> Tensor | None:
            return None if parameter.grad is None else local(parameter.grad).view(-1)

        data = local(parameter.detach()).view(-1)
        rows, length = parameter.shape[0], math.prod(parameter.shape[1:])
        chunk, place = -(-rows // self.way.shards), self.way.rank
        start, stop = (min(row, rows) * length for row in (place * chunk, (place + 1) * chunk))
        return Piece(name, parameter, start, stop, data, self._is_first_owner(name), gradient)

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """RunError where parameters are to be stepped ``whole``, and some are sharded."""
        wanted = set(names)
        sharded = [name for name in self._own if name in wanted and name not in self._whole]
        if whole and sharded:
            raise RunError(
                f"the optimizer steps {sharded[0]} as a whole, which zero=3 shards; write zero=2, or take an "
                "element-wise optimizer such as AdamW"
            )
        return OptimizerPieces(0, tuple(piece for piece in self.pieces() if piece.name in wanted))

    def clear(self) -> None:
        super().clear()
        self._kept.clear()
        self._behind = False


@dataclass
class _CallState:
    """All that changes in a call."""

    training: bool = False
    sync: bool = True
    deferred: bool = False
    """Whether gradients are reduced at the end, after scaling, and not where a unit's last action was."""
    homes: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Where a parameter is registered."""
    last: dict[FsdpUnit, Action] = field(default_factory=dict)
    waiting: list[FsdpUnit] = field(default_factory=list)
    ready: set[FsdpUnit] = field(default_factory=set)
    over: set[FsdpUnit] = field(default_factory=set)
    now: dict[str, nn.Parameter] = field(default_factory=dict)
    """What stands in a parameter's place."""
    local: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


def _stages_of(graph: StageGraph, rank: int | None) -> list[Stage]:
    return [stage for stage in graph if rank in graph.ranks(stage.index)]


def _modules_of(graphs: Sequence[StageGraph], rank: int | None) -> list[nn.Module]:
    """The modules that a rank's stages run, each once, and those whose methods are opaque."""
    modules = [stage.module for graph in graphs for stage in _stages_of(graph, rank)]
    modules += [call.owner for module in modules for call in opaque_calls(module)]
    return list({id(module): module for module in modules if isinstance(module, nn.Module)}.values())
