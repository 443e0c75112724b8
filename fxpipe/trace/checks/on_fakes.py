"""On fakes: runs a program's nodes on fake tensors, which have shapes and no numbers.

Takes: a ``Program`` that is already captured, and an example of any sizes. Gives: ``shapes_of``, the shapes of each
node's value for this example.

1. Fake tensors replace the model's tensors; attributes and random generators are restored at the end.
2. Each node whose operands are known runs, in its modes.
3. A node that fails, as it needs numbers, is unknown, and so are all nodes that use it. If the capture is valid for one
   size only, its own shapes are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from fxpipe.graph.program import Program, Shapes, is_assertion
from fxpipe.seeds import random_apart
from fxpipe.snapshots.snapshot import Snapshot
from fxpipe.specs import TensorSpec
from fxpipe.stage.modes import Autocast, enter_modes, modes_restored, within
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import uncompiled
from fxpipe.trace.fake import FakeModel, fake_model


@contextmanager
def left_as_it_is(program: Program) -> Iterator[None]:
    """Restores the Python attributes of submodules (counters, caches, lists) at exit, and the states of Python's,
    NumPy's and the model's own random generators."""
    # Forward computes with fake tensors, so the model's tensors are safe; its Python objects are not.
    with Snapshot(program.module), random_apart(program.generators), uncompiled():
        yield


def faked(value: Any, fake: FakeModel) -> Any:
    """A value with a fake tensor in place of each tensor; floating-point tensors get the type of inputs in stages."""
    specs = pytree.tree_map_only(Tensor, TensorSpec.from_tensor, value)
    return fake.inputs({"value": specs})["value"]


def attribute(program: Program, node: Node, fake: FakeModel) -> Any:
    """The value of a ``get_attr`` node: the model's own tensors are fake already, and a constant is faked here."""
    value = program.attribute(node)
    return faked(value, fake) if str(node.target) in program.constants else value


def call_node(program: Program, node: Node, values: Mapping[Node, Any]) -> Any:
    """Runs a node on the values of its operands. An assertion is skipped: it may fail for made-up numbers."""
    if is_assertion(node):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_module":
        return program.attribute(node)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


@contextmanager
def modes_of(node: Node) -> Iterator[None]:
    """A context in the grad mode and autocast in which forward ran the node."""
    modes = node.meta.get("modes")
    with modes_restored():
        if modes is not None:
            enter_modes(*modes.arguments)
        yield


def shapes_of(
    program: Program,
    example: Mapping[str, Any],
    device: torch.device,
    autocast: Sequence[Autocast],
    compute: torch.dtype | None,
) -> dict[str, Shapes]:
    """Node → the shapes of its value for an example, whose tensors are ``TensorSpec``; only nodes with known shapes.

    A node that needs real numbers has the shapes of its capture, if the capture is valid for one size only.
    """
    values: dict[Node, Any] = {}
    of_one_size = not program.holds_for_any_size and program.holds_for is None
    # 1. fake tensors
    with (
        left_as_it_is(program),
        fake_model(program.module, device, compute) as fake,
        torch.enable_grad(),
        modes_restored(),
        within(autocast),
        fake.mode,
    ):
        # 2. A node with an unknown operand is unknown, too: a guess would report a row dimension that does not exist.
        for node in program.nodes:
            if node.op == "output" or not all(operand in values for operand in node.all_input_nodes):
                continue
            try:
                if node.op == "placeholder":
                    name = str(node.target)
                    values[node] = fake.inputs({name: example[name]})[name]
                elif node.op == "get_attr":
                    values[node] = attribute(program, node, fake)
                else:
                    with modes_of(node):
                        values[node] = call_node(program, node, values)
            except Exception:  # 3. any error leaves the node's shapes unknown
                if of_one_size and "val" in node.meta:
                    values[node] = faked(node.meta["val"], fake)
    return {
        node.name: tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(value))
        for node, value in values.items()
    }
