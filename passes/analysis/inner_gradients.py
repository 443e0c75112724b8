"""Inner gradients: what forward itself differentiates (forces, gradient penalties) must lie in one stage.

Autograd knows nothing of what another stage has computed: a gradient through it would be an error, or 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpipe.errors import TraceError
from fxpipe.graph.program import Program, is_boundary, where
from fxpipe.passes.alias_groups import held
from fxpipe.passes.analysis.effects import written


def inner_gradients(program: Program) -> list[list[fx.Node]]:
    """For each ``torch.autograd.grad`` in forward, the call and the nodes that it goes through; TraceError where a
    boundary is one of them."""
    found = []
    for node in program.graph.nodes:
        if node.target is torch.autograd.grad:
            between = _between(program, node)
            marker = next((other for other in between if is_boundary(other)), None)
            if marker is not None:
                raise TraceError(
                    f"forward computes a gradient{where(node)} through the stage boundary {marker.name}{where(marker)},"
                    " and autograd knows only what its own stage has computed; move the boundary behind the gradient, "
                    "or in front of what it is taken by (requires_grad_ and all that follows)"
                )
            found.append([*between, node])
    return found


def _between(program: Program, call: fx.Node) -> list[fx.Node]:
    """The nodes on the way from what a gradient is taken by to what it is taken of, in program order.

    A write is on the way where what it writes is. A parameter enters with the modules that hold it, too.
    """
    sources = set(_nodes(call, 1, "inputs"))
    tensors = {tensor for source in sources for tensor in held(program, source)}
    entries = {n for n in program.graph.nodes if n.op == "call_module" and held(program, n) & tensors}
    before = [node for node in program.graph.nodes if node < call]
    reached = sources | entries
    for node in before:
        if any(operand in reached for operand in node.all_input_nodes):
            reached |= {node, *written(program, node)}
    wanted = set(_nodes(call, 0, "outputs"))
    for node in reversed(before):
        if node in wanted or any(target in wanted for target in written(program, node)):
            wanted |= {node, *node.all_input_nodes}
    passed = (reached & wanted) - sources | (entries & wanted)
    passed |= {node for node in sources & wanted if any(operand in reached for operand in node.all_input_nodes)}
    return [node for node in before if node in passed]


def _nodes(call: fx.Node, place: int, name: str) -> Iterable[fx.Node]:
    """The nodes in an argument of a call."""
    argument: Any = call.args[place] if place < len(call.args) else call.kwargs.get(name)
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found
