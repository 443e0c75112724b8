"""Row check: whether rows of a batch change each other's loss, as in a contrastive loss; micro-batches lose this.

Let f(X, Y) be the loss of a batch whose first rows are X and last rows are Y, at one seed. Independent rows have

    f(A, B) + f(B, A) = 2 (w_A f(A, A) + w_B f(B, B)) / (w_A + w_B),

noise included, which depends on a row's position. w: the weights that a step gives the micro-batches A and B. If the
model cannot run, shapes decide: in a matrix of rows against rows, two dimensions double with the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpipe.batch.batch import joined
from fxpipe.graph.program import Program, Shapes, where
from fxpipe.packed import BatchDim, counted
from fxpipe.progress import is_teller, warn
from fxpipe.stage.loss import MicrobatchLoss
from fxpipe.trace.state.replay import Batch, is_close, unit


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
