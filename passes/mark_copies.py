"""Mark copies: the nodes that each stage needing them computes for itself, such as masks and ``logit_scale.exp()``."""

from __future__ import annotations

from torch import fx, nn

from fxpipe.ir import Program, is_compute
from fxpipe.passes.effects import is_random, updates_own_buffers


def mark_copies(program: Program) -> Program:
    """Fills ``Program.copied``: deterministic nodes without writes, on inputs alone or on parameters alone."""
    in_written_group = frozenset().union(*program.written)
    roots: dict[fx.Node, frozenset[str]] = {}  # what a source or copied node depends on: "input", "parameter"
    copied: set[str] = set()
    for node in program.graph.nodes:
        if node.name in in_written_group:
            continue
        if node.op == "placeholder":
            roots[node] = frozenset({"input"})
        elif node.op == "get_attr":
            roots[node] = _kind(program, str(node.target))
        elif is_compute(node) and all(source in roots for source in node.all_input_nodes):
            depends = frozenset().union(*(roots[source] for source in node.all_input_nodes), _own(program, node))
            if len(depends) < 2 and not is_random(program, node) and not _writes_inside(program, node):
                roots[node] = depends
                copied.add(node.name)
    return program.replace(copied=frozenset(copied))


def _kind(program: Program, target: str) -> frozenset[str]:
    if target in program.constants:
        return frozenset()
    return frozenset({"parameter" if isinstance(program.attribute(target), nn.Parameter) else "input"})


def _own(program: Program, node: fx.Node) -> frozenset[str]:
    """What a module call brings along by itself."""
    if node.op != "call_module":
        return frozenset()
    module = program.attribute(str(node.target))
    return frozenset({"parameter"}) if any(True for _ in module.parameters()) else frozenset()


def _writes_inside(program: Program, node: fx.Node) -> bool:
    return node.op == "call_module" and updates_own_buffers(program.attribute(str(node.target)))
