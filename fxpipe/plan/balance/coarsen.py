"""Coarsen: a graph of thousands of blocks as one of hundreds, cut where the fewest bytes cross."""

from __future__ import annotations

from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.candidates import connected
from fxpipe.plan.balance.orders import topological, towers
from fxpipe.plan.balance.segments import Line, segments_of

GRAINS = 256
"""As many pieces as a work is cut into at least, where it has as many blocks."""
GRAINS_A_RANK = 24


def coarsened(work: BlockGraph, ranks: int) -> tuple[int, ...]:
    """For each block the piece that it becomes a part of; pieces are acyclic, and connected.

    The blocks stand in a line, which is cut once in each of many intervals of equal time, where the fewest bytes
    cross, and wherever another tower begins.
    """
    grains = max(GRAINS, GRAINS_A_RANK * ranks)
    if len(work) <= grains:
        return tuple(range(len(work)))
    line = Line(work, topological(work))
    ends = sorted({*_cheapest(line, grains), *_borders(line)})
    parts = connected(work, segments_of(line.order, [*ends, len(work)]))
    number: dict[int, int] = {}
    return tuple(number.setdefault(parts.find(block), len(number)) for block in range(len(work)))


def _cheapest(line: Line, grains: int) -> list[int]:
    """In each interval of equal time the position that the fewest bytes cross, the first of equal ones."""
    whole = line.time[-1] or 1.0
    best: dict[int, int] = {}
    for position in range(1, len(line.order)):
        grain = int(line.time[position] / whole * grains)
        if grain not in best or line.crossing[position] < line.crossing[best[grain]]:
            best[grain] = position
    return list(best.values())


def _borders(line: Line) -> list[int]:
    """Where a tower begins or ends."""
    number = {block: place for place, tower in enumerate(towers(line.work)) for block in tower}
    inside = [number.get(block) for block in line.order]
    return [position for position in range(1, len(inside)) if inside[position] != inside[position - 1]]
