"""Row check: whether rows of a batch change each other's loss, as in a contrastive loss; micro-batches lose this.

Let f(X, Y) be the loss of a batch whose first rows are X and last rows are Y, at one seed. Independent rows have

    f(A, B) + f(B, A) = 2 (w_A f(A, A) + w_B f(B, B)) / (w_A + w_B),

noise included, which depends on a row's position. w: the weights that a step gives the micro-batches A and B. If the
model cannot run, shapes decide: in a matrix of rows against rows, two dimensions double with the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fxpipe.batch.batch import joined
from fxpipe.errors import RunError
from fxpipe.graph.program import Program, Shapes, where
from fxpipe.like import ITEMS
from fxpipe.packed import BatchDim, counted
from fxpipe.progress import is_teller, warn
from fxpipe.stage.loss import MicrobatchLoss
from fxpipe.trace.state.replay import Batch, is_close, unit
from fxpipe.validation import is_number


def warn_of_rows(told: str) -> None:
    """Warns with the text that a row check returned, unless it is empty; only one process warns."""
    if told and is_teller():
        warn(told, UserWarning)


def rows_interact(
    loss: Callable[[Batch], MicrobatchLoss],
    batches: Sequence[Batch],
    batch_dim: BatchDim,
    loss_weight: Callable[..., Any] | None,
) -> str:
    """A warning with the loss of two micro-batches together and apart; empty if both are equal, or not known.

    ``loss``: returns the loss of a batch, always at the same seed and from the same state.
    """
    if counted(batch_dim):
        return ""  # the counts of packed rows belong to other rows
    first, other = batches
    pairs = (first, other), (other, first), (first, first), (other, other)
    try:
        parts = [loss(joined(pair, batch_dim)) for pair in pairs]
        own_weights = [1.0 if loss_weight is None else float(loss_weight(*batch.values())) for batch in batches]
    except Exception:  # inputs that cannot be joined, or a model for a fixed number of rows
        return ""
    # a Sum's totals and counts add up without weights
    weights = [1.0, 1.0, *own_weights] if parts[0].count is None else [1.0] * 4
    totals = torch.stack([weight * part.value for weight, part in zip(weights, parts, strict=True)])
    counts: list[Any] = [
        weight if part.count is None else part.count for weight, part in zip(weights, parts, strict=True)
    ]
    together, apart = totals[:2].sum() / sum(counts[:2]), totals[2:].sum() / sum(counts[2:])
    if not torch.isfinite(together) or is_close(apart.to(together.dtype), together, math.sqrt(unit(together))):
        return ""
    return (
        f"two micro-batches of the example have the loss {together.item():.4g} together and {apart.item():.4g} apart, "
        f"as a step has it. Where a loss compares rows, as a contrastive one, {_GATHER}. Where it is divided by a "
        "count of its own (labels that are not ignored), return fxpipe.Sum(total, count), or give loss_weight="
    )


def check_is_mean(
    loss: Callable[[Batch], MicrobatchLoss], batches: Sequence[Batch], batch_dim: BatchDim, microbatches: int
) -> None:
    """RunError if the losses of these micro-batches grow with the number of rows, as a sum does.

    ``loss``: as in ``rows_interact``. A batch with a number, by which the model may divide, is not checked.
    """
    numbers = (value for batch in batches for name, value in batch.items() if name != ITEMS)
    if counted(batch_dim) or any(is_number(value) or getattr(value, "shape", None) == () for value in numbers):
        return

    def loss_of(batch: Batch, copies: int) -> float:
        rows = joined([batch] * copies, batch_dim)
        part = loss(rows if batch.get(ITEMS) is None else rows | {ITEMS: batch[ITEMS] * copies})
        return math.nan if part.count is not None else part.value.item()

    try:
        if not all(_is_sum(partial(loss_of, batch)) for batch in batches):
            return
    except Exception:  # inputs that cannot be joined, or a model for a fixed number of rows
        return
    raise RunError(
        f"the loss is a sum over rows: {loss_of(batches[0], 1):.4g} for a micro-batch of the example, and "
        f"{loss_of(batches[0], 2):.4g} for its rows twice. A step has the mean over its {microbatches} micro-batches, "
        f"1/{microbatches} of the sum over the batch. Return the mean over rows; or fxpipe.Sum(total, rows), with the "
        "number of rows as output.shape[0] gives it, which trains the sum over the batch divided by its rows. Multiply "
        "the learning rate of SGD by the rows of a batch then, and divide the norm by them to which gradients are "
        "clipped; AdamW's rate stays, as its steps do not depend on the scale of gradients"
    )


def _is_sum(loss_of: Callable[[int], float]) -> bool:
    """Whether the loss of so many copies of the rows grows as copies · S + constant.

    Two copies add S, and two more 2 S. A mean grows by noise alone, and a contrastive loss by ln 2 and ln 2.
    """
    single, twice = loss_of(1), loss_of(2)
    return abs(twice - single) > abs(single) / 4 and 1.5 < (loss_of(4) - twice) / (twice - single) < 2.5


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
