"""Alike nodes: an operator runs on fake tensors once for each kind of operands; the nodes alike take its outcome over.

Two nodes are alike if they call the same operator with equal arguments. Tensors are equal if they have the same layout,
dtype, device and need of a gradient, and share memory with each other in the same way. The outcome names memory by
numbers: first the operands' memory, then the memory that the node allocates, which is new for each node alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import Node

from fxpipe.stage.modes import ambient_autocast
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.fakes import FakeTensor, FakeTensorMode
from fxpipe.torch_compat.operators import OpOverload, schema_of
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.export.layer_calls import LayerTensors, Unrepeatable, layout_of
from fxpipe.trace.fake import outside


def has_only_pure_operators(nodes: Iterable[Node]) -> bool:
    """Whether no node runs a module or writes into a tensor: then a node's outcome depends on its operands alone."""
    called = [node for node in nodes if node.op.startswith("call_")]
    operators = [node.target for node in called if isinstance(node.target, OpOverload)]
    is_known = all(node.op == "call_function" for node in called)
    return is_known and not ambient_autocast() and not any(schema_of(target).is_mutable for target in operators)


@dataclass(frozen=True)
class Operands:
    """The tensors that a node uses, and a key that is equal for nodes that are alike."""

    tensors: Sequence[Tensor]
    key: Any

    @staticmethod
    def of(node: Node, values: Mapping[Node, Any], groups: Sequence[Collection[int]]) -> Operands | None:
        """None for a node whose outcome may depend on more. ``groups``: sets of ids of storages; it matters to the
        outcome which of them have an operand's storage."""
        if not isinstance(node.target, OpOverload) or "modes" in node.meta:
            return None
        used = LayerTensors()
        try:
            described = used.described(fx.node.map_arg((node.args, node.kwargs), values.__getitem__))
        except Unrepeatable:
            return None
        memory = [id(tensor.untyped_storage()) for tensor in used.outside]
        shared = tuple((memory.index(each), *(each in group for group in groups)) for each in memory)
        return Operands(used.outside, (node.target, described, tuple(map(layout_of, used.outside)), shared))


@dataclass(frozen=True)
class NodeOutcome:
    """What a node returns and keeps for backward.

    ``allocated``: the bytes of the memory that the node allocates; ``saved``: the numbers of the memory that autograd
    saves. ``leaves``: of the node's result, with a ``_ResultTensor`` for each tensor.
    """

    allocated: Sequence[int]
    saved: Collection[int]
    structure: Any
    leaves: Sequence[Any]

    @staticmethod
    def of(operands: Operands, result: Any, saved: Mapping[int, int]) -> NodeOutcome:
        """``saved``: the id of each storage that autograd saves → its bytes."""
        sizes = {id(storage): storage.nbytes() for storage in _storages([*operands.tensors, *tensors_in(result)])}
        sizes |= saved
        number = {key: index for index, key in enumerate(sizes)}
        leaves, structure = pytree.tree_flatten(result)
        described = [
            _ResultTensor(number[id(leaf.untyped_storage())], layout_of(leaf)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        allocated = list(sizes.values())[len(_storages(operands.tensors)) :]
        return NodeOutcome(allocated, frozenset(number[key] for key in saved), structure, described)

    def again(self, operands: Operands, mode: FakeTensorMode) -> tuple[Any, list[Any], list[Any]]:
        """The outcome for a node alike: its result, the storages that autograd saves, and the new storages."""
        with outside():
            new = [torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage() for size in self.allocated]
            storages = [*_storages(operands.tensors), *new]
            leaves = [
                _fake(storages[leaf.memory], leaf.layout, mode) if isinstance(leaf, _ResultTensor) else leaf
                for leaf in self.leaves
            ]
        return pytree.tree_unflatten(leaves, self.structure), [storages[index] for index in self.saved], new


class _ResultTensor(NamedTuple):
    """A tensor of a result. ``memory``: the number of its memory."""

    memory: int
    layout: tuple[Any, ...]


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The tensors' storages, each once."""
    return list({id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}.values())


def _fake(storage: torch.UntypedStorage, layout: tuple[Any, ...], mode: FakeTensorMode) -> Tensor:
    shape, stride, offset, _, dtype, device, requires_grad = layout
    memory = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
    return FakeTensor(mode, memory, device).requires_grad_(requires_grad)
