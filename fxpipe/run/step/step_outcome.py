"""Step outcome: from the losses of a step's micro-batches, on one rank, to the loss and gradient scale of all ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.distributed.activity import here
from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.like import ITEMS
from fxpipe.graph.loss import LossKind, StepLoss, metric_dtype
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.agree.agreement import AgreedBatch
from fxpipe.plan.inputs.label_count import Items, as_number
from fxpipe.precision import Precision
from fxpipe.run.step.replicas import differing
from fxpipe.validation import shown


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
    output_ranks: tuple[int, ...],
    microbatches: int,
    news: News,
    known: StepOutcome | None,
) -> StepOutcome:
    """Combines the replicas' losses and sends the result to every rank.

    ``step``: the losses, on the ranks that have some, of which the first puts them together. The parts of a mean have
    been weighted by their share of the whole step, so that they only add up. A ``Sum`` is Σ total / Σ count, and so are
    its gradients. ``known``: an outcome of the same form; with it nothing but numbers travels.
    """
    if known is None:
        kind = None if step is None else (step.is_known, step.is_empty, tuple(step.kind))
        gathered = [item for item in transport.gather("pipe", kind) if item is not None]
        is_sum, dtype, names = max(gathered, key=lambda item: (item[0], not item[1]))[2]  # of those with weight
        for _, is_empty, other in gathered:
            if not is_empty:
                LossKind(*other).check(LossKind(is_sum, dtype, names), "micro-batch")
    else:
        is_sum, dtype, names = known.is_sum, known.dtype, tuple(known.metrics)
        if step is not None and not step.is_empty:
            step.kind.check(LossKind(is_sum, dtype, names), "step")
    if transport.pipe_rank is None and step is not None and not is_sum and not step.is_empty:
        return StepOutcome(step.value(), None, step.metrics(), is_sum, dtype)

    # [loss or total, count, metrics ...], then [loss, factor, metrics ...]; float64, as a number of items may be too
    # large for less
    output_rank, message = output_ranks[0], news.empty(names)
    if step is not None and len(output_ranks) > 1 and transport.pipe_rank is not None:
        rows = step.rows(names, microbatches, message.device)
        summed = Collective("all_reduce", output_ranks, rows)  # each row is one rank's: nothing is rounded
        transport.start([summed], "the losses").wait()  # behind the gradients that these ranks sum
        whole = StepLoss.of_rows(LossKind(is_sum, dtype, names), rows)
        step = whole if transport.pipe_rank == output_rank else None
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


# --- Shares: each micro-batch's part of the weight of a step, over all replicas ---

LossWeight = Callable[..., Any]


def weights_of(
    transport: Transport, agreed: AgreedBatch, loss_weight: LossWeight | None, batches: Sequence[Mapping[str, Any]]
) -> tuple[float, ...]:
    """The weight of each micro-batch, its rows or what ``loss_weight`` says, the same on every rank of a pipe group."""
    if loss_weight is None or not agreed.has_loss:
        return tuple(map(float, agreed.sizes))
    weighs = transport.pipe_rank in (None, agreed.plan.output_ranks[0])
    mine = _weighed(loss_weight, batches) if weighs else None
    decided = next(item for item in transport.gather("pipe", mine) if item is not None)
    if isinstance(decided, str):
        raise RunError(decided)
    return tuple(decided)


def _weighed(loss_weight: LossWeight, batches: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | str:
    """The weights, or what is wrong with them."""
    if len({tuple(batch) for batch in batches}) > 1:  # by place, an input would be taken for another
        names = shown([list(batch) for batch in batches])
        return f"loss_weight= is given inputs by place, and micro-batches have {names}; pass None for what one lacks"
    try:
        given = [loss_weight(*batch.values()) for batch in batches]
        weights = tuple(math.nan if isinstance(one, str) else float(one) for one in given)
    except Exception as error:
        return f"loss_weight failed: {type(error).__name__}: {error}"
    if not all(0 <= weight < float("inf") for weight in weights):
        return f"loss_weight returned {shown(given)}; weights are finite and not negative"
    return weights


N = TypeVar("N", int, float)


def of_groups(numbers: Sequence[N], size: int) -> tuple[N, ...]:
    """The sum of each group of so many."""
    if size == 1:
        return tuple(numbers)
    return tuple(sum(numbers[start : start + size]) for start in range(0, len(numbers), size))


def shares_of(transport: Transport, weights: Sequence[float], training: bool, over_replicas: bool) -> tuple[float, ...]:
    """Each weight's part of their sum, ``over_replicas`` of that of all of them: a collective call of those ranks.

    RunError where replicas make different calls.
    """
    if transport.data_size == 1 or not over_replicas:
        return _normalised(weights, sum(weights))
    everyone = transport.gather_int("data", _reported(sum(weights), training))
    steps = [number >= 0 for number in everyone]  # whatever else a step may meet for here gives none below 0
    if len(set(steps)) > 1:
        trains, evaluates = ([replica for replica, one in enumerate(steps) if one is way] for way in (True, False))
        raise RunError(
            f"the replicas {trains} make a step and {evaluates} call evaluate, which all ranks call together: call "
            "it on every rank, not under `if rank == 0`, and as often on each replica, with "
            "topo.sampler(dataset), which gives all of them as many rows"
        )
    return _normalised(weights, math.fsum(_weight(number) for number in everyone))


def _normalised(weights: Sequence[float], total: float) -> tuple[float, ...]:
    return tuple(weight / total if total else 0.0 for weight in weights)


def _reported(weight: float, training: bool) -> int:
    """A weight by its bits, which is 0 or more in training, and below in evaluation."""
    bits: int = struct.unpack("<q", struct.pack("<d", weight))[0]
    return bits if training else ~bits


def _weight(number: int) -> float:
    """What ``_reported`` found."""
    weight: float = struct.unpack("<d", struct.pack("<q", max(number, ~number)))[0]
    return weight


_CHECKED = 3
"""In how many calls it is looked at what number of items the user gives: it waits for the device."""


class ItemNumbers:
    """Adds them to what stages are given. ``items``: None for a model that takes none."""

    def __init__(self, transport: Transport, items: Items | None) -> None:
        self._transport, self.items = transport, items
        self._given = 0

    def add(
        self, graph: StageGraph, batches: Sequence[dict[str, Any]], shares: Sequence[float]
    ) -> list[dict[str, Any]]:
        """The micro-batches, each with its share of the number of items: the user's, or else the whole batch's count.

        A collective call of the data axis.
        """
        items, rank = self.items, self._transport.pipe_rank
        if items is None:
            return list(batches)
        is_asked = any(ITEMS in s.batch_inputs for s in graph if rank in (None, *graph.ranks(s.index)))
        numbers: list[Any] = [batch.get(ITEMS) for batch in batches]
        is_given = any(number is not None for number in numbers)
        if len(set(self._transport.gather_int("data", is_asked + is_asked * is_given))) > 1:
            raise RunError(
                f"the loss of some replicas divides by {ITEMS} and that of others does not, or it was given to some; "
                "pass the same inputs on all"
            )
        if not is_asked:
            return list(batches)
        if is_given:
            self._check(items, next(number for number in numbers if number is not None), batches)
        else:
            numbers = [self._counted(items, batches)] * len(batches)
        return [
            batch | {ITEMS: number * (share or 1.0)}  # nothing comes of one without weight, nor should it divide by 0
            for batch, number, share in zip(batches, numbers, shares, strict=True)
        ]

    def _check(self, items: Items, number: Tensor, batches: Sequence[Mapping[str, Any]]) -> None:
        """RunError, on all replicas, where they were given the numbers of their own parts of the batch."""
        self._given += 1
        if self._transport.data_size == 1 or self._given > _CHECKED:
            return
        mine, counts = int(number), items.counts_of(batches)
        mine_and_sums = mine, mine in counts, sum(counts[:1])
        everyone = self._transport.gather("data", mine_and_sums)
        given = [one for one, _, _ in everyone]
        whole = sum(count for _, _, count in everyone)
        if len(set(given)) > 1 or any(is_own and one < whole for one, is_own, _ in everyone):
            raise RunError(
                f"{ITEMS} is that of the whole batch, over all replicas, and the same on all; the replicas were given "
                f"{given}, for {whole} labels in all. Leave it out, and it is counted; or add it up over the "
                "replicas, as by torch.distributed.all_reduce(number, group=topo.group('data'))"
            )

    def _counted(self, items: Items, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """The items of the whole batch, over all replicas: 0-dimensional, float32."""
        count = items.count(batches).to(self._transport.device)
        self._transport.all_reduce("data", count)
        return as_number(count.clamp(min=1))
