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
    results = _results(backward)
    now = [node for place, node in enumerate(results) if node is not None and place not in later]
    weights = [node for place, node in enumerate(results) if node is not None and place in later]
    effects = [node for node in backward.graph.nodes if node.op.startswith("call_") and node.is_impure()]
    _mask(backward.graph, _before([*now, *effects], ()))
    given = [node for node in backward.graph.nodes if node.op == "placeholder"]
    in_input = _before([*now, *effects], given)
    in_input |= {node for node in backward.graph.nodes if _is_item(node) and node.args[0] in in_input}
    known = {*given, *(node for node in in_input if not _is_view(node))}
    crossing = _taken(weights, known)
    return Halves(
        tuple(node.name for node in given),
        tuple(None if node is None else node.name for node in results),
        _part(backward, [node for node in dict.fromkeys([*now, *crossing]) if node not in given], effects, given),
        _part(backward, [node for node in dict.fromkeys(weights) if node not in known], (), known),
    )


def _results(module: fx.GraphModule) -> list[fx.Node | None]:
    found: Any = module.graph.output_node().args[0]
    return [node if isinstance(node, fx.Node) else None for node in found]


def _before(ends: Iterable[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """What the ends are made from, they among it, back to what is known."""
    found, waiting = set[fx.Node](), [*ends]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in known:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _taken(ends: Collection[fx.Node], known: Collection[fx.Node]) -> list[fx.Node]:
    """What is known and used by what the ends are made from, or is an end."""
    users = _before(ends, known)
    return sorted(node for node in known if node in ends or any(user in users for user in node.users))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_view(node: fx.Node) -> bool:
    """Whether it is cheaper made again than handed on."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def _mask(graph: fx.Graph, in_input: Collection[fx.Node]) -> None:
    """Gives each half a call of its own, for its gradients alone, where an operator can be given which to make."""
    for node in list(graph.nodes):
        if not _has_mask(node) or not all(map(_is_item, node.users)):
            continue
        rest = [item for item in node.users if item not in in_input]
        if rest and len(rest) < len(node.users):
            with graph.inserting_after(node):
                other = graph.node_copy(node)
            for item in rest:
                item.replace_input_with(node, other)
            for call in (node, other):
                _set_mask(call)


def _has_mask(node: fx.Node) -> bool:
    schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
    return schema is not None and node.target is not _CRASHES and any(one.name == _MASK for one in schema.arguments)


def _set_mask(node: fx.Node) -> None:
    """Of what it makes, what is used."""
    names = [argument.name for argument in schema_of(node.target).arguments]
    used = {user.args[1] for user in node.users}
    mask = [place in used for place in range(len(node.meta["val"]))]
    place = names.index(_MASK)
    if place < len(node.args):
        node.update_arg(place, mask)
    else:
        node.update_kwarg(_MASK, mask)


def _part(
    module: fx.GraphModule, makes: Sequence[fx.Node], effects: Sequence[fx.Node], known: Collection[fx.Node]
) -> BackwardPart:
    """What makes these values, and has these effects, out of what is known."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
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
    return BackwardPart(
        fx.GraphModule(module, graph), tuple(node.name for node in takes), tuple(node.name for node in makes)
    )
