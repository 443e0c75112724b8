"""Segments: an order of blocks, cut into consecutive pieces by dynamic programming.

The slowest rank sets the pace of a pipeline, so the greatest segment is made as small as possible:

    A(k, j) = min over i < j of max(A(k − 1, i), cost(i, j))

A(k, j) is the greatest cost of the first j blocks in k segments. This is PipeDream's partitioning without replication
(Narayanan et al., SOSP 2019, section 3.1). Here cost(i, j) = seconds(i, j) + w · (hop(i) + hop(j)): 1F1B holds so few
micro-batches in flight that a rank waits for a part w of its hops. The part depends on the table, hence several w. And
each w is tried with seconds(0, i) / m added: a rank runs its m micro-batches behind the first one's forwards on the
ranks before it, and in front of the last one's backwards there, so that a chain's last rank should have least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.orders import Order

Cuts = tuple[int, ...]
"""The positions at which the segments end, the last one included."""

WAITS = (0.0, 0.25, 0.5, 1.0)
"""The parts of its hops that a rank is taken to wait for."""


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

    def seconds(self, waits: float, ahead: float = 0.0) -> Tensor:
        """[i, j] → seconds of a segment from i to j, with these parts of its hops and of what is ahead of it."""
        inside = [self.work.hardware.hop(size) for size in self.crossing[1:-1]]
        hops = _tensor([0.0, *inside, 0.0])
        return between(self.time) + waits * (hops[:, None] + hops) + ahead * _tensor(self.time)[:, None]

    def memory(self, in_flight: int) -> Tensor:
        """[i, j] → bytes that a rank needs for a segment while it holds so many micro-batches."""
        return between(self.static) + in_flight * between(self.saved)


@dataclass(frozen=True)
class Room:
    """The most bytes that a rank may use, and how many micro-batches there are to hold."""

    most: float
    microbatches: int

    def in_flight(self, behind: int) -> int:
        """How many 1F1B on a chain holds in a segment with so many behind it."""
        return min(self.microbatches, 1 + behind)


def between(sums: Sequence[float]) -> Tensor:
    """[i, j] → what stands between two positions; infinite unless j is behind i. ``sums``: what stands before each."""
    at = _tensor(sums)
    found = at - at[:, None]
    return found.masked_fill(torch.ones_like(found).tril() > 0, math.inf)


def partition(cost: Callable[[int], Tensor], segments: int) -> Cuts | None:
    """The cut into so many segments whose greatest costs least; None where every cut costs infinitely much.

    ``cost(behind)[i, j]``: what a segment from i to j costs, with so many segments behind it.
    """
    first = cost(segments - 1)
    best, begins = first[0], []
    for behind in reversed(range(segments - 1)):
        best, begin = torch.maximum(best[:, None], cost(behind)).min(0)  # the first of equal ones
        begins.append(begin.tolist())
    if best[-1] == math.inf:
        return None
    cuts = [len(best) - 1]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return tuple(reversed(cuts))


def balanced(line: Line, segments: int, room: Room | None = None, microbatches: int | None = None) -> Iterator[Cuts]:
    """Cuts into so many segments, all different. With a room those that fit it, and those of the fewest bytes: in all,
    and of parameters alone. With ``microbatches`` also those in which later segments take less."""

    def seconds(waits: float, ahead: float) -> Callable[[int], Tensor]:
        plain = line.seconds(waits, ahead)
        if room is None:
            return lambda behind: plain
        return lambda behind: plain.masked_fill(line.memory(room.in_flight(behind)) > room.most, math.inf)

    costs = [seconds(waits, ahead) for ahead in (0.0, *([1 / microbatches] if microbatches else [])) for waits in WAITS]
    if room is not None:
        costs += [lambda behind: line.memory(room.in_flight(behind)), lambda behind: between(line.static)]
    yield from dict.fromkeys(cuts for cost in costs if (cuts := partition(cost, segments)) is not None)


def segments_of(order: Order, ends: Sequence[int]) -> list[int]:
    """Block → the segment that it stands in."""
    found = [0] * len(order)
    for segment, (start, end) in enumerate(pairwise((0, *ends))):
        for block in order[start:end]:
            found[block] = segment
    return found


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")  # whatever the default device is


def _sums(numbers: Sequence[float]) -> list[float]:
    sums = [0.0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return sums
