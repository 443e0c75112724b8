"""Topological order: Kahn's, where several could be next the one that begins first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=Hashable)


def topological_order(first: Mapping[T, int], after: Mapping[T, Collection[T]]) -> dict[T, int]:
    """Group → its number in the order. ``first``: the place where each begins, each another; ``after``: who waits for
    it. Groups that wait for each other, and those behind them, are left out."""
    # how many of those before it each still waits for; a heap gives the earliest that waits for none
    missing = Counter(target for targets in after.values() for target in targets)
    ready: list[tuple[int, Any]] = [(place, group) for group, place in first.items() if not missing[group]]
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
