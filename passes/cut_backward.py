"""Cut backward: the graph of a compiled stage's backward in two, I and W.

What AOTAutograd makes of a stage has a backward that returns a gradient for each input, parameters among them. I is all
that the others' gradients are made from, W the rest of what the parameters' are. What passes between the two are values
that I has, and what the backward was given::

    dy, x, weight ─┬─ I: dx = dy @ weight
                   └─ W: dweight = dy.T @ x
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from fxpipe.torch_compat import OpOverload, schema_of

_MASK = "output_mask"
_CRASHES = torch.ops.aten.native_group_norm_backward.default
"""Where memory is in channels_last, its kernel crashes for the parameters' gradients alone."""


@dataclass(frozen=True)
class BackwardPart:
    """One half of a backward: its code, and the values of the backward that it takes and gives, by name."""

    code: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    @property
    def does_anything(self) -> bool:
        return any(node.op not in ("placeholder", "output") for node in self.code.graph.nodes)


@dataclass(frozen=True)
class Halves:
    """A backward in two. ``given``: the backward's arguments; ``gradients``: its results; None where there is none.

    ``of_input``, ``of_weights``: I and W. A gradient may be what the backward was given, and made by neither.
    """

    given: tuple[str, ...]
    gradients: tuple[str | None, ...]
    of_input: BackwardPart
    of_weights: BackwardPart


def cut_backward(backward: fx.GraphModule, later: Collection[int]) -> Halves:
    """I and W. ``later``: the places, among the results, of the gradients that W makes.

    A parameter's gradient that I needs, it makes; so it does whatever writes, or draws random numbers. The module is
    changed: a call that makes gradients for both becomes two.
    """
    graph = backward.graph
    returned: Any = graph.output_node().args[0]
    gradients = {place: node for place, node in enumerate(returned) if isinstance(node, Node)}
    # I: all that the gradients of inputs are made from, and whatever acts. W: the rest.
    now = [node for place, node in gradients.items() if place not in later]
    weights = [node for place, node in gradients.items() if place in later]
    effects = [node for node in graph.nodes if node.op.startswith("call_") and node.is_impure()]
    _call_twice(graph, _before([*now, *effects], ()))
    given = [node for node in graph.nodes if node.op == "placeholder"]
    in_input = _before([*now, *effects], given)
    # A call of several results belongs to one half with all of them.
    in_input |= {node for node in graph.nodes if node.target is operator.getitem and node.args[0] in in_input}
    # a view is cheaper made again than handed on
    views = {node for node in in_input if isinstance(node.target, OpOverload) and node.target.is_view}
    known = {*given, *in_input} - views
    crossing = _taken(weights, known)
    gives = [node for node in dict.fromkeys([*now, *crossing]) if node not in given]
    return Halves(
        tuple(node.name for node in given),
        tuple(gradients[place].name if place in gradients else None for place in range(len(returned))),
        _part(backward, gives, effects, given),
        _part(backward, [node for node in dict.fromkeys(weights) if node not in known], (), known),
    )


def _before(ends: Iterable[Node], known: Collection[Node]) -> set[Node]:
    """What the ends are made from, they among it, back to what is known."""
    found, waiting = set[Node](), [*ends]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in known:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _taken(ends: Collection[Node], known: Collection[Node]) -> list[Node]:
    """What is known and used by what the ends are made from, or is an end."""
    users = _before(ends, known)
    return sorted(node for node in known if node in ends or any(user in users for user in node.users))


def _call_twice(graph: fx.Graph, in_input: Collection[Node]) -> None:
    """Gives each half a call of its own, for its gradients alone, where an operator can be told which to make."""
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
            mask = [place in used for place in range(len(call.meta["val"]))]
            place = names.index(_MASK)
            if place < len(call.args):
                call.update_arg(place, mask)
            else:
                call.update_kwarg(_MASK, mask)


def _part(
    module: fx.GraphModule, makes: Sequence[Node], effects: Sequence[Node], known: Collection[Node]
) -> BackwardPart:
    """What makes these values, and has these effects, out of what is known."""
    graph, copies = fx.Graph(), dict[Node, Node]()
    ends = [*makes, *effects]
    needed, takes = _before(ends, known), _taken(ends, known)
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
