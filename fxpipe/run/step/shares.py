"""Shares: each micro-batch's part of the weight of a step, over all replicas."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.like import ITEMS
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.agree.agreement import AgreedBatch
from fxpipe.plan.inputs.label_count import Items, as_number
from fxpipe.validation import shown

LossWeight = Callable[..., Any]


def weights_of(
    transport: Transport, agreed: AgreedBatch, loss_weight: LossWeight | None, batches: Sequence[Mapping[str, Any]]
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
        is_asked = any(ITEMS in s.batch_inputs for s in graph if rank in (None, graph.placement[s.index]))
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
