"""Defer weights: rewrites a stage so that its backward runs in two halves, I and W.

Takes: a ``Stage``. Gives: the stage with ``deferring``, a second function that its forward runs when a table splits its
backward, and ``in_input``, the parameters that stay in I.

1. Find the values that depend on parameters alone: a cast, ``weight * scale``, ``weight.t()``.
2. Find the calls that use parameters or such values, and that are listed in ``CALLS`` or ``MODULES``.
3. Drop a call if one of its parameters is also used by a call that is not listed; repeat until nothing changes.
4. Each remaining call becomes a call that leaves the parameters' gradients to W. The rest of the stage stays unchanged.

For example ``linear(%x, %weight, %bias)`` becomes ``deferred_linear(%deferred, None, (%weight, %bias), (%weight,
%bias), %x, %weight, %bias)``. In I it gives the gradient of ``x``; in W it gives the parameters' gradients.

Parameters whose gradients would not have the same bits stay in I:

- parameters of modules that run as a whole, except the classes of ``torch.nn`` in ``MODULES``;
- parameters that other operations use: a write in place, a call with the same input twice, an unlisted function;
- parameters in a call with any of these, since all terms of a parameter's gradient must be summed at once.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.effects import is_in_place, is_known, is_number, is_random, nodes_in, operator_name, written
from fxpipe.stage.deferred import deferring, runs_hooks

CALLS = frozenset(
    "linear bilinear conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm "
    "mv addmm baddbmm einsum tensordot layer_norm batch_norm instance_norm embedding index_select index "
    "getitem prelu add sub mul div truediv cat concat stack where".split()
)
"""Functions and methods that use each argument once: an argument gets a single gradient, not a sum of several, which
autograd would add to the gradients of other users in a different order."""

MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.PReLU, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Module classes, without subclasses, that use each argument once. No group norm: with channels_last memory, torch's
kernel crashes if asked for the parameters' gradients alone."""


def defer_weights(stage: Stage) -> Stage:
    """Returns the stage with ``deferring``, its rewritten function, and ``in_input``, the parameters that stay in I.

    The function runs on the stage's own module, whose parameters may change from call to call.
    """
    trained = {name: parameter for name, parameter in stage.parameters.items() if parameter.requires_grad}
    if not isinstance(stage.module, fx.GraphModule):
        return replace(stage, deferring=None, in_input=tuple(trained))
    deferrable = _Deferrable(Program(stage.module, stage.module.graph))
    code = fx.GraphModule(stage.module, deferrable.rewritten(), class_name=f"{type(stage.module).__name__}_in_halves")
    return replace(
        stage,
        deferring=types.MethodType(type(code).forward, stage.module) if deferrable.calls else None,
        in_input=tuple(name for name, parameter in trained.items() if id(parameter) in deferrable.in_input),
    )


def halves_of(program: Program) -> tuple[list[str], list[str]]:
    """Returns the nodes that would leave gradients to W if the backwards of the stages were split into halves, and the
    nodes whose parameters' gradients would stay in I."""
    deferrable = _Deferrable(program)
    trained = {id(parameter) for parameter in program.module.parameters() if parameter.requires_grad}
    calls = [node.name for node in deferrable.calls if deferrable.parameters(node) & trained]
    return calls, [node.name for node in program.nodes if deferrable.parameters(node) & deferrable.in_input]


class _Deferrable:
    """Finds the calls of a graph that can leave their parameters' gradients to W.

    ``made_from``: node that depends on no input → the ``get_attr`` nodes of the parameters that it depends on.
    ``calls``: the calls that can leave gradients to W; ``in_input``: ids of the parameters that other calls use, too.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._nodes = program, list(program.nodes)
        self.made_from: dict[Node, frozenset[Node]] = {}
        # 1. values from parameters alone
        for node in self._nodes:
            self._trace(node)
        users = [node for node in self._nodes if node not in self.made_from and self.parameters(node)]
        # 2. listed calls
        differentiates = any(node.target is torch.autograd.grad for node in self._nodes)
        # torch.autograd.grad inside forward needs the whole autograd graph, so no gradient is left to W.
        self.calls = [] if differentiates else [node for node in users if self._is_listed(node)]
        self.in_input: set[int] = set()
        while True:  # 3. a call with a kept parameter keeps all parameters that it uses
            # Autograd sums a parameter's gradients in a fixed order: if a use stays in I, all uses must.
            others = [node for node in users if node not in self.calls and not is_number(node)]
            self.in_input = set().union(*map(self.parameters, others))
            lost = [node for node in self.calls if self.parameters(node) & self.in_input]
            if not lost:
                break
            self.calls = [node for node in self.calls if node not in lost]

    def _trace(self, node: Node) -> None:
        """Adds a node to ``made_from`` if it depends on no input."""
        operands = [operand for operand in node.all_input_nodes if not is_number(operand)]
        if node.op == "get_attr":
            value = self._program.attribute(node)
            if isinstance(value, Tensor):
                self.made_from[node] = frozenset({node} if isinstance(value, nn.Parameter) else ())
        elif self._only_computes(node) and all(operand in self.made_from for operand in operands):
            self.made_from[node] = frozenset().union(*(self.made_from[operand] for operand in operands))

    def _only_computes(self, node: Node) -> bool:
        """Whether the node calls an operation of torch that writes nothing and draws no random numbers."""
        return _is_plain(node) and not (
            operator_name(node).endswith("_") or written(self._program, node) or is_random(self._program, node)
        )

    def _is_listed(self, node: Node) -> bool:
        """Whether the operation that a node calls uses each of its arguments once, so that its gradients keep their
        bits."""
        # With the same input twice, the two gradients would have to be added in autograd's order.
        operands = nodes_in((node.args, node.kwargs))
        inputs = [operand for operand in operands if operand not in self.made_from and not is_number(operand)]
        repeats = len(inputs) > len(set(inputs))
        if node.op == "call_module":
            module = self._program.attribute(node)
            return _is_listed_module(module) and (_is_attention(module) or not repeats)
        if not _is_plain(node) or operator_name(node) not in CALLS or is_number(node) or repeats:
            return False
        written_to = written(self._program, node)
        return not (is_in_place(node) or "out" in node.kwargs) and all(
            self.made_from.get(source) == frozenset() for source in written_to
        )

    def parameters(self, node: Node) -> set[int]:
        """Returns the ids of the parameters that a node uses, or that the module it calls or passes on holds."""
        ids = {id(self._program.attribute(root)) for root in self._roots(node)}
        if node.op in ("call_module", "get_attr"):
            value = self._program.attribute(node)
            ids |= set(map(id, value.parameters())) if isinstance(value, nn.Module) else set()
        return ids

    def _roots(self, node: Node) -> list[Node]:
        """Returns the ``get_attr`` nodes of the parameters that a node's arguments are, or depend on."""
        operands = (self.made_from.get(operand, frozenset()) for operand in node.all_input_nodes)
        return sorted(frozenset().union(*operands))

    def rewritten(self) -> fx.Graph:
        """Returns the graph with a ``Deferred`` as first argument, which takes each call's parameter gradients."""
        # 4. the rewritten calls
        graph = fx.Graph()
        deferred = graph.placeholder("deferred")
        copies: dict[Node, Node] = {}
        calls = set(self.calls)
        for node in self._nodes:
            if node not in calls:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                continue
            target, is_module = str(node.target), node.op == "call_module"
            module = graph.create_node("get_attr", target) if is_module else None
            function: Any = getattr(Tensor, target) if node.op == "call_method" else node.target
            is_attention = is_module and _is_attention(self._program.attribute(target))
            call = deferring(function, f"deferred_{node.name}", is_attention)
            roots = tuple(copies[root] for root in self._roots(node))
            # Values made from parameters alone stay attached to the parameters: W computes their gradients.
            attached = tuple(copies[operand] for operand in node.all_input_nodes if operand in self.made_from)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            args = (deferred, module, roots, attached, *args)
            copies[node] = graph.create_node("call_function", call, args, dict(kwargs), name=node.name)
            copies[node].meta = dict(node.meta)
        graph.lint()
        return graph


def _is_plain(node: Node) -> bool:
    """Whether the node calls a method, or a function of torch or Python, but not of fxpipe."""
    if node.op != "call_function":
        return node.op == "call_method"
    return is_known(node.target) and not str(getattr(node.target, "__module__", "")).startswith("fxpipe")


def _is_attention(module: Any) -> bool:
    """Whether a module is torch's multi-head attention, which uses its input several times by itself."""
    return isinstance(module, nn.MultiheadAttention)


def _is_listed_module(module: Any) -> bool:
    """Whether a module is of a listed class, with the class's own forward and no hooks."""
    if type(module) not in MODULES or "forward" in vars(module) or runs_hooks(module):
        return False
    return getattr(module, "max_norm", None) is None and getattr(module, "padding_mode", "zeros") == "zeros"
