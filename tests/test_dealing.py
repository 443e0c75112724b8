"""Samples are dealt to micro-batches: longest first, to the least loaded (Graham, 1969)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch

import fxpipe
from fxpipe.dealing import dealt


def loads(costs: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    return [sum(costs[sample] for sample in group) for group in groups]


def least_makespan(costs: Sequence[int], bins: int) -> int:
    """Of all assignments."""
    return min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == number) for number in range(bins))
        for places in product(range(bins), repeat=len(costs))
    )


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_the_most_expensive_microbatch_is_within_grahams_bound_of_the_best(microbatches: int) -> None:
    draw = random.Random(microbatches)
    bound = Fraction(4, 3) - Fraction(1, 3 * microbatches)
    for _ in range(25):
        costs = [draw.randint(0, 9) for _ in range(draw.randint(microbatches, 7))]
        most = max(loads(costs, fxpipe.deal(costs, microbatches)))
        assert most <= bound * least_makespan(costs, microbatches), costs


@pytest.mark.parametrize("m", [2, 3, 5, 16])
def test_grahams_worst_case_reaches_the_bound(m: int) -> None:
    """Two samples each of 2m - 1 down to m + 1, and three of m: 4m - 1, where 3m is the best."""
    costs = [*chain.from_iterable([cost, cost] for cost in range(2 * m - 1, m, -1)), m, m, m]
    assert max(loads(costs, fxpipe.deal(costs, m))) == 4 * m - 1


@pytest.mark.parametrize("most", [0, 1, 8, 1000])
def test_each_sample_is_dealt_once_in_the_order_of_the_batch_and_no_microbatch_is_empty(most: int) -> None:
    draw = random.Random(most)
    for _ in range(100):
        microbatches = draw.randint(1, 20)
        costs = [draw.randint(0, most) for _ in range(draw.randint(microbatches, 60))]
        groups = fxpipe.deal(costs, microbatches)
        assert sorted(chain.from_iterable(groups)) == list(range(len(costs)))
        assert len(groups) == microbatches
        assert all(group and group == sorted(group) for group in groups)


@pytest.mark.parametrize("cost", [0, 1, 2.5])
def test_samples_of_equal_costs_are_dealt_out_evenly(cost: float) -> None:
    assert fxpipe.deal([cost] * 10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_a_bin_that_is_full_gets_no_more() -> None:
    """The first bin is full at a cost of 11. So the last item goes to the second, which costs 15 by then."""
    assert dealt([1, 9, 8, 7, 1, 1], 2, 3) == [0, 0, 1, 1, 0, 1]
    assert dealt([5, 9, 7], 3, 1) == [2, 0, 1]


def test_costs_may_be_any_list_of_numbers() -> None:
    """Dealt as 3, 2, 1."""
    for costs in (
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.bfloat16),
        np.array([3.0, 1.0, 2.0]),
        (3, np.int64(1), torch.tensor(2)),
        range(3, 0, -1),
        [Fraction(3), np.float32(1), 2],
    ):
        assert fxpipe.deal(costs, 2) == [[0], [1, 2]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "microbatches", "says"),
    [
        ([1, 2, 3], 4, r"3 samples cannot be dealt to 4 micro-batches.*: give 4 samples or more, or fewer micro-batch"),
        ([], 1, "0 samples cannot be dealt to 1 micro-batches"),
        ([1, -2, 3], 2, r"costs\[1\] is -2; a cost is a finite number, 0 or more"),
        ([1, 2, math.nan], 2, r"costs\[2\] is nan; a cost"),
        (torch.tensor([math.inf, 1]), 2, r"costs\[0\] is inf; a cost"),
        ([1, "2"], 2, r"costs\[1\] is '2'; a cost"),
        ([True, 2], 2, r"costs\[0\] is True; a cost"),
        ([None, 2], 2, r"costs\[0\] is None; a cost"),
        (torch.ones(4, 2), 2, r"costs\[0\] is \[1.0, 1.0\]; a cost"),
        (torch.ones(()), 1, r"costs is tensor\(1\..*\); it is a list with a number for each sample"),
        ({3: 1, 4: 1}, 2, r"costs is \{3: 1, 4: 1\}; it is a list"),
        ({3, 4}, 2, r"costs is \{3, 4\}; it is a list"),
        ("123", 2, "costs is '123'; it is a list"),
        (7, 2, "costs is 7; it is a list"),
        ((cost for cost in [1, 2]), 2, "costs is <generator object .*; it is a list"),
        ([1, 2], 0, "microbatches is 0; it is a whole number, 1 or more"),
        ([1, 2], 1.0, r"microbatches is 1\.0; it is a whole number"),
        ([1, 2], True, "microbatches is True; it is a whole number"),
    ],
)
def test_what_is_no_cost_is_refused_by_its_sample(costs: Any, microbatches: Any, says: str) -> None:
    with pytest.raises(fxpipe.RunError, match=says):
        fxpipe.deal(costs, microbatches)
