"""Replica batches: the rows of each batch that a replica draws, the same on all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from fxpipe.seeds import seed_from, seeded

CPU = torch.device("cpu")


def part_of(rows: int, replica: int, replicas: int) -> slice:
    """The rows of a global batch that a replica draws; all of them if there are fewer rows than replicas."""
    return slice(rows) if rows < replicas else slice(rows * replica // replicas, rows * (replica + 1) // replicas)


class ReplicaBatches:
    """A ``batch_sampler``: a replica's part of each global batch, which is ``size`` consecutive rows of the sampler.

    The last batch may be smaller. If it has fewer rows than there are replicas, all of them get all rows of the last
    step, of ``accumulated`` batches, so that the mean over replicas is the mean over rows.
    """

    def __init__(
        self, sampler: Any, size: int, drop_last: bool, replica: int, replicas: int, seed: int, accumulated: int = 1
    ) -> None:
        self.sampler, self.size, self.drop_last, self.accumulated = sampler, size, drop_last, accumulated
        self.replica, self.replicas, self.seed, self.epoch = replica, replicas, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (len(self.sampler) + (0 if self.drop_last else self.size - 1)) // self.size

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with seeded(seed_from(f"{self.seed} {self.epoch}".encode()), CPU, python=True):
            order = list(self.sampler)
        batches = [order[start : start + self.size] for start in range(0, len(self) * self.size, self.size)]
        is_small = bool(batches) and len(batches[-1]) < self.replicas
        whole = (len(batches) - 1) // self.accumulated * self.accumulated if is_small else len(batches)
        for number, rows in enumerate(batches):
            yield self.epoch, rows if number >= whole else rows[part_of(len(rows), self.replica, self.replicas)]


class SeededRows(Dataset[Any]):
    """A dataset of collated batches, whose random numbers depend on ``seed``, the epoch and the rows alone.

    So masks and crops are the same on all ranks of a replica, in worker processes, and in a run that is resumed.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, drawn: tuple[int, list[int]]) -> list[Any]:
        epoch, rows = drawn
        get = getattr(self.dataset, "__getitems__", None) or (lambda rows: [self.dataset[row] for row in rows])
        with seeded(seed_from(f"{self.seed} {epoch} {rows}".encode()), CPU, python=True):
            return [self.collate(get(rows))]
