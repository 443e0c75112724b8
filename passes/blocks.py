"""Blocks: the smallest pieces of a program that a cut may separate, for code that chooses the cut.

A cut may not separate these nodes, so they are in one block:

- nodes that share written memory, and nodes that read a value from before a write;
- a shape query and its tensor;
- calls of opaque regions that set or read the same attribute;
- nodes that would otherwise form a cycle;
- unused nodes and their inputs.

Takes: a ``Program`` after ``before_balance()``, whose only boundaries gather. Gives: ``Blocks``, the blocks in program
order and the values between them. It chooses no cut: ``fxpipe.search`` does.

1. Join readers that must be with a write, as in a partition.
2. Join blocks that wait for each other.
3. Join unused blocks to what they use, and cycles again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from fxpipe.graph.program import Program, made_by
from fxpipe.passes.partition import _Flow


@dataclass(frozen=True)
class Blocks:
    """Blocks of nodes, numbered by their first node in program order, and the values that pass between blocks."""

    nodes: tuple[tuple[str, ...], ...]
    """The names of each block's nodes, in program order."""
    values: tuple[tuple[str, int, tuple[int, ...]], ...]
    """(node, its block, the other blocks that use its value); no blocks if only the model's result uses the value."""
    result: tuple[int, ...]
    """The blocks that compute a part of the model's result."""
    returned: frozenset[str]
    """The nodes whose values are in the model's result."""


def blocks(program: Program) -> Blocks:
    """Returns the blocks of a program after the passes ``before_balance()``."""
    flow = _Flow(program)
    units = flow.units
    makers = [node for node in map(made_by, program.graph.output_node().all_input_nodes) if node in units]
    flow.join_readers_of_written(program)  # 1. readers of written values
    # 2. and 3. Joining unused units may close a cycle, so cycles are joined before and after.
    flow.join_cycles()
    _join_unused(flow, {units.find(node) for node in makers})
    flow.join_cycles()
    members: dict[Node, list[str]] = {}
    for node in flow.nodes:
        members.setdefault(units.find(node), []).append(node.name)
    number = {unit: index for index, unit in enumerate(members)}
    uses: dict[Node, dict[int, None]] = {node: {} for node in makers}
    for edge in flow.edges:
        if not units.same(edge.source, edge.target):
            uses.setdefault(edge.source, {})[number[units.find(edge.target)]] = None
    return Blocks(
        tuple(map(tuple, members.values())),
        tuple((node.name, number[units.find(node)], tuple(targets)) for node, targets in uses.items()),
        tuple(sorted({number[units.find(node)] for node in makers})),
        frozenset(node.name for node in makers),
    )


def _join_unused(flow: _Flow, result: set[Node]) -> None:
    """Joins a unit with unused values, such as a batch norm's count of batches, to the last node that the unit uses.

    ``result``: the units that compute a part of the model's result.
    """
    find = flow.units.find
    targets: dict[Node, list[Node]] = {}
    sources: dict[Node, list[Node]] = {}
    for edge in flow.edges:
        targets.setdefault(find(edge.source), []).append(edge.target)
        sources.setdefault(find(edge.target), []).append(edge.source)
    # From the end: a unit's users are joined before the unit, so that a chain of unused units joins as a whole.
    for unit in dict.fromkeys(find(node) for node in reversed(flow.nodes)):
        if unit in result or any(find(target) != unit for target in targets.get(unit, ())):
            continue
        outside = [source for source in sources.get(unit, ()) if find(source) != unit]
        if outside:
            nearest = find(max(outside))
            sources.setdefault(nearest, []).extend(sources.pop(unit))
            flow.units.join(nearest, unit)
