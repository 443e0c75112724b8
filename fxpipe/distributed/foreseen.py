"""Foreseen: what a gather came to the last time, so that ranks need only tell each other whether all expect the same.

An all-gather of gloo takes a hop for each rank of the group, one behind another. A maximum over two numbers takes far
less, and tells every rank alike whether all brought the same: where max(h) = min(h), which is −max(−h).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fxpipe.distributed.whereabouts import ALIKE_BITS

Values = tuple[int, ...]
_KEPT = 4096
_HASH = (1 << 32) - 1
_ALIKE = (1 << ALIKE_BITS) - 1
UNKNOWN = (1 << 63) - 1, (1 << 63) - 1
"""The words of a rank that expects nothing: with them no ranks agree."""


class Foreseen:
    """What items have come to. Ranks may remember different things: then they do not agree, and gather."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, int], Values] = {}

    def of(self, scope: object, item: int) -> Values | None:
        """The values of all ranks, when this one had the same item."""
        return self._values.get((scope, item))

    def keep(self, scope: object, item: int, values: Values) -> None:
        if len(self._values) >= _KEPT:
            self._values.clear()
        self._values[scope, item] = values


def words(mark: int, values: Values | None) -> tuple[int, int]:
    """What a rank brings: a hash of the call and of what it expects, with what must be alike, and both less than
    nothing, so that the maxima tell the least and the greatest. ``mark``: as ``whereabouts.LastCall`` has it."""
    if values is None:
        return UNKNOWN
    call, alike = mark >> ALIKE_BITS, mark & _ALIKE
    told = hashlib.blake2b(repr((call, values)).encode(), digest_size=4).digest()
    number = int.from_bytes(told, "little")
    return number << ALIKE_BITS | alike, (_HASH - number) << ALIKE_BITS | (_ALIKE - alike if alike else 0)


def agree(greatest: Sequence[int]) -> bool:
    """Whether all ranks that brought words with these maxima expect the same; what must be alike is left out by some,
    who have 0 there."""
    most, least = greatest
    if most >> ALIKE_BITS != _HASH - (least >> ALIKE_BITS):
        return False
    alike = most & _ALIKE
    return not alike or alike == _ALIKE - (least & _ALIKE)
