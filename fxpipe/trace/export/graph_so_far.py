"""The graph that torch.export has recorded so far: whether a value in it is a constant, and how it was computed."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.device import with_shared_names
from fxpipe.graph.topological import reachable
from fxpipe.torch_compat.export import get_proxy_mode, node_of
from fxpipe.torch_compat.operators import no_dispatch_modes, no_function_modes, schema_of


def is_constant(value: Any) -> bool:
    """Whether a value in torch.export depends on no inputs, parameters or random numbers, and so is always the same."""
    last = node_of(value)
    # Walks back through the nodes that the value is computed from, until a node may change.
    for node in () if last is None else reachable([last], lambda each: each.all_input_nodes):
        tags = getattr(node.target, "tags", ())
        if node.op in ("placeholder", "get_attr") or torch.Tag.nondeterministic_seeded in tags:
            return False
    return last is not None


def computed(function: Callable[[Tensor], Any], value: Tensor) -> Any:
    """What a function such as ``bool`` returns for a constant in torch.export, which is computed; None for another
    tensor, and if the graph has written into a tensor so far."""
    last = node_of(value)
    if not is_constant(value) or any(getattr(schema_of(node.target), "is_mutable", False) for node in last.graph.nodes):
        return None

    @functools.cache
    def run(node: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), run)
        return node.target(*args, **kwargs)

    with no_function_modes(), no_dispatch_modes():
        return function(run(last))


def computation_of(value: Tensor, digests: dict[Any, str], passing: Any) -> str:
    """A digest of the graph that computes a tensor in torch.export, equal for equal graphs; "" for unknown graphs.

    ``digests``: node → digest, of one export. ``passing``: an operator that returns its arguments. The digest counts
    earlier in-place writes to integer and boolean tensors, after which the same operators may give other values.
    """
    mode, last = get_proxy_mode(), node_of(value)
    if mode is None or last is None:
        return ""
    # A node's digest is computed from its operator and its arguments' digests, so equal graphs have equal digests.
    writes = 0
    for node in last.graph.nodes:
        if node in digests:
            pass
        elif node.op == "get_attr":
            constant = getattr(getattr(mode.tracer, "root", None), str(node.target))
            with no_dispatch_modes():
                digests[node] = f"{constant.dtype} {constant.tolist()}" if isinstance(constant, Tensor) else node.name
        elif node.target is operator.getitem and node.args[0].target is passing:
            digests[node] = digests[node.args[0].args[0][node.args[1]]]
        else:
            shape = getattr(node.meta.get("val"), "shape", "")
            target = f"{node.name} {shape}" if node.op == "placeholder" else str(node.target)
            told = fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: digests.get(leaf, str(leaf)))
            text = with_shared_names(str(told))
            digests[node] = hashlib.blake2b(f"{target} {text}".encode(), digest_size=8).hexdigest()
        schema = schema_of(node.target)
        fake = node.meta.get("val")
        writes += schema is not None and schema.is_mutable and isinstance(fake, Tensor) and not fake.is_floating_point()
    return f"{digests[last]} {writes}"
