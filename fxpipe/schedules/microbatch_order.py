"""In which order micro-batches of different costs run."""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.schedules.costs import Costs


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
    sizes = [each.forward[0] for each in Costs.of(1, [costs]).by_microbatch]
    ascending = sorted(range(len(sizes)), key=sizes.__getitem__)
    return (*ascending[::2], *reversed(ascending[1::2]))
