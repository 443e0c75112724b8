"""Item numbers: ``num_items_in_batch``, as each micro-batch of a step is given it; see ``label_count``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.like import ITEMS
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.label_count import Items, as_number

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
        """RunError, on all replicas alike, where they were given the numbers of their own parts of the batch."""
        self._given += 1
        if self._transport.data_size == 1 or self._given > _CHECKED:
            return
        mine, counts = int(number), items.counts_of(batches)
        told = mine, mine in counts, sum(counts[:1])
        everyone = self._transport.gather("data", told)
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
