"""Shares: each micro-batch's part of the weight of a step, over all replicas."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.kinds import shown
from fxpipe.plan.agreement import Agreed

LossWeight = Callable[..., Any]


def weights_of(
    transport: Transport, agreed: Agreed, loss_weight: LossWeight | None, batches: Sequence[Mapping[str, Any]]
) -> tuple[float, ...]:
    """The weight of each micro-batch, its rows or what ``loss_weight`` says, the same on every rank of a pipe group."""
    if loss_weight is None or not agreed.has_loss:
        return tuple(map(float, agreed.sizes))
    weighs = transport.pipe_rank in (None, agreed.plan.output_rank)
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
    everyone = transport.gather_int("data", _told(sum(weights), training))
    steps = [number >= 0 for number in everyone]  # whatever else a step may meet for here tells none below 0
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


def _told(weight: float, training: bool) -> int:
    """A weight by its bits, which is 0 or more in training, and below in evaluation."""
    bits: int = struct.unpack("<q", struct.pack("<d", weight))[0]
    return bits if training else ~bits


def _weight(number: int) -> float:
    """What ``_told`` told."""
    weight: float = struct.unpack("<d", struct.pack("<q", max(number, ~number)))[0]
    return weight
