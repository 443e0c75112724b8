"""Rounding: whether two tensors are equal up to rounding. None stands for a tensor of zeros."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLOSE = 4.0
"""The difference that two runs may always have, in units in the last place of a tensor's largest number."""


def in_double(value: Tensor | None, like: Tensor | None) -> Tensor:
    """The value in double precision; zeros for None."""
    if value is None:
        value = torch.zeros(()) if like is None else torch.zeros_like(like)
    # in its own dtype, a difference of two close numbers has few correct digits
    value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def differences(first: Tensor, other: Tensor) -> Tensor:
    """The absolute difference of each pair of elements; 0 for two equal elements, and for two nans."""
    # inf - inf is nan, which nan_to_num would make infinite
    same = (first == other) | (first.isnan() & other.isnan())
    return (first - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)


def gap(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference of two elements; inf if only one of the two is finite, or if the shapes differ."""
    if is_same(got, wanted):
        return 0.0
    first, other = in_double(got, wanted), in_double(wanted, got)
    if first.shape != other.shape:
        return math.inf
    return differences(first, other).max().item() if first.numel() else 0.0


def largest(value: Tensor | None) -> float:
    """The largest absolute value among the finite elements; 0 without elements."""
    if value is None or not value.numel():
        return 0.0
    return in_double(value, None).abs().nan_to_num(0, 0).max().item()


def unit(value: Tensor | None) -> float:
    """A unit in the last place of 1, in the value's dtype; 0 for integers."""
    kind = torch.float64 if value is None else value.dtype
    return torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0


def is_close(got: Tensor | None, wanted: Tensor | None, tolerance: float | None = None) -> bool:
    """Whether both are equal up to rounding. ``tolerance``: relative to the largest element of ``wanted``."""
    apart = gap(got, wanted)
    tolerance = CLOSE * unit(wanted) if tolerance is None else tolerance
    return apart == 0 or apart <= tolerance * largest(wanted)  # 0 first: inf times a tolerance of 0 is nan


def is_repeated(again: Tensor, first: Tensor) -> bool:
    """Whether two runs agree to half of the digits: GPU kernels may round differently in each run."""
    return is_close(again, first, math.sqrt(unit(first)))


def is_same(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether both have the same dtype and layout and are equal. This check comes first, as it allocates nothing."""
    if got is wanted or got is None or wanted is None or got.dtype != wanted.dtype:
        return got is wanted
    return got.layout is wanted.layout is torch.strided and torch.equal(got, wanted)
