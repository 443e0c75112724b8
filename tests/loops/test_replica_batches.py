"""Replicas draw together, batch by batch, the rows that one process draws; and draw the same random numbers again."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

from fxpipe.loops.replica_batches import ReplicaBatches, SeededRows


def drawn(rows: int, replica: int, replicas: int, accumulated: int = 1, drop_last: bool = False) -> list[list[int]]:
    batches = ReplicaBatches(SequentialSampler(range(rows)), 8, drop_last, replica, replicas, 0, accumulated)
    assert len(batches) == len(list(batches))
    return [list(part) for _, part in batches]


@pytest.mark.parametrize("rows", [32, 36, 39])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_parts_of_replicas_are_the_batches_of_one_process(rows: int, replicas: int) -> None:
    parts = [drawn(rows, replica, replicas) for replica in range(replicas)]
    together = [list(chain(*each)) for each in zip(*parts, strict=True)]
    assert together == [list(range(start, min(start + 8, rows))) for start in range(0, rows, 8)]
    assert all(len({*map(len, each)}) <= 2 for each in zip(*parts, strict=True))
    assert drawn(rows, 0, replicas, drop_last=True) == parts[0][: rows // 8]


@pytest.mark.parametrize(("accumulated", "whole"), [(1, [[32, 33, 34]]), (2, [[32, 33, 34]]), (3, [[*range(24, 32)]])])
def test_a_step_with_fewer_rows_than_replicas_is_drawn_by_each(accumulated: int, whole: list[list[int]]) -> None:
    parts = [drawn(35, replica, 4, accumulated) for replica in range(4)]
    assert all(part[-1] == [32, 33, 34] for part in parts)
    first = 5 - len(whole) if accumulated < 3 else 3
    assert all(part[first] == whole[0] for part in parts)
    assert parts[0][first - 1] != parts[1][first - 1]


class Noisy:
    """Rows with noise of each global generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> list[float]:
        return [row, torch.rand((), device="cpu").item(), random.random(), float(np.random.rand())]


def test_random_numbers_depend_on_the_rows_and_the_epoch_alone() -> None:
    rows = SeededRows(Noisy(), lambda batch: batch, seed=3)
    (first,) = rows.__getitems__((0, [1, 2]))
    torch.rand(7, device="cpu")
    before = torch.get_rng_state(), random.getstate()
    assert rows.__getitems__((0, [1, 2])) == [first]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    for other in [(1, [1, 2]), (0, [2, 1])]:
        assert not {number for row in rows.__getitems__(other)[0] for number in row[1:]} & {*first[0][1:]}
