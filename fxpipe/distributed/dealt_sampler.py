"""``DealtSampler``: draws global batches whose samples are dealt over the replicas by cost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler

from fxpipe.dealing import checked_cost, checked_costs, dealt
from fxpipe.errors import TopologyError


class DealtSampler(DistributedSampler[Any]):
    """torch's sampler, which deals the samples of each global batch over the replicas by cost.

    Contract: a global batch has the samples that it has with torch's sampler, and each replica draws as many as there.
    A replica draws its samples in their order in the global batch. The draws depend on the arguments and the epoch
    alone.

    Args:
        dataset: the dataset to draw from.
        costs: a cost for each sample, or a function of a sample's number.
        batch_size: the samples of a batch of one replica.
        *arguments: the further arguments of torch's sampler, in its order.
    """

    def __init__(self, dataset: Any, costs: Any, batch_size: int, *arguments: Any) -> None:
        super().__init__(dataset, *arguments)
        self.batch_size = batch_size
        self.cost_of = costs if callable(costs) else _costs_of(costs, len(dataset)).__getitem__

    def __iter__(self) -> Iterator[int]:
        everything: DistributedSampler[Any] = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        everything.set_epoch(self.epoch)
        # As in torch's sampler, the first samples come again behind the last ones, or the last ones are left out.
        drawn, step = list(islice(cycle(everything), self.total_size)), self.batch_size * self.num_replicas
        for start in range(0, len(drawn), step):
            batch = drawn[start : start + step]
            costs = [checked_cost(self.cost_of(sample), f"costs({sample})", TopologyError) for sample in batch]
            replicas = dealt(costs, self.num_replicas, len(batch) // self.num_replicas)
            yield from (sample for sample, replica in zip(batch, replicas, strict=True) if replica == self.rank)


def _costs_of(costs: Any, samples: int) -> list[float]:
    numbers = checked_costs(costs, TopologyError)
    if len(numbers) != samples:
        raise TopologyError(
            f"costs has {len(numbers)} numbers for the {samples} samples of the dataset: give a number for each"
        )
    return numbers
