"""Row check: whether rows of a batch change each other's loss, as in a contrastive loss; micro-batches lose this.

Takes: the losses of two micro-batches A and B, which it asks for in any combination, or the shapes of a program's
values. Gives: a warning, or a RunError if the loss is a sum over rows.

Let f(X, Y) be the loss of a batch whose first rows are X and last rows are Y, at one seed. Independent rows have

    f(A, B) + f(B, A) = 2 (w_A f(A, A) + w_B f(B, B)) / (w_A + w_B),

noise included, which depends on a row's position. w: the weights that a step gives the micro-batches A and B.

1. If the loss has no noise, f(A, B) and the mean of f(A) and f(B) decide.
2. Otherwise, four runs decide by the formula, to half of the digits.
3. Independent rows whose loss grows with their number are a sum.

If the model cannot run, shapes decide: in a matrix of rows against rows, two dimensions double with the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpipe.batch.batch import joined
from fxpipe.errors import RunError
from fxpipe.graph.program import Program, Shapes, where
from fxpipe.packed import BatchDim, counted
from fxpipe.progress import is_teller, warn
from fxpipe.specs import ITEMS
from fxpipe.stage.loss import MicrobatchLoss
from fxpipe.tensors.rounding import is_close, unit
from fxpipe.trace.replay import Batch
from fxpipe.validation import is_number


def warn_of_rows(told: str) -> None:
    """Warns with the text that a row check returned, unless it is empty; only one process warns."""
    if told and is_teller():
        warn(told, UserWarning)


@dataclass(frozen=True)
class Losses:
    """Losses of the rows of two micro-batches. ``loss``: returns the loss of a batch, always at the same seed and from
    the same state. ``known``: the numbers of micro-batches → the loss of their rows, one micro-batch after the other.
    """

    loss: Callable[[Batch], MicrobatchLoss]
    batches: Sequence[Batch]
    batch_dim: BatchDim
    known: dict[tuple[int, ...], MicrobatchLoss]

    def of(self, *numbers: int) -> MicrobatchLoss:
        """The loss of the rows of these micro-batches, one after the other; computed once."""
        if numbers not in self.known:
            parts = [self.batches[number] for number in numbers]
            items = [part[ITEMS] for part in parts if part.get(ITEMS) is not None]
            self.known[numbers] = self.loss(joined(parts, self.batch_dim) | ({ITEMS: sum(items)} if items else {}))
        return self.known[numbers]

    def mean(self, weights: Sequence[float], *groups: Sequence[int]) -> Tensor:
        """The weighted mean of these batches' losses; Σ total / Σ count of a ``Sum``."""
        parts = [self.of(*numbers) for numbers in groups]
        if parts[0].count is not None:  # a Sum's totals and counts add up without weights
            shares: Any = [part.count for part in parts]
            return torch.stack([part.value for part in parts]).sum().div(sum(shares))
        return torch.stack([part.value * w for part, w in zip(parts, weights, strict=True)]).sum() / sum(weights)


def check_rows(losses: Losses, loss_weight: Callable[..., Any] | None, microbatches: int, norms: bool) -> None:
    """Warns if the rows of two micro-batches change each other's loss. RunError if their loss is a sum. ``norms``:
    whether rows interact by batch statistics, which is allowed."""
    if counted(losses.batch_dim):
        return  # the counts of packed rows belong to other rows
    told = "" if norms else _rows_interact(losses, loss_weight)
    warn_of_rows(told or "")
    if told == "":  # 3. independent rows
        _check_is_mean(losses, microbatches)


def _rows_interact(losses: Losses, loss_weight: Callable[..., Any] | None) -> str | None:
    """A warning with the loss of two micro-batches together and apart; "" if both are equal, or not known; None if the
    loss of the rows of both is known to be the mean of their losses."""
    try:
        weights = [1.0 if loss_weight is None else float(loss_weight(*batch.values())) for batch in losses.batches]
        first, apart = losses.mean([1.0], (0, 1)), losses.mean(weights, (0,), (1,))
        # 1. Without noise one run decides: f(A, B) is the mean of f(A) and f(B), and a sum's is not. Noise agrees to
        # three quarters of float32's digits in one of 10,000 models.
        if unit(first) <= torch.finfo(torch.float32).eps and is_close(apart, first, unit(first) ** 0.75):
            return None
        # 2. with noise
        together, apart = losses.mean([1.0, 1.0], (0, 1), (1, 0)), losses.mean(weights, (0, 0), (1, 1))
    except Exception:  # inputs that cannot be joined, or a model for a fixed number of rows
        return ""
    if not torch.isfinite(together) or is_close(apart.to(together.dtype), together, math.sqrt(unit(together))):
        return ""
    return (
        f"two micro-batches of the example have the loss {together.item():.4g} together and {apart.item():.4g} apart, "
        f"as a step has it. Where a loss compares rows, as a contrastive one, {_GATHER}. Where it is divided by a "
        "count of its own (labels that are not ignored), return fxpipe.Sum(total, count), or give loss_weight="
    )


def _check_is_mean(losses: Losses, microbatches: int) -> None:
    """RunError if the losses of these micro-batches grow with the number of rows, as a sum does. A batch with a number,
    by which the model may divide, is not checked."""
    numbers = (value for batch in losses.batches for name, value in batch.items() if name != ITEMS)
    if any(is_number(value) or getattr(value, "shape", None) == () for value in numbers):
        return

    def loss_of(number: int, copies: int) -> float:
        part = losses.of(*[number] * copies)
        return math.nan if part.count is not None else part.value.item()

    try:
        if not all(_is_sum(partial(loss_of, number)) for number in range(2)):
            return
    except Exception:  # inputs that cannot be joined, or a model for a fixed number of rows
        return
    raise RunError(
        f"the loss is a sum over rows: {loss_of(0, 1):.4g} for a micro-batch of the example, and "
        f"{loss_of(0, 2):.4g} for its rows twice. A step has the mean over its {microbatches} micro-batches, "
        f"1/{microbatches} of the sum over the batch. Return the mean over rows; or fxpipe.Sum(total, rows), with the "
        "number of rows as output.shape[0] gives it, which trains the sum over the batch divided by its rows. Multiply "
        "the learning rate of SGD by the rows of a batch then, and divide the norm by them to which gradients are "
        "clipped; AdamW's rate stays, as its steps do not depend on the scale of gradients"
    )


def _is_sum(loss_of: Callable[[int], float]) -> bool:
    """Whether the loss of so many copies of the rows grows as copies · S + constant.

    A second copy adds S, two more 2 S, and four more 4 S. A mean changes by noise alone, such as dropout's, which does
    not double twice. A contrastive loss grows by ln 2 each time.
    """
    single, twice = loss_of(1), loss_of(2)
    if abs(twice - single) <= abs(single) / 4 or not 1.5 < (loss_of(4) - twice) / (twice - single) < 2.5:
        return False
    return 1.5 < (loss_of(8) - loss_of(4)) / (loss_of(4) - twice) < 2.5


_GATHER = 'they are gathered: fxpipe.stage_boundary(..., gather="batch")'


def rows_meet(program: Program, shapes: Mapping[str, Shapes], doubled: Mapping[str, Shapes]) -> str:
    """A warning with the first value outside of gathered stages that has rows in two dimensions; empty if none has.

    ``shapes``: the shapes of each node's value for a micro-batch; ``doubled``: for a micro-batch with twice the rows.
    """
    for node in program.nodes:
        is_gathered = program.stage_of.get(node.name) in program.gathered
        for shape, two in zip(shapes.get(node.name, ()), doubled.get(node.name, ()), strict=False):
            if not is_gathered and shape and two and sum(b == 2 * a for a, b in zip(shape, two, strict=True)) > 1:
                return (
                    f"a value of shape {list(shape)} has rows of the micro-batch in two dimensions{where(node)}, and "
                    f"no others' rows. Where a loss compares rows, as a contrastive one, {_GATHER}"
                )
    return ""


def check_reduction(program: Program, microbatches: int) -> None:
    """RunError if a function with ``reduction="sum"`` returns the loss: a graph shows this without an example."""
    loss: Any = [*program.nodes][-1].args[0]
    if isinstance(loss, torch.fx.Node) and loss.kwargs.get("reduction") == "sum":
        raise RunError(
            f"the loss is a sum over rows{where(loss)}. A step has the mean over its {microbatches} micro-batches, "
            f"1/{microbatches} of the sum over the batch. Return the mean over rows; or fxpipe.Sum(total, rows)"
        )
