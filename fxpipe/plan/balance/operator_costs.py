"""Operator costs: what each operator below autograd costs, derived from the shapes of what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fxpipe.hardware import Hardware
from fxpipe.torch_compat import TorchDispatchMode, packet_of, pytree, schema_of

_ATTENTION = "_scaled_dot_product"
_ATTENTION_BACKWARD = 2.5
"""Of attention's matrix products: it makes its two again in part, and four for the gradients."""
_ADDED_FIRST = ("addmm", "baddbmm", "addbmm", "addmv")
"""Products whose first argument is a summand and no factor."""
_GATHERS = ("embedding", "index_select", "gather", "index")
"""Operators that read no more of their first argument than they return."""


class OperatorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the operators take that run while it is open; ``clear`` begins anew.

    ``is_weight``: whether a tensor is, or shares the memory of, a parameter. The gradients of those are what an action
    W computes; all others are I's.
    """

    def __init__(self, hardware: Hardware, is_weight: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._is_weight = hardware, is_weight
        self.clear()

    def clear(self) -> None:
        self.forward = self.input = self.weight = self.without_gradient = 0.0
        self.flops = self.backward_flops = 0.0
        self.ideal = 0.0
        """Seconds that the products take at the peak."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        memory = {id(tensor.untyped_storage()) for tensor in given}
        is_view = not schema_of(func).is_mutable and all(id(tensor.untyped_storage()) in memory for tensor in made)
        if is_view or not made:
            return
        name = packet_of(func).__name__
        flops = _flops(func, name, args, kwargs, result)
        read = made if name in _GATHERS else given
        moved = sum(size_in_bytes(tensor) for tensor in [*read, *made])
        seconds = self._hardware.seconds(flops, moved, made[0].element_size())
        self.forward += seconds
        self.flops += flops
        if not torch.is_grad_enabled():
            self.without_gradient += seconds
        before = self.backward_flops
        factors = given[1:3] if name in _ADDED_FIRST else given
        needing = [tensor for tensor in factors if tensor.requires_grad and torch.is_grad_enabled()]
        if needing:
            self._note_gradients(name, needing, made, seconds, flops)
        if flops:
            self.ideal += (flops + self.backward_flops - before) / self._hardware.peak(made[0].element_size())

    def _note_gradients(
        self, name: str, needing: Sequence[Tensor], made: Sequence[Tensor], seconds: float, flops: float
    ) -> None:
        """A product's backward is a product for each factor that needs a gradient; another operator's moves as many
        bytes as its forward, but the gradient of an embedding is as large as its table."""
        if name.startswith(_ATTENTION):
            self.input += _ATTENTION_BACKWARD * seconds
            self.backward_flops += 2 * flops
            return
        if flops:
            needing = [tensor for tensor in needing if tensor.dim() > 1]
            self.backward_flops += flops * len(needing)
        elif name in _GATHERS:
            needing = needing[:1]
            table = size_in_bytes(needing[0]) + sum(map(size_in_bytes, made))
            seconds = self._hardware.seconds(0, table, needing[0].element_size())
        else:
            needing = sorted(needing, key=self._is_weight)[:1]  # an activation, if there is one
        for tensor in needing:
            if self._is_weight(tensor):
                self.weight += seconds
            else:
                self.input += seconds


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
    """By torch's own table; attention for the CPU, which is not in it, is the product of q, k and v as elsewhere."""
    count = flop_registry.get(packet_of(func))
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    if name.startswith(_ATTENTION):
        query, key, value = (tensor.shape for tensor in args[:3])
        return float(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))
    return 0.0


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def size_in_bytes(tensor: Tensor) -> int:
    """Of its elements, whatever memory they lie in."""
    return tensor.numel() * tensor.element_size()
