"""Checkpoint layers: replaces the nodes of a layer by one call that keeps its inputs and runs again in backward.

Takes: a ``Program`` whose ``recompute`` names layers. Gives: a program with a call of a ``RecomputedPart`` for each
call of such a layer; ``inside``, ``layers`` and ``plain`` say what was replaced, and why not where it was not.

1. ``_calls`` finds the calls of the layers, and the nodes of each.
2. ``_Obstacles`` says why a call cannot become one node. The call then stays as it is.
3. ``_replaced`` copies the graph, with one node in place of the nodes of each call.

For example, with the layer ``h.0`` around two nodes::

    a = linear(x); b = gelu(a); c = b * a; d = c.sum()      →      a = linear(x); h = h_0(a); c = h[0]; d = c.sum()

A value keeps its name, and copied nodes stay outside, so that stages exchange the same values with and without it.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import fx, nn
from torch.fx import Node

from fxpipe.graph.program import LAYERS, Effects, Program, graph_module, is_compute, named
from fxpipe.graph.stage_graph import own_tensors
from fxpipe.passes.effects import is_number, is_random, own_writes
from fxpipe.passes.partition import inner_gradients
from fxpipe.stage.activation_checkpoints import Checkpointed
from fxpipe.stage.modes import enter_modes, leave_modes
from fxpipe.stage.opaque_call import has_opaque_calls
from fxpipe.stage.recomputed_part import RecomputedPart
from fxpipe.stage.stage_calls import check_shapes
from fxpipe.torch_compat.modules import BATCH_STATISTICS


def checkpoint_layers(program: Program) -> Program:
    """Returns the program in which the layers that ``Program.recompute`` names keep only their inputs."""
    if not program.recompute:
        return program
    program = program.replace(plain=None, inside={})
    calls = _calls(program)
    obstacles = _Obstacles(program, calls)
    reasons = [obstacles.of(call) for call in calls]
    layers = dict.fromkeys((call.path for call in calls), "")
    layers |= {call.path: why for call, why in zip(calls, reasons, strict=True) if why}
    whole = [call for call, why in zip(calls, reasons, strict=True) if not why]
    return _replaced(program, whole).replace(layers=layers, plain=program)


def without_checkpoints(program: Program) -> Program:
    """Returns the program before ``checkpoint_layers``, with the stages that its nodes have now."""
    if program.plain is None:
        return program
    stage_of = {name: stage for call, stage in program.stage_of.items() for name in program.inside.get(call, (call,))}
    return program.plain.replace(stage_of=stage_of, gathered=program.gathered)


@dataclass(frozen=True, eq=False)
class _CheckpointedCall:
    """A call of a layer. ``nodes``: its nodes, in program order."""

    path: str
    nodes: tuple[Node, ...]

    @cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes outside of the call whose values the call uses, by their first use."""
        used = (operand for node in self.nodes for operand in node.all_input_nodes)
        return tuple(dict.fromkeys(operand for operand in used if operand not in self.members))

    @cached_property
    def outputs(self) -> tuple[Node, ...]:
        """The call's nodes whose values are used outside."""
        return tuple(node for node in self.nodes if not self.members.issuperset(node.users))

    @cached_property
    def members(self) -> frozenset[Node]:
        return frozenset(self.nodes)


# --- 1. the calls of the layers ---


def _calls(program: Program) -> list[_CheckpointedCall]:
    nodes = [node for node in program.nodes if is_compute(node) and node.name not in program.copied]
    stacks = {node: _stack(node) for node in nodes}
    wanted, stages, kinds = program.recompute, program.stage_names, _kinds(program.module)
    calls = {call for stack in stacks.values() for call in stack}
    times = Counter(kinds[path] for _, path in calls if path in kinds)

    def is_layer(path: str) -> bool:
        if wanted == LAYERS:
            return path in kinds and times[kinds[path]] > 1
        return any(named(name, [path]) and not named(name, stages) for name in wanted)

    members: dict[tuple[str, str, int | None], dict[Node, None]] = {}
    for node, stack in stacks.items():
        # the outermost layer; each stage's part of it is a call
        if (outermost := next(((key, path) for key, path in stack if is_layer(path)), None)) is not None:
            members.setdefault((*outermost, program.stage_of.get(node.name)), {})[node] = None
    parts = {call: tuple(_without_numbers(inside)) for call, inside in members.items()}
    return [_CheckpointedCall(path, nodes) for (_, path, _), nodes in parts.items() if nodes]


def _stack(node: Node) -> list[tuple[str, str]]:
    """(call, path) of the submodules in which a node was called, outermost first. Tracers have a key for each call."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(key, path) for key, (path, _) in stack.items() if path]


def _kinds(model: nn.Module) -> dict[str, tuple[str, type]]:
    """Returns path → its text without numbers, and the class, for the entries of lists that may be layers."""
    return {
        path: (re.sub(r"\d+", "*", path), type(module))
        for path, module in model.named_modules(remove_duplicate=False)
        if path.rpartition(".")[2].isdecimal() and _has_parts(module)
    }


def _has_parts(module: nn.Module) -> bool:
    """Whether a module is more than a single layer of torch's, whose input autograd keeps anyway."""
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def around_layers(model: nn.Module, wanted: str | tuple[str, ...]) -> frozenset[str]:
    """Returns the paths of the submodules around the outermost modules that may be the layers of ``wanted``."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)] if wanted else []
    found = set(_kinds(model)) if wanted == LAYERS else {path for name in wanted for path in named(name, paths)}
    around = {path: {path[: dot.start()] for dot in re.finditer(r"\.", path)} for path in found}
    return frozenset().union(*(parents for parents in around.values() if found.isdisjoint(parents)))


def _without_numbers(members: dict[Node, None]) -> dict[Node, None]:
    """The nodes of a call without sizes and types that are used outside: a stage passes these on as numbers."""
    for node in reversed([*members]):
        if not members.keys() >= node.users.keys() and is_number(node):
            del members[node]
    return members


# --- 2. why a call stays as it is ---


_RETURNS = "it needs a value that code outside computes from its own"


class _Obstacles:
    def __init__(self, program: Program, calls: Sequence[_CheckpointedCall]) -> None:
        self._program, self._nodes = program, list(program.nodes)
        self._order = {node: position for position, node in enumerate(self._nodes)}
        self._home = {node: call for call in calls for node in call.nodes}
        self._groups = {name: group for group in program.written for name in group}
        self._by_name = {node.name: node for node in self._nodes}
        self._differentiated = {node for path in inner_gradients(program) for node in path}
        self._statistics = _statistics(program)

    def of(self, call: _CheckpointedCall) -> str:
        """The reason why a call cannot be one node; "" if it can."""
        if not call.outputs:
            return "nothing uses its result"
        if not self._differentiated.isdisjoint(call.nodes):
            return "forward differentiates it"
        found = (self._of_node(call, node) for node in call.nodes)
        return next(filter(None, found), "") or self._amid(call)

    def _of_node(self, call: _CheckpointedCall, node: Node) -> str:
        part = self._program.attribute(node) if node.op == "call_module" else None
        effects = self._program.effects.get(node.name, Effects())
        if has_opaque_calls(part):
            return "it holds an opaque region"
        if isinstance(part, nn.Module) and any(isinstance(each, Checkpointed) for each in part.modules()):
            return "the model checkpoints a part of it"
        if effects.generators:
            return "it draws random numbers that are not torch's"
        # Nodes outside that share memory with a write would see the write of the second run, too.
        sharing = [self._by_name[name] for name in self._groups.get(node.name, ())]
        outside = [other for other in sharing if other not in call.members]
        if any(other.op != "get_attr" for other in outside):
            return "it shares memory that is written with code outside"
        written = [*own_writes(part)] if isinstance(part, nn.Module) else []
        written += [self._program.attribute(name) for name in [*effects.writes, *(str(o.target) for o in outside)]]
        if any(id(tensor) not in self._statistics for tensor in written):
            return "it writes a tensor of the model that is no batch statistic"
        return ""

    def _amid(self, call: _CheckpointedCall) -> str:
        """Whether code that must stay in its place runs between the first and the last node of a call."""
        stage = self._program.stage_of.get(call.nodes[0].name)
        behind: set[Node] = set()  # nodes outside that depend on the call
        for node in self._nodes[self._order[call.nodes[0]] : self._order[call.nodes[-1]]]:
            if node in call.members:
                if not behind.isdisjoint(node.all_input_nodes):
                    return _RETURNS
                continue
            if any(operand in call.members or operand in behind for operand in node.all_input_nodes):
                behind.add(node)
            is_fixed = node.name in self._groups or is_random(self._program, node) or node in self._home
            if is_fixed and is_compute(node) and self._program.stage_of.get(node.name) == stage:
                return "other code runs amid it that must keep its place"
        if not behind.isdisjoint(call.nodes[-1].all_input_nodes):
            return _RETURNS
        return ""


def _statistics(program: Program) -> set[int]:
    """The ids of the buffers of batch norms."""
    norms = [part for part in program.module.modules() if isinstance(part, BATCH_STATISTICS)]
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


# --- 3. one node for each call ---


def _replaced(program: Program, calls: Sequence[_CheckpointedCall]) -> Program:
    """The program with one node in place of each call's nodes, and a node for each result, of the result's own name."""
    graph, home = fx.Graph(), {node: call for call in calls for node in call.nodes}
    built, waiting = dict[Node, Node](), list[Node | _CheckpointedCall]()
    effects, stage_of, opaque = dict(program.effects), dict(program.stage_of), dict(program.opaque)
    inside, now = dict[str, tuple[str, ...]](), dict[str, str]()
    statistics, taken = _statistics(program), {node.name for node in program.nodes}

    def add_call(call: _CheckpointedCall) -> None:
        name = "checkpoint_" + call.path.replace(".", "_")
        while name in taken or name in opaque:
            name += "_again"
        part = opaque[name] = _part(program, call, statistics)
        whole = graph.create_node("call_module", name, tuple(map(built.__getitem__, call.inputs)), name=name)
        whole.stack_trace, whole.meta = call.nodes[0].stack_trace, _notes(call)
        for index, value in enumerate(call.outputs):
            arguments = (whole, index)
            built[value] = graph.create_node("call_function", operator.getitem, arguments, name=value.name)
            notes = {key: fact for key, fact in value.meta.items() if key not in ("modes", "shapes")}
            built[value].meta = {**whole.meta, **notes}
            built[value].stack_trace = value.stack_trace
        names = [node.name for node in call.nodes]
        inside[whole.name] = tuple(names)
        inner = [effects.pop(each) for each in names if each in effects]
        tensors = [own_tensors(program, node) for node in call.nodes if node.op == "call_module"]
        effects[whole.name] = Effects(
            reads=tuple(dict.fromkeys(each for names in tensors for each in names)),
            writes=tuple(dict.fromkeys(each for effect in inner for each in effect.writes)),
            draws_random=part.draws_random,
            runs_python=any(effect.runs_python for effect in inner),
        )
        now.update(dict.fromkeys(names, whole.name))
        if names[0] in stage_of:
            stage_of[whole.name] = stage_of[names[0]]

    for node in program.nodes:
        if node not in home or node is home[node].nodes[-1]:
            waiting.append(home.get(node, node))  # it may use a result of a call that is not complete
        for each in [*waiting]:
            if all(
                value in built
                for value in (each.inputs if isinstance(each, _CheckpointedCall) else each.all_input_nodes)
            ):
                waiting.remove(each)
                if isinstance(each, _CheckpointedCall):
                    add_call(each)
                else:
                    built[each] = graph.node_copy(each, built.__getitem__)
    gone = now.keys() - {node.name for node in graph.nodes}
    return program.replace(
        graph=graph,
        opaque=opaque,
        effects=effects,
        stage_of={name: stage for name, stage in stage_of.items() if name not in gone},
        written=tuple(group - gone | {now[name] for name in group if name in now} for group in program.written),
        inside=inside,
    )


def _notes(call: _CheckpointedCall) -> dict[str, Any]:
    """The ``meta`` of a call's node: the submodules around it, the value, and the modes if all its nodes have one."""
    last = next(index for index, (_, path) in enumerate(_stack(call.nodes[0])) if path == call.path)
    stack = call.nodes[0].meta["nn_module_stack"].items()
    around = [entry for entry in stack if entry[1][0]][: last + 1]
    notes: dict[str, Any] = {"nn_module_stack": dict(around)}
    if all("val" in value.meta for value in call.outputs):
        notes["val"] = tuple(value.meta["val"] for value in call.outputs)
    modes = [node.meta.get("modes") for node in call.nodes]
    if modes[0] is not None and all(each == modes[0] for each in modes):
        notes["modes"] = modes[0]
    return notes


def _part(program: Program, call: _CheckpointedCall, statistics: set[int]) -> RecomputedPart:
    """The module that runs the nodes of a call. It enters their modes, unless the graph enters them around it."""
    graph, around = fx.Graph(), _notes(call).get("modes")
    built = {value: graph.placeholder(f"input_{index}") for index, value in enumerate(call.inputs)}
    for modes, group in groupby(call.nodes, lambda node: node.meta.get("modes")):
        entered = None
        if modes not in (None, around):
            entered = graph.call_function(enter_modes, modes.arguments)
        for node in group:
            built[node] = graph.node_copy(node, built.__getitem__)
            effects = program.effects.get(node.name)
            if effects is not None and "shapes" in node.meta:
                facts = built[node], node.meta["shapes"], str(node.target), effects.is_rehearsed
                graph.call_function(check_shapes, facts)
        if entered is not None:
            graph.call_function(leave_modes, (entered,))
    graph.output(tuple(built[value] for value in call.outputs))
    called = sorted({str(node.target) for node in call.nodes if node.op == "call_module"})
    body = graph_module({name: program.attribute(name) for name in called}, graph, "recomputed")
    named = [value.op == "get_attr" and id(program.attribute(value)) in statistics for value in call.inputs]
    written = [index for index, is_written in enumerate(named) if is_written]
    return RecomputedPart(body, written, any(is_random(program, node) for node in call.nodes))
