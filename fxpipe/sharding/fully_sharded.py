"""Fully sharded: ``zero=3``. The model holds shards of its parameters between steps, as DTensors of torch's FSDP2.

A *unit* is the parameters of a dtype that the same blocks of a stage of this rank use, in a shell: a module that holds
only these parameters, and is never called. So the user's modules keep their classes and hooks, and the rank's row alone
determines the collectives and their order.

1. The first forward of a stage waits for a unit when it reads its parameters, while the next unit is gathered.
2. If the stage has only one forward in the row, a unit is freed once the forward has read it for the last time. So that
   autograd does not keep the parameters, hooks save their places. The backward gathers the units again, in reverse
   order, and waits for a unit when it reads what forward has saved of it. If there are several micro-batches, the units
   stay whole until the last backward: otherwise each micro-batch would gather them twice.
3. The last backward starts a unit's reduction as soon as the unit's gradients are complete, and frees the unit.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from torch.distributed.tensor import DTensor

from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.ownership import Ownership, replace_tensors
from fxpipe.precision import Precision
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Direction
from fxpipe.sharding.data_axis import GradientSums, block_bytes
from fxpipe.sharding.fsdp import FsdpModules
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, Piece, Use
from fxpipe.sharding.stage_reads import StageReads, modules_of, stages_of
from fxpipe.stage.awaiting import Waits
from fxpipe.stage.saved_tensors import SavedTensor, unwritten
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat.fsdp import fsdp_end_backward, fsdp_set_up, fsdp_without_hooks
from fxpipe.torch_compat.tensors import holders_of, saved_version, share_hooks, storage_id, version_of


class FsdpUnit(FsdpModules):
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
        self._handle: Any = None  # of a gather under way
        self.is_whole = False
        self.saved: WeakSet[_SavedWhole] = WeakSet()
        """What forward has saved of the parameters, and no backward has used up."""
        self.used: set[str] | None = None  # the parameters this replica used in this call; None before the reduction
        self.whole: dict[str, nn.Parameter] = {}  # unsharded parameters: the same objects in every call
        self.awaited: set[str] = set()  # the parameters whose gradients the running backward has yet to compute

    @property
    def is_gathering(self) -> bool:
        return self._handle is not None

    def gather(self) -> None:
        """Starts the gather of the unsharded parameters. If they were not freed since the last gather, because other
        tensors use their memory, the memory is filled anew before anything can read it."""
        is_held = self.is_whole
        if is_held:
            self.check_unwritten()
            self.free()
        self._handle = self.shell.unshard(async_op=True)
        if is_held:
            self._arrive()

    def _arrive(self) -> None:
        self._all_gather.wait()
        self._handle.wait()

    def wait(self) -> None:
        """Waits for the unsharded parameters."""
        self._arrive()
        self._handle, self.is_whole = None, True
        pairs = [(managed.unsharded_param, managed.sharded_param) for managed in self._managed]
        whole = [_accumulating(parameter, self._precision, shard) for parameter, shard in pairs]
        self.whole = dict(zip(self.shards, whole, strict=True))
        self._versions, self._holders = list(map(version_of, whole)), list(map(holders_of, whole))

    def is_held(self) -> bool:
        """Whether a tensor other than the parameters uses their memory."""
        return list(map(holders_of, self.whole.values())) != self._holders

    def is_unread(self) -> bool:
        """Whether what the forwards have saved of the parameters is gone, so that no backward reads them."""
        return not self.saved and not self.is_held()

    def free(self) -> None:
        self.shell.reshard()
        self.is_whole = False

    def check_unwritten(self) -> None:
        """RunError if something has written a parameter since the gather: the write would be lost."""
        for (name, parameter), version in zip(self.whole.items(), self._versions, strict=True):
            if version_of(parameter) != version:
                raise RunError(
                    f"forward or a hook has written {name}; zero=3 gathers parameters for a call, and the write would "
                    "be lost: pass zero=2, or write the parameter behind forward_backward(...)"
                )

    def reduce(self) -> None:
        """Starts the reduction of the gradients that the backwards have made."""
        self.used = {name for name, parameter in self.whole.items() if parameter.grad is not None}
        self.check_unwritten()
        with fsdp_without_hooks(self.parameters):
            self.post_backward()

    def finish(self) -> None:
        """Makes the shards' ``.grad`` usable."""
        if self.used is not None:
            fsdp_end_backward(self.shell)
        self.used = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class _SavedWhole:
    """An unsharded parameter, or a view of it, that forward has saved: its place in the parameter's memory."""

    unit: FsdpUnit
    parameter: nn.Parameter
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


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
        for stage in stages_of(graphs[0], transport.pipe_rank):
            for parameter in stage.parameters.values():
                users.setdefault(parameter, set()).add(stage.index)
        grouped: dict[tuple[frozenset[int], torch.dtype], dict[str, nn.Parameter]] = {}  # in order of use
        for parameter, stages in users.items():
            if parameter.ndim:
                group = grouped.setdefault((frozenset(stages), parameter.dtype), {})
                group[names[id(parameter)]] = parameter
        least = block_bytes(sum(parameter.nbytes for parameter in users), least_bytes)
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
        for module in [model, *modules_of(graphs, transport.pipe_rank)]:
            replace_tensors(module, shards)
        own = {name: parameter for name, parameter in model.named_parameters() if name in own_names}
        sums = GradientSums(3, mesh.size(1), mesh.get_local_rank("shard"), mesh.size(0))
        super().__init__(own, transport, sums, owners.tied)
        self._units, self._precision = units, precision
        self._home = {name: unit for unit in units for name in unit.shards}
        self._names = {id(parameter): name for name, parameter in own.items()}
        self._whole = {name: p for name, p in own.items() if not isinstance(p, DTensor)}
        self._plans: dict[tuple[int, bool], tuple[Sequence[StageGraph], _PlanUnits]] = {}
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
        key = id(graphs), call.training
        if key not in self._plans:  # with the graphs, so that the id stays theirs
            self._plans[key] = graphs, self._units_of(graphs, row)
        plan = self._plans[key][1]
        self._call, call.last, call.homes, call.frees = call, dict(plan.last), plan.reads.homes, plan.reads.saves_all()
        # FSDP2 makes the unsharded parameters in the first gather, for which a stage waits before its forward begins.
        if all(unit.whole for unit in call.last):
            call.waiting = list(plan.gathers)
            # The order of gathers does not depend on hooks: another replica may have none.
            call.freed = dict(plan.freed) if call.frees else {}
        else:
            call.waiting = list(plan.last)
        copies = {}  # replace unsharded parameters in this call, so that their gradients are this call's alone
        for name, parameter in self._whole.items():
            data = parameter.detach()
            if self._precision is not None and data.is_floating_point():
                data = data.to(self._precision.compute)
            copies[name] = _accumulating(nn.Parameter(data, parameter.requires_grad), self._precision, parameter)
        self._put_in(copies)
        self._gather_next()

    def _units_of(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> _PlanUnits:
        # A dict keeps the position of a key's first assignment, and the value of its last: units are in the order of
        # their first use, each with its last action.
        last: dict[FsdpUnit, Action] = {}
        passes: dict[int, list[Direction | None]] = {}
        for action in row:
            last |= dict.fromkeys(self._of(action), action)
            passes.setdefault(action.stage, []).append(action.kind.part_of)
        reads = StageReads.of_rank(graphs, self._transport.pipe_rank, self._names)
        freed: dict[FsdpUnit, list[FsdpUnit]] = {}
        for stage, positions in reads.positions.items() if reads.saves else ():
            if passes.get(stage) in ([FORWARD, BACKWARD], [FORWARD]):
                for unit, then in self._ends(positions).items():
                    freed.setdefault(then, []).append(unit)
        again = {unit for units in freed.values() for unit in units}
        gathers, seen = list[FsdpUnit](), set[FsdpUnit]()
        for action in row:
            units = [unit for unit in last if action.stage in unit.stages]
            if action.kind.part_of is BACKWARD:
                gathers += [unit for unit in reversed(units) if unit in again]
            gathers += [unit for unit in units if unit not in seen]
            seen.update(units)
        return _PlanUnits(reads, last, freed, gathers)

    def _ends(self, positions: Mapping[str, tuple[int, int]]) -> dict[FsdpUnit, FsdpUnit]:
        """Returns unit → the next unit of its stage that forward reads for the first time after it has read this unit
        for the last time. ``positions``: as in ``StageReads``."""
        reads: dict[FsdpUnit, list[int]] = {}
        for name, first_and_last in positions.items():
            if name in self._home and len(self._home[name].stages) == 1:
                reads.setdefault(self._home[name], []).extend(first_and_last)
        in_order = sorted(reads, key=lambda unit: min(reads[unit]))
        ends = {}
        for unit in in_order:
            later = [other for other in in_order if min(reads[other]) > max(reads[unit])]
            if later:
                ends[unit] = later[0]
        return ends

    def awaited(self, stage: int) -> Waits:
        units = [unit for unit in self._call.last if stage in unit.stages and not unit.is_whole]
        for unit in units:
            if not unit.whole:
                self._wait_for(unit)
            self._put_in(unit.whole)
        calls = {unit: partial(self._wait_for, unit) for unit in units}
        waits = Waits((id(parameter), calls[unit]) for unit in units for parameter in unit.whole.values())
        if self._call.training and any(stage in unit.stages for unit in self._call.freed):  # none is waited for yet
            waits.around = self._saving()
        return waits

    def _wait_for(self, unit: FsdpUnit) -> None:
        if unit.is_whole:
            return
        # All replicas gather in one order, even if this replica needs a unit earlier.
        while not unit.is_gathering:
            self._call.waiting.pop(0).gather()
        unit.wait()
        for other in self._call.freed.pop(unit, ()):
            if other.is_whole and not other.is_held():
                other.check_unwritten()
                other.free()
        self._gather_next()

    def _saving(self) -> contextlib.AbstractContextManager[object]:
        """The context of a forward that frees units: autograd saves places in parameters in place of parameters."""
        homes = {storage_id(p): (unit, p) for unit in self._call.last for p in unit.whole.values()}

        def pack(tensor: Tensor) -> SavedTensor | _SavedWhole:
            kind = type(tensor)
            if kind not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return SavedTensor(tensor.detach(), version_of(tensor))
            unit, parameter = homes.get(storage_id(tensor), (None, None))
            if (
                unit is None
                or parameter is None
                or tensor.dtype != parameter.dtype
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return SavedTensor(tensor.detach(), saved_version(tensor))
            layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            saved = _SavedWhole(unit, parameter, saved_version(tensor), *layout)
            unit.saved.add(saved)
            return saved

        def unpack(saved: SavedTensor | _SavedWhole) -> Tensor:
            if isinstance(saved, SavedTensor):
                assert saved.tensor is not None
                return unwritten(saved.tensor, saved.version)
            self._wait_for(saved.unit)
            whole = unwritten(saved.parameter.detach(), saved.version)
            return whole.as_strided(saved.size, saved.stride, saved.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

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
            self._gather_last(unit)
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
        """Starts the next unit's all-gather: only one unit ahead, to limit the buffers."""
        if self._call.waiting:
            self._call.waiting.pop(0).gather()

    def _gather_last(self, unit: FsdpUnit) -> None:
        """Runs the gathers up to the unit's last: the other replicas wait for them, even if this replica has kept the
        unit, or has not read it."""
        while unit in self._call.waiting:
            self._gather_next()
        if unit.is_gathering:
            self._wait_for(unit)

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
        self._gather_last(unit)
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


@dataclass(frozen=True)
class _PlanUnits:
    """What the row of a plan, or its forwards alone, does with the units.

    ``last``: the units in the order of their first use, each with its last action. ``freed``: unit → the units that are
    freed, until their backward, when forward waits for this unit. ``gathers``: the units in the order of their gathers,
    the same on all replicas; those that are freed come twice.
    """

    reads: StageReads
    last: Mapping[FsdpUnit, Action]
    freed: Mapping[FsdpUnit, Sequence[FsdpUnit]]
    gathers: Sequence[FsdpUnit]


@dataclass
class _CallState:
    """The state of a call."""

    training: bool = False
    homes: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Parameter name → the (module, attribute) pairs that register the parameter."""
    last: dict[FsdpUnit, Action] = field(default_factory=dict)
    """The units that later actions need, in the order of their first use, each with its last action."""
    waiting: list[FsdpUnit] = field(default_factory=list)
    """The units whose gathers have not started, in their order."""
    freed: dict[FsdpUnit, Sequence[FsdpUnit]] = field(default_factory=dict)
    """As in ``_PlanUnits``, without units that forward has waited for; empty if the call frees none."""
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
