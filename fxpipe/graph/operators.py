"""Operators: functions that a stage's graph calls and that are fxpipe's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.graph.packing import duplicate
from fxpipe.torch_compat import pytree


def handoff(value: Any) -> Any:
    """A value on its way to another stage, as a node of its own in the autograd graph.

    Autograd adds up the gradients of a value in descending order of its uses. With one such node for each stage
    that uses the value, made where that use stands in the program, the order stays that of plain PyTorch.
    """
    with torch.enable_grad():  # it may stand in a part of forward that is without
        return pytree.tree_map(
            lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, value
        )


def private(value: Any) -> Any:
    """A copy that the stage may write into: what it received, or the caller's batch, stays as it was."""
    # a compiler makes its own choice of kernels, and cannot look into how memory lies
    copy = torch.clone if torch.compiler.is_compiling() else _Duplicate.apply
    return pytree.tree_map_only(Tensor, copy, value)


class _Duplicate(torch.autograd.Function):
    """A clone that keeps strides and alignment, which decide the last bit of what is computed from it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return duplicate(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def setitem(target: Any, index: Any, value: Any) -> Any:
    """``target[index] = value`` as an expression whose value is ``target``."""
    target[index] = value
    return target
