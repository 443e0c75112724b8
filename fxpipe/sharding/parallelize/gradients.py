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

from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.transport import Transport
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.dtensors import is_dtensor, ranks_of
from fxpipe.parameters.ownership import Ownership
from fxpipe.schedules.action import Action
from fxpipe.sharding.flat_bucket import Piece
from fxpipe.sharding.gradients import Gradients, OptimizerPieces, WhoUsed, last_backwards
from fxpipe.sharding.parallelize.stage_copy import StageCopy
from fxpipe.sharding.reducer import Reducer

if TYPE_CHECKING:
    from fxpipe.sharding.fsdp import FsdpStage


class ParallelGradients(Gradients):
    """``Gradients`` of a rank some of whose parameters are DTensors.

    ``parameters``: these, by name. ``sharded``: what FSDP2 manages, by stage. ``copies``: the modules that run.
    """

    def __init__(
        self,
        inner: Reducer,
        parameters: Mapping[str, nn.Parameter],
        sharded: Mapping[int, FsdpStage],
        transport: Transport,
        owners: Ownership,
        copies: Sequence[StageCopy],
    ) -> None:
        super().__init__(parameters, transport, inner.way, owners.tied)
        self._inner, self._sharded, self._copies = inner, dict(sharded), list(copies)
        self._names = {id(parameter): name for name, parameter in self._own.items()}
        self._managed = {self._names[id(shard)] for stage in self._sharded.values() for shard in stage.parameters}
        data = set(transport.ranks("data")) if transport.data_size > 1 else set()
        self._to_sum = [n for n, p in self._own.items() if is_dtensor(p) and not data <= ranks_of(p)]
        self._lasts: dict[int, Action] = {}
        self._used: set[str] = set()
        self._asked = WhoUsed({}, transport)

    # a call

    def begin(self, graphs: Sequence[StageGraph], row: Sequence[Action], sync: bool, scales: bool) -> None:
        self._inner.begin(graphs, row, sync, scales)
        self._lasts = last_backwards(row)
        self._used.clear()
        self._take_flags()
        self._set_earlier_aside()

    def _take_flags(self) -> None:
        for copied in self._copies:
            copied.take_flags()

    def watch(self, stopwatch: Stopwatch) -> None:
        self._inner.watch(stopwatch)

    def settle(self, stage: int | None = None) -> None:
        self._inner.settle(stage)
        if stage is not None and stage in self._sharded:
            self._sharded[stage].gather()

    def before(self, action: Action) -> None:
        self._inner.before(action)

    def after(self, action: Action) -> None:
        """Behind a stage's last backward, what FSDP2 shards of it is reduced."""
        self._inner.after(action)
        if self._lasts[action.stage] == action and action.stage in self._sharded:
            self._used |= {self._names[id(shard)] for shard in self._sharded[action.stage].reduce()}

    def flush(self) -> None:
        """Frees, too, what stages without a backward have gathered, and asks who has used what."""
        for sharded in self._sharded.values():
            sharded.free()
        self._inner.flush()
        self._used |= {n for n, p in self._own.items() if p.grad is not None and n not in self._managed}
        self._asked = self._ask_who_used(self._used)

    def end(self, factor: Tensor | None) -> None:
        self._inner.end(factor)
        used = self._asked.wait()
        with torch.no_grad():
            for name, parameter in self._own.items():
                parameter.grad = _settled(parameter) if name in used and parameter.requires_grad else None
            self._sum("data", self._to_sum)
            self._sum_over_owners()
            self._scale(factor)
            self._add_earlier()

    @contextlib.contextmanager
    def evaluating(self, graphs: Sequence[StageGraph], row: Sequence[Action]) -> Iterator[None]:
        self._take_flags()
        with self._inner.evaluating(graphs, row):
            yield
        for sharded in self._sharded.values():
            sharded.free()

    def drop(self) -> None:
        super().drop()
        self._inner.drop()

    def clear(self) -> None:
        super().clear()
        self._inner.clear()

    def close(self) -> None:
        self._inner.close()

    # for an optimizer

    def pieces(self) -> list[Piece]:
        return self._inner.pieces() + super().pieces()

    def claim(self, names: Iterable[str], whole: bool) -> OptimizerPieces:
        """A DTensor as it is, whose operations keep it spread."""
        wanted = set(names)
        claim = self._inner.claim(wanted, whole)
        spread = [piece for piece in super().pieces() if piece.name in wanted]
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
