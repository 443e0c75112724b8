"""Candidates: the layouts that are worth simulating, from cuts of each order of the blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from fxpipe.graph.topological import topological_order
from fxpipe.passes.analysis.union import Union
from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.orders import Order, orders, towers
from fxpipe.plan.balance.segments import Cuts, Line, Room, balanced, segments_of
from fxpipe.plan.balance.simulated_layouts import StageLayout

CRUMB = 0.01
"""What takes no more than this part of the greatest part of its segment is no stage of its own."""


@dataclass(frozen=True)
class Recipe:
    """How a layout comes about: an order, where it is cut, and the rank of each segment.

    ``kinds``: a kind for each block; what is not connected in a segment, or is of another kind, becomes a stage of its
    own, and its rank runs them one by one. None: a stage for each segment.
    """

    order: Order
    cuts: Cuts
    rank_of: tuple[int, ...]
    kinds: tuple[int, ...] | None
    origin: str


def recipes(work: BlockGraph, ranks: int, microbatches: int, keep: bool, room: Room | None) -> Iterator[Recipe]:
    """For each order its cuts into a segment a rank, and two; the towers in a segment as one stage, and apart.

    ``keep``: blocks are stages already, so that only their ranks are open.
    """
    found = towers(work)
    ways: list[tuple[tuple[int, ...] | None, str]] = [(None, "")]
    if not keep and len(found) > 1:
        number = {block: place for place, tower in enumerate(found) for block in tower}
        ways.append((tuple(number.get(block, len(found)) for block in range(len(work))), ", towers apart"))
    for order in orders(work):
        line = Line(work, order)
        for laps, how in ((1, ""), (2, " in laps"))[: 1 if ranks == 1 else 2]:
            for cuts in balanced(line, laps * ranks, *((room, microbatches) if laps == 1 else ())):
                for kinds, apart in ways:
                    origin = f"{laps * ranks} segments{how}{apart}"
                    yield Recipe(order, cuts, tuple(range(ranks)) * laps, kinds, origin)


def layout_of(work: BlockGraph, recipe: Recipe, keep: bool) -> StageLayout:
    """The layout that a recipe makes."""
    segment_of = segments_of(recipe.order, recipe.cuts)
    if keep:
        ranks = tuple(recipe.rank_of[segment] for segment in segment_of)
        return StageLayout(tuple(range(len(work))), ranks, recipe.origin)
    whole = StageLayout(tuple(segment_of), recipe.rank_of, recipe.origin)
    return whole if recipe.kinds is None else _apart(work, recipe, segment_of, recipe.kinds) or whole


def _apart(work: BlockGraph, recipe: Recipe, segment_of: Sequence[int], kinds: Sequence[int]) -> StageLayout | None:
    """A stage for each connected part of a kind in a segment; crumbs go with the largest. None where that makes stages
    that wait for each other."""
    parts = connected(work, list(zip(segment_of, kinds, strict=True)))
    seconds: dict[int, float] = {}
    for block in range(len(work)):
        seconds[parts.find(block)] = seconds.get(parts.find(block), 0.0) + work.blocks[block].seconds
    largest: dict[int, int] = {}
    for root in seconds:
        segment = segment_of[root]
        if segment not in largest or seconds[root] > seconds[largest[segment]]:
            largest[segment] = root
    for root, time in seconds.items():
        if time <= CRUMB * seconds[largest[segment_of[root]]]:
            parts.join(largest[segment_of[root]], root)
    group_of = [parts.find(block) for block in range(len(work))]
    ranks = {group: recipe.rank_of[segment_of[block]] for block, group in enumerate(group_of)}
    number = numbered(work, group_of, recipe.order)
    if number is None:
        return None
    stages = tuple(number[group] for group in group_of)
    return StageLayout(stages, tuple(ranks[group] for group in number), recipe.origin)


def numbered(work: BlockGraph, group_of: Sequence[int], order: Sequence[int]) -> dict[int, int] | None:
    """Group → its place in topological order, the one first that begins first in ``order``; None where there is none.

    The result's own order is that of the places.
    """
    first = {group: place for place, group in reversed(list(enumerate(group_of[block] for block in order)))}
    after: dict[int, set[int]] = {group: set() for group in first}
    for value in work.values:
        source = group_of[value.source]
        after[source] |= {group_of[target] for target in value.targets} - {source}
    found = topological_order(first, after)
    return found if len(found) == len(first) else None


def connected(work: BlockGraph, class_of: Sequence[Hashable]) -> Union[int]:
    """The parts that values connect without leaving a class."""
    parts = Union(range(len(work)))
    for value in work.values:
        for target in value.targets:
            if class_of[value.source] == class_of[target]:
                parts.join(value.source, target)
    return parts
