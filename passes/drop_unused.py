"""Drop unused: leaves out the nodes that nothing reads and that do nothing else, as an auxiliary head in evaluation.

Erase boundaries: leaves out the stage boundaries, for ``fxpipe.plan.balance``, which chooses the cut itself.
"""

from __future__ import annotations

from torch import fx

from fxpipe.graph.program import Program, before_boundary, is_assertion, is_boundary, is_boundary_value
from fxpipe.passes.alias_groups import shared_memory
from fxpipe.passes.effects import acts, written_now
from fxpipe.passes.union import Union


def drop_unused(program: Program) -> Program:
    """Program → the same program, without nodes that change neither its result nor what the model holds."""
    program = program.with_own_graph()
    graph = program.graph
    memory = shared_memory(program, with_writers=True)
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


def erase_boundaries(program: Program) -> Program:
    """Program → the same program without boundaries; what stood behind one is what stood in front of it."""
    program = program.with_own_graph()
    nodes = list(program.nodes)
    for node in filter(is_boundary_value, nodes):
        node.replace_all_uses_with(before_boundary(node))
    # backwards: a node can be erased when all that use it are gone
    for node in reversed(nodes):
        if is_boundary(node) or is_boundary_value(node):
            program.graph.erase_node(node)
    return program
