"""Lone writes: those that no value leads to or from, such as a batch norm's count of its calls.

Nothing connects them, so each would be a stage of its own; they run with the submodule that they are a part of.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

from torch import fx

from fxpipe.graph.program import Program, made_by
from fxpipe.passes.analysis.effects import is_number
from fxpipe.passes.analysis.union import Union


def hosts_of_lone_writes(program: Program, units: Union[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(a node of each unit that only writes, the node to run it with), for units of the nodes to place.

    It is the next node of the same submodule, or of the nearest around it; or else the one before.
    """
    connected = _connected(program, units)
    written = frozenset().union(*program.written)
    nodes = list(program.graph.nodes)
    lone: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in units and node.name in written and units.find(node) not in connected:
            lone.setdefault(units.find(node), node)
    if not lone:
        return
    position = {node: place for place, node in enumerate(nodes)}
    inside: dict[str, list[int]] = {}  # submodule → the places of the nodes that were called in it
    for node in nodes:
        if node in units and units.find(node) in connected and not is_number(node):
            for path in _paths(node):
                inside.setdefault(path, []).append(position[node])
    for node in lone.values():
        places = next((inside[path] for path in reversed(_paths(node)) if path in inside), [])
        if places:
            yield node, nodes[places[min(bisect(places, position[node]), len(places) - 1)]]


def _connected(program: Program, units: Union[fx.Node]) -> set[fx.Node]:
    """The units that a value leads to or from."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        for source in {made_by(operand) for operand in node.all_input_nodes}:
            if source not in units:
                continue
            if node.op == "output":
                found.add(units.find(source))
            elif node in units and not units.same(source, node):
                found |= {units.find(source), units.find(node)}
    return found


def _paths(node: fx.Node) -> list[str]:
    """The submodules that a node was called in, outermost first; the model itself is \"\"."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(dict.fromkeys(["", *(path for path, _ in stack.values())]))
