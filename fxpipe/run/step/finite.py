"""Finite: warns of a loss that is inf or nan, and names the stage that caused it; no step waits for its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.device import to_host
from fxpipe.distributed.observer import StepObserver
from fxpipe.distributed.transport import Transport
from fxpipe.graph.stage_graph import Stage
from fxpipe.plan.plan import Plan
from fxpipe.progress import warn
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import FORWARD
from fxpipe.stage.loss import StepLoss
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat import pytree


class Broken(NamedTuple):
    """A stage's output for a micro-batch that is not finite. ``is_loss``: the output is the micro-batch's loss."""

    replica: int
    microbatch: int
    stage: int
    is_loss: bool
    rank: int


class Extremes(StepObserver):
    """The minimum and maximum of each output of a rank's stages in a step: nan or inf if an element is.

    Computed on the device; the host does not wait. Unlike a sum, they are finite whenever all elements are finite.
    ``shares``: each micro-batch's share of the step's weight; outputs without weight are passed over. ``order``: each
    micro-batch's number in the batch.
    """

    def __init__(self, shares: Sequence[float], order: Sequence[int]) -> None:
        self._shares, self._order = shares, order
        self._found: list[tuple[int, int, bool, Sequence[Tensor]]] = []  # stage, micro-batch, whether it is a loss

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        if stage.outputs and action.kind.messages is FORWARD and self._shares[action.microbatch]:
            self.add_outputs(action.stage, action.microbatch, made[: len(stage.outputs)])

    def add_outputs(self, stage: int, microbatch: int, values: Sequence[Any]) -> None:
        """Records the extremes of the tensors in ``values`` that require a gradient: a mask may hold −∞."""
        alone = len(values) == 1 and isinstance(values[0], Tensor)
        leaves = values if alone else pytree.tree_leaves(values)
        for leaf in {id(leaf): leaf for leaf in leaves}.values():  # several stages may get the same value
            numbers = _plain(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            if numbers is not None:
                # A single kernel reads the tensor once; a sum of finite numbers may overflow.
                self._found.append((stage, microbatch, False, torch.aminmax(numbers)))

    def add_losses(self, stage: int, losses: Mapping[int, Tensor]) -> None:
        """Records the losses of micro-batches, which nothing overwrites."""
        for microbatch, loss in losses.items():
            if (number := _plain(loss)) is not None:
                self._found.append((stage, microbatch, True, (number,)))

    def broken(self, replica: int, rank: int) -> list[Broken]:
        """Returns the outputs that were not finite. Waits for the device."""
        return [
            Broken(replica, self._order[microbatch], stage, is_loss, rank)
            for stage, microbatch, is_loss, ends in self._found
            if not all(math.isfinite(end.item()) for end in ends)
        ]


def _plain(tensor: Tensor) -> Tensor | None:
    """Returns this rank's elements of a tensor; None if there are none, or their type has no order."""
    numbers = tensor.detach()
    numbers = numbers if type(numbers) is Tensor else local(numbers)
    if type(numbers) is not Tensor or numbers.layout is not torch.strided or not numbers.numel():
        return None
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    return numbers if numbers.is_floating_point() and numbers.itemsize > 1 else None  # float8 has no order


class _FinishedStep(NamedTuple):
    """A step that has ended. ``loss``: returns the loss on the host; waits for the device."""

    number: int
    loss: Callable[[], list[Tensor]]
    extremes: Extremes
    plan: Plan


class Watch:
    """Warns of the first loss that is not finite; with ``raises`` finds each such loss.

    The loss of a step is the same number on all ranks. So in the next call each rank knows without communication that
    the loss was not finite. Only then do the ranks gather which outputs were not finite, and where. ``leads``: whether
    this rank warns on behalf of the ranks that do the same work.
    """

    def __init__(self, transport: Transport, raises: bool, leads: bool) -> None:
        self._transport, self._raises, self._leads = transport, raises, leads
        self._extremes: list[Extremes] = []
        self._last: _FinishedStep | None = None
        self._over = False  # whether the warning was given

    def begin(self, shares: Sequence[float], order: Sequence[int]) -> list[Extremes]:
        """Begins a step. Returns the ``Extremes`` that observes it; none once a warning was given."""
        self._extremes = [] if self._over else [Extremes(shares, order)]
        return self._extremes

    def end(self, number: int, loss: Tensor, own: StepLoss, plan: Plan) -> str:
        """Ends a step, and checks the loss of the step before. A collective call of all ranks. ``own``: the losses that
        this process has computed.

        With ``raises``, checks this step's loss, and returns the error text for all ranks; empty if the loss is finite.
        """
        if not self._raises:
            self.warn()
        for extremes in self._extremes if not self._over else ():
            extremes.add_losses(plan.graph.output_stage, own.added)
            self._last = _FinishedStep(number, to_host([loss]), extremes, plan)
        return self.cause() if self._raises else ""

    def warn(self) -> None:
        """Warns, once and on the first rank, if the last step's loss is not finite. A collective call of all ranks."""
        text = self.cause()
        if text and self._leads and self._transport.ranks("all")[0] == self._transport.rank:
            warn(text, RuntimeWarning)

    def cause(self) -> str:
        """Returns a text on the last step's non-finite outputs, on every rank; empty if finite or already checked."""
        last, self._last = self._last, None
        if last is None or math.isfinite(loss := last.loss()[0].item()):
            return ""
        # All ranks reach this gather in the same call, since they have the same loss.
        mine = last.extremes.broken(self._transport.data_rank, self._transport.rank)
        everyone = self._transport.gather("all", mine)
        self._over = not self._raises
        broken = [value for outputs in everyone for value in outputs]
        return _text(last, loss, broken, self._transport.data_size > 1, len(everyone) > 1)


def _text(step: _FinishedStep, loss: float, broken: Sequence[Broken], replicas: bool, ranks: bool) -> str:
    losses = sorted(value for value in broken if value.is_loss)
    head = f"the loss of step {step.number} is {loss}"
    if not losses:
        return f"{head}, though that of each of its micro-batches is finite: their sum or its count is not"
    first, *others = dict.fromkeys(value[:2] for value in losses)  # (replica, micro-batch)
    replica, microbatch = first
    graph, group = step.plan.graph, step.plan.group
    last = microbatch + group - 1
    # Among the outputs that this loss depends on, find the first stage's output that is not finite.
    feeding = [value for value in broken if microbatch <= value.microbatch <= last]
    feeding = [value for value in feeding if graph.sees_replicas or value.replica == replica]
    # Stages are numbered in topological order: the lowest number is the origin.
    stage = min(feeding, key=lambda value: (value.stage, *value))
    which = f"micro-batch {microbatch}" if last == microbatch else f"the group of micro-batches {microbatch}-{last}"
    which += f" of replica {replica}" * replicas
    within = "it" if group == 1 else f"micro-batch {stage.microbatch}"
    if graph.sees_replicas:
        within = f"micro-batch {stage.microbatch} of replica {stage.replica}"
    where = f"stage {stage.stage} `{graph.names[stage.stage]}`" + f", on rank {stage.rank}," * ranks
    return (
        f"{head}: {which} is the first{f' of {len(others) + 1}' if others else ''} whose loss is not finite, and the "
        f"output of {where} is the first in {within} that is not (all counted from 0)"
    )
