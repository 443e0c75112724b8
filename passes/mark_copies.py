"""Mark copies: finds the nodes that each stage computes for itself, such as masks and ``logit_scale.exp()``.

Takes: a ``Program`` with ``written``. Gives: ``Program.copied``, the names of these nodes. They belong to no stage, and
cross no boundary: each stage that uses one has a copy.

A node is copied if it depends on inputs alone, on parameters alone, or on neither, draws no random numbers and shares
no memory that is written. For example, in ``x + mask.unsqueeze(1)`` with inputs x and mask, unsqueeze and add are
copied. In ``self.up(x) + mask.unsqueeze(1)`` only unsqueeze is: ``up`` depends on an input and on parameters.

A copy costs its computation in each stage that uses it, and saves a message.
"""

from __future__ import annotations

from torch import fx, nn

from fxpipe.graph.program import Program, is_compute, made_by
from fxpipe.passes.alias_groups import holders_of_written
from fxpipe.passes.effects import is_random


def mark_copies(program: Program) -> Program:
    """Fills ``Program.copied``: deterministic nodes without writes that depend on inputs or parameters alone."""
    changing = set(frozenset().union(*program.written))
    changing |= {node.name for holders in holders_of_written(program) for node in holders}
    roots: dict[fx.Node, frozenset[str]] = {}  # source or copied node → its dependencies: "input", "parameter"
    copied: set[str] = set()
    for node in program.nodes:
        if node.name in changing:
            continue
        if node.op == "placeholder":
            roots[node] = frozenset({"input"})
        elif node.op == "get_attr":
            roots[node] = _kind(program, str(node.target))
        elif is_compute(node) and all(made_by(operand) in roots for operand in node.all_input_nodes):
            # Nodes that depend on inputs and parameters are the model's own work, and are computed once.
            depends = frozenset().union(*(roots[made_by(operand)] for operand in node.all_input_nodes))
            if node.op == "call_module" and any(True for _ in program.attribute(node).parameters()):
                depends |= {"parameter"}
            if len(depends) < 2 and not is_random(program, node):
                roots[node] = depends
                copied.add(node.name)
    return program.replace(copied=frozenset(copied))


def _kind(program: Program, target: str) -> frozenset[str]:
    """Whether a ``get_attr`` node is a "parameter", counts as an "input" (a buffer), or is neither (a constant)."""
    if target in program.constants:
        return frozenset()
    return frozenset({"parameter" if isinstance(program.attribute(target), nn.Parameter) else "input"})
