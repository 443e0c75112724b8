"""Operators: fxpipe's own functions that a stage's graph calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.graph.packing import duplicate
from fxpipe.torch_compat import pytree


def handoff(value: Any) -> Any:
    """Returns a value for another stage, as a node of its own in the autograd graph.

    Autograd adds the gradients of a value in descending order of its uses. With such a node for each stage that uses
    the value, made at the place of that use in the program, the order is as in plain PyTorch.
    """
    with torch.enable_grad():  # forward may have disabled gradients here
        return pytree.tree_map(
            lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, value
        )


def private(value: Any) -> Any:
    """Returns a copy that the stage may write into: the received value, or the caller's batch, is not changed."""
    # a compiler chooses its own kernels, and cannot trace code that examines memory layout
    copy = torch.clone if torch.compiler.is_compiling() else _Duplicate.apply
    return pytree.tree_map_only(Tensor, copy, value)


class _Duplicate(torch.autograd.Function):
    """A clone with the same strides and alignment, on which the last bit of computed results depends."""

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
