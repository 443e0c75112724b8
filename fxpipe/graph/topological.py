"""Topological order: Kahn's algorithm; of several groups that could be next, the group that begins first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)


def topological_order(first: Mapping[T, int], after: Mapping[T, Collection[T]]) -> dict[T, int]:
    """Returns group → its number in the order. ``first``: the place at which each group begins, all different.
    ``after``: the groups that wait for each. Groups in a cycle, and groups after these, are omitted."""
    # how many groups each group still waits for; a heap gives the earliest group that waits for none
    missing = Counter(target for targets in after.values() for target in targets)
    ready: list[tuple[int, Any]] = [(start, group) for group, start in first.items() if not missing[group]]
    heapq.heapify(ready)
    order: dict[T, int] = {}
    while ready:
        _, group = heapq.heappop(ready)
        order[group] = len(order)
        for target in after[group]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (first[target], target))
    return order
