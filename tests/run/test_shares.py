"""Shares: what part of a step each micro-batch has, told over replicas without losing a bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest

import fxpipe
from fxpipe.distributed.transport import LocalTransport
from fxpipe.run.step.step_outcome import shares_of


class Replica(LocalTransport):
    """One of two replicas, the other of which has told ``other``."""

    data_size = 2

    def __init__(self, other: int) -> None:
        self.other = other

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        return item, self.other


def bits(weight: float) -> int:
    return int.from_bytes(struct.pack("<d", weight), "little")


def test_shares_add_up_to_one_and_are_zero_without_weight() -> None:
    shares, _ = shares_of(LocalTransport(), [1.0, 2.0, 0.0], training=True)
    assert shares == (1 / 3, 2 / 3, 0.0)
    assert shares_of(LocalTransport(), [0.0, 0.0], training=True)[0] == (0.0, 0.0)


def test_shares_are_those_of_all_replicas() -> None:
    transport = Replica(bits(5.0))
    assert shares_of(transport, [1.0, 2.0], training=True)[0] == (1 / 8, 2 / 8)
    assert math.fsum(map(Fraction, shares_of(LocalTransport(), [1.0, 3.0], training=True)[0])) == 1


def test_replicas_that_make_different_calls_are_told_so() -> None:
    transport = Replica(~bits(5.0))
    with pytest.raises(fxpipe.RunError, match=r"replicas \[0\] make a step and \[1\] call evaluate"):
        shares_of(transport, [1.0], training=True)
