"""Finite: warns of a loss that is inf or nan, and of the stage that made it so, without waiting for it in the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.device import to_host
from fxpipe.distributed.transport import Transport
from fxpipe.parameters.dtensors import local
from fxpipe.plan.plan import Plan
from fxpipe.progress import warn
from fxpipe.torch_compat import pytree


class Broken(NamedTuple):
    """What a stage has made of a micro-batch is not finite. ``is_loss``: it is the micro-batch's loss."""

    replica: int
    microbatch: int
    stage: int
    is_loss: bool
    rank: int


class Extremes:
    """The least and the greatest number of what a rank's stages make in a step: nan if one is, inf if one is.

    On the device, without waiting for it. Unlike those of a sum, these are finite wherever all numbers are.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, int, bool, Sequence[Tensor]]] = []  # stage, micro-batch, whether it is a loss

    def add_outputs(self, stage: int, microbatch: int, values: Sequence[Any]) -> None:
        """Looks at those tensors of ``values`` that need a gradient: −∞ in a mask is as it should be."""
        alone = len(values) == 1 and isinstance(values[0], Tensor)
        leaves = values if alone else pytree.tree_leaves(values)
        for leaf in {id(leaf): leaf for leaf in leaves}.values():  # several stages may be given one value
            numbers = _plain(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            if numbers is not None:
                # One kernel reads the tensor once; a sum may overflow where all numbers are finite.
                self._found.append((stage, microbatch, False, torch.aminmax(numbers)))

    def add_loss(self, stage: int, microbatch: int, loss: Tensor) -> None:
        """Keeps a micro-batch's loss, a number that nobody writes."""
        if (number := _plain(loss)) is not None:
            self._found.append((stage, microbatch, True, (number,)))

    def broken(self, replica: int, rank: int) -> list[Broken]:
        """What was not finite. Waits for the device."""
        return [
            Broken(replica, microbatch, stage, is_loss, rank)
            for stage, microbatch, is_loss, ends in self._found
            if not all(math.isfinite(end.item()) for end in ends)
        ]


def _plain(tensor: Tensor) -> Tensor | None:
    """This rank's numbers of a tensor; None where it has none, or none that could be compared."""
    numbers = tensor.detach()
    numbers = numbers if type(numbers) is Tensor else local(numbers)
    if type(numbers) is not Tensor or numbers.layout is not torch.strided or not numbers.numel():
        return None
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    return numbers if numbers.is_floating_point() and numbers.itemsize > 1 else None  # float8 has no order


@dataclass(frozen=True)
class _FinishedStep:
    """A step that is over."""

    number: int
    loss: Callable[[], list[Tensor]]
    """Waits for it."""
    extremes: Extremes
    plan: Plan


class Watch:
    """Warns of the first loss that is not finite, or finds every one where ``raises``.

    The loss of a step is the same number on all ranks. So each of them knows by itself, one call late, that there is
    something to report; only then do they meet, and report what was not finite, and where. ``leads``: whether of
    the ranks that do the same work this one speaks.
    """

    def __init__(self, transport: Transport, raises: bool, leads: bool) -> None:
        self._transport, self._raises, self._leads = transport, raises, leads
        self._extremes: Extremes | None = None
        self._last: _FinishedStep | None = None
        self._over = False  # a warning is given once

    def begin(self) -> Extremes | None:
        """A step begins. Returns the record for its stages' outputs; None once a warning was given."""
        self._extremes = None if self._over else Extremes()
        return self._extremes

    def end(self, number: int, loss: Tensor, plan: Plan) -> str:
        """A step is over: looks at the loss of the one before. A collective call of all ranks.

        Where ``raises``, at this one's, and returns what is to be raised on all ranks; empty where it is finite.
        """
        if not self._raises:
            self.warn()
        if self._extremes is not None and not self._over:
            self._last = _FinishedStep(number, to_host([loss]), self._extremes, plan)
        return self.cause() if self._raises else ""

    def warn(self) -> None:
        """Warns of what was not finite in the last step, on one rank, and once. A collective call of all ranks."""
        text = self.cause()
        if text and self._leads and self._transport.ranks("all")[0] == self._transport.rank:
            warn(text, RuntimeWarning)

    def cause(self) -> str:
        """What was not finite in the last step, the same on every rank; empty where all was, or it was asked before."""
        last, self._last = self._last, None
        if last is None or math.isfinite(loss := last.loss()[0].item()):
            return ""
        # All ranks come here in the same call, since they have the same loss: none waits alone.
        mine = last.extremes.broken(self._transport.data_rank, self._transport.rank)
        everyone = self._transport.gather("all", mine)
        self._over = not self._raises
        broken = [value for found in everyone for value in found]
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
    # of what this loss is computed from, the output of the first stage that is not finite
    feeding = [value for value in broken if microbatch <= value.microbatch <= last]
    feeding = [value for value in feeding if graph.sees_replicas or value.replica == replica]
    # Stages are numbered in topological order: the least one is where it began.
    stage = min(feeding, key=lambda value: (value.stage, *value))
    place = f"micro-batch {microbatch}" if last == microbatch else f"the group of micro-batches {microbatch}-{last}"
    place += f" of replica {replica}" * replicas
    within = "it" if group == 1 else f"micro-batch {stage.microbatch}"
    if graph.sees_replicas:
        within = f"micro-batch {stage.microbatch} of replica {stage.replica}"
    where = f"stage {stage.stage} `{graph.names[stage.stage]}`" + f", on rank {stage.rank}," * ranks
    return (
        f"{head}: {place} is the first{f' of {len(others) + 1}' if others else ''} whose loss is not finite, and the "
        f"output of {where} is the first in {within} that is not (all counted from 0)"
    )
