"""Defer weights: gives a stage the form in which its backward runs in two halves, I and W.

Each call that uses parameters, or values made from parameters alone (a cast, ``weight * scale``, ``weight.t()``),
becomes one whose parameters' gradients are left to W. The rest of the stage stays unchanged. What cannot be split with
the same bits stays in I:

- the parameters of modules that run as a whole, but for those of ``torch.nn`` that are listed here;
- those that any other operation uses: a write in place, one that uses an input twice, a function that is not listed;
- whatever meets these in a call, for the sums of a parameter's gradient must all come at once.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.graph.deferred import deferring, runs_hooks
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.effects import is_in_place, is_known, is_number, is_random, nodes_in, operator_name, written

CALLS = frozenset(
    "linear bilinear conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d matmul mm bmm "
    "mv addmm baddbmm einsum tensordot layer_norm batch_norm instance_norm embedding index_select index "
    "getitem prelu add sub mul div truediv cat concat stack where".split()
)
"""Functions and methods that use each argument once: what comes back to it is one gradient, not a sum of several, which
autograd would add to those of its other users in another order."""

MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.PReLU, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that do, too; of these classes alone, not of those derived from them. No group norm: where memory is in
channels_last, torch's kernel crashes for the parameters' gradients alone."""


def defer_weights(stage: Stage) -> Stage:
    """The same stage, with the function of ``Stage.deferring``, and the parameters that stay in I as ``in_input``.

    It runs on the stage's own module, whose parameters may be others from call to call.
    """
    trained = {name: parameter for name, parameter in stage.parameters.items() if parameter.requires_grad}
    if not isinstance(stage.module, fx.GraphModule):
        return replace(stage, deferring=None, in_input=tuple(trained))
    found = _Deferrable(Program(stage.module, stage.module.graph))
    code = fx.GraphModule(stage.module, found.rewritten(), class_name=f"{type(stage.module).__name__}_in_halves")
    return replace(
        stage,
        deferring=types.MethodType(type(code).forward, stage.module) if found.calls else None,
        in_input=tuple(name for name, parameter in trained.items() if id(parameter) in found.kept),
    )


def deferred_calls(program: Program) -> list[str]:
    """The nodes of a program that would leave gradients to W, if its stages' backwards were in two halves."""
    found = _Deferrable(program)
    trained = {id(parameter) for parameter in program.module.parameters() if parameter.requires_grad}
    return [node.name for node in found.calls if found.parameters(node) & trained]


class _Deferrable:
    """Which calls of a graph can leave their parameters' gradients to W.

    ``made_from``: nodes that no input reaches → the ``get_attr`` nodes of the parameters that they are made from, if
    any. ``calls``: those that can; ``kept``: the parameters, by id, that are used by others, too.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._nodes = program, list(program.nodes)
        self.made_from: dict[Node, frozenset[Node]] = {}
        for node in self._nodes:
            self._trace(node)
        users = [node for node in self._nodes if node not in self.made_from and self.parameters(node)]
        differentiates = any(node.target is torch.autograd.grad for node in self._nodes)
        # torch.autograd.grad inside forward needs the whole graph, so nothing of it is left to W.
        self.calls = [] if differentiates else [node for node in users if self._is_listed(node)]
        self.kept: set[int] = set()
        while True:  # a call that uses a parameter that is kept keeps all that it uses
            # Autograd adds a parameter's gradients in one order: if one use stays in I, all must.
            others = [node for node in users if node not in self.calls and not is_number(node)]
            self.kept = set().union(*map(self.parameters, others))
            lost = [node for node in self.calls if self.parameters(node) & self.kept]
            if not lost:
                break
            self.calls = [node for node in self.calls if node not in lost]

    def _trace(self, node: Node) -> None:
        operands = [operand for operand in node.all_input_nodes if not is_number(operand)]
        if node.op == "get_attr":
            value = self._program.attribute(node)
            if isinstance(value, Tensor):
                self.made_from[node] = frozenset({node} if isinstance(value, nn.Parameter) else ())
        elif self._only_computes(node) and all(operand in self.made_from for operand in operands):
            self.made_from[node] = frozenset().union(*(self.made_from[operand] for operand in operands))

    def _only_computes(self, node: Node) -> bool:
        """Whether it is one of torch's own operations that write nothing and draw nothing."""
        return _is_plain(node) and not (
            operator_name(node).endswith("_") or written(self._program, node) or is_random(self._program, node)
        )

    def _is_listed(self, node: Node) -> bool:
        # given a value twice, what comes back of each would have to be added in autograd's order
        given = nodes_in((node.args, node.kwargs))
        inputs = [operand for operand in given if operand not in self.made_from and not is_number(operand)]
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
        """The parameters, by id, that a node uses, or that a module holds which it calls or hands on."""
        found = {id(self._program.attribute(root)) for root in self._roots(node)}
        if node.op in ("call_module", "get_attr"):
            value = self._program.attribute(node)
            found |= set(map(id, value.parameters())) if isinstance(value, nn.Module) else set()
        return found

    def _roots(self, node: Node) -> list[Node]:
        """The parameters that a node is given, or that what it is given is made from."""
        operands = (self.made_from.get(operand, frozenset()) for operand in node.all_input_nodes)
        return sorted(frozenset().union(*operands))

    def rewritten(self) -> fx.Graph:
        """The graph, with the ``Deferred`` as its first argument; each call leaves its parameters' gradients to it."""
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
            # What is made from parameters alone stays attached to them: its gradient is W's.
            held = tuple(copies[operand] for operand in node.all_input_nodes if operand in self.made_from)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            args = (deferred, module, roots, held, *args)
            copies[node] = graph.create_node("call_function", call, args, dict(kwargs), name=node.name)
            copies[node].meta = dict(node.meta)
        graph.lint()
        return graph


def _is_plain(node: Node) -> bool:
    """Whether it calls a method, or a function of torch's or Python's and not of ours."""
    if node.op != "call_function":
        return node.op == "call_method"
    return is_known(node.target) and not str(getattr(node.target, "__module__", "")).startswith("fxpipe")


def _is_attention(module: Any) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _is_listed_module(module: Any) -> bool:
    if type(module) not in MODULES or "forward" in vars(module) or runs_hooks(module):
        return False
    return getattr(module, "max_norm", None) is None and getattr(module, "padding_mode", "zeros") == "zeros"
