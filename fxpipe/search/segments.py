"""Segments: a topological order of blocks, cut into consecutive pieces by dynamic programming.

The slowest rank sets the pace of a pipeline, so the greatest segment is made as small as possible:

    A(k, j) = min over i < j of max(A(k − 1, i), cost(i, j))

A(k, j) is the greatest cost of the first j blocks in k segments. This is PipeDream's partitioning without replication
(Narayanan et al., SOSP 2019, section 3.1). Here cost(i, j) = seconds(i, j) + w · (hop(i) + hop(j)). 1F1B holds so few
micro-batches in flight that a rank waits for a fraction w of its hops. The fraction w depends on the table, so several
w are tried. Each w is also tried with seconds(0, i) / m added. A rank runs its m micro-batches after the first
micro-batch's forward and before the last micro-batch's backward on the earlier ranks, so the last rank of a chain
should have least work.

A depth-first order finishes a branch before it begins another, and puts each block before the first block that needs
it: the keys of a cross-attention are in the decoder, not after the encoder. An order by upward rank interleaves the
branches, which is better for the towers of CLIP on 5 or 8 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from fxpipe.search.block_graph import BlockGraph

Order = tuple[int, ...]
Cuts = tuple[int, ...]
"""The positions at which segments end, with the end of the last segment."""

WAITS = (0.0, 0.25, 0.5, 1.0)
"""The fractions w of its hops for which a rank is assumed to wait."""


# --- orders ---


def orders(work: BlockGraph) -> list[Order]:
    """Different topological orders, first the depth-first order."""
    return list(dict.fromkeys([depth_first(work), by_upward_rank(work)]))


def by_upward_rank(work: BlockGraph) -> Order:
    """Blocks sorted by the longest path from their start to a result, the longest first: branches end together.

    rank(b) = seconds(b) + max over users u of rank(u); Topcuoglu et al., "HEFT", 2002.
    """
    order, rank = depth_first(work), [0.0] * len(work)
    for block in reversed(order):  # users have added their ranks already
        rank[block] += work.blocks[block].seconds
        for source in work.sources[block]:
            rank[source] = max(rank[source], rank[block])
    return tuple(sorted(order, key=lambda block: -rank[block]))  # stable, so topological at equal ranks


def depth_first(work: BlockGraph) -> Order:
    """The blocks in depth-first order: each block after the blocks that it needs, which are visited by number."""
    done: dict[int, None] = {}
    # Unused blocks come last: no other block waits for them.
    used = {source for sources in work.sources for source in sources}
    unused = sorted(set(range(len(work))) - used - set(work.result))
    for root in [*sorted(work.result), *unused]:
        # A stack instead of recursion: a chain may be thousands of blocks long.
        stack, waiting = [(root, iter(work.sources[root]))], {root}
        while stack:
            block, needed = stack[-1]
            source = next((other for other in needed if other not in done and other not in waiting), None)
            if source is None:
                stack.pop()
                done[block] = None
            else:
                waiting.add(source)
                stack.append((source, iter(work.sources[source])))
    return tuple(done)


def entries(work: BlockGraph) -> list[int]:
    """For each block, the sources of the graph on which it depends, as a bit mask."""
    reached, count = [0] * len(work), 0
    for block in depth_first(work):
        for source in work.sources[block]:
            reached[block] |= reached[source]
        if not work.sources[block]:
            reached[block] = 1 << count
            count += 1
    return reached


# --- cuts of an order ---


@dataclass(frozen=True)
class Line:
    """An order of blocks with the seconds before each position and the bytes that cross it. Blocks outside of the order
    depend on none of its blocks."""

    work: BlockGraph
    order: Order

    @cached_property
    def time(self) -> list[float]:
        """For each position, the seconds of all blocks before it."""
        return _sums(self.work.blocks[block].seconds for block in self.order)

    @cached_property
    def crossing(self) -> list[float]:
        """For each position, the bytes of the values that are made before it and used after it."""
        position_of = {block: position for position, block in enumerate(self.order)}
        # A value crosses every position from its maker to its last user: add its size at the first such position,
        # subtract it after the last, and sum.
        change = [0.0] * (len(self.order) + 2)
        for value in (value for value in self.work.values if value.source in position_of):
            users = (*value.targets, *(self.work.result if value.returned else ()))
            change[position_of[value.source] + 1] += value.size
            change[max(position_of[user] for user in users) + 1] -= value.size
        return _sums(change)[1:-1]

    def seconds(self, waits: float, ahead: float = 0.0) -> Tensor:
        """[i, j] → seconds of a segment from i to j, plus ``waits`` × its hops and ``ahead`` × the seconds before i."""
        inside = [self.work.costs.hardware.hop(size) for size in self.crossing[1:-1]]
        hops = _tensor([0.0, *inside, 0.0])
        return between(self.time) + waits * (hops[:, None] + hops) + ahead * _tensor(self.time)[:, None]

    @cached_property
    def static(self) -> Tensor:
        """[i, j] → bytes of a segment's parameters; a tied parameter counts at its first block only."""
        return self._fresh("parameters", self.work.costs.static_bytes)

    @cached_property
    def saved(self) -> Tensor:
        """[i, j] → bytes that a segment keeps for a micro-batch's backward; shared memory counts at its first block."""
        return self._fresh("saved", self.work.costs.saved_bytes)

    def _fresh(self, name: str, size: Callable[[frozenset[int]], float]) -> Tensor:
        # Memory that several blocks share counts at the first such block. So a segment with only a later block gets too
        # few bytes; the simulation at the end counts exactly.
        seen, sizes = frozenset[int](), []
        for block in self.order:
            keys: frozenset[int] = getattr(self.work.blocks[block].cost, name)
            sizes.append(size(keys - seen))
            seen |= keys
        return between(_sums(sizes))


def between(sums: Sequence[float]) -> Tensor:
    """[i, j] → the sum between two positions; infinite unless j > i. ``sums``: the sum before each position."""
    at = _tensor(sums)
    spans = at - at[:, None]
    positions = torch.arange(len(at), device="cpu")
    return spans.masked_fill_(positions <= positions[:, None], math.inf)


def partition(cost: Callable[[int], Tensor], segments: int) -> Cuts | None:
    """The cuts into ``segments`` that minimize the greatest cost of a segment; None if every cut costs infinitely much.

    ``cost(behind)[i, j]``: the cost of a segment from i to j with ``behind`` segments after it.
    """
    # A(1, j) is a first segment from 0 to j. Each round adds a segment at the end, for all j at once: a (min, max)
    # product of a vector and a matrix.
    best, begins = cost(segments - 1)[0], []
    for behind in reversed(range(segments - 1)):
        best, begin = torch.maximum(best[:, None], cost(behind)).min(0)  # the first minimum
        begins.append(begin.tolist())
    if best[-1] == math.inf:
        return None
    cuts = [len(best) - 1]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    return tuple(reversed(cuts))


def balanced(line: Line, segments: int, microbatches: int | None = None, memory: float | None = None) -> Iterator[Cuts]:
    """Different cuts into ``segments``. With ``microbatches``, also cuts whose later segments take less time. With
    ``memory``, segments fit these bytes, and the cuts of the fewest total bytes and the fewest parameter bytes follow.
    A segment is assumed to hold as many micro-batches as a stage of 1F1B with as many later stages."""

    def bytes_of_stage(behind: int) -> Tensor:
        return line.static + min(microbatches or 1, 1 + behind) * line.saved

    def seconds(waits: float, ahead: float) -> Callable[[int], Tensor]:
        plain = line.seconds(waits, ahead)
        return lambda behind: plain if memory is None else plain.masked_fill(bytes_of_stage(behind) > memory, math.inf)

    # By time first, then by bytes: if memory is short, only the cut of the fewest bytes may fit.
    costs = [seconds(waits, ahead) for ahead in (0.0, *([1 / microbatches] if microbatches else [])) for waits in WAITS]
    if memory is not None:
        costs += [bytes_of_stage, lambda behind: line.static]
    yield from dict.fromkeys(cuts for cost in costs if (cuts := partition(cost, segments)) is not None)


def segments_of(order: Order, ends: Sequence[int]) -> dict[int, int]:
    """Block → the number of its segment."""
    return {b: segment for segment, (start, end) in enumerate(pairwise((0, *ends))) for b in order[start:end]}


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")  # not torch's default device


def _sums(numbers: Iterable[float]) -> list[float]:
    return list(accumulate(numbers, initial=0.0))
