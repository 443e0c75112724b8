"""``topo.sampler(costs=)``: the global batches of torch's sampler, dealt over replicas by cost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

import fxpipe
from fxpipe import Topology, TopologyError
from fxpipe.distributed.dealt_sampler import DealtSampler
from tests.pool import Pool

ALONE = Topology([("pipe", 2), ("data", 2)])


def lognormal(samples: int) -> list[float]:
    draw = random.Random(0)
    return [draw.lognormvariate(0, 1) for _ in range(samples)]


def epoch_of(sampler: Sampler[int], rows: int, epoch: int) -> list[list[int]]:
    """A replica's batches of an epoch."""
    sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return list(BatchSampler(sampler, rows, drop_last=False))


def of_replicas(
    replicas: int, costs: Any, rows: int, epoch: int = 0, shuffle: bool = True, drop_last: bool = False
) -> list[list[list[int]]]:
    """Each replica's batches, each a list of samples."""
    return [
        epoch_of(DealtSampler(range(len(costs)), costs, rows, replicas, replica, shuffle, 7, drop_last), rows, epoch)
        for replica in range(replicas)
    ]


def of_torch(
    replicas: int, samples: int, rows: int, epoch: int = 0, shuffle: bool = True, drop_last: bool = False
) -> list[list[list[int]]]:
    """The same of torch's sampler."""
    return [
        epoch_of(DistributedSampler(range(samples), replicas, replica, shuffle, 7, drop_last), rows, epoch)  # type: ignore[arg-type]
        for replica in range(replicas)
    ]


def drawn_in_order(parts: Sequence[list[int]]) -> list[int]:
    """A global batch of torch's sampler: the replicas draw in turns."""
    return list(chain.from_iterable(zip(*parts, strict=True)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("replicas", "samples", "rows"), [(1, 10, 4), (2, 64, 8), (3, 50, 4), (4, 3, 2), (5, 61, 100)])
def test_a_global_batch_has_the_samples_of_torchs_sampler(
    replicas: int, samples: int, rows: int, shuffle: bool, drop_last: bool
) -> None:
    """As many on each replica, in their order there; so every sample once an epoch, as there."""
    for epoch in range(2):
        settings = (epoch, shuffle, drop_last)
        ours = of_replicas(replicas, lognormal(samples), rows, *settings)
        torchs = of_torch(replicas, samples, rows, *settings)
        assert [[len(batch) for batch in part] for part in ours] == [[len(batch) for batch in part] for part in torchs]
        for dealt, wanted in zip(zip(*ours, strict=True), zip(*torchs, strict=True), strict=True):
            order = drawn_in_order(wanted)
            assert sorted(chain.from_iterable(dealt)) == sorted(order)
            if len(set(order)) == len(order):  # a sample that fills the last batch up is there twice
                assert all([order.index(row) for row in part] == sorted(map(order.index, part)) for part in dealt)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_cost_the_same_where_costs_are_consecutive_numbers(replicas: int) -> None:
    """Of 2R consecutive numbers, each of R replicas gets the i-th greatest and the i-th least."""
    costs = random.Random(1).sample(range(replicas * 6), replicas * 6)
    parts = of_replicas(replicas, costs, 6)
    assert [sum(costs[row] for row in batch) for (batch,) in parts] == [sum(costs) / replicas] * replicas


def waited(costs: Sequence[float], parts: Sequence[list[list[int]]]) -> float:
    """What the data axis waits for in an epoch: the most expensive replica of each batch, above the mean."""
    loads = [[sum(costs[row] for row in batch) for batch in batches] for batches in zip(*parts, strict=True)]
    return sum(max(of_batch) - math.fsum(of_batch) / len(of_batch) for of_batch in loads)


def test_two_replicas_wait_less_than_a_tenth_for_each_other() -> None:
    costs = lognormal(3200)
    assert 10 * waited(costs, of_replicas(2, costs, 16)) < waited(costs, of_torch(2, len(costs), 16))


def test_a_resumed_run_draws_as_an_uninterrupted_one() -> None:
    """Each epoch differs; the rest of an epoch depends on nothing that was drawn before it."""
    costs, rows = lognormal(96), 8
    sampler = DealtSampler(range(96), costs, rows, 2, 1, True, 7)
    epochs = [epoch_of(sampler, rows, epoch) for epoch in range(3)]
    resumed = DealtSampler(range(96), costs, rows, 2, 1, True, 7)
    assert epoch_of(resumed, rows, 1)[4:] + epoch_of(resumed, rows, 2) == epochs[1][4:] + epochs[2]
    assert epochs[0] != epochs[1]


def test_a_global_batch_has_the_same_samples_on_any_number_of_replicas() -> None:
    """So a position counted in batches means the same there."""
    parted = {
        replicas: [
            sorted(chain(*parts)) for parts in zip(*of_replicas(replicas, lognormal(96), 16 // replicas), strict=True)
        ]
        for replicas in (1, 2, 4)
    }
    assert parted[1] == parted[2] == parted[4]


def test_one_process_draws_every_sample_in_order() -> None:
    assert list(ALONE.sampler(range(10), shuffle=False, costs=range(10), batch_size=4)) == list(range(10))


@pytest.mark.parametrize(
    "costs_of",
    [tuple, torch.tensor, lambda costs: costs.__getitem__, lambda costs: lambda row: torch.tensor(costs[row])],
)
def test_costs_may_be_a_list_or_a_function(costs_of: Callable[[Any], Any]) -> None:
    costs = [float(round(cost * 100)) for cost in lognormal(40)]
    sampler = DealtSampler(range(40), costs_of(costs), 5, 2, 0, True, 7)
    assert epoch_of(sampler, 5, 0) == of_replicas(2, costs, 5)[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"costs": [1, 2]}, r"costs= and batch_size= of a sampler need each other.*write both"),
        ({"batch_size": 2}, r"costs= and batch_size= of a sampler need each other"),
        ({"costs": [1, 2], "batch_size": 2}, "costs has 2 numbers for the 3 samples of the dataset: give a number for"),
        ({"costs": [1, math.nan, 2], "batch_size": 2}, r"costs\[1\] is nan; a cost is a finite number"),
        ({"costs": [1, -1, 2], "batch_size": 2}, r"costs\[1\] is -1; a cost"),
        ({"costs": "abc", "batch_size": 2}, "costs is 'abc'; it is a list with a number for each sample"),
        ({"costs": [1, 2, 3], "batch_size": 0}, "batch_size is 0: write 1 or more"),
        ({"costs": [1, 2, 3], "batch_size": 2.0}, r"batch_size must be a whole number, got 2\.0"),
    ],
    ids=str,
)
def test_wrong_costs_are_refused_where_the_sampler_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        ALONE.sampler(range(3), **options)


def test_a_wrong_cost_that_a_function_returns_is_named_by_its_sample() -> None:
    sampler = ALONE.sampler(range(4), shuffle=False, costs=lambda row: None if row == 3 else 1, batch_size=2)  # type: ignore[arg-type,return-value]
    drawn = iter(sampler)
    assert [next(drawn), next(drawn)] == [0, 1]
    with pytest.raises(TopologyError, match=r"costs\(3\) is None; a cost is a finite number, 0 or more"):
        next(drawn)


def drawn(topology: Topology) -> list[list[list[int]]]:
    """This rank's batches of two epochs."""
    fxpipe.init()
    sampler = topology.sampler(range(48), seed=7, costs=lognormal(48), batch_size=6)
    return [epoch_of(sampler, 6, epoch) for epoch in range(2)]


@pytest.mark.parametrize("axes", [[("data", 2), ("pipe", 2)], [("tensor", 2), ("dp", 2)]], ids=str)
def test_the_ranks_of_a_replica_draw_the_same_samples(axes: list[tuple[str, int]], pool: Pool) -> None:
    topology = Topology(axes)
    results = pool.run(drawn, topology)
    for replica, group in enumerate(topology.groups("model")):
        for rank in group:
            assert results[rank] == [of_replicas(2, lognormal(48), 6, epoch)[replica] for epoch in range(2)]
