"""Symbolic sizes: what a capture tells of tensors of which a dimension has no number of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_compat import FakeTensor, hint_of


def is_symbolic(tensor: Tensor) -> bool:
    """Whether a dimension of it has no number of its own."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def sizes_of(value: Any) -> tuple[str, ...]:
    """Of a tensor, each dimension's size as an expression, "" where it is a number; of a number, its own expression.

    Equal expressions of one capture are equal numbers in every run.
    """
    if isinstance(value, torch.SymInt):
        return (str(value.node.expr),)
    if not isinstance(value, Tensor) or not is_symbolic(value):
        return ()
    return tuple(str(size.node.expr) if isinstance(size, torch.SymInt) else "" for size in value.shape)


def as_captured(tensor: Any) -> Any:
    """A fake tensor with the sizes that it had when it was captured."""
    if not is_symbolic(tensor):
        return tensor
    shape, stride = (list(map(hint_of, sizes)) for sizes in (tensor.shape, tensor.stride()))
    memory = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, memory, tensor.device).requires_grad_(tensor.requires_grad)
