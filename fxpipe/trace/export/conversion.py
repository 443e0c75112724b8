"""From an exported program to a ``Program``: inputs, parameters and boundaries under their own names, modes as facts.

Export leaves a change of grad mode or autocast in the graph as an operation; each node is given the modes it is in.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import boundary
from fxpipe.graph.modes import Autocast, Modes
from fxpipe.graph.opaque_call import TENSOR
from fxpipe.graph.program import Effects, Program, SizeGuard
from fxpipe.torch_compat import (
    ASSERTIONS,
    DUAL_NUMBERS,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    enter_autocast,
    exit_autocast,
    hint_of,
    holds_for,
    mode_passes,
    pytree,
    set_grad_enabled,
    size_guard,
)
from fxpipe.trace.export.boundary_operator import marked  # noqa: F401  (it registers the operator)
from fxpipe.trace.export.symbolic_sizes import as_captured, is_symbolic, sizes_of
from fxpipe.trace.export.whole_operator import clauses_of, guards_of, sizes_in
from fxpipe.trace.opaque.region_calls import RegionCall
from fxpipe.trace.patching import LEFT_BEHIND, UNREGISTERED, patched
from fxpipe.trace.state.snapshot import storage_of
from fxpipe.trace.user_line import is_users

_BOUNDARY = torch.ops.fxpipe.boundary.default
_WHOLE = torch.ops.fxpipe.whole.default
_SIZE = torch.ops.aten.sym_size.int
_GIVEN = ("input", "stand-in")
_ASKED = re.compile(r"L\['t(\d+)'\]")


@contextlib.contextmanager
def modes_as_operations() -> Iterator[None]:
    """While it is open, torch.export leaves changes of modes as operations in the graph.

    By itself it moves the operations in between into functions of their own, where boundaries are hidden; and in torch
    2.13 it loses a ``no_grad`` inside an autocast region. torch offers no switch, so its two passes are replaced.
    """
    with contextlib.ExitStack() as stack:
        for module, name in mode_passes():
            stack.enter_context(patched(module, name, _unchanged))
        yield


def _unchanged(graph_module: Any, signature: Any) -> tuple[Any, Any]:
    return graph_module, signature


@dataclass(frozen=True)
class Traced:
    """What was exported, and what its graph does not show.

    ``values``: the inputs by name, ``result``: the leaves of the result with ``TENSOR`` for each tensor, ``spec``: how
    they make the result. ``root``: the name of the model in the exported module. ``cached``: of each autocast region,
    in the order they were entered, whether a weight is cast once in it.
    """

    exported: torch.export.ExportedProgram
    module: nn.Module
    values: Mapping[str, Any]
    result: Sequence[Any]
    spec: pytree.TreeSpec
    cached: Sequence[bool]
    stand_ins: Mapping[tuple[str, int], Sequence[Tensor]] = field(default_factory=dict)
    """What stood for what calls of regions return, by their keys, as inputs of the export behind ``values``."""
    calls: Sequence[RegionCall] = ()
    """The calls of regions, as the operator for them is given their numbers."""
    root: str = "model"
    of_any_size: bool = False
    """Whether values may decide sizes: stages hold no such program, and a question may be one."""

    def program(self) -> Program:
        return _Conversion(self).program()


@dataclass
class _ModesInGraph:
    """Follows the modes through a graph. ``with`` blocks are numbered where they are entered."""

    cached: Iterator[bool]
    grad: bool
    """Whether gradients are on around the call."""
    _autocasts: list[tuple[int, Autocast]] = field(default_factory=list)
    _other_grad: int = 0
    """The number of the block in which they are not as around the call."""
    _entered: int = 0
    _regions: dict[tuple[int, ...], int] = field(default_factory=dict)

    def follow(self, node: fx.Node) -> bool:
        """Whether the node changes a mode; the change is then noted."""
        if node.target is set_grad_enabled:
            self._set_grad(bool(node.args[0]))
        elif node.target is enter_autocast:
            device, dtype, enabled, _ = node.args
            self._entered += 1
            region = Autocast(str(device), bool(enabled), dtype, next(self.cached))  # type: ignore[arg-type]
            self._autocasts.append((self._entered, region))
        elif node.target is exit_autocast:
            self._autocasts.pop()
        else:
            return False
        return True

    def _set_grad(self, on: bool) -> None:
        if on is self.grad:
            self._other_grad = 0
        elif not self._other_grad:
            self._entered += 1
            self._other_grad = self._entered

    def now(self) -> Modes | None:
        """The modes, in which a block is the same after a block inside it; None where nothing is changed."""
        if not self._autocasts and not self._other_grad:
            return None
        innermost = {region.device: region for _, region in self._autocasts}
        place = (*(number for number, _ in self._autocasts), -self._other_grad)
        number = self._regions.setdefault(place, len(self._regions) + 1)
        return Modes(not self.grad if self._other_grad else None, tuple(innermost.values()), number)


class _Unconverted(TraceError):
    """What no stage can hold. ``method``: the submodule that it runs in, and "", if that is known."""

    def __init__(self, text: str, method: tuple[str, str] | None) -> None:
        super().__init__(text)
        self.method = method


class _Conversion:
    """Builds the program's graph, node by node, in the order of the exported one."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._graph = fx.Graph()
        self._modes = _ModesInGraph(iter(traced.cached), torch.is_grad_enabled())
        self._constants: dict[str, Tensor] = {}
        self._sources: dict[str, fx.Node] = {}
        self._parts: dict[tuple[Any, ...], fx.Node] = {}
        self._built: dict[fx.Node, fx.Node] = {}
        self._named: dict[int, str] = {}
        self._in_memory: dict[int, dict[str, Tensor]] = {}
        for name, tensor in [*traced.module.named_parameters(), *traced.module.named_buffers()]:
            self._named.setdefault(id(tensor), name)
            self._in_memory.setdefault(storage_of(tensor), {})[name] = tensor
        self._sources_of = self._origins()
        self._regions: dict[Hashable, fx.Node] = {}
        self._effects: dict[str, Effects] = {}
        self._clauses = self._taken_for_granted()
        ends = accumulate((len(one) for one in traced.stand_ins.values()), initial=self._inputs)
        places = dict(zip(traced.stand_ins, starmap(range, pairwise(ends)), strict=True))
        called = [(call.region.name, places[call.key]) for call in traced.calls]
        uses = [zip(places[call.key], call.kept.uses, strict=True) for call in traced.calls]
        unused = {place for each in uses for place, used in each if not used}
        used = [clause for clause in self._clauses if unused.isdisjoint(place for place, _ in sizes_in(clause))]
        guards = guards_of(used, called)
        self._guards = {call.key: guard for call, guard in zip(traced.calls, guards, strict=True)}

    def program(self) -> Program:
        for name, value in self._traced.values.items():
            placeholder = self._graph.placeholder(name)
            placeholder.meta["val"] = value
            self._parts[(name,)] = placeholder
        for node in self._traced.exported.graph.nodes:
            known = node.op != "call_function" or node.target in ASSERTIONS or self._modes.follow(node)
            if not known and not self._is_late(node):
                with self._naming_the_part_of(node):
                    self._convert(node)
        self._add_output()
        return Program(
            self._traced.module,
            self._graph,
            constants=self._constants,
            tracer="export",
            result=self._traced.spec,
            holds_for=self._holds_for(),
            opaque={call.target: call.kept for call in self._traced.calls},
            effects=self._effects,
        )

    @contextlib.contextmanager
    def _naming_the_part_of(self, node: fx.Node) -> Iterator[None]:
        """A TraceError about a node says in which submodule it runs."""
        try:
            yield
        except TraceError as error:
            parts = {path: self._traced.module.get_submodule(path) for path, _ in self._stack(node).values() if path}
            own = [path for path, part in parts.items() if not type(part).__module__.startswith("torch.nn.")]
            raise _Unconverted(str(error), (own[-1], "") if own else None) from error

    @property
    def _inputs(self) -> int:
        """How many tensors there are among the inputs; stand-ins come behind them."""
        return sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(dict(self._traced.values)))

    def _given(self) -> list[Tensor]:
        """The inputs and stand-ins as they were exported."""
        return [node.meta["val"] for node in self._sources_of if self._sources_of[node][0] in _GIVEN]

    def _taken_for_granted(self) -> list[str]:
        """What the graph takes for granted of the sizes of inputs and of what regions return."""
        given = self._given()
        if any(map(is_symbolic, given)):
            return clauses_of(size_guard(given))
        return [f"L['t{i}'].size()[{dim}] == {n}" for i, one in enumerate(given) for dim, n in enumerate(one.shape)]

    def _holds_for(self) -> SizeGuard | None:
        """For what sizes of its inputs the graph holds; None where none is symbolic."""
        if not any(map(is_symbolic, self._given()[: self._inputs])):
            return None
        about = [one for one in self._clauses if all(int(n) < self._inputs for n in _ASKED.findall(one))]
        code = compile(" and ".join(about) or "True", "<what a capture takes for granted>", "eval")
        return lambda given: holds_for(code, {f"t{place}": one for place, one in enumerate(given)})

    def _is_late(self, node: fx.Node) -> bool:
        """Whether it is a size of what a region returns, which export asks for before the region is called."""
        source = node.args[0] if node.target is _SIZE else None
        return isinstance(source, fx.Node) and self._sources_of.get(source, ("",))[0] == "stand-in"

    def _call_region(self, node: fx.Node) -> fx.Node:
        """A call of a region in place of the operator that stood for it."""
        values, numbers, _, number = node.args
        call = self._traced.calls[number]  # type: ignore[index]
        given = {True: iter(values), False: iter(numbers)}  # type: ignore[arg-type]
        args = [fx.node.map_arg(next(given[isinstance(value, Tensor)]), self._read) for value in call.values]
        call.kept.guard = guard = self._guards[call.key]
        call.kept.of_one_type = True
        args += [self._graph.call_function(_SIZE, (self._tensor(place), dim)) for place, dim in guard.others]
        made = self._graph.create_node("call_module", call.target, tuple(args), name=call.target)
        self._regions[call.key] = made
        node.meta["nn_module_stack"] = self._in_region(node, call)
        self._effects[made.name] = call.effects
        return made

    def _in_region(self, node: fx.Node, call: RegionCall) -> dict[str, Any]:
        """The submodules that a region is called in, and it itself, as export notes them."""
        path = f"{self._traced.root}.{call.region.path}"
        return {**(node.meta.get("nn_module_stack") or {}), path: (path, nn.Module)}

    def _tensor(self, place: int) -> fx.Node:
        """An input, or a tensor that a region has returned, by its number in a guard."""
        return self._read([node for node, origin in self._sources_of.items() if origin[0] in _GIVEN][place])

    def _convert(self, node: fx.Node) -> fx.Node:
        if isinstance(node.target, HigherOrderOperator):
            raise TraceError(
                f"forward uses {node.target}, whose branches or loop cannot be cut into stages; "
                f"tracer='record' keeps a submodule that uses it whole{_line_of(node, *node.all_input_nodes)}"
            )
        if not _is_known(node.target):
            raise TraceError(
                f"forward uses {getattr(node.target, '__name__', node.target)}, which means nothing outside of the "
                f"function around it; tracer='record' keeps a submodule that uses it whole{_line_of(node)}"
            )
        made = self._call_region(node) if node.target is _WHOLE else self._call(node)
        made.meta["val"] = None if self._traced.of_any_size else _static(node)
        made.meta["sizes"] = sizes_of(node.meta.get("val"))
        made.meta["nn_module_stack"] = self._stack(node)
        if (line := users_line(node.stack_trace or "")) is not None:
            made.stack_trace = line
        if (modes := self._modes.now()) is not None:
            made.meta["modes"] = modes
        self._built[node] = made
        return made

    def _call(self, node: fx.Node) -> fx.Node:
        return self._graph.create_node(
            "call_function",
            boundary if node.target is _BOUNDARY else node.target,
            fx.node.map_arg(node.args, self._read),
            fx.node.map_arg(node.kwargs, self._read),
            name=node.name,
        )

    # where values come from

    def _origins(self) -> dict[fx.Node, tuple[Any, ...]]:
        """Each input of the exported graph → what it is: ("input", path…), ("stand-in", key, place), ("tensor", name)
        or ("constant", name)."""
        exported = self._traced.exported
        inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
        leaves, _ = pytree.tree_flatten_with_path(dict(self._traced.values))
        stand_ins = self._traced.stand_ins
        given = iter(
            [("input", *path) for path, leaf in leaves if isinstance(leaf, Tensor)]
            + [("stand-in", key, place) for key in stand_ins for place in range(len(stand_ins[key]))]
        )
        found: dict[fx.Node, tuple[Any, ...]] = {}
        for node, spec in zip(inputs, exported.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                found[node] = next(given)
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                name = str(spec.target).removeprefix(f"{self._traced.root}.")
                found[node] = ("tensor", self._first_name(name))
            else:
                found[node] = ("constant", spec.target)
        return found

    def _first_name(self, name: str) -> str:
        owner, _, last = name.rpartition(".")
        return self._named[id(getattr(self._traced.module.get_submodule(owner), last))]

    def _read(self, node: fx.Node) -> fx.Node:
        if node in self._built:
            return self._built[node]
        origin = self._sources_of.get(node)
        if self._is_late(node):
            return self._convert(node)
        if origin is not None and origin[0] == "stand-in":
            return self._returned_by(origin[1], origin[2])
        if origin is None:
            raise TraceError(f"{node.format_node()} is no operation that stages can hold")
        if origin[0] == "input":
            made = self._part(origin[1:])
        else:
            made = self._source(node, origin[1] if origin[0] == "tensor" else self._constant(node, origin[1]))
        self._built[node] = made
        return made

    def _returned_by(self, key: tuple[str, int], place: int) -> fx.Node:
        """A tensor that a region has returned."""
        part = self._graph.call_function(operator.getitem, (self._regions[key], place))
        made = self._regions[key].meta["val"]
        part.meta["val"] = None if made is None else made[place]
        part.meta["nn_module_stack"] = self._regions[key].meta["nn_module_stack"]
        part.meta["sizes"] = sizes_of(self._traced.stand_ins[key][place])
        return part

    def _part(self, path: tuple[Any, ...]) -> fx.Node:
        """A tensor in an input: ``getitem(input, key)`` for each step of its path, each made once."""
        path = (path[0].key if isinstance(path[0], pytree.MappingKey) else path[0], *path[1:])
        if path in self._parts:
            return self._parts[path]
        parent = self._part(path[:-1])
        function, key = _step(path[-1])
        part = self._parts[path] = self._graph.call_function(function, (parent, key))
        part.meta["val"] = function(parent.meta["val"], key)
        return part

    def _source(self, node: fx.Node, name: str) -> fx.Node:
        """A parameter, a buffer or a constant, named once, where it is first used."""
        if name not in self._sources:
            made = self._sources[name] = self._graph.create_node("get_attr", name, name=name.replace(".", "_"))
            made.meta["val"] = node.meta.get("val")
        return self._sources[name]

    def _constant(self, node: fx.Node, target: str) -> str:
        """The name of a tensor that forward has met: the model's, where it is one of the model's, from a list say."""
        tensor = self._traced.exported.constants[target]
        if isinstance(tensor, FakeTensor):
            raise TraceError(LEFT_BEHIND + _line_of(*node.users))
        if not isinstance(tensor, Tensor):
            raise TraceError(
                f"forward uses {target.removeprefix(self._traced.root + '.')}, a {type(tensor).__name__} that is no "
                f"input and no result of torch's operations; a stage cannot hold it{_line_of(*node.users)}"
            )
        known = self._of_memory(node, tensor)
        if known is not None:
            return known
        if tensor.requires_grad:
            raise TraceError("; ".join(UNREGISTERED) + _line_of(*node.users))
        name = f"_constant{len(self._constants)}"
        self._constants[name] = tensor
        return name

    def _of_memory(self, node: fx.Node, tensor: Tensor) -> str | None:
        """The name of the model's tensor with the same memory: for a parameter, export gives another object."""
        memory = storage_of(tensor)
        for name, other in self._in_memory.get(memory, {}).items() if memory else ():
            if _layout(other) == _layout(tensor):
                return name
            raise TraceError(
                f"forward uses a view of {name} that was made outside of it; make the view in forward"
                f"{_line_of(*node.users)}"
            )
        return None

    # facts

    def _stack(self, node: fx.Node) -> dict[str, tuple[str, Any]]:
        """The submodules that the operation was called in, under the model's own names."""
        root = self._traced.root
        found: dict[str, tuple[str, Any]] = {}
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if path == root or path.startswith(f"{root}."):
                found[key] = path[len(root) + 1 :], kind
        return found

    def _add_output(self) -> None:
        (returned,) = self._traced.exported.graph.output_node().args
        tensors = iter(returned)
        leaves = [self._returned(next(tensors)) if leaf is TENSOR else leaf for leaf in self._traced.result]
        self._graph.output(tuple(leaves))

    def _returned(self, value: Any) -> Any:
        return fx.node.map_arg(value, self._read)


def _step(key: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """A step of a path into a container, as a function and its second argument."""
    if isinstance(key, pytree.GetAttrKey):
        return getattr, key.name
    return operator.getitem, key.idx if isinstance(key, pytree.SequenceKey) else key.key


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _static(node: fx.Node) -> Any:
    """The node's fake value, as captured; for a Python number that only running shows, one that stands for it."""
    value = node.meta.get("val")
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and any(hint_of(size) is None for size in leaf.shape):
            raise TraceError(
                f"forward makes a tensor whose shape depends on the values of another one ({node.name}), and what "
                "passes between stages has a fixed shape; use torch.where or a mask, or tracer='record' where it is "
                f"inside a submodule{_line_of(node)}"
            )
    for symbolic, stand_in in ((torch.SymInt, 1), (torch.SymFloat, 1.0), (torch.SymBool, True)):
        value = pytree.tree_map_only(symbolic, partial(_hint_or, stand_in), value)
    return pytree.tree_map_only(FakeTensor, as_captured, value)


def _hint_or(stand_in: Any, number: Any) -> Any:
    hint = hint_of(number)
    return stand_in if hint is None else hint


def _line_of(*nodes: fx.Node) -> str:
    """The user's line of the first of the nodes that has one, for the end of a message."""
    lines = (users_line(node.stack_trace or "") for node in nodes)
    return next((f"\n{line}" for line in lines if line), "")


def _is_known(target: Any) -> bool:
    """Whether it is an operator, or a function of Python's or torch's on numbers: what can run by itself."""
    numbers = ("_operator", "builtins", "math")
    known = getattr(target, "__module__", None) in numbers or getattr(target, "__name__", "").startswith("sym_")
    return (isinstance(target, OpOverload) and target not in DUAL_NUMBERS) or known


def users_line(stack_trace: str) -> str | None:
    """The innermost line of user code in a stack trace, in traceback form; None where there is none."""
    lines = stack_trace.splitlines()
    for place in reversed(range(len(lines))):
        head = lines[place].strip()
        if head.startswith('File "') and is_users(head.removeprefix('File "').partition('"')[0]):
            code = lines[place + 1].strip() if place + 1 < len(lines) else ""
            return f"  {head}\n    {code}"
    return None
