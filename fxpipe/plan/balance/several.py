"""Several ranks: layouts with a part of the work on all ranks beside the others, as encoders in front of a model are.

What the others come to is found by the same search, of the work without that part. The part is one stage, or several,
each of them on all ranks: their shorter actions fit into shorter gaps of what a rank runs beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from fxpipe.plan.balance.block_graph import BlockGraph, BlockValue
from fxpipe.plan.balance.candidates import numbered
from fxpipe.plan.balance.orders import SMALL, entries, topological
from fxpipe.plan.balance.simulated_layouts import LayoutOutcome, StageLayout

MOST_PARTS = 3
"""So many are tried, the largest first."""

STAGES = (1, 2, 4)
"""Into so many stages a part is cut, where it has as many blocks."""

Part = frozenset[int]
"""Blocks that are to be on all ranks."""


def layouts(
    work: BlockGraph, ranks: int, keep: bool, best_of: Callable[[BlockGraph], LayoutOutcome | None]
) -> Iterator[StageLayout]:
    """``keep``: each block is a stage. ``best_of``: the search, of the rest of the work."""
    found = _stages(work) if keep else _encoders(work)
    fitting = [part for part in found if not part & work.alone and part.isdisjoint(work.result)]
    for part in sorted(fitting, key=lambda part: (-_seconds(work, part), min(part)))[:MOST_PARTS]:
        rest = [block for block in range(len(work)) if block not in part]
        outcome = best_of(_only(work, rest)) if len(rest) >= ranks else None
        if outcome is None:
            continue
        for count in (count for count in STAGES if count <= len(part)):
            group_of = _cut(work, part, count)
            for block, stage in zip(rest, outcome.layout.stage_of, strict=True):
                group_of[block] = stage
            number = numbered(work, group_of, topological(work))
            if number is not None:
                places = (tuple(range(ranks)) if stage < 0 else outcome.layout.rank_of[stage] for stage in number)
                what = "a stage" if count == 1 else f"{count} stages"
                origin = f"{outcome.layout.origin}, beside {what} on all ranks"
                yield StageLayout(tuple(number[group] for group in group_of), tuple(places), origin)


def _cut(work: BlockGraph, part: Part, count: int) -> list[int]:
    """The part's blocks → -1, -2, ..., so many segments of equal time; all others → 0."""
    found, before, whole = [0] * len(work), 0.0, _seconds(work, part)
    for block in topological(work):
        if block in part:
            middle = before + work.blocks[block].seconds / 2
            found[block] = -1 - min(int(count * middle / whole), count - 1)
            before += work.blocks[block].seconds
    return found


def _encoders(work: BlockGraph) -> Iterable[Part]:
    """The large parts that depend on some of the graph's sources alone, as an image encoder does beside embeddings."""
    reached = entries(work)
    for bits in dict.fromkeys(reached):
        part = frozenset(block for block, mine in enumerate(reached) if mine & bits == mine)
        if _seconds(work, part) > SMALL * work.seconds:
            yield part


def _stages(work: BlockGraph) -> Iterable[Part]:
    """The stages that need no other, and do not run once for the whole batch."""
    return (frozenset([block]) for block in range(len(work)) if not work.sources[block] and block not in work.gather)


def _seconds(work: BlockGraph, part: Part) -> float:
    return sum(work.blocks[block].seconds for block in part)


def _only(work: BlockGraph, blocks: list[int]) -> BlockGraph:
    """The work of these blocks, whatever else they need."""
    number = {block: place for place, block in enumerate(blocks)}
    values = []
    for value in work.values:
        targets = tuple(number[target] for target in value.targets if target in number)
        if value.source in number and (targets or value.returned):
            values.append(BlockValue(number[value.source], targets, value.size, value.returned))
    return dataclasses.replace(
        work,
        blocks=tuple(work.blocks[block] for block in blocks),
        values=tuple(values),
        result=tuple(number[block] for block in work.result),
        gather={number[block]: size for block, size in work.gather.items() if block in number},
        alone=frozenset(number[block] for block in work.alone if block in number),
    )
