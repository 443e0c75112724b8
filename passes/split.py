"""Split: cuts a partitioned program into a graph of stages, each with its own fx graph.

Takes: a ``Program`` in which each node has a stage or is copied. Gives: a ``StageGraph``, whose stages have code,
inputs, outputs, tensors, and facts for running them.

1. ``_WholeProgram`` finds the uses of each value over all stages.
2. For each stage, ``_Builder`` copies the nodes that it needs, in program order: its own, and copied nodes that these
   depend on.
3. Values from other stages become placeholders, and values for other stages become outputs. If only a size of an input
   is needed, the stage gets the number.
4. A stage gets a private copy of a value that it writes. A value that shares a written buffer is copied where it
   leaves.
5. Changes of grad mode and autocast become calls in the graph.
6. Stages whose messages may change from step to step are marked (``varies``).

For example, ``b = relu(a); c = b * b`` with a boundary behind b::

    stage 0   a → relu → output(relu)
    stage 1   placeholder(relu) → mul(relu, relu) → output(mul)

The order of nodes stays, so that autograd sums gradients in the order of the whole program, with the same bits. It does
not decide where to cut, and places no stage on a rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.errors import PartitionError
from fxpipe.graph.boundary import Gather, Mode
from fxpipe.graph.operators import handoff, private
from fxpipe.graph.program import (
    Effects,
    Program,
    SizeOf,
    crossings,
    described,
    gather_of,
    graph_module,
    is_boundary,
    is_boundary_value,
    is_compute,
    made_by,
    named,
    where,
)
from fxpipe.graph.stage_graph import Edge, OwnGenerator, Stage, StageGraph, own_tensors
from fxpipe.passes.alias_groups import holders_of_written, names_of_written, names_written_by_batch, shared_memory
from fxpipe.passes.counting import counting
from fxpipe.passes.effects import SIZE, aliased, is_number, is_random
from fxpipe.passes.gather import crossed, entering, gather_mode, readers_of
from fxpipe.stage.modes import Modes, enter_modes, leave_modes
from fxpipe.stage.opaque_call import OpaqueCall, opaque_calls
from fxpipe.stage.stage_calls import check_shapes


def split(program: Program) -> StageGraph:
    """Returns the StageGraph of a program with stages. The stage that computes a value sends it to each user stage.

    PartitionError if a boundary gathers and the pass ``gather`` did not run, if the result depends on no stage, or if
    opaque regions of two stages use the same changing attribute.
    """
    if not program.gathered and any(is_boundary(node) and gather_of(node) for node in program.nodes):
        raise PartitionError("a boundary gathers, and passes= leaves out the pass that sees to it: gather")
    wanted = program.recompute if isinstance(program.recompute, tuple) else (program.recompute,)
    if program.plain is None and not all(named(name, program.stage_names) for name in wanted):
        raise PartitionError("recompute= has names, and passes= leaves out the pass that sees to it: checkpoint_layers")
    _check_attributes(program)
    # 1. uses over all stages
    whole = _WholeProgram(program)
    stages: list[Stage] = []
    first = {whole.stage_of(node): node for node in reversed(whole.nodes)}
    for index, name in enumerate(program.stage_names):
        # 2. to 5. one stage after another
        builder, node = _Builder(whole, index), first.get(index) if name == f"stage{index}" else None
        module, is_last = builder.graph_module(), index == whole.output_stage
        stages.append(
            Stage(
                index=index,
                name=name,
                module=module,
                function=module,
                inputs=tuple(builder.inputs),
                outputs=tuple(builder.sent),
                returns_result=is_last,
                result=program.result if is_last else None,
                tensors=builder.tensors(),
                draws_random=builder.draws_random,
                runs_python=builder.runs_python,
                gathered=program.gathered.get(index),
                ways=tuple(builder.ways) if index in program.gathered else (),
                begins="" if node is None else described(node) + where(node),
            )
        )
    stages = varying_marked(program, stages)  # 6. messages that may change
    # The fact alone: another tracer has captured the model, so that the advice after the semicolon needs no answer.
    lost = [f"{name} could not: {why.splitlines()[0].partition('; ')[0]}" for name, why in program.refusals]
    origin = "\n".join([f"the {program.tracer} tracer", *lost])
    written = names_of_written(program)
    last = stages[whole.output_stage]
    batch_inputs = None if last.gathered else [name for name in last.inputs if isinstance(name, str)]
    counts = counting(program, batch_inputs)
    graph = StageGraph(
        tuple(stages),
        program.inputs,
        program.module,
        origin=origin,
        written=written,
        written_by_batch=names_written_by_batch(program) & written,
        counting=counts,
        crossings=crossings(program.plain or program),
        layers=program.layers,
        generators=_own_generators(program),
    )
    return graph.with_backward()


def _own_generators(program: Program) -> dict[str, OwnGenerator]:
    """The model's own random generators, by name, each with the stage that drew first in the first capture."""
    first, stages = program.first or program, dict[str, int]()
    for node in first.nodes:
        drawn = first.effects.get(node.name, Effects()).generators
        for name in (name for name, each in first.generators.items() if id(each) in drawn):
            stages.setdefault(name, first.stage_of[node.name])
    return {name: OwnGenerator(each, stages.get(name)) for name, each in program.generators.items()}


def _check_attributes(program: Program) -> None:
    """PartitionError if an opaque region sets a Python attribute that a call in another stage sets or reads: each rank
    has its own attribute."""
    users: dict[tuple[str, str], tuple[str, str]] = {}
    for node in program.nodes:
        calls = opaque_calls(program.opaque.get(str(node.target))) if node.name in program.stage_of else ()
        for call in calls:
            stage = program.stage_names[program.stage_of[node.name]]
            for attribute in sorted(call.attributes):
                first, other = users.setdefault(attribute, (stage, call.name))
                if first != stage:
                    raise PartitionError(
                        f"{'.'.join(filter(None, attribute))}, an attribute that changes while the model runs, is used "
                        f"by {other} in stage {first!r} and by {call.name} in stage {stage!r}, which are "
                        "opaque: each rank would have a value of its own; return it as a tensor from one of them "
                        "and give it to the other, or cut so that both are in one stage"
                    )


class _WholeProgram:
    """The uses of all values over the whole program."""

    def __init__(self, program: Program) -> None:
        self.program, self.output = program, program.graph.output_node()
        self.nodes = list(program.nodes)
        if program.output_stage is None:
            raise PartitionError("the model's output depends on inputs alone, or on parameters alone")
        self.output_stage = program.output_stage
        # value → the groups that write an input, or a value behind a boundary: a stage then needs a private copy
        self.rewritten: dict[Node, list[frozenset[str]]] = {}
        group_of = {name: group for group in program.written for name in group}
        for node in self.nodes:
            if node.name in group_of and (node.op == "placeholder" or is_boundary_value(node)):
                self.rewritten.setdefault(made_by(node), []).append(group_of[node.name])
        # A stage may run several forwards before the first backward, as in 1F1B. A buffer that the stage writes has
        # changed by then, so the forward copies the buffer's value where another stage or a backward needs it.
        holders = [node for nodes in holders_of_written(program) for node in nodes]
        self.may_write = frozenset().union({node.name for node in holders}, *program.written)
        self.views_of_written = self._sharing([node for node in holders if node.op == "get_attr"])
        # Keep program order throughout: autograd sums the gradients of a value in this order.
        self.readers = defaultdict(list, readers_of(program))
        self.uses: dict[Node, list[tuple[Node, int]]] = {}
        """Value of a stage → its uses, in program order: (the user node, the user's stage)."""
        for node in self.nodes:
            stage = self.output_stage if node is self.output else self.stage_of(node)
            for value in dict.fromkeys(map(made_by, node.all_input_nodes)):
                if stage is not None and self.stage_of(value) is not None:
                    self.uses.setdefault(value, []).append((node, stage))
        self.arriving: dict[int, list[Node]] = {}
        """Stage → the values of other stages that it uses, ordered by their first use in the program."""
        for value in self.uses:
            for stage in self.edges_from(value):
                self.arriving.setdefault(stage, []).append(value)

    def _sharing(self, buffers: list[Node]) -> frozenset[str]:
        """Returns the nodes that share the memory of a written buffer, which the next micro-batch writes again. A batch
        norm's result does not share this memory."""
        if not buffers:
            return frozenset()
        memory = shared_memory(self.program)
        roots = {memory.find(node) for node in buffers}
        return frozenset(node.name for node in self.nodes if memory.find(node) in roots)

    def stage_of(self, node: Node) -> int | None:
        """The stage of a node; None for inputs, tensors of the model, and copied nodes."""
        return self.program.stage_of.get(node.name)

    def edges_from(self, value: Node) -> dict[int, Node]:
        """Returns consuming stage → the last node that uses a value, for uses outside of the value's own stage."""
        # A later use in the same stage replaces the earlier use.
        last = {stage: user for user, stage in self.uses.get(value, ()) if stage != self.stage_of(value)}
        return dict(sorted(last.items()))


class _Builder:
    """Builds a stage's graph in program order, so that autograd works as in the whole program.

    The constructor builds all of it. Afterwards ``inputs``, ``ways`` and ``sent`` say what the stage takes and gives,
    and ``graph_module`` has the code.
    """

    def __init__(self, whole: _WholeProgram, stage: int) -> None:
        self._whole, self._program, self._stage = whole, whole.program, stage
        self.inputs: list[str | Edge] = []
        self.ways: list[Mode | None] = []
        self.draws_random = self.runs_python = False
        self._graph = fx.Graph()
        self._built: dict[Node, Node] = {}
        self._as_now: dict[Node, Node] = {}
        self.sent: dict[Edge, Node] = {}
        """Outgoing edge → the program's node that computes its value, in order."""
        self._handed_off: dict[Edge, Node] = {}
        self._arrived: dict[tuple[Node, Mode | None], Node] = {}
        self._way_of: dict[tuple[Node, Node, Gather | None], Mode | None] = {}
        """(reader, value, the ``Gather`` in front of the reader) → mode, for values that enter in several modes."""
        self._modes: Modes | None = None
        self._entered: Node | None = None
        self._asked: dict[Node, tuple[Node, int]] = {}
        """Size node of an input → (an arriving tensor with the same size, its dimension)."""
        self._numbers: dict[Node, SizeOf] = {}
        """Size node of an input → the size as a stage input, if no arriving tensor has it: the input is not needed."""
        # The order matters: inputs come before their readers, and fx requires every placeholder in front.
        self._members = self._needed()
        self._own_names = {node.name for node in self._members if is_compute(node)}
        self._add_inputs()
        self._add_sizes()
        handoffs = self._handoffs()
        for node in sorted({*self._members, *handoffs}):
            if node in self._members:
                self._add(node)
            for edge in handoffs.get(node, ()):
                name = f"{edge.value}_to_{self._program.stage_names[edge.target]}".replace(".", "_")
                values = (self._now(self.sent[edge]),)
                self._handed_off[edge] = self._graph.create_node("call_function", handoff, values, name=name)
        self._add_output()

    def _needed(self) -> set[Node]:
        """Returns this stage's own nodes, and the copied nodes and ``get_attr`` nodes that they depend on."""
        needed: set[Node] = set()
        arriving = self._arriving_sizes()
        # From the ends backwards, through copied nodes, which belong to each stage that needs them.
        waiting = [node for node in self._whole.readers[self._stage] if node.op != "output"]
        waiting += self._whole.output.all_input_nodes if self._stage == self._whole.output_stage else []
        while waiting:
            node = made_by(waiting.pop())
            stage = self._whole.stage_of(node)
            if node.target is SIZE and stage is None and self._finds_size(node, arriving):
                continue
            mine = stage == self._stage or node.name in self._program.copied or node.op == "get_attr"
            if node not in needed and mine:
                needed.add(node)
                waiting.extend(node.all_input_nodes)
        return needed

    def _finds_size(self, node: Node, arriving: Mapping[tuple[str, ...], tuple[Node, int]]) -> bool:
        """Whether this stage gets a size of an input without the input itself."""
        size = None if self._stage in self._program.gathered else SizeOf.queried_by(node)  # a group has its own rows
        if node.meta.get("sizes") in arriving:
            self._asked[node] = arriving[node.meta["sizes"]]
        elif size is not None:
            self._numbers[node] = size
        return node in self._asked or node in self._numbers

    def _arriving_sizes(self) -> dict[tuple[str, ...], tuple[Node, int]]:
        """Returns symbolic size → (arriving value with this size, its dimension), so that the size needs no input."""
        sizes: dict[tuple[str, ...], tuple[Node, int]] = {}
        gathered = self._program.gathered.get(self._stage)
        if gathered is not None and len(gathered.modes) > 1:  # arriving values have different rows in each mode
            return sizes
        for value in self._whole.arriving.get(self._stage, ()):
            for dim, size in enumerate(() if is_number(value) else value.meta.get("sizes", ())):
                if size:
                    sizes.setdefault((size,), (value, dim))
        return sizes

    def _add_inputs(self) -> None:
        """Adds placeholders: batch inputs in call order, then arriving values by stage and program order; a value that
        is gathered in several modes gets a placeholder per mode."""
        ways: dict[Node, set[Mode | None]] = {}
        way_of: dict[tuple[Node, Node, Gather | None], Mode | None] = {}
        for arrival in entering(self._program, self._stage, self._whole.readers[self._stage]):
            if arrival.reader.op != "output" and arrival.reader not in self._members:
                continue  # only a size needs this value, and the stage gets the size otherwise
            mode = gather_mode(self._program, self._stage, arrival)
            ways.setdefault(arrival.value, set()).add(mode)
            way_of[arrival.reader, arrival.value, arrival.gather] = mode
        self._way_of = {key: mode for key, mode in way_of.items() if len(ways[key[1]]) > 1}

        def order(node: Node) -> tuple[bool, int, Node]:
            return node.op != "placeholder", self._whole.stage_of(node) or 0, node

        for node in sorted(ways, key=order):
            source = self._whole.stage_of(node)
            for mode in sorted(ways[node], key=str):
                self.inputs.append(str(node.target) if source is None else Edge(source, self._stage, node.name))
                self.ways.append(mode)
                name = f"{node.name}_{mode}" if len(ways[node]) > 1 else node.name
                self._arrived[node, mode] = self._graph.placeholder(name)
        # Copies come behind the last placeholder.
        for (node, mode), arrived in [*self._arrived.items()]:
            self._built[node] = self._arrived[node, mode] = self._private(node, arrived)

    def _add_sizes(self) -> None:
        """Adds a placeholder for each size of an input, after the others, and size queries of arriving values."""
        placeholders: dict[SizeOf, Node] = {}
        for number, size in self._numbers.items():
            if size not in placeholders:
                self.inputs.append(size)
                self.ways.append(None)
                placeholders[size] = self._graph.placeholder(number.name)
                placeholders[size].meta["is_number"] = True
            self._built[number] = placeholders[size]
        for number, (value, dim) in self._asked.items():
            self._built[number] = self._graph.call_function(SIZE, (self._built[value], dim))

    def _private(self, value: Node, built: Node) -> Node:
        """Returns a private copy of an arriving value if this stage writes it; otherwise the value."""
        if any(not self._own_names.isdisjoint(group) for group in self._whole.rewritten.get(value, ())):
            return self._graph.call_function(private, (built,))
        return built

    def _handoffs(self) -> dict[Node, list[Edge]]:
        """Returns node → edges to hand off after it: a value with several uses gets a handoff node per consumer."""
        edges_after: dict[Node, list[Edge]] = {}
        for node in self._whole.readers[self._stage]:
            for target, user in self._whole.edges_from(node).items():
                edge = Edge(self._stage, target, node.name)
                self.sent[edge] = node
                # Autograd sums the gradients of a value in the order of its uses. A use in another stage gets its own
                # node at the place of the use, so that the sum has the bits of the whole program.
                if len(self._whole.uses[node]) > 1:
                    edges_after.setdefault(user, []).append(edge)
        return edges_after

    def _add(self, node: Node) -> None:
        """Adds a node of this stage, in its modes; checks the result shapes of a call that was captured as a whole."""
        program = self._program
        self._change_modes(node)
        copied = self._graph.node_copy(node, partial(self._read, node))
        effects = program.effects.get(node.name)
        if effects is not None and "shapes" in node.meta:
            part, name, shapes = program.opaque.get(str(node.target)), "", node.meta["shapes"]
            if isinstance(part, OpaqueCall):
                name = part.name
                shapes = [shape if used else None for shape, used in zip(shapes, part.uses, strict=True)]
            facts = (shapes, str(node.target), effects.is_rehearsed, name)
            self._graph.call_function(check_shapes, (copied, *facts))
        self._built[node] = self._private(node, copied)
        # A write makes every private copy from before it stale.
        if node.name in self._whole.may_write:
            self._as_now.clear()
        self.draws_random |= is_random(program, node)
        self.runs_python |= effects is not None and effects.runs_python

    def _change_modes(self, node: Node | None) -> None:
        """Leaves the modes of the previous nodes, and enters the modes of ``node``, if they differ."""
        # fx records no context managers, so each change of grad mode or autocast becomes a call in the graph.
        wanted = node.meta.get("modes") if node is not None else None
        if wanted == self._modes or (node is not None and not is_compute(node)):
            return
        if self._entered is not None:
            self._graph.call_function(leave_modes, (self._entered,))
        self._modes, self._entered = wanted, None
        if wanted is not None:
            self._entered = self._graph.call_function(enter_modes, wanted.arguments)

    def _read(self, reader: Node, operand: Node) -> Node:
        """The built node for an operand: in the reader's mode, and as it is now if its memory is written."""
        value = made_by(operand)
        key = reader, value, crossed(operand)[0]
        if key in self._way_of:
            return self._arrived[value, self._way_of[key]]
        is_view = value.name in self._whole.views_of_written and not is_number(reader)
        return self._now(value) if is_view and operand not in aliased(self._program, reader) else self._built[value]

    def _now(self, value: Node) -> Node:
        """Returns a copy of ``value`` at this place, for a backward or another stage, if it shares a written buffer."""
        if value.name not in self._whole.views_of_written:
            return self._built[value]
        if value not in self._as_now:
            self._as_now[value] = self._graph.call_function(private, (self._built[value],))
        return self._as_now[value]

    def _add_output(self) -> None:
        """Leaves the last modes, and adds the output: the sent values in order of their edges, then the result."""
        self._change_modes(None)
        values: list[Any] = [self._handed_off.get(edge) or self._now(value) for edge, value in self.sent.items()]
        if self._stage == self._whole.output_stage:
            output = self._whole.output
            values.append(fx.node.map_arg(output.args[0], partial(self._read, output)))
        self._graph.output(tuple(values))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers that this stage uses, by the model's names."""
        tensors: dict[str, Tensor] = {}
        for node in sorted(self._members):
            tensors |= own_tensors(self._program, node)
        return tensors

    def graph_module(self) -> fx.GraphModule:
        """Returns the stage's code."""
        names = {str(node.target) for node in self._graph.nodes if node.op in ("get_attr", "call_module")}
        root = {name: self._program.attribute(name) for name in sorted(names)}
        module = graph_module(root, self._graph, self._program.stage_names[self._stage])
        _note_parts(module)
        return module


def _note_parts(module: nn.Module) -> None:
    """Also sets the submodules that a graph calls as plain attributes: for ``self.encoder.layers`` Python calls
    ``nn.Module.__getattr__``, which takes half a microsecond per dot, only if there is no plain attribute."""
    for name, part in module.named_children():
        vars(module).setdefault(name, part)
        if type(part) is nn.Module:  # the graph module's own, made for a dot in a name
            _note_parts(part)


# --- Varying ---


def varying_marked(program: Program, stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages with ``varies`` set.

    1. A stage varies if it holds an opaque region with varying results, or code that draws from generators of Python,
       NumPy or the model's own.
    2. Stages before it vary: the region may use their values in some steps only, and otherwise sends no gradient back.
    3. Stages behind it vary if they compute values whose sizes come from the region, or of any size if sizes are
       unknown.
    4. Stages behind it also vary if they train nothing: their outputs require a gradient only if their inputs do.
    """
    opaque = {node: opaque_calls(program.opaque.get(str(node.target))) for node in program.nodes}
    draws = {name for name, effects in program.effects.items() if effects.generators}
    regions = [node for node, calls in opaque.items() if node.name in draws or any(call.varies for call in calls)]
    # 1. the regions themselves
    own = {program.stage_of[node.name] for node in regions}
    varying, behind, unsure = set(own), set(own), set(own)
    # 2. Before a region, backwards along the edges: only the step shows whether a gradient comes back.
    for stage in reversed(stages):
        if any(edge.target in varying for edge in stage.outputs):
            varying.add(stage.index)
    # 3. Behind a region: sizes that the region returns change from step to step.
    symbols = {name for node in regions for out in node.users for name in _symbols(out)}
    sizes = {node.name: _symbols(node) for node in program.nodes}
    for stage in stages if program.holds_for_any_size or symbols else ():
        if any(isinstance(entry, Edge) and entry.source in behind for entry in stage.inputs):
            behind.add(stage.index)
            if program.holds_for_any_size or any(sizes[edge.value] & symbols for edge in stage.outputs):
                varying.add(stage.index)
    # 4. A stage that trains nothing passes on whether its input needs a gradient.
    for stage in stages:
        takes_unsure = any(isinstance(entry, Edge) and entry.source in unsure for entry in stage.inputs)
        if takes_unsure and not any(parameter.requires_grad for parameter in stage.parameters.values()):
            unsure.add(stage.index)
    varying |= unsure
    return [replace(stage, varies=stage.index in varying) for stage in stages]


def _symbols(node: Node) -> set[str]:
    """Returns the symbols in a node's symbolic sizes."""
    return {name for size in node.meta.get("sizes", ()) for name in re.findall(r"[a-z]+\d+", size)}
