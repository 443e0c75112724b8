"""Split: cuts a partitioned program into a graph of stages, each with a graph of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.errors import PartitionError
from fxpipe.graph.boundary import Gather, Mode
from fxpipe.graph.modes import Modes, enter_modes, leave_modes
from fxpipe.graph.opaque_call import OpaqueCall, has_opaque_calls, opaque_calls
from fxpipe.graph.operators import handoff, private
from fxpipe.graph.program import Program, gather_of, is_boundary, is_boundary_value, is_compute, made_by
from fxpipe.graph.root import graph_module
from fxpipe.graph.size_of import SizeOf
from fxpipe.graph.stage_calls import check_shapes
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph, all_tensors
from fxpipe.passes.alias_groups import holders_of_written, names_of_written
from fxpipe.passes.analysis.effects import aliased, is_number, is_random, writes_apart
from fxpipe.passes.analysis.union import Union
from fxpipe.passes.gather import crossed, entering, readers_of, way

SIZE = torch.ops.aten.sym_size.int
"""Asks a tensor for a dimension's size, which is symbolic in the capture."""

_Use = tuple[int, int]
"""A value's use: (program position, stage)."""


def split(program: Program) -> StageGraph:
    """Program with stages → StageGraph. A value goes straight from the stage that makes it to all that use it."""
    if not program.gathered and any(is_boundary(node) and gather_of(node) for node in program.graph.nodes):
        raise PartitionError(
            "a boundary gathers, and passes= leaves out the pass that sees to it: gather, the last one"
        )
    _check_attributes(program)
    whole = _WholeProgram(program)
    builders = [_Builder(whole, stage) for stage in range(len(program.stage_names))]
    stages: list[Stage] = []
    for builder in builders:
        stages.append(
            Stage(
                index=builder.stage,
                name=program.stage_names[builder.stage],
                module=(module := builder.graph_module()),
                function=module,
                inputs=tuple(builder.inputs),
                outputs=tuple(builder.outputs),
                returns_result=builder.stage == whole.output_stage,
                result=program.result if builder.stage == whole.output_stage else None,
                tensors=builder.tensors(),
                draws_random=builder.draws_random,
                runs_python=builder.runs_python,
                gathered=program.gathered.get(builder.stage),
                ways=tuple(builder.ways) if builder.stage in program.gathered else (),
            )
        )
    stages = varying_marked(program, stages)
    lost = [f"{name} could not: {why.splitlines()[0]}" for name, why in program.refusals]
    origin = "\n".join([f"the {program.tracer} tracer", *lost])
    written = names_of_written(program)
    graph = StageGraph(tuple(stages), program.inputs, program.module, origin=origin, written=written)
    return graph.with_backward()


def _check_attributes(program: Program) -> None:
    """PartitionError where an opaque region sets an attribute of Python's that a call in another stage sets or reads:
    each rank has its own."""
    users: dict[tuple[str, str], tuple[int, str]] = {}
    for node in program.graph.nodes:
        stage = program.stage_of.get(node.name)
        if stage is None:
            continue
        for call in opaque_calls(program.opaque.get(str(node.target))):
            for attribute in sorted(call.attributes):
                first, other = users.setdefault(attribute, (stage, call.name))
                if first != stage:
                    names = program.stage_names
                    raise PartitionError(
                        f"{'.'.join(filter(None, attribute))}, an attribute that changes while the model runs, is used "
                        f"by {other} in stage {names[first]!r} and by {call.name} in stage {names[stage]!r}, which are "
                        "opaque: each rank would have a value of its own; return it as a tensor from one of them "
                        "and give it to the other, or cut so that both are in one stage"
                    )


class _WholeProgram:
    """Who uses which value where, over the whole program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.position = {node: place for place, node in enumerate(self.nodes)}
        output = program.graph.output_node()
        if program.output_stage is None:
            raise PartitionError("the model's output depends on inputs alone, or on parameters alone")
        self.output_stage = program.output_stage
        self.rewritten = self._rewritten()
        self.holders = [node for nodes in holders_of_written(program) for node in nodes]
        self.kept = self._kept()
        self.may_write = frozenset().union({node.name for node in self.holders}, *program.written)
        self.uses: dict[fx.Node, list[_Use]] = {}
        for node in self.nodes:
            stage = self.output_stage if node is output else self.stage_of(node)
            if stage is not None:
                self._note_uses(node, self.position[node], stage, set())
        self.readers = readers_of(program)
        self.arriving = self._arriving()

    def _rewritten(self) -> dict[fx.Node, list[frozenset[str]]]:
        """Value → the groups that write into it as an input, or behind a boundary: there it needs a private copy."""
        group_of = {name: group for group in self.program.written for name in group}
        found: dict[fx.Node, list[frozenset[str]]] = {}
        for node in self.nodes:
            if node.name in group_of and (node.op == "placeholder" or is_boundary_value(node)):
                found.setdefault(made_by(node), []).append(group_of[node.name])
        return found

    def _kept(self) -> frozenset[str]:
        """The nodes that are a buffer which is written, or share its memory: the next micro-batch writes it again. What
        a batch norm returns is no part of it."""
        buffers = [node for node in self.holders if node.op == "get_attr"]
        if not buffers:
            return frozenset()
        memory = Union(self.nodes)
        for node in self.nodes:
            for source in () if writes_apart(self.program, node) else aliased(self.program, node):
                memory.join(node, source)
        roots = {memory.find(node) for node in buffers}
        return frozenset(node.name for node in self.nodes if memory.find(node) in roots)

    def stage_of(self, node: fx.Node) -> int | None:
        return self.program.stage_of.get(node.name)

    def _note_uses(self, user: fx.Node, place: int, stage: int, seen: set[fx.Node]) -> None:
        for operand in user.all_input_nodes:
            value = made_by(operand)
            if value in seen:
                continue
            seen.add(value)
            if self.stage_of(value) is not None:
                self.uses.setdefault(value, []).append((place, stage))

    def _arriving(self) -> dict[int, list[fx.Node]]:
        """Stage → the values of other stages that it uses, by their first use in the program."""
        found: dict[int, list[fx.Node]] = {}
        for value in self.uses:
            for stage in self.edges_from(value):
                found.setdefault(stage, []).append(value)
        return found

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

    whole: _WholeProgram
    stage: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[str | Edge] = field(default_factory=list)
    ways: list[Mode | None] = field(default_factory=list)
    outputs: list[Edge] = field(default_factory=list)
    draws_random: bool = False
    runs_python: bool = False

    def __post_init__(self) -> None:
        program, whole = self.whole.program, self.whole
        self._built: dict[fx.Node, fx.Node] = {}
        self._as_now: dict[fx.Node, fx.Node] = {}
        self._handed_off: dict[tuple[str, int | None], fx.Node] = {}
        self._arrived: dict[tuple[fx.Node, Mode | None], fx.Node] = {}
        self._way_of: dict[tuple[fx.Node, fx.Node, Gather | None], Mode | None] = {}  # (reader, value, gather) → how
        self._in_two_ways: set[fx.Node] = set()
        self._modes: Modes | None = None
        self._entered: fx.Node | None = None
        self._asked: dict[fx.Node, tuple[fx.Node, int]] = {}
        """Sizes of inputs → an arriving tensor that has them too, and in which dimension."""
        self._numbers: dict[fx.Node, SizeOf] = {}
        """Sizes of inputs that nothing that arrives has: no input is needed for its size alone."""
        self._own = [node for node in whole.readers[self.stage] if node.op != "output"]
        self._members = self._needed()
        self._own_names = {node.name for node in self._members if is_compute(node)}
        self._add_inputs()
        for number, (value, dim) in self._asked.items():
            self._built[number] = self.graph.call_function(SIZE, (self._built[value], dim))
        handoffs = self._handoffs()
        for node in self._in_order([*self._members, *(whole.nodes[place] for place in handoffs)]):
            if node in self._members:
                self._change_modes(node)
                self._built[node] = self.graph.node_copy(node, partial(self._read, node))
                self._check_shapes(node)
                self._make_private(node)
                if node.name in whole.may_write:
                    self._as_now.clear()
                self.draws_random |= is_random(program, node)
                self.runs_python |= node.name in program.effects
            for value in handoffs.get(whole.position[node], ()):
                self._hand_off(value, node)
        self._add_output()

    def _in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Nodes in program order, each once."""
        return sorted(set(nodes), key=lambda node: self.whole.position[node])

    def _check_shapes(self, call: fx.Node) -> None:
        """Where a call of a module was captured as a whole, what it returns is held against the capture."""
        effects = self.whole.program.effects.get(call.name)
        if effects is not None and "shapes" in call.meta:
            part = self.whole.program.opaque.get(str(call.target))
            name, shapes = "", call.meta["shapes"]
            if isinstance(part, OpaqueCall):
                name = part.name
                shapes = [shape if used else None for shape, used in zip(shapes, part.uses, strict=True)]
            facts = (shapes, str(call.target), effects.is_rehearsed, name)
            self.graph.call_function(check_shapes, (self._built[call], *facts))

    def _change_modes(self, node: fx.Node | None) -> None:
        """Leaves the modes of the nodes before, and enters those of ``node``, where they are others."""
        wanted = node.meta.get("modes") if node is not None else None
        if wanted == self._modes or (node is not None and not is_compute(node)):
            return
        if self._entered is not None:
            self.graph.call_function(leave_modes, (self._entered,))
        self._entered = None
        if wanted is not None:
            regions = tuple(tuple(region) for region in wanted.autocast)  # plain tuples, which generated code can write
            self._entered = self.graph.call_function(enter_modes, (wanted.grad, regions))
        self._modes = wanted

    def _needed(self) -> set[fx.Node]:
        """This stage's own nodes, and the copied ones behind them."""
        needed: set[fx.Node] = set()
        arriving = self._arriving_sizes()
        waiting = [*self._own, *(self._result_operands() if self.stage == self.whole.output_stage else [])]
        while waiting:
            node = made_by(waiting.pop())
            if node.target is SIZE and self.whole.stage_of(node) is None and self._finds_size(node, arriving):
                continue
            mine = self.whole.stage_of(node) == self.stage or node.name in self.whole.program.copied
            if node not in needed and (mine or node.op == "get_attr"):
                needed.add(node)
                waiting.extend(node.all_input_nodes)
        return needed

    def _finds_size(self, node: fx.Node, arriving: Mapping[tuple[str, ...], tuple[fx.Node, int]]) -> bool:
        """Whether this stage has a size of an input without that input."""
        size = None if self.stage in self.whole.program.gathered else SizeOf.asked(node)  # a group has its own rows
        if node.meta.get("sizes") in arriving:
            self._asked[node] = arriving[node.meta["sizes"]]
        elif size is not None:
            self._numbers[node] = size
        return node in self._asked or node in self._numbers

    def _arriving_sizes(self) -> dict[tuple[str, ...], tuple[fx.Node, int]]:
        """Each symbolic size of what other stages send → where to ask for it, so that no input is needed for it."""
        found: dict[tuple[str, ...], tuple[fx.Node, int]] = {}
        gathered = self.whole.program.gathered.get(self.stage)
        if gathered is not None and len(gathered.modes) > 1:  # what arrives has other rows by each way
            return found
        for value in self.whole.arriving.get(self.stage, ()):
            for dim, size in enumerate(() if is_number(value) else value.meta.get("sizes", ())):
                if size:
                    found.setdefault((size,), (value, dim))
        return found

    def _result_operands(self) -> list[fx.Node]:
        return self.whole.program.graph.output_node().all_input_nodes

    def _add_inputs(self) -> None:
        """Placeholders: batch inputs in call order, then what arrives, by stage and program order; one for each way in
        which a value is gathered."""
        ways: dict[fx.Node, dict[Mode | None, None]] = {}
        for arrival in entering(self.whole.program, self.stage, self.whole.readers[self.stage]):
            if arrival.reader.op != "output" and arrival.reader not in self._members:
                continue  # it leads to a size alone, which this stage has otherwise
            mode = way(self.whole.program, self.stage, arrival)
            ways.setdefault(arrival.value, {})[mode] = None
            self._way_of[arrival.reader, arrival.value, arrival.gather] = mode
        order = {node: (self.whole.stage_of(node) or 0, self.whole.position[node]) for node in ways}
        batch = sorted((node for node in ways if node.op == "placeholder"), key=lambda node: order[node])
        arriving = sorted((node for node in ways if node.op != "placeholder"), key=lambda node: order[node])
        for node in [*batch, *arriving]:
            source = self.whole.stage_of(node)
            if len(ways[node]) > 1:
                self._in_two_ways.add(node)
            for mode in sorted(ways[node], key=str):
                self.inputs.append(str(node.target) if source is None else Edge(source, self.stage, node.name))
                self.ways.append(mode)
                name = f"{node.name}_{mode}" if len(ways[node]) > 1 else node.name
                self._arrived[node, mode] = self.graph.placeholder(name)
        for node, mode in list(self._arrived):
            self._built[node] = self._arrived[node, mode]
            self._make_private(node)
            self._arrived[node, mode] = self._built[node]
        self._add_told()

    def _add_told(self) -> None:
        """Placeholders for sizes, one for each."""
        made: dict[SizeOf, fx.Node] = {}
        for number, size in self._numbers.items():
            if size not in made:
                self.inputs.append(size)
                self.ways.append(None)
                made[size] = self.graph.placeholder(number.name)
                made[size].meta["is_number"] = True
            self._built[number] = made[size]

    def _make_private(self, value: fx.Node) -> None:
        """Where this stage writes into a value that it was given, it gets a copy of its own."""
        if any(not self._own_names.isdisjoint(group) for group in self.whole.rewritten.get(value, ())):
            self._built[value] = self.graph.call_function(private, (self._built[value],))

    def _handoffs(self) -> dict[int, list[fx.Node]]:
        """Position → values to hand off there: a value used more than once gets a node of its own per consumer."""
        found: dict[int, list[fx.Node]] = {}
        for node in self._own:
            many = len(self.whole.uses.get(node, [])) > 1
            for target, place in self.whole.edges_from(node).items():
                edge = Edge(self.stage, target, node.name)
                self.outputs.append(edge)
                if many:
                    found.setdefault(place, []).append(node)
        return found

    def _hand_off(self, value: fx.Node, user: fx.Node) -> None:
        stage = self.whole.output_stage if user.op == "output" else self.whole.stage_of(user)
        name = f"{value.name}_to_{self.whole.program.stage_names[stage or 0]}".replace(".", "_")
        made = self.graph.create_node("call_function", handoff, (self._now(value),), name=name)
        self._handed_off[value.name, stage] = made

    def _read(self, reader: fx.Node, operand: fx.Node) -> fx.Node:
        value, program = made_by(operand), self.whole.program
        if value in self._in_two_ways:
            return self._arrived[value, self._way_of[reader, value, crossed(operand)[0]]]
        if value.name in self.whole.kept and not is_number(reader) and operand not in aliased(program, reader):
            return self._now(value)
        return self._built[value]

    def _now(self, value: fx.Node) -> fx.Node:
        """What ``value`` is at this place, for a backward or another stage to have when the buffer is written again."""
        if value.name not in self.whole.kept:
            return self._built[value]
        if value not in self._as_now:
            self._as_now[value] = self.graph.call_function(private, (self._built[value],))
        return self._as_now[value]

    def _add_output(self) -> None:
        self._change_modes(None)
        by_name = {node.name: node for node in self._built}
        values: list[Any] = [
            self._handed_off.get((e.value, e.target)) or self._now(by_name[e.value]) for e in self.outputs
        ]
        if self.stage == self.whole.output_stage:
            output = self.whole.program.graph.output_node()
            values.append(fx.node.map_arg(output.args[0], partial(self._read, output)))
        self.graph.output(tuple(values))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this stage uses, by the model's names."""
        found: dict[str, Tensor] = {}
        for node in self._in_order(self._members):
            if str(node.target) in self.whole.program.constants:
                continue
            if node.op == "get_attr":
                found[str(node.target)] = self.whole.program.attribute(str(node.target))
            elif node.op == "call_module" and str(node.target) in self.whole.program.opaque:
                reads = self.whole.program.effects[node.name].reads
                found |= {name: self.whole.program.attribute(name) for name in reads}
            elif node.op == "call_module":
                found |= all_tensors(self.whole.program.attribute(str(node.target)), str(node.target))
        return found

    def graph_module(self) -> fx.GraphModule:
        names = {str(n.target) for n in self.graph.nodes if n.op in ("get_attr", "call_module")}
        root = {name: self.whole.program.attribute(name) for name in sorted(names)}
        module = graph_module(root, self.graph, self.whole.program.stage_names[self.stage])
        _note_parts(module)
        return module


def _note_parts(module: nn.Module) -> None:
    """Lets the submodules that a graph calls stand among the plain attributes, too: at ``self.encoder.layers``, Python
    asks ``nn.Module.__getattr__``, half a microsecond for each dot, only for what it does not find there."""
    for name, part in module.named_children():
        vars(module).setdefault(name, part)
        if type(part) is nn.Module:  # the graph's own, which stands for a dot in a name
            _note_parts(part)


# --- Varying ---


def varying_marked(program: Program, stages: Sequence[Stage]) -> list[Stage]:
    """The stages, marked which of them vary.

    That is one that holds an opaque region; those behind it that make values of sizes which come out of it,
    or of any size, where nothing is known of sizes, or that train nothing, so that what they send needs a gradient if
    what they are given does; and those before it: it may use what they send in one step, and not in the next, and then
    sends no gradient back.
    """
    regions = [node for node in program.graph.nodes if is_kept(program, node)]
    found = {program.stage_of[node.name] for node in regions}
    for stage in reversed(stages):
        if any(edge.target in found for edge in stage.outputs):
            found.add(stage.index)
    symbols = {name for node in regions for out in node.users for name in _symbols(out)}
    sizes = {node.name: _symbols(node) for node in program.graph.nodes}
    behind = {program.stage_of[node.name] for node in regions}
    for stage in stages if program.tracer == "symbolic" or symbols else ():
        if any(isinstance(entry, Edge) and entry.source in behind for entry in stage.inputs):
            behind.add(stage.index)
            if program.tracer == "symbolic" or any(sizes[edge.value] & symbols for edge in stage.outputs):
                found.add(stage.index)
    unsure = {program.stage_of[node.name] for node in regions}
    for stage in stages:
        given = any(isinstance(entry, Edge) and entry.source in unsure for entry in stage.inputs)
        if given and not any(parameter.requires_grad for parameter in stage.parameters.values()):
            unsure.add(stage.index)
    found |= unsure
    return [dataclasses.replace(stage, varies=stage.index in found) for stage in stages]


def is_kept(program: Program, node: fx.Node) -> bool:
    """Whether a node calls an opaque region."""
    return node.op == "call_module" and has_opaque_calls(program.opaque.get(str(node.target)))


def _symbols(node: fx.Node) -> set[str]:
    """The symbolic sizes that a node's own are made of."""
    return {name for size in node.meta.get("sizes", ()) for name in re.findall(r"[a-z]+\d+", size)}
