"""Erase boundaries: the program as if the user had marked nothing, for whoever balances the cut anew."""

from __future__ import annotations

from torch import fx

from fxpipe.graph.program import Program, before_boundary, is_boundary, is_boundary_value


def erase_boundaries(program: Program) -> Program:
    """Program → the same program without boundaries; what stood behind one is what stood in front of it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in list(graph.nodes):
        if is_boundary_value(node):
            node.replace_all_uses_with(before_boundary(node))
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if is_boundary(node):
            graph.erase_node(node)
    return program.replace(graph=graph)
