"""Several ranks: layouts with a part of the work on all ranks beside the others, as encoders in front of a model are.

What the others come to is found by the same search, of the work without that part.
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

Part = frozenset[int]
"""Blocks that are to be one stage on all ranks."""


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
        group_of = [-1] * len(work)
        for block, stage in zip(rest, outcome.layout.stage_of, strict=True):
            group_of[block] = stage
        number = numbered(work, group_of, topological(work))
        if number is not None:
            places = (tuple(range(ranks)) if stage < 0 else outcome.layout.rank_of[stage] for stage in number)
            origin = f"{outcome.layout.origin}, beside a stage on all ranks"
            yield StageLayout(tuple(number[group] for group in group_of), tuple(places), origin)


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
