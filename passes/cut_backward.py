"""Cut backward: splits the graph of a compiled stage's backward into two graphs, I and W.

Takes: AOTAutograd's backward of a stage, which returns a gradient for each input, including parameters. Gives:
``Halves``. I computes the gradients of the other inputs, and W the remaining part of the parameters' gradients. W takes
values of I, and arguments of the backward::

    dy, x, weight ─┬─ I: dx = dy @ weight
                   └─ W: dweight = dy.T @ x

1. An operator that computes gradients for both halves by an ``output_mask`` is called twice, once in each half.
2. I is all that the inputs' gradients depend on, and all nodes with effects.
3. W is the rest. It recomputes views, and takes the other values of I that it needs.
4. Each half becomes a graph module with named values.

Together the halves run the operators of the backward; split operators and some views run twice. The bits of the
gradients stay.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from fxpipe.graph.topological import reachable
from fxpipe.torch_compat.operators import OpOverload, schema_of

_MASK = "output_mask"
_CRASHES = torch.ops.aten.native_group_norm_backward.default
"""With channels_last memory, this kernel crashes if asked for the parameters' gradients alone."""


@dataclass(frozen=True)
class BackwardPart:
    """A half of a backward: its code, and the names of the backward's values that the half takes and returns."""

    code: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def does_anything(self) -> bool:
        """Whether the half calls an operator: a stage without deferred parameters has no W."""
        return any(node.op not in ("placeholder", "output") for node in self.code.graph.nodes)


@dataclass(frozen=True)
class Halves:
    """The halves of a backward. ``arguments``: the backward's; ``gradients``: its results, None for no gradient.

    ``of_input``, ``of_weights``: I and W. A gradient may be an argument of the backward, which neither half computes.
    """

    arguments: tuple[str, ...]
    gradients: tuple[str | None, ...]
    of_input: BackwardPart
    of_weights: BackwardPart


def cut_backward(backward: fx.GraphModule, later: Collection[int]) -> Halves:
    """Returns I and W. ``later``: the places, among the results, of the gradients that W computes.

    I also computes parameters' gradients that I itself needs, and contains all writes and random draws. The function
    changes ``backward``: a call that computes gradients for both halves becomes two calls.
    """
    graph = backward.graph
    returned: Any = graph.output_node().args[0]
    gradients = {index: node for index, node in enumerate(returned) if isinstance(node, Node)}
    # the ends of both halves
    now = [node for index, node in gradients.items() if index not in later]
    weights = [node for index, node in gradients.items() if index in later]
    effects = [node for node in graph.nodes if node.op.startswith("call_") and node.is_impure()]
    _call_twice(graph, _before([*now, *effects], ()))  # 1. a call for each half
    # 2. I: all nodes that the gradients of inputs depend on, and nodes with effects. W: the rest.
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    in_input = _before([*now, *effects], arguments)
    # A call with several results is in the same half as all of its results.
    in_input |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in in_input}
    # 3. W recomputes a view, which is cheaper than passing it on.
    views = {node for node in in_input if isinstance(node.target, OpOverload) and node.target.is_view}
    available = {*arguments, *in_input} - views
    crossing = _taken(weights, available)
    gives = [node for node in dict.fromkeys([*now, *crossing]) if node not in arguments]
    # 4. graphs with named values
    return Halves(
        tuple(node.name for node in arguments),
        tuple(gradients[index].name if index in gradients else None for index in range(len(returned))),
        _part(backward, gives, effects, arguments),
        _part(backward, [node for node in dict.fromkeys(weights) if node not in available], (), available),
    )


def _before(ends: Iterable[Node], available: Collection[Node]) -> set[Node]:
    """Returns the nodes that the ends depend on, including the ends, without known nodes and their inputs."""
    return set(reachable(ends, lambda node: () if node in available else node.all_input_nodes)).difference(available)


def _taken(ends: Collection[Node], available: Collection[Node]) -> list[Node]:
    """Returns the known nodes that are ends, or that nodes which the ends depend on use."""
    users = _before(ends, available)
    return sorted(node for node in available if node in ends or any(user in users for user in node.users))


def _call_twice(graph: fx.Graph, in_input: Collection[Node]) -> None:
    """Gives each half its own call, for its gradients alone, of operators with an ``output_mask``."""
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target is _CRASHES:
            continue
        names = [argument.name for argument in schema_of(node.target).arguments]
        items = list(node.users)
        rest = [item for item in items if item not in in_input]
        are_items = all(item.target is operator.getitem for item in items)
        if _MASK not in names or not are_items or len(rest) in (0, len(items)):
            continue
        with graph.inserting_after(node):
            other = graph.node_copy(node)
        for item in rest:
            item.replace_input_with(node, other)
        for call in (node, other):
            used = {item.args[1] for item in call.users}
            mask = [index in used for index in range(len(call.meta["val"]))]
            index = names.index(_MASK)
            if index < len(call.args):
                call.update_arg(index, mask)
            else:
                call.update_kwarg(_MASK, mask)


def _part(
    module: fx.GraphModule, makes: Sequence[Node], effects: Sequence[Node], available: Collection[Node]
) -> BackwardPart:
    """Returns the part that computes ``makes`` and has the ``effects``, from known nodes.

    ``available``: the nodes whose values the part takes instead of computing them. Its placeholders are those that it
    uses.
    """
    graph, copies = fx.Graph(), dict[Node, Node]()
    ends = [*makes, *effects]
    needed, takes = _before(ends, available), _taken(ends, available)
    for node in takes:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in makes))
    graph.lint()
    code = fx.GraphModule(module, graph)
    return BackwardPart(code, tuple(node.name for node in takes), tuple(node.name for node in makes))
