"""Converts an exported program to a ``Program``: inputs, parameters and boundaries keep the model's names.

Takes: the ``ExportedProgram``, the model, the inputs, and the calls of opaque regions. Gives: ``Program`` with its
constants, effects, and the guard of its symbolic sizes.

1. Placeholders of the export are sorted: tensors of the batch, results of regions, and lifted parameters, buffers and
   constants.
2. The graph gets one placeholder for each input by name. A tensor inside a container becomes ``getitem`` nodes, at its
   first use.
3. Each operation becomes a node with its fake value, its symbolic sizes, its submodules and the user's line. Assertions
   are left out.
4. Operations that change grad mode or autocast become no nodes. The modes at each node are in ``node.meta["modes"]``:
   torch.export leaves such changes as operations in the graph.
5. The operator ``whole`` becomes a call of the region, ``marked`` becomes ``boundary``.
6. The guards of the export become the program's ``holds_for``, and checks of the results of regions.

For example, of ``with torch.no_grad(): y = self.head(x)`` the export has three nodes and the program one::

    set_grad_enabled(False)
    %linear = aten.linear(%x, %p_head_weight)      →  %linear = aten.linear(%x, %head_weight)   modes: grad off
    set_grad_enabled(True)

It runs nothing, and does not look at values. It refuses operators that mean nothing outside of the function around
them, such as the body of a loop, and tensors whose shape depends on values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import boundary
from fxpipe.graph.program import Effects, Program, SizeGuard
from fxpipe.graph.stage_graph import first_names
from fxpipe.patches import replaced
from fxpipe.snapshots.snapshot import storage_of
from fxpipe.stage.modes import Autocast, Modes
from fxpipe.stage.opaque_call import TENSOR
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.export import enter_autocast, exit_autocast, mode_passes, set_grad_enabled
from fxpipe.torch_compat.fakes import FakeTensor
from fxpipe.torch_compat.operators import ASSERTIONS, OpOverload
from fxpipe.torch_compat.sizes import hint_of, holds_for, size_guards
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.export.operators import SizeClauses, clauses_of, guards_of, sizes_in
from fxpipe.trace.opaque.region_calls import RegionCall
from fxpipe.trace.patching import LEAKED, UNREGISTERED
from fxpipe.user_line import users_line_in

_BOUNDARY = torch.ops.fxpipe.boundary.default
_WHOLE = torch.ops.fxpipe.whole.default
_SIZE = torch.ops.aten.sym_size.int
_ROOT = "model"
"""The name of the model in the exported module."""
_NUMBER = re.compile(r"_\d+$")
_ASKED = re.compile(r"L\['t(\d+)'\]")


def modes_as_operations() -> AbstractContextManager[None]:
    """While this context is open, torch.export leaves changes of modes as operations in the graph.

    By default torch.export moves the operations of a mode into a submodule, which hides boundaries. Torch 2.13 also
    loses a ``no_grad`` inside an autocast region. Torch has no switch for that, so fxpipe replaces its two passes.
    """

    def unchanged(graph_module: Any, signature: Any) -> tuple[Any, Any]:
        return graph_module, signature

    return replaced((module, name, unchanged) for module, name in mode_passes())


@dataclass
class _ModesInGraph:
    """Tracks grad mode and autocast along a graph's nodes. Each ``with`` block gets a number when it is entered."""

    grad: bool
    """Whether grad mode is on outside of the exported call."""
    _autocasts: list[tuple[int, Autocast]] = field(default_factory=list)
    _other_grad: int = 0
    """The number of the open block whose grad mode differs from ``grad``; 0 if no such block is open."""
    _entered: int = 0
    _regions: dict[tuple[int, ...], int] = field(default_factory=dict)

    def follow(self, node: Node) -> bool:
        """Returns whether the node changes a mode, and records the change."""
        if node.target is set_grad_enabled:
            # leaving a block sets the mode, too: only the value shows whether the node enters or leaves a block
            is_other = bool(node.args[0]) is not self.grad
            if is_other and not self._other_grad:
                self._entered += 1
                self._other_grad = self._entered
            elif not is_other:
                self._other_grad = 0
        elif node.target is enter_autocast:
            device, dtype, enabled, _ = node.args
            # the trace runs without autocast's weight cache, so the node has it off; a step runs with the cache
            self._entered += 1
            self._autocasts.append((self._entered, Autocast(str(device), bool(enabled), dtype)))  # type: ignore[arg-type]
        elif node.target is exit_autocast:
            self._autocasts.pop()
        else:
            return False
        return True

    def now(self) -> Modes | None:
        """The modes at this node, or None if they equal the modes around the exported call."""
        if not self._autocasts and not self._other_grad:
            return None
        # an outer with block keeps its number after an inner block ends: the numbers of all open blocks are the key
        innermost = {region.device: region for _, region in self._autocasts}
        key = (*(number for number, _ in self._autocasts), -self._other_grad)
        number = self._regions.setdefault(key, len(self._regions) + 1)
        return Modes(not self.grad if self._other_grad else None, tuple(innermost.values()), number)


class _Unconverted(TraceError):
    """An operation that no stage can run. ``method``: (the path of the submodule around it, ""); None if unknown. The
    part can then be made opaque, although the error is raised after forward has returned."""

    def __init__(self, text: str, method: tuple[str, str] | None) -> None:
        super().__init__(text)
        self.method = method


@dataclass
class Conversion:
    """Builds the program's graph, node by node, in the order of the exported graph.

    ``values``: the inputs by name. ``result``: the result's leaves, with ``TENSOR`` for each tensor. ``stand_ins``: a
    region call's key → the fake tensors that the export took as inputs, after ``values``, for the call's results.
    ``calls``: the region calls; the last argument of the ``whole`` operator is an index into this list.
    ``of_any_size``: whether tensor values may decide sizes, as in a program that answers a question; no stage runs it.
    """

    exported: torch.export.ExportedProgram
    module: nn.Module
    values: Mapping[str, Any]
    result: Sequence[Any]
    stand_ins: Mapping[tuple[str, int], Sequence[Tensor]]
    calls: Sequence[RegionCall]
    of_any_size: bool

    def __post_init__(self) -> None:
        self._graph = fx.Graph()
        self._modes = _ModesInGraph(torch.is_grad_enabled())
        self._constants: dict[str, Tensor] = {}
        self._sources: dict[str, Node] = {}
        self._parts: dict[tuple[Any, ...], Node] = {}
        self._built: dict[Node, Node] = {}
        self._named = first_names(self.module)
        self._in_memory: dict[int, dict[str, Tensor]] = {}
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            self._in_memory.setdefault(storage_of(tensor), {})[name] = tensor
        self._regions: dict[Hashable, Node] = {}
        self._effects: dict[str, Effects] = {}
        self._lifted: dict[Node, tuple[str, str]] = {}
        """Placeholders other than the batch's → (the model's name of the parameter or buffer, or "" for any other
        tensor that forward uses; torch.export's name)."""
        self._flat: list[Node] = []
        """The placeholders of the batch's tensors, followed by the placeholders of the stand-ins."""
        # 1. the export's placeholders
        self._sort_inputs()
        # torch.export flattens the batch first, then the results of regions
        leaves, _ = pytree.tree_flatten_with_path(dict(self.values))
        paths = [tuple(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
        self._inputs = len(paths)
        self._paths = dict(zip(self._flat, paths, strict=False))
        returned = [(key, index) for key, leaves in self.stand_ins.items() for index in range(len(leaves))]
        self._stand_ins = dict(zip(self._flat[self._inputs :], returned, strict=True))
        self._clauses = self._taken_for_granted()
        self._guards = self._guards_of_calls()

    def program(self) -> Program:
        """Converts all operations in order. TraceError, with the submodule and line, for one that no stage can run."""
        # 2. inputs by name (1. is done in __post_init__)
        for name, value in self.values.items():
            placeholder = self._graph.placeholder(name)
            placeholder.meta["val"] = value
            self._parts[(pytree.MappingKey(name),)] = placeholder
        # 3. to 5. operations, without assertions, changes of modes and late sizes
        checks = self._checks()
        for node in self.exported.graph.nodes:
            is_done = node.op != "call_function" or node in checks or self._modes.follow(node)
            if not is_done and not self._is_late(node):
                try:
                    self._convert(node)
                except TraceError as error:
                    raise self._in_its_part(node, error) from error
        (returned,) = self.exported.graph.output_node().args
        tensors = iter(returned)
        leaves = [fx.node.map_arg(next(tensors), self._read) if leaf is TENSOR else leaf for leaf in self.result]
        self._graph.output(tuple(leaves))
        return Program(
            self.module,
            self._graph,
            constants=self._constants,
            tracer="export",
            holds_for=self._holds_for(),
            opaque={call.target: call.opaque for call in self.calls},
            effects=self._effects,
        )

    def _checks(self) -> set[Node]:
        """The assertions, and the nodes that compute numbers for them alone: they may use a later region's result."""
        checks: set[Node] = set()
        for node in reversed(self.exported.graph.nodes):
            is_number = node.users and not tensors_in(node.meta.get("val"))
            if node.target in ASSERTIONS or (is_number and checks.issuperset(node.users)):
                checks.add(node)
        return checks

    def _in_its_part(self, node: Node, error: TraceError) -> _Unconverted:
        """The error about a node, with the submodule that runs the node."""
        parts = {path: self.module.get_submodule(path) for path, _ in self._stack(node).values() if path}
        own = [path for path, part in parts.items() if not type(part).__module__.startswith("torch.nn.")]
        return _Unconverted(str(error), (own[-1], "") if own else None)

    # 6. the size conditions that the graph assumes

    def _taken_for_granted(self) -> list[str]:
        """The conditions on the sizes of inputs and of region results under which the graph is valid."""
        # without a symbolic size torch.export has no guards: the graph then assumes every size
        inputs = [node.meta["val"] for node in self._flat]
        if any(map(_is_symbolic, inputs)):
            return [clause for guard in size_guards(inputs) for clause in clauses_of(guard)]
        shapes = [tensor.shape for tensor in inputs]
        return [f"L['t{i}'].size()[{dim}] == {n}" for i, shape in enumerate(shapes) for dim, n in enumerate(shape)]

    def _holds_for(self) -> SizeGuard | None:
        """Returns a check whether the graph is valid for the sizes of a batch; None if no input size is symbolic."""
        if not any(_is_symbolic(node.meta["val"]) for node in self._flat[: self._inputs]):
            return None
        # the region's call checks the clauses about its results; this check covers the inputs alone
        about = [f"({each})" for each in self._clauses if all(int(n) < self._inputs for n in _ASKED.findall(each))]
        code = compile(" and ".join(about) or "True", "<what a capture takes for granted>", "eval")
        return lambda tensors: holds_for(code, {f"t{index}": tensor for index, tensor in enumerate(tensors)})

    def _guards_of_calls(self) -> dict[Hashable, SizeClauses]:
        """A region call's key → the size conditions to check on its results, without those on unused results."""
        ends = accumulate((len(leaves) for leaves in self.stand_ins.values()), initial=self._inputs)
        places = dict(zip(self.stand_ins, starmap(range, pairwise(ends)), strict=True))
        uses = [zip(places[call.key], call.opaque.uses, strict=True) for call in self.calls]
        unused = {index for each in uses for index, used in each if not used}
        used = [clause for clause in self._clauses if unused.isdisjoint(index for index, _ in sizes_in(clause))]
        guards = guards_of(used, [(call.region.name, places[call.key]) for call in self.calls])
        return {call.key: guard for call, guard in zip(self.calls, guards, strict=True)}

    # operations

    def _is_late(self, node: Node) -> bool:
        """Whether the node reads a size of a region's result; torch.export may read it before the region's call."""
        return node.target is _SIZE and node.args[0] in self._stand_ins

    def _convert(self, node: Node) -> Node:
        """Adds the node for one operation of the export."""
        if not _is_known(node.target):
            # a higher-order operator, such as a branch or a loop, or a part of a transform such as torch.vmap
            raise TraceError(
                f"forward uses {getattr(node.target, '__name__', node.target)}, which means nothing outside of the "
                "function around it; it cannot be cut into stages, and tracer='record' keeps a submodule that uses it "
                f"whole{_line_of(node, *node.all_input_nodes)}"
            )
        if node.target is _WHOLE:
            created = self._call_region(node)
        else:
            target = boundary if node.target is _BOUNDARY else node.target
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._read)
            # copies of a repeated layer's nodes have numbers of their own
            name = _NUMBER.sub("", node.name)
            created = self._graph.create_node("call_function", target, args, kwargs, name=name)
        created.meta["val"] = None if self.of_any_size else _static(node)
        created.meta["sizes"] = _sizes_of(node.meta.get("val"))
        created.meta["nn_module_stack"] = self._stack(node)
        if line := _line_of(node):
            created.stack_trace = line.removeprefix("\n")
        if (modes := self._modes.now()) is not None:
            created.meta["modes"] = modes
        self._built[node] = created
        return created

    def _call_region(self, node: Node) -> Node:
        """Adds the call of a region, in place of the ``whole`` operator."""
        values, numbers, _, number = node.args
        call = self.calls[number]  # type: ignore[index]
        iterators = {True: iter(values), False: iter(numbers)}  # type: ignore[arg-type]
        # after the region's own arguments, the call takes the sizes that its guard compares
        args = [fx.node.map_arg(next(iterators[isinstance(value, Tensor)]), self._read) for value in call.values]
        call.opaque.guard = guard = self._guards[call.key]
        call.opaque.of_one_type = True
        args += [self._graph.call_function(_SIZE, (self._read(self._flat[index]), dim)) for index, dim in guard.others]
        created = self._graph.create_node("call_module", call.target, tuple(args), name=call.target)
        self._regions[call.key] = created
        path = f"{_ROOT}.{call.region.path}"
        node.meta["nn_module_stack"] = {**(node.meta.get("nn_module_stack") or {}), path: (path, nn.Module)}
        self._effects[created.name] = call.effects
        return created

    def _stack(self, node: Node) -> dict[str, tuple[str, Any]]:
        """The submodules around the operation, under the model's names."""
        # modules outside of the model, such as a loss function's, are left out
        stack = node.meta.get("nn_module_stack") or {}
        model = f"{_ROOT}."
        return {
            key: (f"{path}.".removeprefix(model).removesuffix("."), kind)
            for key, (path, kind) in stack.items()
            if f"{path}.".startswith(model)
        }

    # inputs, parameters, buffers and constants

    def _sort_inputs(self) -> None:
        """Fills ``_flat`` and ``_lifted`` from the signature of the export. A tied parameter has the first of its
        names."""
        inputs = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(inputs, self.exported.graph_signature.input_specs, strict=True):
            target, own_name = str(spec.target), ""
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                owner, _, name = target.removeprefix(f"{_ROOT}.").rpartition(".")
                own_name = self._named[id(getattr(self.module.get_submodule(owner), name))]
            if spec.kind is InputKind.USER_INPUT:
                self._flat.append(node)
            else:
                self._lifted[node] = own_name, target

    def _read(self, node: Node) -> Node:
        """The new graph's node for a node of the export. Inputs, parameters and constants are made at their first use;
        a late size is converted now. TraceError for a node that is none of these."""
        if node in self._built:
            return self._built[node]
        if self._is_late(node):
            return self._convert(node)
        if node in self._stand_ins:
            return self._returned_by(*self._stand_ins[node])
        if node in self._paths:
            created = self._part(self._paths[node])
        elif node in self._lifted:
            own_name, target = self._lifted[node]
            created = self._source(node, own_name or self._constant(node, target))
        else:
            raise TraceError(f"{node.format_node()} is no operation that stages can hold")
        self._built[node] = created
        return created

    def _returned_by(self, key: tuple[str, int], index: int) -> Node:
        """The node of one tensor in a region's result."""
        region = self._regions.get(key)
        if region is None:
            raise TraceError(
                f"torch.export takes a size from what {key[0]}, an opaque region, returns after it is asked"
            )
        part = self._graph.call_function(operator.getitem, (region, index))
        part.meta["val"] = None if region.meta["val"] is None else region.meta["val"][index]
        part.meta["nn_module_stack"] = region.meta["nn_module_stack"]
        part.meta["sizes"] = _sizes_of(self.stand_ins[key][index])
        return part

    def _part(self, path: tuple[Any, ...]) -> Node:
        """The node of a tensor in an input, with one ``getitem`` or ``getattr`` node for each step of its path."""
        if path in self._parts:
            return self._parts[path]
        parent, step = self._part(path[:-1]), path[-1]
        is_attribute, is_index = isinstance(step, pytree.GetAttrKey), isinstance(step, pytree.SequenceKey)
        function: Any = getattr if is_attribute else operator.getitem
        key = step.name if is_attribute else step.idx if is_index else step.key
        part = self._parts[path] = self._graph.call_function(function, (parent, key))
        part.meta["val"] = function(parent.meta["val"], key)
        return part

    def _source(self, node: Node, name: str) -> Node:
        """The ``get_attr`` node of a parameter, buffer or constant. The first use creates the node."""
        if name not in self._sources:
            created = self._sources[name] = self._graph.create_node("get_attr", name, name=name.replace(".", "_"))
            created.meta["val"] = node.meta.get("val")
        return self._sources[name]

    def _constant(self, node: Node, target: str) -> str:
        """The name of a tensor that forward uses: the name in the model, or a new name for a constant.

        The tensor is compared by memory and layout, as torch.export puts other objects in the places of parameters.

        TraceError for a fake tensor that forward has kept from an earlier capture, or an object that is no tensor. Also
        for a view that was made outside of forward, and a tensor that requires a gradient.
        """
        tensor = self.exported.constants[target]
        if isinstance(tensor, FakeTensor):
            raise TraceError(LEAKED + _line_of(*node.users))
        if not isinstance(tensor, Tensor):
            raise TraceError(
                f"forward uses {target.removeprefix(_ROOT + '.')}, a {type(tensor).__name__} that is no "
                f"input and no result of torch's operations; a stage cannot hold it{_line_of(*node.users)}"
            )
        # compared by memory: torch.export puts another object in a parameter's place
        memory = storage_of(tensor)
        for name, other in self._in_memory.get(memory, {}).items() if memory else ():
            if _layout(other) == _layout(tensor):
                return name
            raise TraceError(
                f"forward uses a view of {name} that was made outside of it; make the view in forward"
                f"{_line_of(*node.users)}"
            )
        if tensor.requires_grad:
            raise TraceError("; ".join(UNREGISTERED) + _line_of(*node.users))
        name = f"_constant{len(self._constants)}"
        self._constants[name] = tensor
        return name


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """The facts by which two tensors of the same memory are the same tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _static(node: Node) -> Any:
    """The node's fake value with the capture's sizes; 1, 1.0 or True for a number that only a run can show."""
    value = node.meta.get("val")
    for leaf in tensors_in(value):
        if any(hint_of(size) is None for size in leaf.shape):
            raise TraceError(
                f"forward makes a tensor whose shape depends on the values of another one ({node.name}), and what "
                "passes between stages has a fixed shape; use torch.where or a mask, or tracer='record' where it is "
                f"inside a submodule{_line_of(node)}"
            )

    def hinted(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return _as_captured(leaf)
        if type(leaf) not in _STAND_INS:
            return leaf
        hint = hint_of(leaf)
        return _STAND_INS[type(leaf)] if hint is None else hint

    return pytree.tree_map(hinted, value)


_STAND_INS: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}


def _is_known(target: Any) -> bool:
    """Whether the target can run by itself: an operator of torch, or a function of Python or torch on numbers."""
    numbers = ("_operator", "builtins", "math")
    is_function = getattr(target, "__module__", None) in numbers or getattr(target, "__name__", "").startswith("sym_")
    return isinstance(target, OpOverload) or is_function


def _line_of(*nodes: Node) -> str:
    """The innermost line of user code of the first node that has such a line, in traceback form, to end a message."""
    lines = (users_line_in(node.stack_trace or "") for node in nodes)
    return next((f"\n{line}" for line in lines if line), "")


# --- symbolic sizes ---


def _is_symbolic(tensor: Tensor) -> bool:
    """Whether a size of the tensor is symbolic."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def _sizes_of(value: Any) -> tuple[str, ...]:
    """The expressions of a tensor's sizes, "" for each size that is a number; for a symbolic number, its expression.

    Within one capture, equal expressions are equal numbers in every run.
    """
    if isinstance(value, torch.SymInt):
        return (str(value.node.expr),)
    if not isinstance(value, Tensor) or not _is_symbolic(value):
        return ()
    return tuple(str(size.node.expr) if isinstance(size, torch.SymInt) else "" for size in value.shape)


def _as_captured(tensor: Any) -> Any:
    """A fake tensor with the capture's numbers in place of symbolic sizes."""
    if not _is_symbolic(tensor):
        return tensor
    shape, stride = (list(map(hint_of, sizes)) for sizes in (tensor.shape, tensor.stride()))
    memory = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, memory, tensor.device).requires_grad_(tensor.requires_grad)
