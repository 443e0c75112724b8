"""Dealing: divides items of unequal costs over bins whose costs are nearly equal.

The bins are micro-batches, replicas, or the ranks that step whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from fxpipe.errors import FxpipeError, RunError
from fxpipe.validation import is_list, is_number, is_whole, shown


def deal(costs: Sequence[float], microbatches: int) -> list[list[int]]:
    """Returns the numbers of the samples of each micro-batch, so that the micro-batches cost nearly the same.

    The samples are dealt from the most expensive one down. Each goes to the micro-batch whose samples cost the least so
    far, and among equal micro-batches to the one with the fewest samples. So each micro-batch has at least one sample.
    The most expensive micro-batch costs at most 4/3 - 1/(3 · ``microbatches``) of the least possible (Graham, 1969:
    longest processing time first). Within a micro-batch the samples have the order of the batch.

    Args:
        costs: a number for each sample of the batch, such as its images or its tokens: a list, an array or a tensor.
        microbatches: the number of micro-batches.

    Raises:
        RunError: there are fewer samples than micro-batches; ``microbatches`` is no whole number from 1 on; or a cost
            is negative, nan, inf, or no number.

    >>> deal([1, 7, 2, 4, 0], 2)
    [[1, 4], [0, 2, 3]]
    """
    if not is_whole(microbatches) or microbatches < 1:
        raise RunError(f"microbatches is {shown(microbatches)}; it is a whole number, 1 or more")
    numbers = checked_costs(costs, RunError)
    if len(numbers) < microbatches:
        raise RunError(
            f"{len(numbers)} samples cannot be dealt to {microbatches} micro-batches, because each has at least one "
            f"sample: give {microbatches} samples or more, or fewer micro-batches"
        )
    samples: list[list[int]] = [[] for _ in range(microbatches)]
    for sample, microbatch in enumerate(dealt(numbers, microbatches)):
        samples[microbatch].append(sample)
    return samples


def dealt(costs: Sequence[float], bins: int, most: int | None = None) -> list[int]:
    """Returns the bin of each item: the most expensive item first, each to the bin that costs the least so far.

    Among bins of equal cost, the item goes to the bin with the fewest items, and then to the first of them.

    Args:
        costs: what each item costs, 0 or more.
        bins: the number of bins.
        most: the most items of a bin; None: any number. ``bins * most`` items must not be fewer than ``costs``.
    """
    bin_of = [0] * len(costs)
    open_bins: list[tuple[float, int, int]] = [(0, 0, number) for number in range(bins)]  # a heap, as it is sorted
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, count, bin_of[item] = heappop(open_bins)
        if most is None or count + 1 < most:
            heappush(open_bins, (load + costs[item], count + 1, bin_of[item]))
    return bin_of


def checked_costs(costs: Any, error: type[FxpipeError]) -> list[float]:
    """Returns the costs as a list of numbers; ``error`` names the first that is no cost."""
    listed = _plain(costs)
    if not is_list(listed):
        raise error(f"costs is {shown(costs)}; it is a list with a number for each sample")
    return [checked_cost(cost, f"costs[{sample}]", error) for sample, cost in enumerate(listed)]


def checked_cost(cost: Any, name: str, error: type[FxpipeError]) -> float:
    """Returns the cost as a number; ``error``, with its name, if it is no cost."""
    number = _plain(cost)
    if not is_number(number) or not 0 <= number < math.inf:
        raise error(f"{name} is {shown(cost)}; a cost is a finite number, 0 or more")
    return number  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Python's numbers for a tensor or an array, whose element is a tensor or a number of NumPy's."""
    return value.tolist() if hasattr(value, "tolist") else value
