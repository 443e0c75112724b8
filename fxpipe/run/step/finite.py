"""Finite: warns of a loss that is inf or nan, and of the stage that made it so, without waiting for it in the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.parameters.dtensors import local
from fxpipe.progress import warn
from fxpipe.run.step.to_host import ToHost
from fxpipe.torch_compat import pytree

_COMPARABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


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
        self._outputs: list[tuple[int, int, Sequence[Tensor]]] = []
        self._losses: list[tuple[int, int, Tensor]] = []

    def add_outputs(self, stage: int, microbatch: int, values: Sequence[Any]) -> None:
        """Looks at those tensors of ``values`` that need a gradient: −∞ in a mask is as it should be."""
        alone = len(values) == 1 and isinstance(values[0], Tensor)
        seen = set()
        for leaf in values if alone else pytree.tree_leaves(values):
            numbers = _plain(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            if numbers is None:
                continue
            if not alone:
                place = (numbers.data_ptr(), numbers.shape, numbers.stride())  # several stages may be given one value
                if place in seen:
                    continue
                seen.add(place)
            self._outputs.append((stage, microbatch, torch.aminmax(numbers)))

    def add_loss(self, stage: int, microbatch: int, loss: Tensor) -> None:
        """Keeps a micro-batch's loss, a number that nobody writes."""
        self._losses.append((stage, microbatch, loss))

    def broken(self, replica: int, rank: int) -> list[Broken]:
        """What was not finite. Waits for the device."""
        found = [(stage, microbatch, False, ends) for stage, microbatch, ends in self._outputs]
        losses = [(stage, microbatch, _plain(loss)) for stage, microbatch, loss in self._losses]
        found += [(stage, microbatch, True, (loss,)) for stage, microbatch, loss in losses if loss is not None]
        return [
            Broken(replica, microbatch, stage, is_loss, rank)
            for stage, microbatch, is_loss, ends in found
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
    return numbers if numbers.dtype in _COMPARABLE else None


@dataclass(frozen=True)
class _FinishedStep:
    """A step that is over. ``names``: of its stages. ``group``: of how many micro-batches a loss is; ``sees_replicas``:
    and of all replicas."""

    number: int
    loss: ToHost
    extremes: Extremes
    names: Sequence[str]
    group: int = 1
    sees_replicas: bool = False

    def described(self, microbatch: int) -> str:
        """Whose loss it is, in words."""
        last = microbatch + self.group - 1
        return f"micro-batch {microbatch}" if self.group == 1 else f"the group of micro-batches {microbatch}-{last}"

    def feeds(self, one: Broken, loss: Broken) -> bool:
        """Whether a loss is of the micro-batch that something was found in."""
        alike = self.sees_replicas or one.replica == loss.replica
        return alike and loss.microbatch <= one.microbatch < loss.microbatch + self.group


class Watch:
    """Tells the first loss that is not finite, or every one where ``raises``.

    The loss of a step is the same number on all ranks. So each of them knows by itself, one call late, that there is
    something to report; only then do they meet, and report what was not finite, and where. ``leads``: whether of
    the ranks that do the same work this one speaks.
    """

    def __init__(self, transport: Transport, raises: bool = False, leads: bool = True) -> None:
        self._transport, self._raises, self._leads = transport, raises, leads
        self._extremes: Extremes | None = None
        self._last: _FinishedStep | None = None
        self._warned = False  # whether this rank's pipe group knows
        self._over = False  # whether all ranks have met: a warning is given once

    def begin(self) -> Extremes | None:
        """A step begins; where its stages' outputs are to be looked at."""
        self._extremes = None if self._over else Extremes()
        return self._extremes

    def end(self, number: int, loss: Tensor, names: Sequence[str], group: int = 1, sees_replicas: bool = False) -> str:
        """A step is over: looks at the loss of the one before. A collective call of all ranks.

        Where ``raises``, at this one's, and returns what is to be raised on all ranks; empty where it is finite.
        """
        if not self._raises:
            self.warn("all")
        if self._extremes is not None:
            self._last = _FinishedStep(number, ToHost(loss), self._extremes, names, group, sees_replicas)
        return self._look("all") if self._raises else ""

    def warn(self, scope: str) -> None:
        """Warns of what was not finite in the last step, on one rank, and once. A collective call of "pipe", or "all"
        ranks."""
        warned = self._warned
        text = self._look(scope)
        speaks = self._leads and self._transport.ranks(scope)[0] == self._transport.rank
        if text and speaks and not warned:
            warn(text, RuntimeWarning)

    def cause(self) -> str:
        """What was not finite, on every rank: of a step that an optimizer leaves out."""
        return self._look("all")

    def _look(self, scope: str) -> str:
        last, everywhere = self._last, scope == "all"
        if last is None or (self._warned and not everywhere):
            return ""
        loss = last.loss.wait().item()
        if everywhere:
            self._last = None
        if math.isfinite(loss):
            return ""
        mine = last.extremes.broken(self._transport.data_rank, self._transport.rank)
        everyone = self._transport.gather(scope, (self._warned, mine))
        if everywhere and not self._raises:
            self._over = True
        broken = [one for _, found in everyone for one in found]
        if any(warned for warned, _ in everyone):
            return ""
        if not everywhere and self._transport.data_size > 1 and not any(one.is_loss for one in broken):
            return ""  # it was another replica's
        self._warned = not self._raises
        return _text(last, loss, broken, self._transport.data_size > 1, len(everyone) > 1)


def _text(step: _FinishedStep, loss: float, broken: Sequence[Broken], replicas: bool, ranks: bool) -> str:
    losses = sorted(one for one in broken if one.is_loss)
    head = f"the loss of step {step.number} is {loss}"
    if not losses:
        return f"{head}, though that of each of its micro-batches is finite: their sum or its count is not"
    first = losses[0]
    stage = min((one for one in broken if step.feeds(one, first)), key=lambda one: (one.stage, *one))
    place = step.described(first.microbatch) + f" of replica {first.replica}" * replicas
    within = f"micro-batch {stage.microbatch} of replica {stage.replica}" if step.sees_replicas else ""
    within = within or (f"micro-batch {stage.microbatch}" if step.group > 1 else "it")
    where = f"stage {stage.stage} `{step.names[stage.stage]}`" + f", on rank {stage.rank}," * ranks
    others = len({one[:2] for one in losses}) - 1
    return (
        f"{head}: {place} is the first{f' of {others + 1}' if others else ''} whose loss is not finite, and the output "
        f"of {where} is the first in {within} that is not (all counted from 0)"
    )
