"""Converts a tape to a graph: nodes with shapes, modes and user lines, and a module for each checkpointed part.

Takes: the operations of a tape, the inputs, and the leaves of the result. Gives: an ``fx.Graph``, the opaque modules
that it calls, and the effects of its calls.

1. ``needed`` drops operations whose results nothing uses and that write nothing.
2. ``_outlined`` replaces the operations of each checkpointed part by one call of a ``Checkpointed`` module, innermost
   parts first.
3. ``_Writer`` makes the nodes in order. A part of a result becomes a ``getitem`` node where it is used.

For example, with ``checkpoint(f, x)`` around two operations::

    tape    a = linear(x); b = gelu(a) [checkpoint]; c = mul(b, b) [checkpoint]; d = c.sum()
    graph   a = linear(x); checkpoint_0 = Checkpointed(a); d = checkpoint_0[0].sum()

It runs nothing. It refuses a checkpointed part that writes a tensor from outside, since backward would write it again.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.errors import TraceError
from fxpipe.graph.program import Effects, graph_module
from fxpipe.snapshots.snapshot import storage_of
from fxpipe.stage.activation_checkpoints import Checkpointed
from fxpipe.stage.modes import enter_modes, leave_modes
from fxpipe.stage.stage_calls import check_shapes, shapes_of
from fxpipe.trace.record.tape import Checkpoint, ModesNow, NamedSource, Operation, TapeValue, Touched, mapped, tensors

Key = tuple[int, tuple[Any, ...]]
Storages = Mapping[int, tuple[int, str]]
"""The storage of a model tensor → (the tensor's position in the model's order, its name)."""


def needed(tape: Sequence[Operation], result: Sequence[Any], storages: Storages) -> list[Operation]:
    """The tape without operations whose result is unused and whose writes have no effect.

    A write has an effect if the storage belongs to the model, or if a later operation uses the storage.
    """
    read = [leaf for leaf in result if isinstance(leaf, TapeValue)]
    wanted, memory = {id(value.maker) for value in read}, {*storages, *(storage_of(fake_of(value)) for value in read)}
    # backwards, as the users of an operation's result, or of the storage that it writes, come later on the tape
    operations: list[Operation] = []
    for operation in reversed(tape):
        if operation.stays or id(operation) in wanted or operation.writes & memory:
            operations.append(operation)
            wanted |= {id(value.maker) for value in operation.values}
            memory |= {storage_of(fake_of(value)) for value in operation.values}
    return operations[::-1]


@dataclass
class _Writer:
    """Writes operations into a graph. Each used part of a result becomes a node after the result's own node."""

    tape: Sequence[Operation]
    result: Sequence[Any]
    around: ModesNow
    bare: Callable[[Any], Any]
    graph: fx.Graph = field(default_factory=fx.Graph)
    effects: dict[str, Effects] = field(default_factory=dict)
    keeps_notes: bool = True
    """Whether nodes hold modes and shapes in their meta; if not, extra nodes enter the modes and check the shapes."""

    def __post_init__(self) -> None:
        self._nodes: dict[Key, Node] = {}
        self._parts: dict[int, dict[Key, TapeValue]] = {}
        used = [value for operation in self.tape for value in operation.values]
        for value in [*used, *(leaf for leaf in self.result if isinstance(leaf, TapeValue))]:
            # only the used parts of a result become nodes
            self._parts.setdefault(id(value.maker), {})[value.key] = value

    def add_input(self, source: NamedSource) -> None:
        """Adds the placeholder of an input, and nodes for the tensors inside of it that are used."""
        node = self.graph.placeholder(source.name)
        node.meta["val"] = self.bare(source.result)
        self._nodes[id(source), ()] = node
        self._add_parts(source, node)

    def bind(self, value: TapeValue, node: Node) -> None:
        """Maps a value from outside of this graph to one of the graph's nodes."""
        self._nodes[value.key] = node

    def write(self) -> fx.Graph:
        """Writes all operations in order, and returns the graph."""
        # groups consecutive operations in the same modes; a checkpoint's body enters the modes once for each group
        for modes, group in itertools.groupby(self.tape, lambda operation: operation.scope.modes.beside(self.around)):
            entered = None
            if modes is not None and not self.keeps_notes:
                entered = self.graph.call_function(enter_modes, modes.arguments)
            for operation in group:
                self._write(operation, modes)
            if entered is not None:
                self.graph.call_function(leave_modes, (entered,))
        self.graph.output(tuple(map(self.argument, self.result)))
        return self.graph

    def _write(self, operation: Operation, modes: Any) -> None:
        """Adds the node of one operation, and nodes for the used parts of its result.

        A node has the user's line, its submodules, its fake result, its modes, and, for an opaque call, its shapes and
        effects.
        """
        node = self.graph.create_node(
            operation.kind,
            operation.target,
            mapped(operation.args, self.argument),
            mapped(operation.kwargs, self.argument),
        )
        node.stack_trace = operation.scope.line or None
        node.meta["nn_module_stack"] = dict(operation.scope.stack)
        node.meta["val"] = self.bare(operation.result)
        if modes is not None and self.keeps_notes:
            node.meta["modes"] = modes
        if operation.effects is not None:
            self.effects[node.name] = operation.effects
            # an opaque call must return the same shapes in each step
            shapes = shapes_of(operation.result)
            if self.keeps_notes:
                node.meta["shapes"] = shapes
            elif operation.effects.is_rehearsed:
                self.graph.call_function(check_shapes, (node, shapes, str(node.target), True))
        self._nodes[id(operation), ()] = node
        self._add_parts(operation, node)
        for key, index in operation.stands_for.items():
            self._nodes[key] = self._part(operation, (index,), node)

    def _add_parts(self, maker: Operation | NamedSource, node: Node) -> None:
        for value in self._parts.get(id(maker), {}).values():
            self._part(maker, value.path, node)

    def _part(self, maker: Operation | NamedSource, path: tuple[Any, ...], whole: Node) -> Node:
        """The node of a part of a result: one ``getitem`` for each step of its path."""
        if (id(maker), path) not in self._nodes:
            container = self._part(maker, path[:-1], whole)
            part = self.graph.call_function(operator.getitem, (container, path[-1]))
            part.meta = {name: fact for name, fact in whole.meta.items() if name != "val"}
            part.meta["val"] = container.meta["val"][path[-1]]
            part.stack_trace = whole.stack_trace
            self._nodes[id(maker), path] = part
        return self._nodes[id(maker), path]

    def argument(self, leaf: Any) -> Any:
        """The node for a value; a parameter, buffer or constant gets its ``get_attr`` node at its first use."""
        if not isinstance(leaf, TapeValue):
            return leaf
        if leaf.key not in self._nodes:
            assert isinstance(leaf.maker, NamedSource), leaf
            node = self.graph.create_node("get_attr", leaf.maker.name)
            node.meta["val"] = self.bare(leaf.maker.result)
            self._nodes[leaf.key] = node
        return self._nodes[leaf.key]


@dataclass
class Emitter:
    """Makes the graph of a tape, with one call of an opaque module for each checkpointed part.

    ``opaque``: the opaque modules by name; the emitter adds the modules of checkpointed parts. ``bare``: makes a value
    without its autograd graph, for ``node.meta``.
    """

    module: nn.Module
    opaque: dict[str, nn.Module]
    storages: Storages
    bare: Callable[[Any], Any]
    effects: Mapping[str, Effects] = field(default_factory=dict)
    """For ``Program.effects``, once the graph is made."""

    def graph(
        self, tape: Sequence[Operation], inputs: Sequence[NamedSource], result: Sequence[Any], around: ModesNow
    ) -> fx.Graph:
        """The graph of the needed operations. ``result``: the result's leaves, with a ``TapeValue`` for each tensor."""
        # 1. and 2. needed operations, with checkpoints as calls
        main = self._outlined(needed(tape, result, self.storages), result, depth=0)
        # 3. nodes
        writer = _Writer(main, result, around, self.bare)
        for source in inputs:
            writer.add_input(source)
        self.effects = writer.effects
        return writer.write()

    def _outlined(self, tape: Sequence[Operation], result: Sequence[Any], depth: int) -> list[Operation]:
        """The tape with one operation for each checkpointed part of this nesting depth; the outermost depth is 0."""
        uses = [(id(user), value) for user in tape for value in user.values]
        uses += [(id(result), leaf) for leaf in result if isinstance(leaf, TapeValue)]
        outlined: list[Operation] = []
        for inside, run in itertools.groupby(tape, lambda step: next(iter(step.scope.checkpoints[depth:]), None)):
            group = list(run)
            if inside is None:
                outlined.extend(group)
                continue
            ids = {id(operation) for operation in group}
            # the part returns the values that later operations use, in the order of their first uses
            outputs = {value.key: value for user, value in uses if id(value.maker) in ids and user not in ids}
            outlined.append(self._outline(inside, group, list(outputs.values()), depth))
        return outlined

    def _outline(self, part: Checkpoint, group: list[Operation], outputs: list[TapeValue], depth: int) -> Operation:
        """The call in place of one checkpointed part's operations.

        Its inputs are the values from outside that the part uses, its outputs the values that later operations use,
        each in the order of first use.
        """
        ids = {id(operation) for operation in group}
        outer = [value for operation in group for value in operation.values if id(value.maker) not in ids]
        inputs = list({value.key: value for value in outer}.values())
        body = self._outlined(group, outputs, depth + 1)
        # numbered after the inner checkpoints, which _outlined has added already
        name = f"checkpoint_{len(self.opaque)}"
        self.opaque[name] = Checkpointed(self._body(body, inputs, outputs, part.scope.modes), part.options)
        touched = Touched()
        for operation in group:
            touched.add(operation.touched)
        arguments, results = [fake_of(value) for value in inputs], tuple(fake_of(value) for value in outputs)
        # Backward runs the function again, and would repeat its writes to a tensor from outside. Plain PyTorch repeats
        # writes to the model's own buffers, too.
        own = (isinstance(value.maker, NamedSource) and value.maker.kind == "get_attr" for value in inputs)
        if touched.writes & {storage_of(value) for value, is_own in zip(arguments, own, strict=True) if not is_own}:
            raise TraceError(
                "a function given to torch.utils.checkpoint writes a tensor from outside of it, and would write it "
                f"again in backward; write out of place\n{part.scope.line}"
            )
        effects = effects_of(touched, arguments, results, self.storages)
        call = Operation("call_module", name, tuple(inputs), {}, results, part.scope, touched, 0, effects, stays=True)
        call.stands_for = {value.key: index for index, value in enumerate(outputs)}
        return call

    def _body(
        self, body: list[Operation], inputs: list[TapeValue], outputs: list[TapeValue], around: ModesNow
    ) -> fx.GraphModule:
        """The code of a checkpointed part. It enters the modes itself, as backward runs it again outside of the
        graph."""
        writer = _Writer(body, outputs, around, self.bare, keeps_notes=False)
        for index, value in enumerate(inputs):
            writer.bind(value, writer.graph.placeholder(f"input_{index}"))
        graph = writer.write()
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        root = {name: self.opaque.get(name) or self.module.get_submodule(name) for name in sorted(called)}
        return graph_module(root, graph, "checkpointed")


def effects_of(touched: Touched, arguments: Sequence[Tensor], result: Any, storages: Storages) -> Effects:
    """The effects of a call, by the model's names, in the model's order. ``arguments``: its tensors."""
    shared = {storage_of(tensor) for tensor in tensors(result)}
    reads, writes = (
        tuple(name for _, name in sorted(storages[storage] for storage in memory & storages.keys()))
        for memory in (touched.reads, touched.writes)
    )
    shares = tuple(index for index, tensor in enumerate(arguments) if storage_of(tensor) in shared)
    draws_random, generators = touched.draws_random or touched.is_stateful, frozenset(touched.generators)
    return Effects(reads, writes, shares, draws_random, generators=generators)


def fake_of(value: TapeValue) -> Any:
    """The fake tensor of a value."""
    return functools.reduce(operator.getitem, value.path, value.maker.result)
