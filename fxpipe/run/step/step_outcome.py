"""Step outcome: from the losses of a step's micro-batches, on one rank, to the loss and gradient scale of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.distributed.activity import here
from fxpipe.distributed.collective import Work
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.loss import LossKind, StepLoss, metric_dtype
from fxpipe.precision import Precision
from fxpipe.run.step.replicas import differing


@dataclass(frozen=True)
class StepOutcome:
    """``factor``: what this step's gradients are multiplied by, before or after they are summed; None for 1."""

    loss: Tensor
    factor: Tensor | None
    metrics: Mapping[str, Tensor]
    is_sum: bool
    dtype: torch.dtype


class News:
    """The step's loss on its way to a rank that does not make it, which listens for it from the step's beginning on.

    Where losses of its form are known: of others it is not known yet how much there is to send.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self._under: tuple[Work, Tensor] | None = None

    def listen(self, known: StepOutcome | None, output_rank: int) -> None:
        """A step begins on all ranks of a pipe group."""
        if known is not None and self._transport.pipe_rank not in (None, output_rank):
            message = self.empty(known.metrics)
            self._under = self._transport.tell("pipe", message, output_rank), message

    def empty(self, names: Collection[str]) -> Tensor:
        """Room for what there is to send."""
        return torch.empty(2 + len(names), dtype=torch.float64, device=self._device)

    def heard(self) -> Tensor | None:
        """What there was to send; None where nobody listened."""
        if self._under is None:
            return None
        here.awaited = lambda: "the loss of the step"
        try:
            self._under[0].wait()
        finally:
            here.awaited = None
        message, self._under = self._under[1], None
        return message

    def drop(self) -> None:
        """The step has failed."""
        self._under = None


def conclude(
    transport: Transport,
    step: StepLoss | None,
    output_rank: int,
    news: News,
    known: StepOutcome | None,
) -> StepOutcome:
    """Combines the replicas' losses and sends the result to every rank.

    ``step``: the losses, on the rank that has them. The parts of a mean have been weighted by their share of the whole
    step, so that they only add up. A ``Sum`` is Σ total / Σ count, and so are its gradients. ``known``: an outcome of
    the same form; with it nothing but numbers travels.
    """
    if known is None:
        gathered = transport.gather("pipe", tuple(step.kind) if step is not None else None)
        is_sum, dtype, names = next(item for item in gathered if item is not None)
    else:
        is_sum, dtype, names = known.is_sum, known.dtype, tuple(known.metrics)
        if step is not None and not step.is_empty:
            step.kind.check(LossKind(is_sum, dtype, names), "step")
    if transport.pipe_rank is None and step is not None and not is_sum and not step.is_empty:
        return StepOutcome(step.value(), None, step.metrics(), is_sum, dtype)

    # [loss or total, count, metrics ...], then [loss, factor, metrics ...]; float64, as a number of items may be too
    # large for less
    message = news.empty(names)
    if step is not None:
        _check_alike(transport, is_sum, names)
        numbers = step.numbers(names, message.device)
        transport.all_reduce("data", numbers)
        total = torch.where(numbers[1] == 0, 1.0, numbers[1])
        torch.cat([(numbers[0] / total).view(1), (1 / total).view(1), numbers[2:]], out=message)
    heard = news.heard()
    if heard is not None:
        message = heard
    elif known is not None:
        transport.tell("pipe", message, output_rank).wait()
    else:
        transport.broadcast("pipe", message, output_rank)
    loss, factor = message[0].to(dtype), message[1]
    metrics = {name: message[2 + place].to(metric_dtype(dtype)) for place, name in enumerate(names)}
    return StepOutcome(loss, factor if is_sum else None, metrics, is_sum, dtype)


def check_kind(outcome: StepOutcome, earlier: bool | None, precision: Precision | None) -> None:
    """RunError: gradients of means and of sums cannot be accumulated together, nor in a type without room for sums.

    ``earlier``: whether the losses of earlier steps were sums; None before the first.
    """
    if earlier not in (None, outcome.is_sum):
        raise RunError("the loss is a fxpipe.Sum in one step and a mean in another; return the same kind always")
    if outcome.is_sum and precision is not None and precision.reduce == torch.float16:
        raise RunError(
            "gradients of a fxpipe.Sum are summed before they are divided by its count, for which float16 has no "
            "room; write Precision(reduce=torch.bfloat16) or float32"
        )


def _check_alike(transport: Transport, is_sum: bool, names: tuple[str, ...]) -> None:
    """Replicas add up their losses and metrics, so they must have the same."""
    everyone = [] if transport.data_size == 1 else differing(transport, (is_sum, names))
    if len({one for one, _ in everyone}) > 1:
        raise RunError("the loss is a fxpipe.Sum on one replica and a mean on another; return the same kind on all")
    if everyone:
        raise RunError(
            f"the replicas' losses come with different metrics: {[one for _, one in everyone]}; return the same on all"
        )
