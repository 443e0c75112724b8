"""Fingerprints: sums by formula, additive over parts, and an estimate of a difference's norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fxpipe.numerics.fingerprint import Fingerprint, measure

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def fingerprint(tensor: Tensor, positions: Tensor | None = None) -> Fingerprint:
    numbers, bits = measure(tensor, positions)
    return Fingerprint.from_numbers(numbers.tolist(), int(bits))


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_sums_are_those_of_the_elements() -> None:
    tensor = torch.tensor([3.0, -4.0, math.inf, math.nan, 1.0])
    got = fingerprint(tensor)
    assert got.squares == 9 + 16 + 1
    assert got.largest == 4
    assert got.nonfinite == 2
    assert all(abs(projection) in (0, 2, 6, 8) for projection in got.projections)


@pytest.mark.parametrize("dtype", [*TYPES, torch.complex64])
@pytest.mark.parametrize("permuted", [False, True])
def test_parts_in_any_order_add_up_to_the_whole(dtype: torch.dtype, permuted: bool) -> None:
    whole = (10 * numbers(0, 6, 50)).to(torch.float32).to(dtype)
    positions = torch.arange(300).view(6, 50)
    if permuted:
        whole, positions = whole.t(), positions.t()
    logical = whole.t() if permuted else whole
    cuts = [7, 100, 193]
    parts = zip(whole.reshape(-1).split(cuts), positions.reshape(-1).split(cuts), strict=True)
    first, *others = (fingerprint(part, at) for part, at in parts)
    total = first
    for other in others:
        total = other + total
    expected = fingerprint(logical)
    assert (total.bits, total.largest, total.nonfinite) == (expected.bits, expected.largest, expected.nonfinite)
    assert total.squares == pytest.approx(expected.squares, rel=1e-12)
    assert total.projections == pytest.approx(expected.projections, rel=1e-9)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_bit_or_a_swap_of_two_elements_is_another_number(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(torch.float32).to(dtype)
    changed, swapped = tensor.clone(), tensor[[1, 0, 2, 3, 4]]
    changed[3] = 1
    assert len({fingerprint(each).bits for each in (tensor, changed, swapped)}) == 3


def test_more_elements_than_are_read_at_a_time() -> None:
    tensor = numbers(1, 2**20 + 3).float()
    at = torch.arange(tensor.numel())
    halves = [fingerprint(part, where) for part, where in zip(tensor.split(2**19), at.split(2**19), strict=True)]
    assert (halves[0] + halves[1] + halves[2]).bits == fingerprint(tensor).bits


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1])
def test_projections_estimate_the_norm_of_a_difference(scale: float) -> None:
    # The square of the estimate is a mean of 4 squares of nearly normal numbers: chi-square with 4 degrees of freedom.
    a = numbers(2, 4000)
    ratios = []
    for seed in range(3, 43):
        difference = numbers(seed, 4000)
        expected = scale * float(difference.norm() / a.norm())
        ratios.append(fingerprint(a).relative_difference(fingerprint(a + scale * difference)) / expected)
    assert 0.8 < math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios)) < 1.2
    assert all(0.1 < ratio < 3 for ratio in ratios)
