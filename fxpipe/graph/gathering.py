"""Gathering: joins the values of several micro-batches, or replicas, into values of a group, and splits them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.torch_compat import pytree

Places = Mapping[tuple[str, int], tuple[int, ...]]
"""(value, leaf) → the dimensions that hold its rows, if its shapes for two row counts have shown them."""


N = TypeVar("N", int, float)


def of_groups(numbers: Sequence[N], size: int) -> tuple[N, ...]:
    """Returns the sum of each group of ``size`` numbers."""
    return tuple(sum(numbers[start : start + size]) for start in range(0, len(numbers), size))


def concatenated(parts: Sequence[Tensor], along: int) -> Tensor:
    """Returns the detached parts, concatenated; the result requires a gradient if any part does."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts], along)
    return whole.requires_grad_(any(part.requires_grad for part in parts))


def added(gradient: Any, other: Any) -> Any:
    """Returns the sum of a value's gradients from two users; None means no gradient."""
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return pytree.tree_map(lambda a, b: b if a is None else a if b is None else a + b, gradient, other)
