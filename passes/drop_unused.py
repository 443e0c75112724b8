"""Drop unused: what nothing reads and that does nothing else, such as an auxiliary head in evaluation, is left out."""

from __future__ import annotations

from torch import fx

from fxpipe.graph.program import Program, is_assertion, is_boundary, is_boundary_value
from fxpipe.passes.analysis.effects import acts, aliased, written_now
from fxpipe.passes.analysis.union import Union


def drop_unused(program: Program) -> Program:
    """Program → the same program, without nodes that change neither its result nor what the model holds."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    program = program.replace(graph=graph)
    memory = Union(graph.nodes)
    for node in graph.nodes:
        for source in aliased(program, node):
            memory.join(node, source)
    # Backwards, so that a write is met when all that reads its memory afterwards is known.
    lasting = {memory.find(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in reversed(list(graph.nodes)):
        if node.users or not _is_idle(program, node, memory, lasting):
            lasting |= {memory.find(source) for source in node.all_input_nodes}
        else:
            graph.erase_node(node)
    return program


def _is_idle(program: Program, node: fx.Node, memory: Union[fx.Node], lasting: set[fx.Node]) -> bool:
    """Whether a node whose result nothing reads can go."""
    if node.op == "get_attr" or is_boundary(node) or is_boundary_value(node):
        return True
    if node.op in ("placeholder", "output") or is_assertion(node) or acts(program, node):
        return False
    return lasting.isdisjoint(map(memory.find, written_now(program, node)))
