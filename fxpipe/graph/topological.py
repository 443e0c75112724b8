"""Walks over graphs: the topological order, and all that can be reached.

The order is by Kahn's algorithm; of several groups that could be next, the group that begins first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
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


def reachable(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields the starts, and everything to which ``following`` leads from them, each once. ``following`` is called for
    an item only when the caller asks for the next one. No recursion: a path may be as long as the model is deep."""
    waiting, seen = [*starts], set[T]()
    while waiting:
        item = waiting.pop()
        if item not in seen:
            seen.add(item)
            yield item
            waiting += following(item)
