"""Layer calls: records the calls of torch's functions in a layer's forward, and compares another layer with a record.

Tensors are numbered in the order in which the calls use them. Two layers are alike if their calls are equal, with these
numbers in place of tensors, and if the tensors from outside of the layers are alike, pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from fxpipe.specs import TensorSpec
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.export import node_of
from fxpipe.torch_compat.fakes import FakeTensor
from fxpipe.torch_compat.operators import no_function_modes
from fxpipe.torch_compat.tensors import version_of
from fxpipe.trace.export.decisions import ASKS
from fxpipe.trace.fake import FakeModel, outside

Description = tuple[Any, tuple[Any, ...]]
"""The structure of a value, and its leaves with a number in place of each tensor; equal for values that are alike."""


class Differs(BaseException):
    """A layer differs from the record that it follows. A BaseException, so that no user's handler catches it."""


class Unrepeatable(Exception):
    """A layer uses a value that a description cannot hold, or whose numbers forward may ask for."""


class LayerTensors:
    """The tensors of one call of a layer."""

    def __init__(self) -> None:
        self.outside: list[Tensor] = []
        """The tensors from outside of the layer, among them its parameters."""
        self.kinds: list[tuple[Any, ...]] = []
        """What torch knows of each of ``outside``."""
        self.nodes: list[Node | None] = []
        """The node that computes each of ``outside``, at its first use."""
        self.versions: list[int] = []
        """The count of writes to each of ``outside``, at its first use."""
        self.made: list[Tensor] = []
        """The tensors that the layer's calls return."""
        self.objects: list[Any] = []
        """The layer's arguments that only their identity describes, such as a cache of keys and values."""
        self._known: dict[int, tuple[str, int]] = {}

    def given(self, arguments: Any) -> Description:
        """Describes the layer's arguments."""
        for leaf in pytree.tree_leaves(arguments):
            if not isinstance(leaf, (Tensor, slice, *PLAIN_LEAF)):
                self._known[id(leaf)] = "objects", len(self.objects)
                self.objects.append(leaf)
        return self.described(arguments)

    def described(self, value: Any) -> Description:
        """Describes a value; a new tensor in it is from outside."""
        # torch would make a tuple of a torch.Size
        leaves, structure = pytree.tree_flatten(value, torch.Size.__instancecheck__)
        return structure, tuple(map(self._leaf, leaves))

    def add(self, result: Any) -> Description:
        """Describes the result of a call; a new tensor in it is made by the call."""
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._known:
                _check_sizes(leaf)
                self._known[id(leaf)] = "made", len(self.made)
                self.made.append(leaf)
        return self.described(result)

    def filled(self, description: Description, made: Sequence[Tensor] | Mapping[int, Tensor]) -> Any:
        """The described value. ``made``: the tensors for those that calls return."""
        structure, leaves = description
        values = {"outside": self.outside, "made": made, "objects": self.objects}
        return pytree.tree_unflatten([values[kind][of] if kind in values else of for kind, of in leaves], structure)

    def _leaf(self, leaf: Any) -> tuple[Any, Any]:
        if id(leaf) in self._known:
            return self._known[id(leaf)]
        if isinstance(leaf, Tensor):
            return self._from_outside(leaf)
        if isinstance(leaf, slice):
            return slice, self.described([leaf.start, leaf.stop, leaf.step])
        if not isinstance(leaf, PLAIN_LEAF) or (isinstance(leaf, torch.Size) and _is_symbolic(leaf)):
            raise Unrepeatable
        return type(leaf), leaf

    def _from_outside(self, tensor: Tensor) -> tuple[str, int]:
        self.kinds.append(_kind_of(tensor))
        self.nodes.append(node_of(tensor))
        self.versions.append(version_of(tensor))
        self._known[id(tensor)] = "outside", len(self.outside)
        self.outside.append(tensor)
        return self._known[id(tensor)]


def _check_sizes(tensor: Tensor) -> None:
    with no_function_modes():
        if not isinstance(tensor, FakeTensor) or _is_symbolic(tensor.shape):
            raise Unrepeatable


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What torch knows of a fake tensor. A constant among fake tensors has numbers, too."""
    _check_sizes(tensor)
    with no_function_modes():
        if tensor.constant is not None:  # type: ignore[attr-defined]
            raise Unrepeatable
        return *layout_of(tensor), tensor.is_leaf, type(tensor)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides, offset, layout, dtype, device, and whether the tensor needs a gradient."""
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.layout
    return *layout, tensor.dtype, tensor.device, tensor.requires_grad


def _is_symbolic(sizes: Sequence[Any]) -> bool:
    return any(type(size) is not int for size in sizes)


def last_node(graph: fx.Graph) -> Node:
    last: Node = next(iter(reversed(graph.nodes)))
    return last


class LayerRecording(TorchFunctionMode):
    """Records the calls. ``is_repeatable``: whether other layers can be compared with them."""

    def __init__(self, graph: fx.Graph, tensors: LayerTensors) -> None:
        super().__init__()
        self._graph, self._tensors, self._last = graph, tensors, last_node(graph)
        self.is_repeatable = True
        self.calls: list[tuple[Any, Any, Any]] = []
        """(the function, its arguments, its result)"""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = self.noted(self._tensors.described, (args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self._last = last_node(self._graph)
        self.is_repeatable &= function not in ASKS
        self.calls.append((function, arguments, self.noted(self._tensors.add, result)))
        return result

    def noted(self, describe: Callable[[Any], Description], value: Any) -> Any:
        """``describe(value)``; None after the layer has done something that no record holds."""
        # boundaries, opaque regions and an operator that forward calls itself add nodes between the calls
        self.is_repeatable &= self._last is last_node(self._graph)
        try:
            return describe(value) if self.is_repeatable else None
        except Unrepeatable:
            self.is_repeatable = False


@dataclass(frozen=True)
class LayerRecord:
    """What a layer's forward does. ``kinds``: of the tensors from outside; ``result``: the description of its result.

    ``plain``: the plain values of attributes that forward reads, by the path of a submodule and the name: layers that
    differ in them are not compared further. ``specs``: of the tensors that calls return. ``returned``: the number of a
    tensor that the layer makes and returns → the traced layer's tensor.
    """

    number: int
    name: str
    plain: Mapping[tuple[str, str], Any]
    calls: Sequence[tuple[Any, Description, Description]]
    kinds: Sequence[Any]
    fake: FakeModel
    specs: Sequence[TensorSpec]
    result: Description
    returned: Mapping[int, Tensor]

    def stand_ins(self) -> list[Tensor]:
        """Stand-ins for the tensors that one layer's calls return. Any operation on a stand-in fails."""
        with outside():
            return list(map(self.fake.leaf, self.specs))


_NO_CALL: tuple[Any, Any, Any] = (None, None, None)


class LayerFollowing(TorchFunctionMode):
    """Returns a record's results. Raises ``Differs`` at the first call that is not the record's next call."""

    def __init__(self, record: LayerRecord, tensors: LayerTensors) -> None:
        super().__init__()
        self._record, self._tensors, self._stand_ins = record, tensors, record.stand_ins()
        self._calls = iter(record.calls)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called, arguments, returned = next(self._calls, _NO_CALL)
        if called != function or self._tensors.described((args, kwargs or {})) != arguments:
            raise Differs
        result = self._tensors.filled(returned, self._stand_ins)
        self._tensors.add(result)
        return result

    def end(self, result: Any) -> None:
        """``Differs`` if the record has more calls, another result, or other tensors from outside."""
        alike = self._tensors.described(result) == self._record.result and self._tensors.kinds == self._record.kinds
        if not alike or next(self._calls, _NO_CALL) is not _NO_CALL:
            raise Differs
