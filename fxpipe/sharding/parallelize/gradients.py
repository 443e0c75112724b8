"""Parallel gradients: those of a rank some of whose parameters are DTensors, made so by ``compile(parallelize=)``.

Plain parameters are the business of the reducer inside. Of DTensors, those that FSDP2 manages are summed by it, once in
a call, after the last backward of their stage; those that lie over other axes alone (tensor parallelism) have their
local parts summed over the data axis at the end of a call. Both happen in every call, also where gradients are not to
be synchronised: sums of sums are the same, and no unsummed gradient need be kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fxpipe.distributed.broadcast import in_flat_buffers
from fxpipe.distributed.collective import Collective, Scope, Work
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.dtensors import is_dtensor, local, ranks_of
from fxpipe.parameters.ownership import Ownership
from fxpipe.schedules.action import Action, Op
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.sharding.parallelize.stage_copy import StageCopy
from fxpipe.sharding.reducer import OptimizerPieces, Reducer

if TYPE_CHECKING:
    from fxpipe.sharding.parallelize.fsdp_stage import ShardedStage


class ParallelGradients:
    """All gradients of one rank; ``reduce.Reducer``'s protocol.

    ``parameters``: the DTensors, by name. ``sharded``: what FSDP2 manages, by stage. ``copies``: the modules that run.
    """

    def __init__(
        self,
        inner: Reducer,
        parameters: Mapping[str, nn.Parameter],
        sharded: Mapping[int, ShardedStage],
        transport: Transport,
        owners: Ownership,
        copies: Sequence[StageCopy],
    ) -> None:
        self._inner, self._parameters, self._sharded = inner, dict(parameters), dict(sharded)
        self.way: GradientSums = inner.way
        self._transport, self._copies = transport, list(copies)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        rank = transport.pipe_rank
        self._tied = {
            ranks: [name for name in names if name in self._parameters]
            for ranks, names in owners.tied.items()
            if rank is not None and rank in ranks
        }
        self._elsewhere = {name for ranks, names in self._tied.items() if ranks[0] != rank for name in names}
        data = set(transport.ranks("data"))
        self._to_sum = [n for n, p in self._parameters.items() if is_dtensor(p) and not data <= ranks_of(p)]
        self._lasts: dict[int, Action] = {}
        self._earlier: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._asked: tuple[Work, Tensor] | None = None

    @property
    def shards(self) -> bool:
        """Whether the ranks of a shard group have different pieces: of DTensors, their own mesh knows."""
        return self._inner.shards

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        """A call begins that runs this row of the graphs' stages; see ``Reducer.begin``."""
        self._inner.begin(graphs, row, sync, scales)
        self._lasts = {action.stage: action for action in row if action.op is not Op.F}
        self._used.clear()
        self._take_flags()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._earlier[name] = parameter.grad
                parameter.grad = None

    def _take_flags(self) -> None:
        for copied in self._copies:
            copied.take_flags()

    def watch(self, stopwatch: Stopwatch) -> None:
        self._inner.watch(stopwatch)

    def settle(self, stage: int | None = None) -> None:
        """Ahead of a forward of ``stage``: its parameters are there, whole where FSDP2 shards them."""
        self._inner.settle(stage)
        if stage is not None and stage in self._sharded:
            self._sharded[stage].gather()

    def before(self, action: Action) -> None:
        """A backward begins."""
        self._inner.before(action)

    def after(self, action: Action) -> None:
        """A backward is over, or was left out; behind a stage's last one, what FSDP2 shards of it is reduced."""
        self._inner.after(action)
        if self._lasts[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """All backwards are over: frees what stages without one have gathered, and asks who has used what."""
        for sharded in self._sharded.values():
            sharded.free()
        self._inner.flush()
        managed = {id(shard) for sharded in self._sharded.values() for shard in sharded.parameters}
        self._used |= {n for n, p in self._parameters.items() if p.grad is not None and id(p) not in managed}
        flags = self._flags([name in self._used for name in self._parameters])
        step = Collective("maximum", "flags", flags)
        what = "which parameters were used"
        asks = self._parameters and self._transport.data_size > 1
        self._asked = (self._transport.start([step], what), flags) if asks else None

    def end(self, factor: Tensor | None) -> None:
        """Sums are done when it returns. ``factor``: what this call's gradients are multiplied by; None for 1."""
        self._inner.end(factor)
        self._hear()
        with torch.no_grad():
            self._sum("data", self._to_sum if self._transport.data_size > 1 else [])
            for ranks, names in self._tied.items():
                self._sum_over_owners(ranks, names)
            for name, parameter in self._parameters.items():
                if parameter.grad is not None and factor is not None:
                    local(parameter.grad).mul_(factor.to(parameter.grad.device))
                if name in self._earlier:
                    parameter.grad = _added(self._earlier[name], parameter.grad)
        self._earlier.clear()

    def _hear(self) -> None:
        """A parameter that some replica has used has a gradient on all; one that none has used has none."""
        if self._asked is not None:
            work, flags = self._asked
            work.wait()
            self._used = {name for name, used in zip(self._parameters, flags.tolist(), strict=True) if used}
        for name, parameter in self._parameters.items():
            if name not in self._used or not parameter.requires_grad:
                parameter.grad = None
            else:
                parameter.grad = _settled(parameter)

    def _sum(self, scope: Scope, names: Iterable[str]) -> None:
        """Sums local parts over a group, in place: each is the sum's local part, since all are spread alike."""
        gradients = [self._parameters[name].grad for name in names]
        parts = [local(gradient) for gradient in gradients if gradient is not None]
        in_flat_buffers(parts, lambda flat: self._transport.all_reduce(scope, flat))

    def _sum_over_owners(self, ranks: tuple[int, ...], names: Sequence[str]) -> None:
        if not names:
            return
        flags = self._flags([self._parameters[name].grad is not None for name in names])
        self._transport.all_reduce(ranks, flags)
        used = [name for name, anyone in zip(names, flags.tolist(), strict=True) if anyone]
        for name in used:
            self._parameters[name].grad = _settled(self._parameters[name])
        self._sum(ranks, used)

    def _flags(self, values: Sequence[bool]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._transport.device)

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        """A forward-only call."""
        self._take_flags()
        with self._inner.evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()

    def clear(self) -> None:
        """Drops all gradients."""
        self._inner.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self) -> None:
        self._inner.close()

    # for an optimizer

    def pieces(self) -> list[Piece]:
        """This rank's part of all parameters."""
        return self._inner.pieces() + [self._piece(name, parameter) for name, parameter in self._parameters.items()]

    def _piece(self, name: str, parameter: nn.Parameter) -> Piece:
        counts = name not in self._elsewhere
        return Piece(name, parameter, 0, parameter.numel(), parameter.detach(), counts, lambda: parameter.grad)

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """These parameters, for an optimizer of fxpipe's; a DTensor as it is, whose operations keep it spread."""
        wanted = list(names)
        claim = self._inner.claim(wanted, whole)
        spread = [self._piece(name, parameter) for name, parameter in self._parameters.items() if name in set(wanted)]
        return OptimizerPieces(claim.number, (*claim.pieces, *spread))

    def publish(self, claim: OptimizerPieces) -> None:
        self._inner.publish(claim)


def _settled(parameter: nn.Parameter) -> Tensor:
    """A DTensor's gradient, spread as the parameter is; zeros where this rank has none."""
    gradient = parameter.grad
    assert is_dtensor(parameter)
    if gradient is None:
        return torch.zeros_like(parameter.detach())
    if is_dtensor(gradient) and tuple(gradient.placements) != tuple(parameter.placements):
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _added(earlier: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        local(earlier).add_(local(gradient))
    return earlier
