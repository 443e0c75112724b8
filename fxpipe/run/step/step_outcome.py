"""Step outcome: combines the micro-batches' losses of a step to the loss and gradient factor on all ranks."""

from __future__ import annotations

import copy
import math
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fxpipe.batch.label_count import Items, as_number
from fxpipe.distributed.activity import here
from fxpipe.distributed.collective import Collective, Work
from fxpipe.distributed.transport import Transport, differing
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plain_data import encode, number_of
from fxpipe.plan.plan import Plan
from fxpipe.plan.together import check_refusals
from fxpipe.specs import ITEMS
from fxpipe.stage.loss import LossKind, StepLoss, combined_metrics, log_left_out, step_dtype
from fxpipe.torch_compat.tensors import plain_results
from fxpipe.validation import shown


@dataclass(frozen=True)
class StepOutcome:
    """``factor``: multiplies this step's gradients, before or after they are summed over replicas; None means 1."""

    loss: Tensor
    factor: Tensor | None
    metrics: Mapping[str, Tensor]
    kind: LossKind


class LossMessage:
    """Sends the step's loss and metrics to the ranks that do not compute them.

    If the form of the loss is known, the receiving ranks post their receive when the step begins.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self._listening: tuple[Work, Tensor] | None = None

    def listen(self, kind: LossKind | None, output_rank: int) -> None:
        """Posts the receive at the beginning of a step, on the ranks that do not compute the loss."""
        if kind is not None and self._transport.pipe_rank not in (None, output_rank):
            numbers = self.empty(kind)
            self._listening = self._transport.tell("pipe", numbers, output_rank), numbers

    def empty(self, kind: LossKind) -> Tensor:
        """Returns a buffer for [loss, factor, metrics ...]; float64, since a count of items may exceed float32."""
        return torch.empty(2 + len(kind.metrics), dtype=torch.float64, device=self._device)

    def exchange(self, numbers: Tensor, output_rank: int) -> Tensor:
        """Returns the output rank's numbers on every rank of a pipe group."""
        if self._listening is None:
            self._transport.tell("pipe", numbers, output_rank).wait()
            return numbers
        (work, numbers), self._listening = self._listening, None
        here.awaited = lambda: "the loss of the step"
        try:
            work.wait()
        finally:
            here.awaited = None
        return numbers

    def drop(self) -> None:
        """Drops the receive, after the step has failed."""
        self._listening = None


def conclude(
    transport: Transport,
    step: StepLoss | None,
    plan: Plan,
    message: LossMessage,
    earlier: LossKind | None,
    is_agreed: bool,
    add_up: Callable[[Tensor], object],
) -> StepOutcome:
    """Combines the replicas' losses and sends the result to every rank.

    ``step``: the losses, on the ranks that compute some; the first of these ranks combines them. The parts of a mean
    are already weighted by their share of the whole step, so they are added. A ``Sum`` is Σ total / Σ count, and its
    gradients are divided by Σ count; if the plan ``counts`` the items before the forward, the gradients are divided
    already. ``earlier``: the form of this loss from an earlier step; with it, ranks exchange numbers alone.
    ``is_agreed``: whether all replicas have it. ``add_up``: sums a tensor over the replicas, in place.
    """
    if earlier is None:
        mine = None if step is None or step.kind is None else (step.is_empty, tuple(step.kind))
        gathered = [item for item in transport.gather("pipe", mine) if item is not None]
        # A rank whose micro-batches have no weight may have zeros of another form: ranks with weight decide.
        kind = LossKind(*min(gathered, key=lambda item: item[0])[1])
        if kind.left_out:
            log_left_out(kind.left_out)
        for is_empty, other in gathered:
            if not is_empty:
                LossKind(*other).check(kind, "micro-batch")
    else:
        kind = earlier
        if step is not None and step.kind is not None and not step.is_empty:
            step.kind.check(kind, "step")
    # A single process has all parts of a mean: no communication.
    is_sum, dtype, columns, _ = kind
    if transport.pipe_rank is None and step is not None and not is_sum and not step.is_empty:
        return StepOutcome(step.value(), None, combined_metrics(step.metrics(), dtype), kind)

    output_ranks, counted = plan.output_ranks, plan.counts
    output_rank, numbers = output_ranks[0], message.empty(kind)
    if step is not None and len(output_ranks) > 1 and transport.pipe_rank is not None:
        rows = step.rows(columns, len(plan.graphs), numbers.device)
        summed = Collective("all_reduce", output_ranks, rows)  # a single rank fills each row, so the sum is exact
        transport.start([summed], "the losses").wait()  # queued after the gradients that these ranks sum
        step = StepLoss.of_rows(kind, rows) if transport.pipe_rank == output_rank else None
    if step is not None:
        if others := [] if is_agreed else differing(transport, "data", (is_sum, columns, counted)):
            raise RunError(
                "the replicas' losses come with different metrics, or as a fxpipe.Sum on one and as a mean on another, "
                f"or with a count that inputs decide on one alone: (is a Sum, metrics, count) are {shown(others)}; "
                "return the same on all"
            )
        numbers = sums = step.numbers(columns, numbers.device)  # loss or total, count, metrics ...
        if plan.has_all_rows and transport.data_rank:  # the first replica's integers are of all rows
            sums[2:] *= torch.tensor([form != "integer" for _, form in columns], device=sums.device)
        add_up(sums)
        if is_sum:  # the loss of a step without items is 0, and not 0 / 0
            count = torch.where(sums[1] == 0, 1.0, sums[1])
            numbers = torch.cat([(sums[0] / count).view(1), (1 / count).view(1), sums[2:]])
    loss, factor, *metrics = message.exchange(numbers, output_rank).unbind()  # iterating would check for a trace
    named = combined_metrics(dict(zip(columns, metrics, strict=True)), dtype)
    return StepOutcome(loss.to(step_dtype(dtype)), factor if is_sum and not counted else None, named, kind)


# --- The loss that the user gets, and on which the user may call backward by habit ---


_HAS_GRADIENTS = (
    "gradients are there already: the call that returned this loss has run forward and backward; leave .backward() "
    "out. Gradients of several calls add up; for their mean give one call the larger batch, with more microbatches=, "
    "or scale .grad before the optimizer steps. In place of a GradScaler, whose scale they were never multiplied by, "
    "write compile(..., precision=fxpipe.Precision())"
)


class DetachedLoss(Tensor):
    """The loss of a step: a detached tensor whose ``.backward()`` raises, since the call has run the backward already.
    It raises for a GradScaler that scales it, too.

    A multiple of a ``DetachedLoss`` is a ``DetachedLoss``, too, for ``(loss / k).backward()`` and loss scalers. All
    other results, and copies and pickles, are plain tensors.
    """

    # as torch's "Extending PyTorch" notes describe
    __torch_function__ = plain_results

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(_HAS_GRADIENTS)

    def __mul__(self, other: Any) -> Any:
        # GradScaler.scale: its step would divide gradients by a scale that they were never multiplied by.
        if isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            raise RunError(_HAS_GRADIENTS)
        return detached(super().__mul__(other))

    def __rmul__(self, other: Any) -> Any:
        return detached(super().__rmul__(other))

    def __truediv__(self, other: Any) -> Any:
        return detached(super().__truediv__(other))

    # wandb decides by the names of x.__class__ and its module whether x is a torch tensor (wandb/util.py,
    # get_full_typename), and would log a subclass from another module as text. No class hook changes that name.
    @property  # type: ignore[misc]
    def __class__(self) -> type[Tensor]:  # type: ignore[override]
        return Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __format__(self, spec: str) -> str:
        return format(self.detach(), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.detach())


def detached(value: Any) -> Any:
    """A 0-dimensional tensor without a gradient as a ``DetachedLoss``, on the same memory; anything else unchanged."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        return value.as_subclass(DetachedLoss)
    return value


# --- Shares: each micro-batch's part of the weight of a step, over all replicas ---


class Facts(NamedTuple):
    """What a replica knows of a call before it runs. ``rows``: ``shared_rows``. ``items``: whether the number of items
    is asked for, and given. ``form``: the form of the numbers that replicas will add up, from an earlier call."""

    rows: tuple[int, ...] | None = None
    items: tuple[bool, bool] | None = None
    form: Any = None


NO_FACTS = Facts()


@lru_cache(256)
def _digest(facts: Facts) -> int:
    return number_of(encode(tuple(facts)))


def shares_of(
    transport: Transport, weights: Sequence[float], training: bool, facts: Facts = NO_FACTS, refusal: str | None = None
) -> tuple[tuple[float, ...], Sequence[Facts]]:
    """Returns each weight divided by the sum of all replicas' weights; and the replicas' facts, once where all are
    equal. A collective call of the data axis.

    A replica that refuses its batch passes the weight NaN, and why. RunError if replicas make different calls, or if
    other replicas alone refuse their batches.
    """
    total, different = sum(weights), [facts]
    if transport.data_size > 1:
        # Send the total's 64 bits below a digest of the facts: 0 or more; in evaluation the complement, below 0.
        # The sign tells a step from an evaluation, in the collective call that both make anyway.
        (bits,) = struct.unpack("<q", struct.pack("<d", total))
        number = _digest(facts) << 64 | bits
        everyone = transport.gather_int("data", number if training else ~number)
        steps = [number >= 0 for number in everyone]  # other gather_int calls of a step send no number below 0
        if len(set(steps)) > 1:
            trains, evaluates = (
                [replica for replica, step in enumerate(steps) if step is is_step] for is_step in (True, False)
            )
            raise RunError(
                f"the replicas {trains} make a step and {evaluates} call evaluate, which all ranks call together: call "
                "it on every rank, not under `if rank == 0`, and as often on each replica, with "
                "topo.sampler(dataset), which gives all of them as many rows"
            )
        numbers = [max(number, ~number) for number in everyone]
        totals = [number & (1 << 64) - 1 for number in numbers]
        total = math.fsum(struct.unpack(f"<{len(totals)}d", struct.pack(f"<{len(totals)}q", *totals)))
        if math.isnan(total):
            check_refusals(transport, transport.gather("data", refusal))
        elif len({number >> 64 for number in numbers}) > 1:
            different = [Facts(*each) for each in transport.gather("data", tuple(facts))]
    return tuple(weight / total if total else 0.0 for weight in weights), different


CHECKED_NUMBERS = 3
"""The number of calls that check the user's number of items: each check waits for the device."""


class ItemNumbers:
    """Adds the number of items to the inputs of the stages. ``in_parts``: whether context ranks share a row."""

    def __init__(self, transport: Transport, items: Items, in_parts: bool) -> None:
        self._transport, self.items, self._in_parts = transport, items, in_parts
        self._given = 0

    def uses(self, graph: StageGraph, batches: Sequence[Mapping[str, Any]]) -> tuple[bool, bool] | None:
        """Whether this rank's stages ask for the number of items, and whether the user has given it; None if the model
        takes no number."""
        if not self.items.is_taken:
            return None
        rank = self._transport.pipe_rank
        is_asked = any(ITEMS in s.batch_inputs for s in graph if rank in (None, *graph.ranks(s.index)))
        return is_asked, is_asked and any(batch.get(ITEMS) is not None for batch in batches)

    def add(
        self, batches: Sequence[dict[str, Any]], shares: Sequence[float], everyone: Collection[tuple[bool, bool] | None]
    ) -> Sequence[dict[str, Any]]:
        """Returns the micro-batches, each with its share of the user's number of items, or of the whole batch's count.

        A collective call of the data axis. ``everyone``: what replicas' ``uses`` returned, once where all are equal.
        """
        items = self.items
        for batch in batches if self._in_parts else ():
            has_tokens = any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
            if items.has_positions and has_tokens and batch.get("position_ids") is None:
                raise RunError(
                    "without position_ids the model would count this context rank's positions from 0; pass "
                    "position_ids=topo.context_part(torch.arange(positions).expand(rows, -1)), too"
                )
            if items.shifts and batch.get("labels") is not None and batch.get("shift_labels") is None:
                raise RunError(
                    "the loss would shift labels within this context rank's positions, whose ends lie elsewhere; pass "
                    "shift_labels=topo.context_part(F.pad(labels[:, 1:], (0, 1), value=-100)), too"
                )
        if len(everyone) > 1:
            raise RunError(
                f"the loss of some replicas divides by {ITEMS} and that of others does not, or it was given to some; "
                "pass the same inputs on all"
            )
        (used,) = everyone
        if used is None or not used[0]:
            return batches
        passed = [batch[ITEMS] for batch in batches if batch.get(ITEMS) is not None]
        numbers: Sequence[Any] = [batch.get(ITEMS) for batch in batches]
        if passed:
            self._check(items, passed[0], batches)
        else:
            count = items.count(batches).to(self._transport.device)  # over all replicas: 0-dimensional, float32
            self._transport.all_reduce("data", count)
            numbers = [as_number(count.clamp(min=1))] * len(batches)
        return [
            batch | {ITEMS: number * (share or 1.0)}  # a micro-batch without weight must not divide by 0
            for batch, number, share in zip(batches, numbers, shares, strict=True)
        ]

    def _check(self, items: Items, number: Tensor, batches: Sequence[Mapping[str, Any]]) -> None:
        """RunError, on all replicas, if each replica passed the number of items of its own part of the batch."""
        self._given += 1
        if self._transport.data_size == 1 or self._given > CHECKED_NUMBERS:
            return
        mine, counts = int(number), items.counts_of(batches)
        mine_and_sums = mine, mine in counts, sum(counts[:1])
        everyone = self._transport.gather("data", mine_and_sums)
        passed = [count for count, _, _ in everyone]
        whole = sum(count for _, _, count in everyone)
        if len(set(passed)) > 1 or any(is_own and count < whole for count, is_own, _ in everyone):
            raise RunError(
                f"{ITEMS} is that of the whole batch, over all replicas, and the same on all; the replicas were given "
                f"{passed}, for {whole} labels in all. Leave it out, and it is counted; or add it up over the "
                "replicas, as by torch.distributed.all_reduce(number, group=topo.group('data'))"
            )
