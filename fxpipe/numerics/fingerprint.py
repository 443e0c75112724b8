"""Fingerprint: eight numbers for a tensor, which are sums over its elements: shards' fingerprints add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.tensors.dtensors import local, part_of

PROJECTIONS = 4
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 2**20
"""The number of elements that are read at a time; bounds the additional memory."""


class Fingerprint(NamedTuple):
    """The numbers of a tensor, or of one rank's part of a tensor.

    ``bits``: Σ bits_i · w_i modulo 2⁶⁴, with an odd w_i for each position i in the whole tensor: equal bits have equal
    sums. ``squares``: Σ x_i² of the finite elements. ``largest``: the largest absolute value of a finite element.
    ``nonfinite``: how many elements are inf or nan. ``projections``: Σ ±x_i for 4 seeded signs of each position, in
    float64. The expected square of a projection of a difference d is ‖d‖² (Achlioptas 2003, Lemma 4).
    """

    bits: int
    squares: float
    largest: float
    nonfinite: int
    projections: tuple[float, ...]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float], bits: int) -> Fingerprint:
        """The fingerprint from the host's copies of ``measure``'s two results."""
        squares, largest, nonfinite, *projections = numbers
        return cls(bits % 2**64, squares, largest, int(nonfinite), tuple(projections))

    def __add__(self, other: Any) -> Fingerprint:
        """The fingerprint of a tensor from the fingerprints of two disjoint parts."""
        return Fingerprint(
            (self.bits + other.bits) % 2**64,
            self.squares + other.squares,
            max(self.largest, other.largest),
            self.nonfinite + other.nonfinite,
            tuple(a + b for a, b in zip(self.projections, other.projections, strict=True)),
        )

    def relative_difference(self, other: Fingerprint) -> float:
        """About ‖a − b‖ / ‖a‖, from the projections; inf if the two differ in inf or nan elements."""
        if self.nonfinite != other.nonfinite:
            return math.inf
        pairs = zip(self.projections, other.projections, strict=True)
        distance = math.sqrt(sum((a - b) ** 2 for a, b in pairs) / PROJECTIONS)
        norm = math.sqrt(max(self.squares, other.squares))
        return distance / norm if norm else math.inf


NOTHING = Fingerprint(0, 0.0, 0.0, 0, (0.0,) * PROJECTIONS)
"""The fingerprint of no elements."""


@torch.no_grad()
def measure(tensor: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns, on the tensor's device, the float64 numbers and the int64 bits of a fingerprint; no wait of the host.

    ``positions``: each element's position in the whole tensor, in row-major order; None: the tensor is whole.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
        if positions is not None:
            positions = (2 * positions[:, None] + torch.arange(2, device=flat.device)).reshape(-1)
    totals = torch.zeros(3 + PROJECTIONS, dtype=torch.float64, device=flat.device)
    bits = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _AT_A_TIME):
        part = flat[start : start + _AT_A_TIME]
        stop = start + part.numel()
        mixed = split_mix(torch.arange(start, stop, device=flat.device) if positions is None else positions[start:stop])
        bits += (part.view(BITS[part.element_size()]) * (mixed | 1)).sum(dtype=torch.int64)
        numbers = part.float().double() if part.is_floating_point() and part.itemsize == 1 else part.double()
        is_finite = numbers.isfinite()
        numbers = torch.where(is_finite, numbers, 0.0)
        signs = [1 - 2 * ((mixed >> (8 + 12 * number)) & 1) for number in range(PROJECTIONS)]
        sums = [(numbers * numbers).sum(), (~is_finite).sum(), *((numbers * sign).sum() for sign in signs)]
        squares, nonfinite, *projections = sums
        largest = torch.maximum(totals[1], numbers.abs().max())
        projected = totals[3:] + torch.stack(projections)
        totals = torch.stack([totals[0] + squares, largest, totals[2] + nonfinite, *projected])
    return totals, bits


def positions_of(tensor: Tensor) -> Tensor | None:
    """Each local element's position in the whole tensor, shaped like the local shard; None for a plain tensor."""
    shard = local(tensor)
    if shard is tensor:
        return None
    whole = torch.arange(tensor.numel(), device=shard.device).view(tensor.shape)
    return part_of(tensor, whole)


def split_mix(positions: Tensor) -> Tensor:
    """A random-looking int64 for each position: SplitMix64 (Steele, Lea and Flood 2014), seeded with 0."""
    # SplitMix64's factors are above 2⁶³; subtracting 2⁶⁴ makes them fit int64.
    z = (positions + 1) * (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ _shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """A logical right shift, which shifts zeros in; int64's own shift repeats the sign bit."""
    return (z >> by) & ((1 << (64 - by)) - 1)
