"""Closeness: how far two tensors are apart; either may be None for zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = 4.0
"""Units in the last place of a tensor's largest number that two runs may always differ by."""


def in_double(value: Tensor | None, like: Tensor | None) -> Tensor:
    """In double precision; nothing is zeros."""
    if value is None:
        value = torch.zeros(()) if like is None else torch.zeros_like(like)
    value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def differences(one: Tensor, other: Tensor) -> Tensor:
    """Of each pair of numbers; none between two that are equal, or both nan."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)


def gap(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference; infinite where only one of them is finite, or shapes differ."""
    if got is wanted:
        return 0.0
    one, other = in_double(got, wanted), in_double(wanted, got)
    if one.shape != other.shape:
        return math.inf
    return differences(one, other).max().item() if one.numel() else 0.0


def largest(value: Tensor | None) -> float:
    """The largest of the numbers that are finite, without its sign."""
    if value is None or not value.numel():
        return 0.0
    return in_double(value, None).abs().nan_to_num(0, 0).max().item()


def unit(value: Tensor | None) -> float:
    """A unit in the last place of 1, in its type."""
    kind = torch.float64 if value is None else value.dtype
    return torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0


def is_close(got: Tensor | None, wanted: Tensor | None, tolerance: float | None = None) -> bool:
    """Whether they are the same but for rounding. ``tolerance``: of the largest number."""
    apart = 0.0 if _is_same(got, wanted) else gap(got, wanted)
    tolerance = CLOSE * unit(wanted) if tolerance is None else tolerance
    return apart == 0 or apart <= tolerance * largest(wanted)


def is_repeated(again: Tensor, first: Tensor) -> bool:
    """Whether a run has made the same again, to half of the digits: kernels on a GPU may round otherwise each time."""
    return is_close(again, first, math.sqrt(unit(first)))


def _is_same(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether they are of one kind and equal, which is asked first: it takes no memory."""
    if got is None or wanted is None or got.dtype != wanted.dtype:
        return got is wanted
    return got.layout is wanted.layout is torch.strided and torch.equal(got, wanted)
