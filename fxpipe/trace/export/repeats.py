"""Repeats: torch.export traces a repeated layer once; of the other layers like it, only the Python code runs.

Contract: a layer repeats an earlier layer if its forward calls the same functions of torch, in the same order, with
equal arguments. Tensors are equal if both layers compute them by the same call, or if both get them from outside of the
layer, with the same layout, dtype, device and need of a gradient. No code, attribute or hook has to be compared.

Pseudocode: the first layer of a kind is traced, and its calls are recorded. A later layer of this kind runs on
stand-ins for its tensors: each of its calls must be the next call of the record, and returns the record's result. An
operator ``again`` takes the layer's place in the graph. ``expand`` replaces it by copies of the first layer's nodes.

Layers that write into tensors from outside, ask for a tensor's numbers, or contain boundaries or opaque regions, are
traced as usual. If a layer turns out to differ, or if a stand-in is used outside of its layer, fxpipe exports again
without repeats.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fxpipe.progress import progress
from fxpipe.specs import TensorSpec
from fxpipe.stage.modes import ambient_autocast
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.torch_compat.export import traced_graph
from fxpipe.torch_compat.fakes import FakeTensor, FakeTensorMode
from fxpipe.torch_compat.operators import OpOverload
from fxpipe.torch_compat.tensors import storage_id, version_of
from fxpipe.trace.export.layer_calls import (
    Differs,
    LayerFollowing,
    LayerRecord,
    LayerRecording,
    LayerTensors,
    Unrepeatable,
    last_node,
)
from fxpipe.trace.export.operators import again
from fxpipe.trace.fake import FakeModel, outside
from fxpipe.trace.patching import Key, handled
from fxpipe.trace.request import Request

_Recorded = tuple[Any, LayerRecord | None]
_AGAIN = torch.ops.fxpipe.again.default
_RECORD, _OUTSIDE = "fxpipe_record", "fxpipe_outside"
"""The keys in a node's ``meta``: the number of the record that the node belongs to, and the records that use the node
from outside, as (the record's number, the number of the tensor)."""


class Repeats:
    """The layers of a model that may be repeats: submodules of one class, side by side; and the records of one export.

    ``read``: returns the attributes that forward has read, as (the id of a module's ``__dict__``, the name).
    """

    def __init__(self, request: Request, read: Callable[[], Collection[tuple[int, str]]]) -> None:
        self._read, self._device = read, request.device
        self.followed = 0
        """The number of calls of layers that followed a record."""
        cut = [*request.cuts, *(region.path for region in request.whole)]
        parts = {path: part for path, part in request.module.named_modules() if next(part.children(), None) is not None}
        alike = Counter((path.rpartition(".")[0], type(part)) for path, part in parts.items())
        self._layers = {
            id(vars(part)): (part, path.rpartition(".")[2], _structure(part))
            for path, part in parts.items()
            if alike[path.rpartition(".")[0], type(part)] > 1 and not any(name.startswith(f"{path}.") for name in cut)
        }
        paths = {path for path, part in parts.items() if id(vars(part)) in self._layers}
        inside = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
        self._outermost = {id(vars(parts[path])) for path in paths - inside}
        self._records: dict[Any, list[LayerRecord] | None] = {}
        self._is_inside = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this context is open, a layer that repeats another layer is not traced. Enter it outside of cuts."""
        self._records.clear()
        self._left = set(self._outermost)
        calls = handled([(part, "forward") for part, *_ in self._layers.values()], self._call)
        with progress("capturing", len(self._left), "layers") as self._advance, calls:
            yield

    def check_outside(self, values: Iterable[Any]) -> None:
        """``Differs`` for a stand-in among these values: nothing computes it."""
        modes = {id(record.fake.mode) for records in self._records.values() for record in records or ()}
        if any(isinstance(value, FakeTensor) and id(value.fake_mode) in modes for value in values):
            raise Differs

    def _call(self, key: Key, inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        graph, run = traced_graph(), partial(inner, *args, **kwargs)
        if graph is None or self._is_inside:
            return run()
        layer, name, structure = self._layers[key[0]]
        call = _LayerCall(graph, LayerTensors(), layer, name, run)
        try:
            given = call.tensors.given((args, dict(kwargs)))
        except Unrepeatable:
            return run()
        same = tuple(map(id, call.tensors.objects))
        like = structure, torch.is_grad_enabled(), ambient_autocast(), given, tuple(call.tensors.kinds), same
        self._is_inside = True
        if key[0] in self._left:
            self._left.remove(key[0])
            self._advance(1)
        try:
            return self._known_or_traced(call, like)
        finally:
            self._is_inside = False

    def _known_or_traced(self, call: _LayerCall, like: Any) -> Any:
        records = self._records.setdefault(like, [])
        if records is None:
            return call.run()
        for record in records:
            if call.has_values_of(record):
                self.followed += 1
                return call.follow(record)
        number = sum(len(records or ()) for records in self._records.values())
        result, new = call.record(number, self._read(), self._device)
        self._records[like] = None if new is None else [*records, new]
        return result


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer in an export. ``name``: the layer's, in its parent; ``run``: calls its forward."""

    graph: fx.Graph
    tensors: LayerTensors
    layer: nn.Module
    name: str
    run: Callable[[], Any]

    def has_values_of(self, record: LayerRecord) -> bool:
        """Whether the layer has the record's plain values, but for its own number, such as ``layer_idx``."""
        values, names = _plain(self.layer, record.plain), (record.name, self.name)
        pairs = [(was, values.get(key)) for key, was in record.plain.items()]
        return len(values) == len(pairs) and all(
            was == value or (type(value) is int and (f"{was}", f"{value}") == names) for was, value in pairs
        )

    def follow(self, record: LayerRecord) -> Any:
        """Compares the call with a record, and adds an operator in place of the layer's nodes."""
        last, following = last_node(self.graph), LayerFollowing(record, self.tensors)
        try:
            with following:
                result = self.run()
            following.end(result)
        except Exception as error:  # stand-ins may be the reason
            raise Differs from error
        if last is not last_node(self.graph):
            raise Differs
        return self._result(record)

    def record(
        self, number: int, read: Collection[tuple[int, str]], device: torch.device
    ) -> tuple[Any, LayerRecord | None]:
        """Traces the layer. Returns its result, and the record for later layers; None if they cannot follow it."""
        before, recording = last_node(self.graph), LayerRecording(self.graph, self.tensors)
        with recording:
            result = self.run()
        described = recording.noted(self.tensors.described, result)
        nodes = list(takewhile(lambda node: node is not before, reversed(self.graph.nodes)))
        if not recording.is_repeatable or not all(map(_can_be_copied, nodes)):
            return result, None
        made = self.tensors.made
        returned = {index: made[index] for origin, index in described[1] if origin == "made"}
        with outside():
            are_written = self.tensors.versions != list(map(version_of, self.tensors.outside))
            if are_written or not _behave_like_copies(list(returned.values()), self.tensors.outside):
                return result, None
            specs = list(map(TensorSpec.from_tensor, made))
        for node in nodes:
            if node.op == "call_function":  # copies share the constants
                node.meta[_RECORD] = number
        for index, used in enumerate(self.tensors.nodes):
            if used is not None:
                used.meta.setdefault(_OUTSIDE, []).append((number, index))
        paths = {id(vars(part)): path for path, part in self.layer.named_modules()}
        plain = _plain(self.layer, [(paths[owner], name) for owner, name in read if owner in paths])
        fake, kinds = FakeModel(FakeTensorMode(), device), list(self.tensors.kinds)
        record = LayerRecord(number, self.name, plain, recording.calls, kinds, fake, specs, described, returned)
        return self._result(record), record

    def _result(self, record: LayerRecord) -> Any:
        tensors = again(self.tensors.outside, list(record.returned.values()), record.number)
        return self.tensors.filled(record.result, dict(zip(record.returned, tensors, strict=True)))


def _structure(layer: nn.Module) -> Any:
    """What a layer has in common with its repeats."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        tuple((path, type(part), part.training) for path, part in layer.named_modules()),
        tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
    )


def _plain(layer: nn.Module, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The plain values among attributes of a layer's submodules, such as ``layer_idx``."""
    parts = {path: vars(part) for path, part in layer.named_modules()}
    values = {(path, name): parts[path].get(name) for path, name in names}
    return {key: value for key, value in values.items() if isinstance(value, PLAIN_LEAF)}


def _can_be_copied(node: Node) -> bool:
    """Whether a node sets no mode, and is no part of a transform such as ``torch.vmap``."""
    return isinstance(node.target, OpOverload) or node.op == "get_attr" or node.target is operator.getitem


def _behave_like_copies(returned: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether ``again`` can return tensors like these: in memory of their own, with a gradient if an argument has."""
    memory = Counter(map(storage_id, [*returned, *given]))
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in [*returned, *given])
    return bool(returned) and all(
        memory[storage_id(tensor)] == 1 and tensor.requires_grad == (needed and tensor.is_floating_point())
        for tensor in returned
    )


# --- after the export


def expand(exported: torch.export.ExportedProgram) -> None:
    """Replaces each ``again`` in an exported graph by copies of its record's nodes; ``Differs`` if it cannot."""
    graph, records = exported.graph, defaultdict[Any, _Traced](_Traced)
    for node in graph.nodes:
        if _RECORD in node.meta:
            records[node.meta[_RECORD]].nodes.append(node)
        for number, index in node.meta.get(_OUTSIDE, ()):
            records[number].starts[index] = node
    now: dict[Any, Node] = {}  # a node → the node that computes its tensor from here on
    repeats = [node for node in graph.nodes if node.target is _AGAIN]
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    for node in list(graph.nodes) if repeats else ():
        before = node.args
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: now.get(used, used))
        if node.target is _AGAIN:
            values, ends = records[node.args[2]].copied(node, now, constants)
            now.update({before[0][index]: end for index, end in ends.items()})
            now.update({part: values[part.args[1]] for part in node.users})
    for node in reversed(repeats):
        for part in list(node.users):
            graph.erase_node(part)
        graph.erase_node(node)


@dataclass
class _Traced:
    """A layer that was traced: its nodes, and the nodes of the tensors from outside, by number, at their first use."""

    nodes: list[Node] = field(default_factory=list)
    starts: dict[int, Node] = field(default_factory=dict)
    again: Node | None = None
    """The operator that returns the layer's tensors."""

    def copied(
        self, repeat: Node, now: Mapping[Node, Node], constants: Collection[str]
    ) -> tuple[list[Node], dict[int, Node]]:
        """Copies the layer in place of a repeat. Returns the nodes of the results, and of each tensor from outside
        that another node computes after the layer, by number: a call such as ``x.to(x.dtype)`` returns its argument.

        ``now``: a node before the repeat → the node that computes its tensor at the repeat."""
        given, results, _ = (cast(Any, argument) for argument in repeat.args)
        if self.again is None:
            self.again = repeat
            self.starts = {index: now.get(start, start) for index, start in self.starts.items()}
            return results, {}
        ends, copies = dict(enumerate(cast(Any, self.again.args[0]))), dict[Node, Node]()
        copies |= {self.starts.get(index, end): given[index] for index, end in ends.items()}
        for node in self.nodes:
            if any(used not in copies and used.name not in constants for used in node.all_input_nodes):
                raise Differs
            with repeat.graph.inserting_before(repeat):
                copies[node] = repeat.graph.node_copy(node, lambda used: copies.get(used, used))
            copies[node].meta["nn_module_stack"] = _moved(node, self.again, repeat)
        moved = {index: copies[end] for index, end in ends.items() if self.starts.get(index, end) is not end}
        return [copies[result] for result in results], moved


def _moved(node: Node, old: Node, new: Node) -> dict[str, tuple[str, Any]]:
    """The submodules around a node of one layer, for the node's copy in another layer. ``old``, ``new``: the operators
    that return the two layers' tensors."""
    stack, outer, moved = ({**each.meta.get("nn_module_stack", {})} for each in (node, old, new))
    was, now = (list(each.values())[-1][0] for each in (outer, moved))
    for key, (path, kind) in list(stack.items())[len(outer) :]:
        if path.startswith(f"{was}."):
            key = path = now + path[len(was) :]
        moved[key] = path, kind
    return moved
