"""Predicted: what a gather will come to, so that ranks need only compare whether all expect the same.

An all-gather of gloo takes a hop for each rank of the group, one behind another. A maximum over a few numbers takes far
less, and shows every rank whether all brought the same: where max(h) = min(h), which is −max(−h).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fxpipe.distributed.activity import ALIKE_BITS

Values = tuple[bytes, ...]
_KEPT = 1 << 15
"""Values, of all ranks together, of some 500 bytes at most, and mostly of few."""
_HASH = (1 << 32) - 1
_MORE = (1 << 63) - 1
_ALIKE = (1 << ALIKE_BITS) - 1


class Predicted:
    """What messages have come to. Ranks may remember different things: then they do not agree, and gather."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, bytes], Values] = {}
        self._count = 0

    def of(self, scope: object, mine: bytes, count: int) -> Values:
        """What ``count`` ranks will bring, this one ``mine``: what they brought beside it the last time, or else the
        same."""
        return self._values.get((scope, mine)) or (mine,) * count

    def keep(self, scope: object, mine: bytes, values: Values) -> None:
        self._count += len(values)
        if self._count > _KEPT:
            self._values.clear()
            self._count = len(values)
        self._values[scope, mine] = values


def words(mark: int, values: Values) -> tuple[int, int, int, int]:
    """What a rank brings: a hash of the call and of what it expects, with what must be the same, and more of the hash;
    and each of both less than nothing, so that the maxima give the least and the greatest. ``mark``: as
    ``activity.LastCall`` has it."""
    call, alike = mark >> ALIKE_BITS, mark & _ALIKE
    each_once = {value: place for place, value in enumerate(dict.fromkeys(values))}  # they may be long
    text = repr((call, list(each_once), [each_once[value] for value in values]))
    digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
    number, more = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little") >> 1
    least = (_HASH - number) << ALIKE_BITS | (_ALIKE - alike if alike else 0)
    return number << ALIKE_BITS | alike, least, more, _MORE - more


def agree(greatest: Sequence[int]) -> bool:
    """Whether all ranks that brought words with these maxima expect the same. Some leave out what must be the same, and
    have 0 there."""
    most, least, more, less = greatest
    if most >> ALIKE_BITS != _HASH - (least >> ALIKE_BITS) or more != _MORE - less:
        return False
    alike = most & _ALIKE
    return not alike or alike == _ALIKE - (least & _ALIKE)
