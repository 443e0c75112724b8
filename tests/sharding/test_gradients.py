"""Gradients: three kinds that can stand for each other, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from fxpipe.distributed.transport import LocalTransport
from fxpipe.sharding.data_axis import GradientSums
from fxpipe.sharding.gradients import Gradients, WhoUsed
from fxpipe.sharding.reducer import Reducer

# (zero, ranks of a shard group) → whether they have different pieces
WAYS = {(0, 2): False, (1, 2): True, (1, 1): False, (3, 2): True}


def base(names: Iterable[str] = ("a", "b", "c"), zero: int = 0, shards: int = 1) -> Gradients:
    own = {name: nn.Parameter(torch.zeros(2)) for name in names}
    return Reducer([], own, LocalTransport(), GradientSums(zero, shards, 0, 1), capacity=1, tied={})


@pytest.mark.parametrize(("zero", "shards"), WAYS)
def test_ranks_have_different_pieces_where_several_shard(zero: int, shards: int) -> None:
    assert base(zero=zero, shards=shards).shards == WAYS[zero, shards]


def test_earlier_gradients_are_not_scaled_and_those_of_a_call_are_added_to_them() -> None:
    gradients = base()
    a, b, c = gradients._own.values()
    a.grad, b.grad = torch.ones(2), torch.ones(2)
    earlier = a.grad
    gradients._set_earlier_aside()
    assert [p.grad for p in (a, b, c)] == [None] * 3
    a.grad, c.grad = torch.full((2,), 4.0), torch.full((2,), 4.0)
    gradients._scale(torch.tensor(0.5))
    gradients._leave_gradients()
    assert a.grad is earlier
    assert [p.grad.tolist() for p in (a, b, c)] == [[3, 3], [1, 1], [2, 2]]


def test_what_a_call_that_failed_has_set_aside_does_not_come_back() -> None:
    gradients = base()
    (a, *_) = gradients._own.values()
    a.grad = torch.ones(2)
    gradients._set_earlier_aside()
    gradients.clear()
    gradients._set_earlier_aside()
    gradients._leave_gradients()
    assert a.grad is None


def test_a_call_that_failed_leaves_the_gradients_of_earlier_ones() -> None:
    gradients = base()
    a, b, c = gradients._own.values()
    a.grad = earlier = torch.ones(2)
    b.grad = torch.full((2,), 2.0)
    gradients._set_earlier_aside()
    a.grad, c.grad = torch.full((2,), 3.0), torch.full((2,), 4.0)
    gradients.drop()
    assert a.grad is earlier
    assert [None if p.grad is None else p.grad.tolist() for p in (a, b, c)] == [[1, 1], [2, 2], None]


def test_a_call_that_failed_and_set_nothing_aside_leaves_what_it_has_added() -> None:
    gradients = base()
    (a, *_) = gradients._own.values()
    gradients._set_earlier_aside(wanted=False)
    a.grad = torch.ones(2)
    gradients.drop()
    assert a.grad.tolist() == [1, 1]


def test_a_process_alone_waits_for_no_device() -> None:
    transport = LocalTransport()
    transport.device = torch.device("meta")  # which has no numbers to wait for
    assert WhoUsed({"a": ((), True), "b": ((), False)}, transport).wait() == {"a"}
