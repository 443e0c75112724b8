"""Shares: what part of a step each micro-batch has, told over replicas without losing a bit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

import fxpipe
from fxpipe.distributed.transport import LocalTransport
from fxpipe.run.step.step_outcome import _reported, _weight, shares_of


class Replica(LocalTransport):
    """One of two replicas, the other of which has told ``other``."""

    data_size = 2

    def __init__(self, other: int) -> None:
        self.other = other

    def gather_int(self, scope: str, item: int) -> tuple[int, ...]:
        return item, self.other


@pytest.mark.parametrize("weight", [0.0, 1.0, 1 / 3, 5e-324, 1.7e308])
@pytest.mark.parametrize("training", [True, False])
def test_a_weight_is_told_to_the_bit_and_by_its_sign_whether_it_is_a_step_s(weight: float, training: bool) -> None:
    assert _weight(_reported(weight, training)) == weight
    assert (_reported(weight, training) >= 0) == training


def test_shares_add_up_to_one_and_are_zero_without_weight() -> None:
    shares = shares_of(LocalTransport(), [1.0, 2.0, 0.0], training=True, over_replicas=True)
    assert shares == (1 / 3, 2 / 3, 0.0)
    assert shares_of(LocalTransport(), [0.0, 0.0], training=True, over_replicas=True) == (0.0, 0.0)


def test_shares_are_those_of_all_replicas_where_that_matters() -> None:
    transport = Replica(_reported(5.0, training=True))
    assert shares_of(transport, [1.0, 2.0], training=True, over_replicas=True) == (1 / 8, 2 / 8)
    assert math.fsum(map(Fraction, shares_of(transport, [1.0, 3.0], training=True, over_replicas=False))) == 1


def test_replicas_that_make_different_calls_are_told_so() -> None:
    transport = Replica(_reported(5.0, training=False))
    with pytest.raises(fxpipe.RunError, match=r"replicas \[0\] make a step and \[1\] call evaluate"):
        shares_of(transport, [1.0], training=True, over_replicas=True)
