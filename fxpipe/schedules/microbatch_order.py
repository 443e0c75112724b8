"""In which order micro-batches of different costs run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fxpipe.dealing import checked_cost
from fxpipe.errors import RunError, ScheduleError, nearest
from fxpipe.validation import is_mapping


def pyramid(costs: Sequence[float]) -> tuple[int, ...]:
    """Returns the numbers of the micro-batches in a pyramidal order: small ones first and last, the largest in the
    middle. Every second of the micro-batches, in ascending order, comes before the middle, and the others after it.

    Ranks wait for each other while the pipeline fills and drains, so the micro-batches of these times should be small.

    Args:
        costs: a cost per micro-batch, such as the sum of its costs at all stages. Of equal micro-batches, the one with
            the smaller number counts as smaller.

    Raises:
        ScheduleError: a cost is negative or not finite.

    >>> pyramid([5, 1, 2, 4, 3])  # ascending: 1, 3, 5; descending: 4, 2
    (1, 4, 0, 3, 2)
    """
    sizes = [
        checked_cost(cost, f"the cost of micro-batch {number}", ScheduleError) for number, cost in enumerate(costs)
    ]
    ascending = sorted(range(len(sizes)), key=sizes.__getitem__)
    return (*ascending[::2], *reversed(ascending[1::2]))


def by_stage(cost: Any, what: str, stages: Sequence[str]) -> list[float]:
    """Returns a cost as a number per stage.

    Args:
        cost: a number for all stages, or a dict stage name → number. A stage that the dict lacks costs 0.
        what: the beginning of an error.
        stages: the names of the stages.

    Raises:
        RunError: a name is no stage, or a cost is no finite number of 0 or more.

    >>> by_stage({"encoder": 7}, "the cost", ["encoder", "decoder"])
    [7, 0.0]
    """
    if not is_mapping(cost):
        return [checked_cost(cost, what, RunError)] * len(stages)
    if unknown := [name for name in cost if name not in stages]:
        raise RunError(f"{what} names {unknown[0]!r}, which is no stage{nearest(unknown[0], stages)}")
    return [checked_cost(cost.get(name, 0.0), f"{what} at {name!r}", RunError) for name in stages]


def weighed(costs: Sequence[Sequence[float]]) -> list[float]:
    """Returns a number for each micro-batch, or sample: the sum over stages of its cost over the stage's mean.

    So each stage counts the same, whatever the unit of its costs. A stage without any costs counts 1 for each.

    Args:
        costs: for each micro-batch its cost at each stage, as ``by_stage`` returns it.

    >>> weighed([[1, 0], [3, 0], [2, 0]])
    [1.5, 2.5, 2.0]
    """
    means = [fmean(stage) for stage in zip(*costs, strict=True)]
    return [sum(cost / mean if mean else 1.0 for cost, mean in zip(each, means, strict=True)) for each in costs]
