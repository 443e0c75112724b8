"""Segments: an order of blocks, cut into consecutive pieces by dynamic programming.

The step of a chain takes about Σ segments + (m − 1)·max segment + 2·Σ hops, whose first term no cut changes. So for
each of a few bounds on the greatest segment the least sum of hops is looked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.orders import Order

Cuts = tuple[int, ...]
"""The positions at which the segments end, the last one included."""

SLACK = (1.0, 1.01, 1.03, 1.06, 1.12, 1.25)
"""How far the greatest segment may exceed the least possible one, where that saves hops."""


@dataclass(frozen=True)
class Line:
    """An order of blocks as a line: what stands before each position, and what crosses it."""

    work: BlockGraph
    order: Order

    @cached_property
    def time(self) -> list[float]:
        """Seconds of all blocks before a position."""
        return _sums([self.work.blocks[block].seconds for block in self.order])

    @cached_property
    def static(self) -> list[float]:
        """Bytes that the parameters before a position take; tied ones once."""
        return self._fresh(lambda block: self.work.blocks[block].parameters, self.work.static_bytes)

    @cached_property
    def saved(self) -> list[float]:
        """Bytes that the blocks before a position keep for backward; what two keep once."""
        return self._fresh(lambda block: self.work.blocks[block].saved, self.work.saved_bytes)

    def _fresh(self, keys: Callable[[int], frozenset[int]], size: Callable[[frozenset[int]], float]) -> list[float]:
        seen: set[int] = set()
        found = []
        for block in self.order:
            found.append(size(keys(block) - seen))
            seen |= keys(block)
        return _sums(found)

    @cached_property
    def crossing(self) -> list[float]:
        """Bytes of the values that are made before a position and used behind it."""
        place = {block: position for position, block in enumerate(self.order)}
        change = [0.0] * (len(self.order) + 2)
        for value in self.work.values:
            users = (*value.targets, *(self.work.result if value.returned else ()))
            start, end = place[value.source], max(place[user] for user in users)
            change[start + 1] += value.size
            change[end + 1] -= value.size
        return _sums(change)[1:-1]

    def memory(self, start: int, end: int, in_flight: int) -> float:
        """Bytes that a rank needs for a segment while it holds so many micro-batches."""
        return self.static[end] - self.static[start] + in_flight * (self.saved[end] - self.saved[start])


@dataclass(frozen=True)
class Room:
    """The most bytes that a rank may use, and how many micro-batches there are to hold."""

    most: float
    microbatches: int

    def in_flight(self, behind: int) -> int:
        """How many 1F1B on a chain holds in a segment with so many behind it."""
        return min(self.microbatches, 1 + behind)


def least_greatest(weights: Sequence[float], segments: int) -> float:
    """The least possible weight of the greatest of so many segments; ``weights``: their sums before each position."""
    high = weights[-1]
    low = max((b - a for a, b in pairwise(weights)), default=0.0)
    low = max(low, high / segments)
    for _ in range(40):
        if high - low <= 1e-6 * high:
            break
        middle = (low + high) / 2
        if _greedy(weights, middle) <= segments:
            high = middle
        else:
            low = middle
    return high


def _greedy(weights: Sequence[float], bound: float) -> int:
    """How many segments it takes if each is as long as the bound allows."""
    count, begin = 1, weights[0]
    for before, behind in pairwise(weights):
        if behind - begin > bound:
            count, begin = count + 1, before
    return count


def cut(
    line: Line, segments: int, bound: float, room: Room | None = None, weights: Sequence[float] | None = None
) -> Cuts | None:
    """The cut into so many segments, none heavier than the bound, over whose hops the least time passes; or None.

    ``weights``: their sums before each position; None: seconds.
    """
    stop = len(line.order)
    limit = _Limit(line, line.time if weights is None else weights, bound * (1 + 1e-9), room)
    cost = {0: 0.0}
    back: list[dict[int, int]] = []
    for number in range(1, segments + 1):
        left = segments - number
        cost, chosen = _one_more(limit, cost, range(number, stop - left + 1), left)
        back.append(chosen)
    if stop not in cost:
        return None
    cuts = [stop]
    for chosen in reversed(back[1:]):
        cuts.append(chosen[cuts[-1]])
    return tuple(reversed(cuts))


@dataclass(frozen=True)
class _Limit:
    """What a segment may take, in seconds (or what else ``weights`` are), and in bytes."""

    line: Line
    weights: Sequence[float]
    bound: float
    room: Room | None

    def exceeded(self, start: int, end: int, behind: int) -> bool:
        if self.weights[end] - self.weights[start] > self.bound:
            return True
        room = self.room
        return room is not None and self.line.memory(start, end, room.in_flight(behind)) > room.most


def _one_more(
    limit: _Limit, cost: Mapping[int, float], ends: range, behind: int
) -> tuple[dict[int, float], dict[int, int]]:
    """For each end of one more segment the least sum of hops, and where that segment begins; ``cost``: the least sums
    of the segments before. Of possible beginnings those are kept in a window that nothing cheaper stands behind."""
    line, hop = limit.line, limit.line.work.hardware.hop
    row: dict[int, float] = {}
    chosen: dict[int, int] = {}
    window: deque[tuple[float, int]] = deque()
    entered = begin = ends.start - 1
    for position in ends:
        for new in range(entered, position):
            if new in cost:
                price = cost[new] + (hop(line.crossing[new]) if new else 0.0)
                while window and window[-1][0] >= price:
                    window.pop()
                window.append((price, new))
        entered = position
        while begin < position and limit.exceeded(begin, position, behind):
            begin += 1
        while window and window[0][1] < begin:
            window.popleft()
        if window:
            row[position], chosen[position] = window[0]
    return row, chosen


def least_bound(line: Line, segments: int) -> float:
    """The least greatest segment where no cut is made whose hop takes longer than that segment: a link would be what
    the pipeline waits for. Where that leaves too few cuts, the least of all."""
    bound = least_greatest(line.time, segments)
    for _ in range(8):
        inside = range(1, len(line.order))
        allowed = [0, *(i for i in inside if line.work.hardware.hop(line.crossing[i]) <= bound), len(line.order)]
        if len(allowed) <= segments:
            break
        again = least_greatest([line.time[position] for position in allowed], segments)
        if again <= bound * (1 + 1e-5):
            break
        bound = again
    return bound


def least_in_room(line: Line, segments: int, room: Room) -> float | None:
    """The least bound for which ``cut`` finds segments that fit; None where none do."""
    low, high = least_greatest(line.time, segments), line.time[-1]
    if cut(line, segments, high, room=room) is None:
        return None
    for _ in range(12):
        middle = math.sqrt(low * high) if low else (low + high) / 2
        if cut(line, segments, middle, room=room) is None:
            low = middle
        else:
            high = middle
    return high


def lightest(line: Line, segments: int, microbatches: int) -> Cuts | None:
    """The cut whose fullest rank needs the least bytes, with what it holds in flight; None where there are too few
    blocks."""
    low, high = 0.0, line.memory(0, len(line.order), microbatches)
    found = cut(line, segments, math.inf, room=Room(high, microbatches))
    for _ in range(16):
        middle = (low + high) / 2
        cuts = cut(line, segments, math.inf, room=Room(middle, microbatches))
        if cuts is None:
            low = middle
        else:
            high, found = middle, cuts
    return found


def balanced(line: Line, segments: int, room: Room | None = None) -> Iterator[Cuts]:
    """Cuts into so many segments, for each slack one, all different."""
    if segments > len(line.order):
        return
    least = least_bound(line, segments) if room is None else least_in_room(line, segments, room)
    if least is None:
        return
    found: dict[Cuts, None] = {}
    for slack in SLACK:
        cuts = cut(line, segments, least * slack, room=room)
        if cuts is not None and cuts not in found:
            found[cuts] = None
            yield cuts


def segments_of(order: Order, ends: Sequence[int]) -> list[int]:
    """Block → the segment that it stands in."""
    found = [0] * len(order)
    for segment, (start, end) in enumerate(pairwise((0, *ends))):
        for block in order[start:end]:
            found[block] = segment
    return found


def _sums(numbers: Sequence[float]) -> list[float]:
    sums = [0.0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums
