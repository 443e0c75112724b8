"""Recorded values: gives a ``ValueRecorder`` the numbers of steps: inputs, values, gradients, losses, parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from fxpipe.distributed.observer import REST, StepObserver
from fxpipe.graph.gathering import added
from fxpipe.graph.program import Crossing
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.numerics.fingerprint import positions_of
from fxpipe.numerics.recording import (
    GRADIENT,
    LOSS,
    MOST_OUTPUTS,
    PARAMETER,
    PARAMETER_GRADIENT,
    VALUE,
    TensorPart,
    ValueRecorder,
)
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD
from fxpipe.sharding.gradients import Gradients
from fxpipe.sharding.parameter_groups import first_names
from fxpipe.stage.loss import read_loss
from fxpipe.tensors.dtensors import local


class RecordedValues(StepObserver):
    """Records steps. ``model``: the whole model, of which ``module`` is this rank's part."""

    def __init__(self, recorder: ValueRecorder, gradients: Gradients, model: nn.Module, module: nn.Module) -> None:
        self._recorder, self._gradients = recorder, gradients
        self._parameters = list(module.named_parameters())
        first = first_names(dict(model.named_parameters(remove_duplicate=False)))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(first.values()))}
        self._numbers = {name: (own, numbers[own]) for name, own in first.items()}
        """Each name of a parameter → the first name of the same parameter, and its number in the model."""

    def begin(
        self, step: int, batches: Sequence[Mapping[str, Any]], graph: StageGraph, sync: bool, order: Sequence[int]
    ) -> None:
        """Begins a step. ``batches``: the inputs of the micro-batches in the order in which they run. ``sync``: whether
        the step sums its gradients. ``order``: their numbers in the batch, under which values are recorded."""
        self.record_parameters()
        self._recorder.begin(step, [batch for _, batch in sorted(zip(order, batches, strict=True), key=itemgetter(0))])
        self._crossings, self._sync, self._order = graph.crossings, sync, order

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        if action.kind.messages is BACKWARD:
            self._record(GRADIENT, action, stage, arrived)

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        if action.kind.messages is FORWARD:
            self._record(VALUE, action, stage, made)
            if stage.returns_result:
                self._recorder.add(LOSS, LOSS, self._order[action.microbatch], 0, read_loss(made[-1]).value)

    def on_step(self, part: str) -> None:
        if part == REST and self._sync:
            self._recorder.add_parts(PARAMETER_GRADIENT, self._gradient_parts())
            self._recorder.write()

    def _record(self, kind: str, action: Action, stage: Stage, values: Sequence[Any]) -> None:
        """Records the values of the stage's outgoing edges, or their gradients: a value with several edges once, with
        the sum of the gradients that arrive for it."""
        by_name: dict[str, Any] = {}
        for edge, value in zip(stage.outputs, values, strict=False):
            is_summed = kind == GRADIENT and edge.value in by_name
            by_name[edge.value] = added(by_name[edge.value], value) if is_summed else value
        for number, (name, value) in enumerate(by_name.items()):
            crossing = self._crossings.get(name, Crossing())
            label, boundary = name, crossing.boundary
            if kind == GRADIENT:
                label, boundary = crossing.gradient or name, crossing.gradient_boundary
            order = action.stage * MOST_OUTPUTS + number
            self._recorder.add(kind, label, self._order[action.microbatch], order, value, boundary, crossing.what)

    def record_parameters(self) -> None:
        """Records the parameters, which optimizers have stepped since the last recorded call."""
        if self._recorder.has_parameters:
            return
        self._gradients.settle()
        parts = (TensorPart(*self._numbers[name], p, p.shape, positions_of(p)) for name, p in self._parameters)
        self._recorder.add_parts(PARAMETER, parts)
        self._recorder.write()

    def _gradient_parts(self) -> Iterator[TensorPart]:
        """Yields the parts of the summed gradients that this rank has."""
        for piece in self._gradients.pieces():
            gradient, shape = piece.current_gradient(), piece.parameter.shape
            if gradient is None:
                continue
            positions = positions_of(piece.parameter)
            if positions is None and gradient.shape != shape:
                positions = piece.part_of(torch.arange(shape.numel(), device=gradient.device).view(shape))
            elif positions is not None and local(gradient).numel() != positions.numel():
                positions = positions.reshape(-1)[piece.start : piece.stop]
            yield TensorPart(*self._numbers[piece.name], gradient, shape, positions)
