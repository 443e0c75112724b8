"""On fakes: what it takes to run a program's nodes on tensors that have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import enter_modes, leave_modes
from fxpipe.graph.program import Program, is_assertion
from fxpipe.seeds import random_apart
from fxpipe.torch_compat import pytree
from fxpipe.trace.fake import FakeModel
from fxpipe.trace.state.snapshot import Snapshot


@contextmanager
def left_as_it_is(module: nn.Module) -> Iterator[None]:
    """Submodules that run here keep no counter, cache or list of it, nor do Python's random numbers move."""
    snapshot = Snapshot(module)
    with random_apart():
        try:
            yield
        finally:
            snapshot.restore()


def faked(value: Any, fake: FakeModel) -> Any:
    """A value with a fake tensor in place of each tensor, floating-point ones in the type that inputs will have."""
    likes = pytree.tree_map_only(Tensor, TensorLike.of, value)
    return fake.inputs({"value": likes})["value"]


def attribute(program: Program, node: fx.Node, fake: FakeModel) -> Any:
    """What a ``get_attr`` node names."""
    value = program.attribute(str(node.target))
    return faked(value, fake) if str(node.target) in program.constants else value


def call_node(program: Program, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Runs one node on the values of those before it; not an assertion, which need not hold for made-up numbers."""
    if is_assertion(node):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_module":
        return program.attribute(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


@contextmanager
def modes_of(node: fx.Node) -> Iterator[None]:
    """The modes in which forward runs a node."""
    modes = node.meta.get("modes")
    if modes is None:
        yield
        return
    entered = enter_modes(modes.grad, modes.autocast)
    try:
        yield
    finally:
        leave_modes(entered)
