"""Gathering: values of several micro-batches, or replicas, put together as those of a group; and cut up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.torch_compat import pytree

Places = Mapping[tuple[str, int], tuple[int, ...]]
"""(value, leaf) → the dimensions that hold its rows, where the shapes for two numbers of rows have shown them."""


N = TypeVar("N", int, float)


def of_groups(numbers: Sequence[N], size: int) -> tuple[N, ...]:
    """The sum of each group of so many."""
    return tuple(sum(numbers[start : start + size]) for start in range(0, len(numbers), size))


def concatenated(parts: Sequence[Tensor], along: int) -> Tensor:
    """The parts in a row, cut from where they came from; it requires a gradient if one of them does."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts], along)
    return whole.requires_grad_(any(part.requires_grad for part in parts))


def added(gradient: Any, other: Any) -> Any:
    """The sum of a value's gradients by two ways; None is no gradient."""
    if gradient is None or other is None:
        return other if gradient is None else gradient
    return pytree.tree_map(lambda a, b: b if a is None else a if b is None else a + b, gradient, other)
