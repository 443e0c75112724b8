"""Borders: pieces that are whole modules, so that cuts between them are at borders of modules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fxpipe.graph.program import Program, called_in
from fxpipe.passes.partition import components
from fxpipe.plan.balance.block_graph import BlockGraph
from fxpipe.plan.balance.candidates import connected


def whole_modules(program: Program, work: BlockGraph, most: float) -> tuple[int, ...]:
    """For each block the piece that it becomes a part of; pieces are acyclic, and connected.

    A piece is one call of the outermost module that takes no more than ``most`` seconds. What stands in larger ones
    alone stays as it is, and so does what would wait for itself, such as a module that is called twice with others
    between.
    """
    paths = {node.name: called_in(node) for node in program.graph.nodes}
    inside = [_common([paths[name] for name in block.nodes]) for block in work.blocks]
    seconds: dict[str, float] = {}
    for block, modules in zip(work.blocks, inside, strict=True):
        for path in modules:
            seconds[path] = seconds.get(path, 0.0) + block.seconds
    kinds: list[Hashable] = []
    for number, modules in enumerate(inside):
        kinds.append(next((path for path in modules if seconds[path] <= most), number))
    while True:
        parts = connected(work, kinds)
        pieces = [parts.find(block) for block in range(len(work))]
        waiting = _waiting(work, pieces)
        if not waiting:
            break
        kinds = [block if piece in waiting else kinds[block] for block, piece in enumerate(pieces)]
    number_of: dict[int, int] = {}
    return tuple(number_of.setdefault(piece, len(number_of)) for piece in pieces)


def _common(stacks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The modules that all of a block's nodes are called in, outermost first."""
    found = []
    for level in zip(*stacks, strict=False):
        if len(set(level)) > 1:
            break
        found.append(level[0])
    return tuple(found)


def _waiting(work: BlockGraph, pieces: Sequence[int]) -> set[int]:
    """The pieces that wait for each other."""
    after: dict[int, set[int]] = {piece: set() for piece in pieces}
    for value in work.values:
        after[pieces[value.source]] |= {pieces[target] for target in value.targets} - {pieces[value.source]}
    return {piece for component in components(after) if len(component) > 1 for piece in component}
