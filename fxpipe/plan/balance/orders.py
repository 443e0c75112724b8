"""Orders: the topological orders of a graph of blocks that are worth cutting into consecutive segments.

A depth-first order finishes a branch before it begins another, and puts each block in front of the first that needs
it: the keys of a cross-attention stand in the decoder, not behind the encoder. Which branch comes first is the
freedom that is left: program order, or its reverse. By upward rank branches run side by side instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from fxpipe.plan.balance.block_graph import BlockGraph

Order = tuple[int, ...]
Key = Callable[[int], int]
"""Block → when it is visited among those that another one needs."""

SMALL = 0.02
"""What takes less than this part of the whole makes no tower."""


def orders(work: BlockGraph) -> list[Order]:
    """Topological orders, all different, the program's own first."""
    found = [topological(work), depth_first(work, lambda block: -block), by_upward_rank(work)]
    return list(dict.fromkeys(found))


def topological(work: BlockGraph) -> Order:
    """Program order, depth first."""
    return depth_first(work, lambda block: block)


def by_upward_rank(work: BlockGraph) -> Order:
    """Blocks by the longest path from their start to a result, the longest first: branches end together.

    rank(b) = seconds(b) + max over users u of rank(u); Topcuoglu et al., "HEFT", 2002.
    """
    order, rank = topological(work), [0.0] * len(work)
    for block in reversed(order):  # its users have added their own ranks
        rank[block] += work.blocks[block].seconds
        for source in work.sources[block]:
            rank[source] = max(rank[source], rank[block])
    return tuple(sorted(order, key=lambda block: -rank[block]))  # stable, so topological where ranks are equal


def depth_first(work: BlockGraph, key: Key) -> Order:
    """The blocks, each behind all that it needs, which are visited in the order of their keys."""
    done: dict[int, None] = {}
    used = {source for sources in work.sources for source in sources}
    unused = sorted(set(range(len(work))) - used - set(work.result))
    for root in [*sorted(work.result, key=key), *unused]:
        stack = [(root, iter(sorted(work.sources[root], key=key)))]
        waiting = {root}
        while stack:
            block, needed = stack[-1]
            source = next((other for other in needed if other not in done and other not in waiting), None)
            if source is None:
                stack.pop()
                done[block] = None
            else:
                waiting.add(source)
                stack.append((source, iter(sorted(work.sources[source], key=key))))
    return tuple(done)


def towers(work: BlockGraph) -> list[frozenset[int]]:
    """The large parts of a work that do not depend on each other, in front of what joins them; by first block.

    Blocks differ in the sources of the graph that they depend on. What depends on the sources of two large parts, of
    which neither contains the other's, joins them; the largest of what is left are the towers.
    """
    reached = entries(work)
    seconds: dict[int, float] = {}
    for block, bits in enumerate(reached):
        seconds[bits] = seconds.get(bits, 0.0) + work.blocks[block].seconds
    large = [bits for bits, time in seconds.items() if time > SMALL * work.seconds]
    separate = [bits for bits in large if not _joins(bits, large)]
    heads = [bits for bits in separate if not any(bits != other and bits & other == bits for other in separate)]
    groups: dict[int, list[int]] = {bits: [] for bits in heads}
    for block, bits in enumerate(reached):
        head = next((head for head in heads if bits & head == bits), None)
        if head is not None:
            groups[head].append(block)
    return [frozenset(group) for group in groups.values()]


def _joins(bits: int, large: Sequence[int]) -> bool:
    """Whether what depends on these sources depends on two large parts, neither of which depends on the other."""
    inside = [other for other in large if other != bits and other & bits == other]
    return any(one & two not in (one, two) for one, two in itertools.combinations(inside, 2))


def entries(work: BlockGraph) -> list[int]:
    """For each block the sources of the graph that it depends on, a bit each."""
    reached = [0] * len(work)
    count = 0
    for block in topological(work):
        for source in work.sources[block]:
            reached[block] |= reached[source]
        if not work.sources[block]:
            reached[block] = 1 << count
            count += 1
    return reached
