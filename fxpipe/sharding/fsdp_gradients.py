"""Fully sharded: ``zero=3``, parameters, gradients and optimizer state sharded, with torch's FSDP2 underneath.

Between steps the model holds shards, as DTensors. A *unit* is the parameters of one type that the same stages of this
rank use: it is gathered before its first action in the row, lies whole in the modules until its last one, and is then
reduced and freed. A unit is FSDP2 on a shell, a module that holds these parameters and nothing else and is never
called. So the user's modules keep their classes and hooks, raw parameters are as good as those of modules, and which
collectives run, and in which order, follows from the row alone: not from what autograd does, what the data takes part
in, or which micro-batches have no weight. On every replica it is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpipe.distributed.broadcast import in_flat_buffers
from fxpipe.distributed.collective import Collective, Scope
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors
from fxpipe.parameters.dtensors import local
from fxpipe.parameters.ownership import Ownership
from fxpipe.precision import Precision
from fxpipe.schedules.action import Action, Op
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.sharding.fsdp_unit import FsdpUnit, accumulating, finish_setup
from fxpipe.sharding.reducer import OptimizerPieces

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    every, kept = _named_parameters(model), owners.names[transport.pipe_rank]
    names = {id(parameter): name for name, parameter in reversed(every.items())}
    mine = _stages_of(graphs[0], transport.pipe_rank)
    _prepare([parameter for name, parameter in every.items() if name in kept], precision)
    units = [
        FsdpUnit(stages, {names[id(p)]: p for p in parameters}, mesh, transport, precision)
        for (stages, _), parameters in _grouped(mine).items()
    ]
    finish_setup([unit.shell for unit in units])
    shards = {name: shard for unit in units for name, shard in unit.shards().items()}
    new = {key: shards[name] for key, name in names.items() if name in shards}
    for module in [model, *_modules_of(graphs, transport.pipe_rank)]:
        for home, old in list(_homes(module)):
            if id(old) in new and new[id(old)] is not old:
                _put(home, new[id(old)])
    held = {name: parameter for name, parameter in model.named_parameters() if name in kept}
    return FullyShardedGradients(held, units, mesh, transport, owners, precision)


class FullyShardedGradients:
    """The gradients of a rank whose parameters are sharded; ``reduce.Reducer``'s protocol.

    A call: ``begin``, ``settle(stage)`` ahead of each forward, ``before`` and ``after`` around each backward, one that
    is left out included, and ``end``. A forward-only call is the same: with ``training=False``, and ``end()``.
    """

    def __init__(
        self,
        held: Mapping[str, nn.Parameter],
        units: Sequence[FsdpUnit],
        mesh: DeviceMesh,
        transport: Transport,
        owners: Ownership,
        precision: Precision | None,
    ) -> None:
        self._held, self._units, self._transport = dict(held), units, transport
        self._precision = precision
        self.way = GradientSums(3, mesh.size(1), mesh.get_local_rank("shard"), mesh.size(0))
        self._names = {id(parameter): name for name, parameter in self._held.items()}
        self._whole = {name: p for name, p in self._held.items() if not isinstance(p, DTensor)}
        rank = transport.pipe_rank
        self._tied = {ranks: names for ranks, names in owners.tied.items() if rank in ranks}
        self._elsewhere = {name for ranks, names in self._tied.items() if ranks[0] != rank for name in names}
        self._kept: dict[str, Tensor] = {}  # unreduced gradients of calls without synchronisation, by name
        self._behind = False  # whether there has been such a call, on whatever replica it left gradients
        self._call = _CallState()

    # a call

    def begin(
        self,
        graphs: Sequence[StageGraph],
        row: Sequence[Action],
        sync: bool = True,
        scales: bool = True,
        training: bool = True,
    ) -> None:
        """Starts a call that runs this rank's row, or without ``training`` its forwards, on the stages of ``graphs``.

        ``sync``: whether gradients are summed in it; alike on all ranks. ``scales`` changes nothing here.
        """
        row = [action for action in row if training or action.op is Op.F]
        self._call = call = _CallState(training, sync, deferred=training and (self._behind or not sync))
        for module in _modules_of(graphs, self._transport.pipe_rank):
            for home, parameter in _homes(module):
                if id(parameter) in self._names:
                    call.homes.setdefault(self._names[id(parameter)], []).append(home)
        for action in row:
            for unit in self._of(action):
                call.last[unit] = action
        call.waiting = list(dict.fromkeys(unit for action in row for unit in self._of(action)))
        if training:
            self._take_earlier()
        for name, parameter in self._whole.items():
            self._swap(name, self._copy_of(parameter))
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

    def before(self, action: Action) -> None:
        """Before an action."""
        self.settle(action.stage)

    def after(self, action: Action) -> None:
        """After an action, run or left out: what no later one needs is reduced and freed."""
        for unit in self._of(action):
            if self._call.last[unit] == action:
                self._let_go(unit)

    def flush(self) -> None:
        """All actions have run. A stage without backward still has its parameters whole."""
        for unit in self._units:
            if unit in self._call.last and unit not in self._call.over:
                self.settle(min(unit.stages))
                self._let_go(unit)

    def end(self, factor: Tensor | None = None) -> None:
        """Ends the call: ``.grad`` has its gradients, times ``factor``, added to those of earlier calls."""
        self.flush()
        call = self._call
        for name, parameter in self._whole.items():
            copy = self._swap(name, parameter)
            if copy is not None and copy.grad is not None:
                call.local[name] = copy.grad.to(parameter.dtype)
        if call.training:
            if call.deferred:
                self._settle_local(factor)
            if call.sync:
                self._reduce_all(None if call.deferred else factor)
            self._add_earlier()
        self._call = _CallState()

    def _of(self, action: Action) -> list[FsdpUnit]:
        return [unit for unit in self._units if action.stage in unit.stages]

    def _gather_next(self) -> None:
        """Starts the next unit's all-gather, in the order of first use: one ahead, to keep few buffers."""
        if self._call.waiting:
            self._call.waiting.pop(0).gather()

    def _swap(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Puts a parameter into the modules of this call's stages; what was there."""
        before = self._call.now.get(name)
        self._call.now[name] = parameter
        for home in self._call.homes.get(name, ()):
            _put(home, parameter)
        return before

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands in a whole parameter's place in a call: its gradient is this call's alone."""
        data = parameter.detach()
        if self._precision is not None and data.is_floating_point():
            data = data.to(self._precision.compute)
        return accumulating(nn.Parameter(data, parameter.requires_grad), self._precision)

    def _let_go(self, unit: FsdpUnit) -> None:
        call = self._call
        call.over.add(unit)
        if call.training:
            found = {name: p.grad for name in unit.names if (p := call.now[name]).grad is not None}
            if call.deferred:
                call.local |= found
                for name in found:
                    call.now[name].grad = None
        for name, shard in unit.shards().items():
            self._swap_at_rest(name, shard)
        if not call.training or call.deferred:
            unit.free()
        else:
            call.used |= found.keys()
            unit.reduce()

    def _swap_at_rest(self, name: str, shard: nn.Parameter) -> None:
        for home in self._call.homes.get(name, ()):
            _put(home, shard)

    # gradients

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._held.items() if parameter.requires_grad}

    def _take_earlier(self) -> None:
        """Keeps earlier calls' gradients out of what is reduced and scaled now."""
        for name, parameter in self._held.items():
            if parameter.grad is None:
                self._kept.pop(name, None)  # somebody has cleared it
            else:
                self._call.earlier[name] = parameter.grad
                parameter.grad = None

    def _settle_local(self, factor: Tensor | None) -> None:
        """The unreduced gradients of this call, scaled, and those of the calls before it."""
        call = self._call
        for name, gradient in call.local.items():
            if factor is not None:
                gradient.mul_(factor)
            if name in self._kept:
                gradient.copy_(self._kept.pop(name).add_(gradient))
        self._kept |= call.local
        self._behind = True
        if not call.sync:
            for name in call.local:  # tells the next call, where it is gone, that gradients were cleared
                call.earlier.setdefault(name, torch.zeros_like(self._held[name]))
            return
        call.local, self._kept, self._behind = self._kept, {}, False
        call.used = {name for name in call.local if name not in self._whole}
        for unit in self._units:
            if unit in call.last:
                unit.reduce({name: call.local[name] for name in unit.names if name in call.local})

    def _reduce_all(self, factor: Tensor | None) -> None:
        """This call's gradients, summed over the data axis and the owners; None where no replica used a parameter."""
        call, trainable = self._call, self._trainable()
        for unit in self._units:
            unit.finish()
        used = call.used | call.local.keys()
        flags = self._flags([name in used for name in trainable])
        if trainable:
            self._transport.start([Collective("maximum", "flags", flags)], "which parameters were used").wait()
        anyone = dict(zip(trainable, map(bool, flags.tolist()), strict=True))
        whole = {n: call.local[n] if n in call.local else _zeros(p) for n, p in self._whole.items() if anyone.get(n)}
        self._sum("data", list(whole.values()))
        for name, parameter in trainable.items():
            if not anyone[name]:
                parameter.grad = None
                continue
            if name in whole:
                parameter.grad = whole[name]
            if factor is not None and parameter.grad is not None:
                local(parameter.grad).mul_(factor)
        for ranks, names in self._tied.items():
            self._sum_over_owners(ranks, {name: trainable[name] for name in names if name in trainable})

    def _sum_over_owners(self, ranks: tuple[int, ...], tied: Mapping[str, nn.Parameter]) -> None:
        if not tied:
            return
        flags = self._flags([p.grad is not None for p in tied.values()])
        self._transport.all_reduce(ranks, flags)
        shared = [p for p, anyone in zip(tied.values(), flags.tolist(), strict=True) if anyone]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._sum(ranks, [local(p.grad) for p in shared if p.grad is not None])

    def _flags(self, values: Sequence[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._transport.device)

    def _sum(self, scope: Scope, tensors: Sequence[Tensor]) -> None:
        """Sums tensors over a group, in place."""
        in_flat_buffers(tensors, lambda flat: self._transport.all_reduce(scope, flat))

    def _add_earlier(self) -> None:
        for name, gradient in self._call.earlier.items():
            parameter = self._held[name]
            if parameter.grad is not None:
                local(gradient).add_(local(parameter.grad))
            parameter.grad = gradient

    # what an optimizer sees

    @property
    def shards(self) -> bool:
        """Whether the ranks of a shard group have different pieces."""
        return self.way.shards > 1

    def pieces(self) -> list[Piece]:
        """This rank's shard of every parameter, in order."""
        return [self._piece(name, parameter) for name, parameter in self._held.items()]

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """These parameters, for an optimizer to step. ``whole``: each of them by one rank.

        Raises:
            RunError: ``whole``, and some are sharded.
        """
        wanted = set(names)
        sharded = [name for name in self._held if name in wanted and name not in self._whole]
        if whole and sharded:
            raise RunError(
                f"the optimizer steps {sharded[0]} as a whole, which zero=3 shards; write zero=2, or take an "
                "element-wise optimizer such as AdamW"
            )
        return OptimizerPieces(0, tuple(piece for piece in self.pieces() if piece.name in wanted))

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        first = name not in self._elsewhere

        def gradient() -> Tensor | None:
            return None if parameter.grad is None else local(parameter.grad).view(-1)

        if name in self._whole:
            counts = first and self.way.rank == 0
            return Piece(name, parameter, 0, parameter.numel(), parameter.detach(), counts, lambda: parameter.grad)
        data = local(parameter.detach()).view(-1)
        rows, length = parameter.shape[0], math.prod(parameter.shape[1:])
        chunk, place = -(-rows // self.way.shards), self.way.rank
        start, stop = (min(row, rows) * length for row in (place * chunk, (place + 1) * chunk))
        return Piece(name, parameter, start, stop, data, first, gradient)

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        """A forward-only call."""
        self.begin(graphs, row, training=False)
        yield
        self.end()

    def publish(self, claim: OptimizerPieces) -> None:
        """Nothing: the next call gathers what it needs."""

    def watch(self, stopwatch: Stopwatch) -> None:
        """What is waited for here is not told apart from computing."""

    def close(self) -> None:
        """Nothing is under way."""

    def clear(self) -> None:
        """zero_grad: drops all gradients, those not reduced yet included."""
        self._kept.clear()
        self._behind = False
        for parameter in self._held.values():
            parameter.grad = None


@dataclass
class _CallState:
    """All that changes in a call."""

    training: bool = False
    sync: bool = True
    deferred: bool = False
    """Whether gradients are reduced at the end, after scaling, and not where a unit's last action was."""
    homes: dict[str, list[_Home]] = field(default_factory=dict)
    last: dict[FsdpUnit, Action] = field(default_factory=dict)
    waiting: list[FsdpUnit] = field(default_factory=list)
    ready: set[FsdpUnit] = field(default_factory=set)
    over: set[FsdpUnit] = field(default_factory=set)
    now: dict[str, nn.Parameter] = field(default_factory=dict)
    earlier: dict[str, Tensor] = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Home:
    """Where a parameter is registered."""

    module: nn.Module
    name: str


def _stages_of(graph: StageGraph, rank: int | None) -> list[Stage]:
    return [stage for stage in graph if graph.placement[stage.index] == rank]


def _modules_of(graphs: Sequence[StageGraph], rank: int | None) -> list[nn.Module]:
    """The modules that a rank's stages run, each once."""
    modules = [stage.module for graph in graphs for stage in _stages_of(graph, rank)]
    return list({id(module): module for module in modules if isinstance(module, nn.Module)}.values())


def _homes(module: nn.Module) -> Iterator[tuple[_Home, nn.Parameter]]:
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                yield _Home(submodule, name), parameter


def _put(home: _Home, parameter: nn.Parameter) -> None:
    if type(home.module).__setattr__ is nn.Module.__setattr__:
        home.module._parameters[home.name] = parameter
    else:  # such as nn.LSTM's, which keeps a list of its own
        setattr(home.module, home.name, parameter)


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in all_tensors(model).items() if isinstance(tensor, nn.Parameter)}


def _grouped(stages: Sequence[Stage]) -> dict[tuple[frozenset[int], torch.dtype], list[nn.Parameter]]:
    """(stages that use them, type) → parameters that can be sharded, in order of use."""
    users: dict[nn.Parameter, set[int]] = {}
    for stage in stages:
        for parameter in stage.parameters.values():
            users.setdefault(parameter, set()).add(stage.index)
    groups: dict[tuple[frozenset[int], torch.dtype], list[nn.Parameter]] = {}
    for parameter, indices in users.items():
        if parameter.ndim:
            groups.setdefault((frozenset(indices), parameter.dtype), []).append(parameter)
    return groups


def _prepare(parameters: Sequence[nn.Parameter], precision: Precision | None) -> None:
    """Master precision, and plain strides, which are all that FSDP2 can shard."""
    for parameter in parameters:
        if precision is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(precision.master)
        parameter.data = parameter.data.contiguous()


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter.detach())
