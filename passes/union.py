"""Union-find over hashable items.

Takes: items. Gives: disjoint groups of them, which only grow. ``find`` shortens the paths that it walks, so that a
sequence of calls is nearly linear. The representative of a group is known to callers: ``join`` keeps the first item's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Union(Generic[T]):
    """Disjoint groups of items; each item starts in its own group."""

    def __init__(self, items: Iterable[T]) -> None:
        self._parent: dict[T, T] = {item: item for item in items}

    def __contains__(self, item: object) -> bool:
        return item in self._parent

    def find(self, item: T) -> T:
        """Returns the representative of ``item``'s group."""
        root = item
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, item: T, *others: T) -> None:
        """Merges the groups of all items; the group of ``item`` gives the representative."""
        for other in others:
            self._parent[self.find(other)] = self.find(item)

    def same(self, item: T, other: T) -> bool:
        """Whether two items are in one group."""
        return self.find(item) == self.find(other)

    def groups(self) -> list[list[T]]:
        """Returns all groups, in the order of their first items."""
        groups: dict[T, list[T]] = {}
        for item in self._parent:
            groups.setdefault(self.find(item), []).append(item)
        return list(groups.values())
