"""Counting: extracts the part of a program that computes the count of a loss that is a ``Sum``.

A step runs this part for all micro-batches before the first backward, so that each backward begins with the gradient of
the whole step's mean, as in plain PyTorch.

Takes: a ``Program`` whose result is a loss. Gives: ``Counting``, with a graph from batch inputs to the count; without a
graph if the count needs more than inputs; None if the loss is no ``Sum``.

1. Find the count in the program's result.
2. Walk back from it to batch inputs, sizes of inputs and constants. Anything else ends the walk: the count is then
   known only after the forward.
3. Copy the nodes of the walk into a graph of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx
from torch.fx import Node

from fxpipe.graph.program import Program, SizeOf, graph_module, made_by
from fxpipe.graph.topological import reachable
from fxpipe.passes.effects import SIZE, is_random, written
from fxpipe.stage.loss import Counting, Sum
from fxpipe.torch_compat import pytree


def counting(program: Program, inputs: Collection[str] | None) -> Counting | None:
    """Returns how to compute the count from these ``inputs``; None if the loss is no ``Sum``. The ``Counting`` has no
    function if the count needs more: a stage's values, a tensor of the model, random numbers, the user's Python. It
    has none either if ``inputs`` is None, since a loss of several micro-batches has its own items."""
    # 1. the count
    result = program.graph.output_node().args[0]
    if program.result is not None:
        result = pytree.tree_unflatten(list(result), program.result)  # type: ignore[arg-type]
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Node) and loss.target is Sum:  # the symbolic tracer's form
        loss = Sum(*loss.args, **loss.kwargs)  # type: ignore[arg-type]
    if not isinstance(loss, Sum):
        return None
    if inputs is None:
        return Counting((), None)
    # 2. what the count depends on
    graph, built, names = fx.Graph(), dict[Node, Node](), list[str]()
    shared = frozenset[str]().union(*program.written)
    ends = [made_by(loss.count)] if isinstance(loss.count, Node) else []
    needed = set[Node]()
    for node in reachable(ends, lambda each: () if each in built else map(made_by, each.all_input_nodes)):
        needed.add(node)
        size = SizeOf.queried_by(node) if node.target is SIZE else None
        name = str(node.target) if node.op == "placeholder" else size
        if name in inputs:
            names.append(str(name))
            built[node] = graph.placeholder(node.name)
            continue
        modes = node.meta.get("modes")  # forward's own modes: under autocast a count may be a different number
        computes = node.op in ("call_function", "call_method") and not is_random(program, node)
        computes = computes and not (modes is not None and modes.autocast)
        constant = node.op == "get_attr" and node.target in program.constants
        if node.name in shared or not (constant or (computes and not written(program, node))):
            return Counting((), None)
    # 3. its own graph
    for node in program.nodes:
        if node in needed and node not in built:
            built[node] = graph.node_copy(node, lambda operand: built[made_by(operand)])
    graph.output(built[made_by(loss.count)] if isinstance(loss.count, Node) else loss.count)
    root = {str(node.target): program.attribute(node) for node in graph.nodes if node.op == "get_attr"}
    return Counting(tuple(names), graph_module(root, graph, "Counting"))
