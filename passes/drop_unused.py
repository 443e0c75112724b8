"""Drop unused: removes nodes without readers and without effects, such as an auxiliary head in evaluation.

Erase boundaries, erase cuts: remove stage boundaries, for ``fxpipe.search``, which chooses the cut itself.

Takes: a ``Program``. Gives: a ``Program`` with its own, smaller graph. The nodes are visited from the end, so that a
chain of unused nodes goes as a whole. A node stays if it writes a parameter, a buffer, an input, or memory that a later
node reads; if its effects are unknown; and if it is an assertion.
"""

from __future__ import annotations

from torch import fx

from fxpipe.graph.program import Program, before_boundary, gather_of, is_assertion, is_boundary, is_boundary_value
from fxpipe.passes.alias_groups import shared_memory
from fxpipe.passes.effects import acts, written_now
from fxpipe.passes.union import Union


def drop_unused(program: Program) -> Program:
    """Returns the program without nodes that change neither its result nor the model's parameters and buffers."""
    program = program.with_own_graph()
    graph = program.graph
    memory = shared_memory(program, with_writers=True)
    # Backwards, so that at a write all later readers of its memory are known.
    lasting = {memory.find(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in reversed(list(graph.nodes)):
        if node.users or not _is_idle(program, node, memory, lasting):
            lasting |= {memory.find(source) for source in node.all_input_nodes}
        else:
            graph.erase_node(node)
    return program


def _is_idle(program: Program, node: fx.Node, memory: Union[fx.Node], lasting: set[fx.Node]) -> bool:
    """Whether a node without readers can be removed."""
    if node.op == "get_attr" or is_boundary(node) or is_boundary_value(node):
        return True
    if node.op in ("placeholder", "output") or is_assertion(node) or acts(program, node):
        return False
    return lasting.isdisjoint(map(memory.find, written_now(program, node)))


def erase_boundaries(program: Program, gathering: bool = True) -> Program:
    """Returns the program without boundaries; users of a boundary's result use its input instead. ``gathering``:
    whether boundaries that gather are removed, too."""
    program = program.with_own_graph()
    markers = [node for node in program.nodes if is_boundary(node) and (gathering or not gather_of(node))]
    # Backwards: fx erases a node only after all of its users.
    for marker in reversed(markers):
        for node in list(marker.users):
            node.replace_all_uses_with(before_boundary(node))
            program.graph.erase_node(node)
        program.graph.erase_node(marker)
    return program


def erase_cuts(program: Program) -> Program:
    """Returns the program without the boundaries that do not gather."""
    return erase_boundaries(program, gathering=False)
