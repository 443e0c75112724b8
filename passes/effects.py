"""Effects: finds an operation's effects besides its result: its writes, the arguments that its result shares memory
with, and random draws. The sources are operator schemas, or short lists for operations without a schema; for a
module that the capture ran as a whole, the effects observed in that run (``Program.effects``).

Takes: a node and its program. Gives, without running anything:

- ``written``: the arguments that the node writes. ``aliased``: the arguments whose memory its result may share.
- ``is_random``, ``acts``: whether it may draw random numbers, or have other effects.
- ``is_number``: whether it asks a tensor only for its shape, dtype or device.

An unknown function counts as sharing memory, drawing random numbers and having effects, but as writing none of its
arguments. The sources are asked in this order: opaque regions and observed effects, short lists of names, operator
schemas.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.nn.utils.spectral_norm import SpectralNorm

from fxpipe.graph.operators import setitem
from fxpipe.graph.program import IN_PLACE_NAMES, Program, is_boundary, is_boundary_value, made_by
from fxpipe.graph.stage_graph import own_tensors
from fxpipe.graph.topological import reachable
from fxpipe.stage.deferred import runs_hooks
from fxpipe.stage.opaque_call import OpaqueCall
from fxpipe.stage.recomputed_part import RecomputedPart
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import BATCH_STATISTICS, DROPOUTS, SPECTRAL_NORM
from fxpipe.torch_compat.operators import OpOverload, OpOverloadPacket, schema_of

_IN_PLACE_OPERATORS: frozenset[Any] = frozenset(getattr(operator, name) for name in IN_PLACE_NAMES)
_IN_PLACE_METHODS = frozenset(f"__{name}__" for name in IN_PLACE_NAMES)
_ITEM_WRITES: frozenset[Any] = frozenset({operator.setitem, setitem})
_NUMBER_METHODS = frozenset("size dim numel nelement ndimension stride element_size is_contiguous get_device".split())
_NUMBER_ATTRIBUTES = frozenset("shape ndim dtype device layout is_cuda itemsize nbytes requires_grad".split())
SIZE = torch.ops.aten.sym_size.int
"""Returns a tensor's size in a dimension, which is symbolic in the capture."""
_SIZES = frozenset({SIZE, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default})
_CONVERSIONS = frozenset(
    "float double half bfloat16 int long short bool byte char cpu cuda type requires_grad_".split()
)
"""Methods without their own schema whose result may be the argument itself."""
_VIEWS_UNSAID = frozenset(
    "type_as atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid cartesian_prod chain_matmul einsum data "
    "sum_to_size conj_physical _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk to_dense".split()
)
"""Functions whose schema does not say that the result may share memory with an argument."""
_RUNNING_STATISTICS = frozenset(
    "batch_norm instance_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _batch_norm_impl_index "
    "batch_norm_update_stats".split()
)
"""Functions whose schema does not say that they write ``running_mean`` and ``running_var``."""
_MAY_RETURN_INPUT = (nn.Identity, nn.Flatten, nn.Unflatten, DROPOUTS)
_HAVE_STATISTICS = (BATCH_STATISTICS, SPECTRAL_NORM)
_RANDOM_MODULES = (
    DROPOUTS,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_RANDOM_FUNCTIONS = frozenset("scaled_dot_product_attention multi_head_attention_forward gumbel_softmax".split())
_SWITCHED = frozenset("scaled_dot_product_attention lstm gru rnn_tanh rnn_relu rrelu".split())
"""Functions that draw random numbers only if an argument enables it."""
_CASTS = frozenset("to type_as float double half bfloat16 int long bool cpu cuda".split())
"""Functions that return their argument itself, or else a copy of another dtype or device."""


def is_number(node: Node) -> bool:
    """Whether ``node`` queries a tensor's shape, dtype or device, or computes from such values alone."""
    parts = reachable([node], lambda part: () if _is_query(part) else part.all_input_nodes)
    return all(_is_query(part) or _computes_numbers(part) for part in parts)


def _is_query(node: Node) -> bool:
    """Whether ``node`` queries a tensor's shape, dtype or device."""
    return (
        "is_number" in node.meta  # a placeholder for such a value
        or (node.op == "call_method" and node.target in _NUMBER_METHODS)
        or node.target in _SIZES
        or (node.target is getattr and node.args[1] in _NUMBER_ATTRIBUTES)
    )


def _computes_numbers(node: Node) -> bool:
    """Whether ``node`` is a function of Python on operands, such as ``x + 1``, that may be numbers."""
    is_python = getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")
    return node.op == "call_function" and node.target is not getattr and is_python and bool(node.all_input_nodes)


def is_in_place(node: Node) -> bool:
    """Whether a function is called with ``inplace=True``, so that it writes and returns its first argument."""
    return named_arguments(node).get("inplace") is True


def is_item_write(node: Node) -> bool:
    """Whether the node is ``x[i] = y``, which writes its first argument and returns nothing."""
    return node.target in _ITEM_WRITES or operator_name(node) == "__setitem__"


def returns_written(program: Program, node: Node) -> bool:
    """Whether an operation that writes returns the tensor that it has written, as ``x.add_(1)`` does."""
    if node.op == "call_module":
        return not isinstance(program.attribute(node), OpaqueCall | RecomputedPart)
    if node.target in _IN_PLACE_OPERATORS:
        return True
    if isinstance(node.target, OpOverload):
        returns = schema_of(node.target).returns
        return bool(returns) and returns[0].alias_info is not None and returns[0].alias_info.is_write
    if is_in_place(node) or isinstance(node.kwargs.get("out"), Node):
        return True
    return operator_name(node).endswith("_") and not is_item_write(node)


def written(program: Program, node: Node) -> list[Node]:
    """Returns the argument nodes whose memory ``node`` writes.

    For example, ``x.add_(y)``, ``torch.add(x, y, out=x)`` and ``x[0] = y`` write x, and ``batch_norm(x, mean, var)``
    writes mean and var, in evaluation, too: see ``written_now``. A module's own parameters and buffers do not count:
    see ``own_writes``.
    """
    if node.op == "call_module":
        module = program.attribute(node)
        is_part = isinstance(module, OpaqueCall | RecomputedPart)
        indices = module.overwrites if is_part else [0] * bool(getattr(module, "inplace", False))
        return [source for index in indices for source in nodes_in(node.args[index])]
    only_reads = isinstance(node.target, OpOverload) and _only_reads(node.target)
    if only_reads or not node.op.startswith("call_") or is_number(node):
        return []
    name = operator_name(node)
    if node.target in _IN_PLACE_OPERATORS or name in _IN_PLACE_METHODS or is_item_write(node):
        return nodes_in(node.args[0])
    targets = [source for is_write, value in _schema_arguments(node) if is_write for source in nodes_in(value)]
    arguments = named_arguments(node)
    if is_in_place(node):
        targets += nodes_in(next(iter(arguments.values())))
    if name in _RUNNING_STATISTICS:
        targets += nodes_in(arguments.get("running_mean")) + nodes_in(arguments.get("running_var"))
    if name in ("embedding", "embedding_bag") and arguments.get("max_norm") is not None:
        targets += nodes_in(arguments["weight"])
    return list(dict.fromkeys(targets))


@cache
def _only_reads(operator: OpOverload) -> bool:
    """Whether no call of an operator writes an argument, by its schema."""
    may = ("inplace", "running_mean", "max_norm")
    arguments = schema_of(operator).arguments
    return not any(a.name in may or (a.alias_info is not None and a.alias_info.is_write) for a in arguments)


def written_now(program: Program, node: Node) -> list[Node]:
    """Returns ``written`` in the mode of this capture: in evaluation, a batch norm does not write its statistics."""
    # The functional batch norm takes the training flag as an argument; a module has it as an attribute.
    is_off = operator_name(node) in _RUNNING_STATISTICS and named_arguments(node).get("training") is False
    return [] if is_off else written(program, node)


def acts(program: Program, node: Node) -> bool:
    """Whether a node may have effects besides its result and writes into its arguments; True if it is unknown."""
    if node.op == "call_method":
        return not (is_number(node) or node.target in _CONVERSIONS or _overloads(node))
    if node.op == "call_function":
        return not is_known(node.target)
    module, effects = program.attribute(node), program.effects.get(node.name)
    if isinstance(module, OpaqueCall) or runs_hooks(module):
        return True
    if effects is not None:
        returned = pytree.tree_leaves(node.meta.get("val"))
        return bool(effects.writes) or not any(isinstance(leaf, Tensor) for leaf in returned)
    trains = any(part.training for part in module.modules())
    return any(trains or isinstance(tensor, nn.Parameter) for tensor in own_writes(module))


def aliased(program: Program, node: Node) -> list[Node]:
    """Returns the argument nodes whose memory ``node``'s result may share, including those that ``node`` writes."""
    if is_boundary(node) or is_boundary_value(node) or is_number(node) or not node.op.startswith("call_"):
        return []
    # A node that writes a tensor shares its memory, whatever the node returns.
    writes = written(program, node)
    shared = _shared_by_module(program, node) if node.op == "call_module" else _shared(node)
    return list(dict.fromkeys(writes + shared))


def writes_apart(program: Program, node: Node) -> bool:
    """Whether a node writes memory that its result does not share, as a batch norm writes its running mean."""
    if not written(program, node) or returns_written(program, node):
        return False
    return not (_shared_by_module(program, node) if node.op == "call_module" else _shared(node))


def _shared_by_module(program: Program, node: Node) -> list[Node]:
    """Returns the arguments whose memory the result of a module's call may share."""
    if node.name in program.effects:
        operands = nodes_in((node.args, node.kwargs))
        return [operands[index] for index in program.effects[node.name].shares]
    module = program.attribute(node)
    return node.all_input_nodes if isinstance(module, _MAY_RETURN_INPUT) else []


def _shared(node: Node) -> list[Node]:
    """Returns the arguments whose memory the result of a function may share."""
    name = operator_name(node)
    # x.to(dtype) is x itself if x already has this dtype, and a copy otherwise.
    if name in _CASTS and _is_other_type(node):
        return []
    if node.target in (operator.getitem, getattr) or name in _CONVERSIONS:
        return nodes_in(node.args[0])
    if name in _VIEWS_UNSAID:
        return node.all_input_nodes
    if not _overloads(node):
        # Without a schema, the result may be a view of any argument, except for Python arithmetic.
        arithmetic = ("_operator", "builtins", "math", "fxpipe.graph.operators")
        return [] if getattr(node.target, "__module__", "") in arithmetic else node.all_input_nodes
    shared = [source for _, value in _schema_arguments(node) for source in nodes_in(value)]
    if "dropout" in name:
        shared += nodes_in(node.args[0] if node.args else None)  # in eval mode, dropout returns its input
    return shared


def _is_other_type(node: Node) -> bool:
    """Whether the result is known to have another dtype or device than the argument, so that it is a copy."""
    result = node.meta.get("val")
    source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    if not (isinstance(result, Tensor) and isinstance(source, Tensor)):
        return False
    return (result.dtype, result.device) != (source.dtype, source.device)


def is_random(program: Program, node: Node) -> bool:
    """Whether ``node`` may draw random numbers; True if the node is unknown."""
    if node.op == "call_module":
        if node.name in program.effects:
            return program.effects[node.name].draws_random
        parts = program.attribute(node).modules()
        return any(isinstance(part, _RANDOM_MODULES) for part in parts)
    if not node.op.startswith("call_") or is_boundary(node) or is_boundary_value(node) or _draws_nothing(node):
        return False
    name = operator_name(node)
    if "dropout" in name or name in _RANDOM_FUNCTIONS:
        return True
    # Unknown functions may draw: an unneeded seed costs nothing, a missing seed changes the random numbers.
    if node.op == "call_function" and not is_known(node.target):
        return True
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(node))


def _draws_nothing(node: Node) -> bool:
    """Whether the arguments of an operation turn its random draws off."""
    name = operator_name(node)
    if not ("dropout" in name or name in _SWITCHED):
        return False
    arguments = named_arguments(node)
    is_off = any(arguments.get(key) is False for key in ("train", "training"))
    chances = (arguments.get(key) for key in ("p", "dropout", "dropout_p"))
    return is_off or any(isinstance(chance, (int, float)) and chance == 0 for chance in chances)


def used_tensors(program: Program, node: Node) -> dict[str, Tensor]:
    """Returns the ``own_tensors`` of a node, and the parameters and buffers that are its arguments, by name."""
    tensors = own_tensors(program, node)
    for source in map(made_by, node.all_input_nodes):
        tensors |= own_tensors(program, source) if source.op == "get_attr" else {}
    return tensors


def own_writes(module: nn.Module) -> list[Tensor]:
    """Returns the module's tensors that its call writes: batch statistics, power iterations, renormalised embeddings.

    The result does not depend on the training mode, so that training and evaluation have the same stages.
    """
    tensors: list[Tensor] = []
    for part in module.modules():
        hooks = part._forward_pre_hooks.values()  # nn.utils.spectral_norm is a hook that writes buffers
        if isinstance(part, _HAVE_STATISTICS) or any(isinstance(hook, SpectralNorm) for hook in hooks):
            tensors += part.buffers(recurse=False)
        elif getattr(part, "max_norm", None) is not None and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            tensors.append(part.weight)
    return tensors


def is_known(target: Any) -> bool:
    """Whether a function belongs to torch, Python or fxpipe; functions of torchvision and the like do not."""
    if isinstance(target, OpOverload):
        return target.namespace in ("aten", "prims")
    package = str(getattr(target, "__module__", None)).partition(".")[0]
    return package in ("torch", "_operator", "builtins", "math", "fxpipe") or isinstance(
        target, type(torch.relu) | type(torch.Tensor.relu)
    )


def operator_name(node: Node) -> str:
    """Returns ``add_`` for each of ``x.add_(y)``, ``torch.Tensor.add_(x, y)``, ``torch.ops.aten.add_.Tensor(x, y)``."""
    if isinstance(node.target, OpOverload):
        return str(schema_of(node.target).name).rpartition("::")[2]
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _overloads(node: Node) -> list[OpOverload]:
    """Returns the torch operators that a node may call: its own overload, or all overloads of its name."""
    if isinstance(node.target, OpOverload):
        return [node.target]
    return _named(operator_name(node))


@cache
def _named(name: str) -> list[OpOverload]:
    """Returns all overloads of the ATen operator of a name; empty if there is none."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]


def nodes_in(value: Any) -> list[Node]:
    """Returns the nodes in an argument or several arguments of a call, in order."""
    nodes: list[Node] = []
    fx.node.map_arg(value, nodes.append)
    return nodes


class _AliasedArgument(NamedTuple):
    """An argument with alias information in an operator's schema. ``position``: None for a keyword-only argument."""

    position: int | None
    name: str
    is_write: bool


@cache
def _schemas(target: str | OpOverload) -> tuple[_AliasedArgument, ...]:
    """Returns the aliased arguments of an operator, or of all overloads of a name."""
    overloads = [target] if isinstance(target, OpOverload) else _named(target)
    return tuple(
        _AliasedArgument(None if argument.kwarg_only else position, argument.name, argument.alias_info.is_write)
        for overload in overloads
        for position, argument in enumerate(schema_of(overload).arguments)
        if argument.alias_info is not None
    )


def _schema_arguments(node: Node) -> Iterator[tuple[bool, Any]]:
    """Yields (whether the argument is written, the passed value) for each argument with alias information."""
    target = node.target if isinstance(node.target, OpOverload) else operator_name(node)
    for argument in _schemas(target):
        if argument.position is not None and argument.position < len(node.args):
            yield argument.is_write, node.args[argument.position]
        elif argument.name in node.kwargs:
            yield argument.is_write, node.kwargs[argument.name]


def named_arguments(node: Node) -> dict[str, Any]:
    """Returns all arguments of a call by name, in the order of the signature, including defaults.

    Returns only the keyword arguments if the names of positional arguments are not known.
    """
    if node.op == "call_function" and inspect.isfunction(node.target):
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):  # ValueError: the wrapper of x ** 2 wraps no Python function
            return dict(node.kwargs)
        bound.apply_defaults()
        return bound.arguments
    overloads = _overloads(node)
    if not overloads or not (len(overloads) == 1 or str(overloads[0]).endswith(".default")):
        return dict(node.kwargs)
    arguments = schema_of(overloads[0]).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    positional = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    return {**defaults, **positional, **node.kwargs}
