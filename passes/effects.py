"""What an operation does beside computing its result: what it writes, what its result shares memory with, whether it
draws random numbers. Read from operator schemas where there is one, from short lists where there is none."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.callables import setitem
from fxpipe.ir import IN_PLACE_NAMES, Program, is_boundary, is_boundary_value

_IN_PLACE_OPERATORS: frozenset[Any] = frozenset(getattr(operator, name) for name in IN_PLACE_NAMES) | frozenset(
    f"__{name}__" for name in IN_PLACE_NAMES
)
_ITEM_WRITES: frozenset[Any] = frozenset({operator.setitem, setitem, "__setitem__"})
_NUMBER_METHODS = frozenset("size dim numel nelement ndimension stride element_size is_contiguous get_device".split())
_NUMBER_ATTRIBUTES = frozenset("shape ndim dtype device layout is_cuda itemsize nbytes requires_grad".split())
_CONVERSIONS = frozenset(
    "float double half bfloat16 int long short bool byte char cpu cuda type requires_grad_".split()
)
"""Methods without a schema of their own whose result may be the very same tensor."""
_VIEWS_UNSAID = frozenset(
    "type_as atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid cartesian_prod chain_matmul einsum".split()
)
"""Functions whose schema does not tell that the result may share memory with an argument."""
_RUNNING_STATISTICS = frozenset({"batch_norm", "instance_norm"})
"""Functions whose schema does not tell that they write ``running_mean`` and ``running_var``."""
_MAY_RETURN_INPUT = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_HAVE_STATISTICS = (nn.modules.batchnorm._NormBase, nn.utils.parametrizations._SpectralNorm)
_RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_RANDOM_FUNCTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "gumbel_softmax"})


def is_number(node: fx.Node) -> bool:
    """Whether ``node`` asks a tensor for its shape, type or device, or computes with such answers alone."""
    if node.op == "call_method":
        return node.target in _NUMBER_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _NUMBER_ATTRIBUTES
    if getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
        return bool(node.all_input_nodes) and all(is_number(source) for source in node.all_input_nodes)
    return False


def is_in_place(node: fx.Node) -> bool:
    """Whether a function is called with ``inplace=True``: it writes its first argument, and returns it."""
    return _bound(node).get("inplace") is True


def written(program: Program, node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory ``node`` writes."""
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        return [node.args[0]] if getattr(module, "inplace", False) and isinstance(node.args[0], fx.Node) else []
    if not node.op.startswith("call_") or is_number(node):
        return []
    if node.target in _IN_PLACE_OPERATORS or node.target in _ITEM_WRITES:
        return _nodes(node.args[0])
    found = [source for argument, value in _schema_arguments(node) if argument.is_write for source in _nodes(value)]
    bound = _bound(node)
    if is_in_place(node):
        found += _nodes(next(iter(bound.values())))
    if _name(node) in _RUNNING_STATISTICS:
        found += _nodes(bound.get("running_mean")) + _nodes(bound.get("running_var"))
    if _name(node) in ("embedding", "embedding_bag") and bound.get("max_norm") is not None:
        found += _nodes(bound["weight"])
    return list(dict.fromkeys(found))


def aliased(program: Program, node: fx.Node) -> list[fx.Node]:
    """The argument nodes whose memory ``node``'s result may share; what it writes included."""
    if is_boundary(node) or is_boundary_value(node) or is_number(node) or not node.op.startswith("call_"):
        return []
    writes = written(program, node)
    if node.op == "call_module":
        module = program.attribute(str(node.target))
        return writes + (node.all_input_nodes if isinstance(module, _MAY_RETURN_INPUT) else [])
    if node.target in (operator.getitem, getattr) or node.target in _CONVERSIONS:
        return writes + _nodes(node.args[0])
    if _name(node) in _VIEWS_UNSAID:
        return list(dict.fromkeys(writes + node.all_input_nodes))
    schemas = _schemas(_name(node))
    if not schemas:
        known = getattr(node.target, "__module__", "") in (
            "_operator",
            "builtins",
            "math",
            "fxpipe.callables",
        )
        return writes if known else list(dict.fromkeys(writes + node.all_input_nodes))
    shared = [source for argument, value in _schema_arguments(node) if argument.shares for source in _nodes(value)]
    if "dropout" in _name(node):
        shared += _nodes(node.args[0] if node.args else None)  # in eval, the input itself
    return list(dict.fromkeys(writes + shared))


def is_random(program: Program, node: fx.Node) -> bool:
    """Whether ``node`` may draw random numbers; so for what is not known."""
    if node.op == "call_module":
        parts = program.attribute(str(node.target)).modules()
        return any(isinstance(part, _RANDOM_MODULES) for part in parts)
    if not node.op.startswith("call_") or is_boundary(node) or is_boundary_value(node):
        return False
    name = _name(node)
    if "dropout" in name or name in _RANDOM_FUNCTIONS:
        return True
    if node.op == "call_function" and not _is_known(node.target):
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
    )


def own_writes(module: nn.Module) -> list[Tensor]:
    """What a call of ``module`` writes of its own: batch statistics, power iterations, rows that grew too long.

    Whether it is in training mode or not, so that both have the same stages.
    """
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, _HAVE_STATISTICS):
            found += part.buffers(recurse=False)
        elif getattr(part, "max_norm", None) is not None and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            found.append(part.weight)
    return found


def _is_known(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch", "_operator", "builtins", "math", "fxpipe")) or isinstance(
        target, type(torch.relu) | type(torch.Tensor.relu)
    )


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


class _Argument:
    """What the schemas of an operator say of one argument."""

    def __init__(self, position: int | None, name: str, is_write: bool, shares: bool) -> None:
        self.position, self.name, self.is_write, self.shares = position, name, is_write, shares


@cache
def _schemas(name: str) -> tuple[_Argument, ...]:
    """The arguments, over all overloads, that carry alias information; plus a marker entry where there are none."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    found = [_Argument(None, "", False, False)]
    for overload in packet.overloads():
        for position, argument in enumerate(getattr(packet, overload)._schema.arguments):
            if argument.alias_info is not None:
                place = None if argument.kwarg_only else position
                found.append(_Argument(place, argument.name, argument.alias_info.is_write, True))
    return tuple(found)


def _schema_arguments(node: fx.Node) -> Iterator[tuple[_Argument, Any]]:
    """(what the schema says, the value given) for each argument with alias information."""
    for argument in _schemas(_name(node)):
        if argument.position is not None and argument.position < len(node.args):
            yield argument, node.args[argument.position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _bound(node: fx.Node) -> dict[str, Any]:
    """A Python function's arguments by name; empty for what has no signature."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return {}
    target: Callable[..., Any] = node.target
    try:
        return dict(inspect.signature(target).bind(*node.args, **node.kwargs).arguments)
    except TypeError:
        return dict(node.kwargs)
