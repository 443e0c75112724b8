"""A captured program as plain data, and back. Nothing is imported or run that the data names.

A target is one of torch's registered operators, or one of ``_FUNCTIONS``; a tensor's value is what it is like.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import RunError
from fxpipe.graph.boundary import boundary
from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import Autocast, Modes
from fxpipe.graph.plain_data import MOST_BYTES, admitted, encode
from fxpipe.graph.program import Program
from fxpipe.torch_compat import FakeTensor, FakeTensorMode, OpOverload, bytes_of, overload_name, pytree, schema_of
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.cached.operator_digest import LIFTS
from fxpipe.trace.cached.rehearsed import RunOnFakes
from fxpipe.trace.crossing import check_boundaries
from fxpipe.trace.request import Request

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"getitem": operator.getitem, "boundary": boundary}
_FACTS = ("val", "sizes", "nn_module_stack", "modes", "stack_trace")
"""What a node may be told; another fact has no word here."""
_OF_SOURCE = {"val"}
"""The facts of what is computed nowhere: inputs and their parts, parameters, constants."""


@admitted
@dataclass(frozen=True)
class NodeNumber:
    """A node among the arguments of another, by its place in the graph."""

    number: int


def encoded(program: Program) -> bytes:
    """The program as plain data. NotKept where something in it has no word."""
    try:
        return encode(_as_data(program))
    except RunError:  # whose words are for what is sent to other ranks
        raise NotKept(f"its graph holds an object, or takes more than {MOST_BYTES >> 20} MiB") from None


def _as_data(program: Program) -> dict[str, Any]:
    if program.holds_for is not None or program.fixed_sizes or program.opaque or program.effects:
        raise NotKept("it holds for more than one shape, or keeps regions whole")
    told = _InWords({node: NodeNumber(place) for place, node in enumerate(program.graph.nodes)})
    nodes = [told.node(node) for node in program.graph.nodes]
    constants = {name: _constant(program, name, tensor) for name, tensor in program.constants.items()}
    return {"nodes": nodes, "facts": list(told.facts.values()), "constants": constants}


@dataclass
class _InWords:
    """What is in words so far. ``facts``: each fact once, for many nodes have the same."""

    numbers: Mapping[fx.Node, NodeNumber]
    facts: dict[str, Any] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)

    def node(self, node: fx.Node) -> list[Any]:
        unknown = node.meta.keys() - {*_FACTS}
        if unknown:
            raise NotKept(f"{node.name} has the facts {sorted(unknown)}")
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        has_value = node.op not in ("placeholder", "output") and not _is_part(node)
        facts = {name: self._fact(name, node.meta[name]) for name in _FACTS[not has_value :] if name in node.meta}
        return [node.op, _target_word(node), node.name, args, kwargs, facts]

    def _fact(self, name: str, value: Any) -> int:
        word = _FACT_WORDS[name](value)
        key = repr((name, word))
        self.facts.setdefault(key, word)
        return self._places.setdefault(key, len(self._places))

    def _argument(self, value: Any) -> Any:
        """Lists and dicts as Python's own; a graph has immutable ones."""
        if isinstance(value, fx.Node):
            return self.numbers[value]
        if isinstance(value, list):
            return [self._argument(part) for part in value]
        if type(value) is tuple:
            return tuple(self._argument(part) for part in value)
        if isinstance(value, dict):
            return {key: self._argument(part) for key, part in value.items()}
        return value


def _target_word(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return f"operator {_operator_name(node.target)}"
    for name, function in _FUNCTIONS.items():
        if node.target is function:
            return f"function {name}"
    raise NotKept(f"it calls {node.target}, which is none of torch's operators")


def _operator_name(overload: OpOverload) -> str:
    """``aten::add.Tensor``."""
    return f"{schema_of(overload).name}.{overload_name(overload)}"


def _is_part(node: fx.Node) -> bool:
    """Whether it is a part of an input: an item of a container."""
    return node.op == "call_function" and node.meta.keys() == _OF_SOURCE


def _value_word(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) is not FakeTensor:
            raise NotKept(f"a value is a {type(value).__name__}")
        like = TensorLike.of(value)
        return TensorLike(like.shape, like.dtype, like.stride, str(value.device), like.requires_grad)
    if isinstance(value, (list, tuple)):
        return [_value_word(part) for part in value] if isinstance(value, list) else tuple(map(_value_word, value))
    return value


def _modes_word(modes: Modes) -> Any:
    return modes.grad, [tuple(region) for region in modes.autocast], modes.region


def _stack_word(stack: Mapping[str, tuple[str, Any]]) -> Any:
    if not all(isinstance(kind, str) for _, kind in stack.values()):
        raise NotKept("the class of a submodule is not told by its name")
    return [(key, path, kind) for key, (path, kind) in stack.items()]


_FACT_WORDS: Mapping[str, Callable[[Any], Any]] = {
    "val": _value_word,
    "sizes": lambda sizes: sizes,
    "nn_module_stack": _stack_word,
    "modes": _modes_word,
    "stack_trace": lambda line: line,
}


def _constant(program: Program, name: str, tensor: Tensor) -> Any:
    """Numbers of ``torch.tensor([1.0])``. A tensor that lives somewhere would be another object, which nobody sees."""
    users = [user for node in program.graph.nodes if node.target == name for user in node.users]
    if not all(user.target in LIFTS for user in users):
        raise NotKept("forward uses a tensor that is kept somewhere and is no buffer; register_buffer keeps it")
    return tensor.dtype, tuple(tensor.shape), tensor.device, bytes_of(tensor.detach().cpu().contiguous())


# --- and back


def program_of(data: Any, request: Request, rehearsal: RunOnFakes) -> Program:
    """The program again, for this model. An error of any kind where the data is none, or is another model's."""
    facts, made = data["facts"], list[fx.Node]()
    graph = fx.Graph()
    constants = {name: _tensor(*parts) for name, parts in data["constants"].items()}
    program = Program(request.module, graph, constants, tracer="export", result=rehearsal.result)
    named = {*constants, *dict(request.module.named_parameters(remove_duplicate=False))}
    named |= {*dict(request.module.named_buffers(remove_duplicate=False))}
    for op, target, name, args, kwargs, told in data["nodes"]:
        given = pytree.tree_map_only(NodeNumber, lambda one: made[one.number], (args, kwargs))
        node = graph.create_node(op, _target(op, target, rehearsal.operators), given[0], given[1], name)
        made.append(node)
        if not node.kwargs.keys() <= _names(node.target):
            raise ValueError(f"{name} has no arguments {[*node.kwargs]}")
        if op != "output" and node.name != name:
            raise ValueError(f"{name} would be {node.name}")
        node.meta |= {fact: _FACTS_MADE[fact](facts[place], rehearsal.mode) for fact, place in told.items()}
        _check_source(node, rehearsal, named)
    if program.inputs != tuple(rehearsal.values):
        raise ValueError(f"inputs {program.inputs}")
    check_boundaries(graph, rehearsal.boundaries)
    graph.lint()
    return program


def _target(op: str, word: str, met: Collection[Any]) -> Any:
    if op != "call_function":
        return word
    kind, _, name = word.partition(" ")
    return _FUNCTIONS[name] if kind == "function" else _operator(name, met)


def _operator(name: str, met: Collection[Any]) -> OpOverload:
    """One of ``met``, which forward runs by itself, or one of torch's that computes tensors from what it is given."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload) or _operator_name(found) != name:
        raise ValueError(f"there is no operator {name}")
    schema = schema_of(found)
    computes = namespace == "aten" and any("Tensor" in str(part.type) for part in schema.returns)
    if found not in met and (not computes or "filename" in _names(found)):
        raise ValueError(f"{name} does more than to compute, and forward does not call it")
    return found


def _names(target: Any) -> set[str]:
    """Of the arguments of an operator: what is given by name becomes a part of Python code."""
    return {argument.name for argument in schema_of(target).arguments} if isinstance(target, OpOverload) else set()


def _check_source(node: fx.Node, rehearsal: RunOnFakes, named: Collection[str]) -> None:
    """Inputs and their parts are those of the run; what the graph reads is named, and no attribute is asked for."""
    if node.op == "placeholder":
        node.meta["val"] = rehearsal.values[str(node.target)]
    elif node.op == "get_attr":
        if node.target not in named:
            raise ValueError(f"{node.target} is no tensor")
    elif node.op == "call_function" and not node.meta:
        parent, place = node.args
        if node.target is not operator.getitem or not isinstance(parent, fx.Node):
            raise ValueError(f"{node.name} is no part of an input")
        node.meta["val"] = parent.meta["val"][place]
    elif node.op not in ("call_function", "output"):
        raise ValueError(f"a node that does {node.op}")


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, content: bytes) -> Tensor:
    numbers = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return numbers.reshape(shape).to(device)


def _value(word: Any, mode: FakeTensorMode) -> Any:
    return pytree.tree_map_only(TensorLike, lambda like: _fake(like, mode), word)


def _fake(like: TensorLike, mode: FakeTensorMode) -> Tensor:
    memory = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
    return FakeTensor(mode, memory, torch.device(like.device)).requires_grad_(like.requires_grad)


def _modes(word: Any, mode: FakeTensorMode) -> Modes:
    grad, autocast, region = word
    return Modes(grad, tuple(Autocast(*each) for each in autocast), region)


_FACTS_MADE: Mapping[str, Callable[[Any, FakeTensorMode], Any]] = {
    "val": _value,
    "sizes": lambda word, mode: word,
    "nn_module_stack": lambda word, mode: {key: (path, kind) for key, path, kind in word},
    "modes": _modes,
    "stack_trace": lambda word, mode: word,
}
