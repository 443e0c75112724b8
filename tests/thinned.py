"""Fewer cases of what is proven many times over; ``FXPIPE_ALL=1`` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")

ALL = bool(os.environ.get("FXPIPE_ALL"))


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which every value meets every value of every other axis: faults of two factors show.

    Greedy, in the order of the product: the first combination that has the most pairs not met yet.
    """
    combined = list(product(*axes))
    if ALL:
        return combined
    places = list(product(*(range(len(axis)) for axis in axes)))
    pairs = [{(a, b, place[a], place[b]) for a, b in combinations(range(len(axes)), 2)} for place in places]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(places)), key=lambda number: len(pairs[number] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [combined[number] for number in sorted(chosen)]


def in_turn(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest axis has values, each other axis in turn: every value occurs."""
    if ALL:
        return list(product(*axes))
    longest = max(len(axis) for axis in axes)
    return [tuple(axis[place % len(axis)] for axis in axes) for place in range(longest)]


def seeds(number: int) -> range:
    """Of as many random cases a quarter."""
    return range(number if ALL else number // 4)


def every(step: int, cases: Sequence[T]) -> Sequence[T]:
    """Each ``step``-th case, the first among them."""
    return cases if ALL else cases[::step]
