"""Split: cuts a partitioned program into a graph of stages, each with a graph of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.callables import handoff, private
from fxpipe.errors import PartitionError
from fxpipe.ir import Edge, Program, Stage, StageGraph, before_boundary, is_boundary_value, is_compute
from fxpipe.passes.effects import is_random

_Use = tuple[int, int]
"""A value's use: (program position, stage)."""


def split(program: Program) -> StageGraph:
    """Program with stages → StageGraph. A value goes straight from the stage that makes it to all that use it."""
    plan = _Plan(program)
    builders = [_Builder(plan, stage) for stage in range(len(program.stage_names))]
    stages: list[Stage] = []
    for builder in builders:
        arrivals = [entry for entry in builder.inputs if isinstance(entry, Edge)]
        tensors = builder.tensors()
        trains = any(isinstance(t, nn.Parameter) and t.requires_grad for t in tensors.values())
        stages.append(
            Stage(
                index=builder.stage,
                name=program.stage_names[builder.stage],
                module=(module := builder.graph_module()),
                function=module.forward,
                inputs=tuple(builder.inputs),
                outputs=tuple(builder.outputs),
                returns_result=builder.stage == plan.output_stage,
                tensors=tensors,
                has_backward=trains or any(stages[edge.source].has_backward for edge in arrivals),
                draws_random=builder.draws_random,
            )
        )
    origin = f"the {program.tracer} tracer"
    return StageGraph(tuple(stages), program.inputs, program.module, origin=origin)


class _Plan:
    """Who uses which value where, over the whole program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.position = {node: place for place, node in enumerate(self.nodes)}
        output = program.graph.output_node()
        producers = [self.stage_of(self.made_by(node)) for node in output.all_input_nodes]
        made = [stage for stage in producers if stage is not None]
        if not made:
            raise PartitionError("the model's output depends on inputs alone, or on parameters alone")
        self.output_stage = max(made)
        self.uses: dict[fx.Node, list[_Use]] = {}
        for node in self.nodes:
            stage = self.output_stage if node is output else self.stage_of(node)
            if stage is not None:
                self._note_uses(node, self.position[node], stage, set())

    def stage_of(self, node: fx.Node) -> int | None:
        return self.program.stage_of.get(node.name)

    def made_by(self, node: fx.Node) -> fx.Node:
        """The node that makes a value: what is in front of all boundaries that ``node`` stands behind."""
        while is_boundary_value(node):
            node = before_boundary(node)
        return node

    def _note_uses(self, user: fx.Node, place: int, stage: int, seen: set[fx.Node]) -> None:
        for operand in user.all_input_nodes:
            value = self.made_by(operand)
            if value in seen:
                continue
            seen.add(value)
            if self.stage_of(value) is not None:
                self.uses.setdefault(value, []).append((place, stage))

    def edges_from(self, value: fx.Node) -> dict[int, int]:
        """Consuming stage → position of its last use, for a value's uses outside of its own stage."""
        found: dict[int, int] = {}
        for place, stage in self.uses.get(value, []):
            if stage != self.stage_of(value):
                found[stage] = max(found.get(stage, 0), place)
        return dict(sorted(found.items()))


@dataclass
class _Builder:
    """Builds one stage's graph, in program order, so that autograd sees what it would in the whole program."""

    plan: _Plan
    stage: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[str | Edge] = field(default_factory=list)
    outputs: list[Edge] = field(default_factory=list)
    draws_random: bool = False

    def __post_init__(self) -> None:
        program, plan = self.plan.program, self.plan
        self._built: dict[fx.Node, fx.Node] = {}
        self._written = frozenset().union(*program.written)
        self._members = self._needed()
        self._add_inputs()
        handoffs = self._handoffs()
        for node in plan.nodes:
            if node in self._members:
                self._built[node] = self.graph.node_copy(node, self._value)
                self.draws_random |= is_random(program, node)
            for value in handoffs.get(plan.position[node], ()):
                self._hand_off(value, node)
        self._add_output()

    def _needed(self) -> set[fx.Node]:
        """This stage's own nodes, and the copied ones behind them."""
        needed: set[fx.Node] = set()
        own = [n for n in self.plan.nodes if self.plan.stage_of(n) == self.stage]
        waiting = [*own, *(self._result_operands() if self.stage == self.plan.output_stage else [])]
        while waiting:
            node = self.plan.made_by(waiting.pop())
            mine = self.plan.stage_of(node) == self.stage or node.name in self.plan.program.copied
            if node not in needed and (mine or node.op == "get_attr"):
                needed.add(node)
                waiting.extend(node.all_input_nodes)
        return needed

    def _result_operands(self) -> list[fx.Node]:
        return self.plan.program.graph.output_node().all_input_nodes

    def _operands(self) -> set[fx.Node]:
        found = {self.plan.made_by(o) for node in self._members for o in node.all_input_nodes}
        if self.stage == self.plan.output_stage:
            found |= {self.plan.made_by(o) for o in self._result_operands()}
        return found

    def _add_inputs(self) -> None:
        """Placeholders: batch inputs in call order, then what arrives, by stage and program order."""
        operands = self._operands()
        batch = [n for n in self.plan.nodes if n.op == "placeholder" and n in operands]
        arriving = [n for n in self.plan.nodes if is_compute(n) and n in operands and n not in self._members]
        for node in [*batch, *sorted(arriving, key=lambda n: self.plan.stage_of(n) or 0)]:
            source = self.plan.stage_of(node)
            self.inputs.append(str(node.target) if source is None else Edge(source, self.stage, node.name))
            self._built[node] = self.graph.placeholder(node.name)
        for node in [*batch, *arriving]:
            if self._writes_into(node):
                self._built[node] = self.graph.call_function(private, (self._built[node],))

    def _writes_into(self, value: fx.Node) -> bool:
        """Whether this stage writes into a value that it was given, itself or behind a boundary."""
        behind = [n for n in self.plan.nodes if is_boundary_value(n) and self.plan.made_by(n) is value]
        groups = [g for g in self.plan.program.written if any(n.name in g for n in [value, *behind])]
        mine = {n.name for n in self._members if is_compute(n)}
        received = value.op == "placeholder" or bool(behind)
        return received and any(mine & group for group in groups)

    def _handoffs(self) -> dict[int, list[fx.Node]]:
        """Position → values to hand off there: a value used more than once gets a node of its own per consumer."""
        found: dict[int, list[fx.Node]] = {}
        for node in self.plan.nodes:
            if self.plan.stage_of(node) != self.stage:
                continue
            many = len(self.plan.uses.get(node, [])) > 1
            for target, place in self.plan.edges_from(node).items():
                edge = Edge(self.stage, target, node.name)
                self.outputs.append(edge)
                if many:
                    found.setdefault(place, []).append(node)
        return found

    def _hand_off(self, value: fx.Node, user: fx.Node) -> None:
        stage = self.plan.output_stage if user.op == "output" else self.plan.stage_of(user)
        name = f"{value.name}_to_{self.plan.program.stage_names[stage or 0]}".replace(".", "_")
        made = self.graph.create_node("call_function", handoff, (self._built[value],), name=name)
        self._handed_off = {**getattr(self, "_handed_off", {}), (value.name, stage): made}

    def _value(self, node: fx.Node) -> fx.Node:
        return self._built[self.plan.made_by(node)]

    def _add_output(self) -> None:
        handed_off: dict[tuple[str, int | None], fx.Node] = getattr(self, "_handed_off", {})
        by_name = {node.name: built for node, built in self._built.items()}
        values: list[Any] = [handed_off.get((e.value, e.target), by_name[e.value]) for e in self.outputs]
        if self.stage == self.plan.output_stage:
            values.append(fx.node.map_arg(self.plan.program.graph.output_node().args[0], self._value))
        self.graph.output(tuple(values))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this stage uses, by the model's names."""
        found: dict[str, Tensor] = {}
        for node in self.plan.nodes:
            if node not in self._members or str(node.target) in self.plan.program.constants:
                continue
            if node.op == "get_attr":
                found[str(node.target)] = self.plan.program.attribute(str(node.target))
            elif node.op == "call_module":
                module = self.plan.program.attribute(str(node.target))
                prefix = str(node.target)
                found |= dict(module.named_parameters(prefix, remove_duplicate=False))
                found |= dict(module.named_buffers(prefix, remove_duplicate=False))
        return found

    def graph_module(self) -> fx.GraphModule:
        names = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        root = {name: self.plan.program.attribute(name) for name in sorted(names)}
        return fx.GraphModule(root, self.graph, class_name=self.plan.program.stage_names[self.stage])
