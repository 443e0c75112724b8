"""Reduce: sums of gradients and broadcasts of whatever a model holds, over groups of strict ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from fxpipe.connect import connect
from fxpipe.reduce import broadcast, sum_gradients
from fxpipe.strict import run_strict
from fxpipe.topology import Topology
from fxpipe.transport import LocalTransport, Transport

T = TypeVar("T")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def on_replicas(body: Callable[[int, Transport], T], replicas: int = 3) -> list[T]:
    """``body(data rank, transport)`` on every rank of a data group."""
    topology = Topology([("data", replicas)])
    return run_strict(lambda rank: body(rank, connect(topology)), replicas)


def parameter(value: Tensor, gradient: Tensor | None) -> nn.Parameter:
    made = nn.Parameter(value)
    made.grad = gradient
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_summed(dtype: torch.dtype) -> None:
    def body(rank: int, transport: Transport) -> list[Tensor | None]:
        ramp = torch.arange(6).view(2, 3)
        held = [
            parameter(torch.zeros(2, 3, dtype=dtype), ((rank + 1) * ramp).to(dtype)),
            parameter(torch.zeros((), dtype=dtype), torch.tensor(10**rank).to(dtype)),
        ]
        sum_gradients(held, transport, "data")
        return [p.grad for p in held]

    for first, second in on_replicas(body):
        assert first is not None
        assert second is not None
        assert torch.equal(first, (6 * torch.arange(6).view(2, 3)).to(dtype))
        assert torch.equal(second, torch.tensor(111).to(dtype))
        assert (first.dtype, second.dtype) == (dtype, dtype)


def test_a_parameter_that_no_replica_used_keeps_none_and_one_that_some_used_is_summed() -> None:
    def body(rank: int, transport: Transport) -> list[Tensor | None]:
        held = [
            parameter(torch.zeros(2), None),
            parameter(torch.zeros(2), torch.tensor([1.0, 2.0]) if rank == 1 else None),
            parameter(torch.zeros(2), torch.full((2,), float(rank))),
        ]
        sum_gradients(held, transport, "data")
        return [p.grad for p in held]

    for unused, once, always in on_replicas(body):
        assert unused is None
        assert once is not None
        assert once.tolist() == [1.0, 2.0]
        assert always is not None
        assert always.tolist() == [3.0, 3.0]


def test_a_default_device_changes_nothing() -> None:
    def body(rank: int, transport: Transport) -> Tensor | None:
        held = [parameter(torch.zeros(2), torch.ones(2) if rank else None)]
        with torch.device("meta"):
            sum_gradients(held, transport, "data")
        return held[0].grad

    for gradient in on_replicas(body):
        assert gradient is not None
        assert gradient.tolist() == [2.0, 2.0]


def test_types_may_be_mixed_in_any_order() -> None:
    def body(rank: int, transport: Transport) -> list[Tensor | None]:
        held = [
            parameter(torch.zeros(number + 1, dtype=dtype), torch.full((number + 1,), number + 1, dtype=dtype))
            for number, dtype in enumerate([*DTYPES, *reversed(DTYPES)])
        ]
        sum_gradients(held, transport, "data")
        return [p.grad for p in held]

    for gradients in on_replicas(body, 2):
        for number, gradient in enumerate(gradients):
            assert gradient is not None
            assert torch.equal(gradient, torch.full_like(gradient, 2 * (number + 1)))


def test_a_gradient_stays_the_same_tensor_with_the_same_strides() -> None:
    def body(rank: int, transport: Transport) -> bool:
        gradient = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        held = parameter(torch.zeros(1, 2, 3, 4), gradient)
        sum_gradients([held], transport, "data")
        same = held.grad is gradient and gradient.is_contiguous(memory_format=torch.channels_last)
        return same and torch.equal(gradient, 2 * torch.arange(24.0).view(1, 2, 3, 4))

    assert on_replicas(body, 2) == [True, True]


def test_every_replica_has_the_same_bits() -> None:
    def body(rank: int, transport: Transport) -> Tensor:
        draw = torch.Generator().manual_seed(rank)
        held = parameter(torch.zeros(1000), torch.randn(1000, generator=draw))
        sum_gradients([held], transport, "data")
        assert held.grad is not None
        return held.grad

    first, *others = on_replicas(body)
    assert all(torch.equal(first, other) for other in others)
    terms = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    torch.testing.assert_close(first, sum(terms[1:], terms[0]))


def test_a_rank_without_parameters_takes_no_part() -> None:
    sum_gradients([], LocalTransport(), "data")

    def body(rank: int, transport: Transport) -> str:
        sum_gradients([], transport, "data")
        return "done"

    assert on_replicas(body, 2) == ["done", "done"]


def test_only_the_owners_of_a_tied_parameter_sum_it() -> None:
    topology = Topology([("pipe", 3)])

    def body(rank: int) -> float:
        transport = connect(topology)
        transport.open([], [(0, 2)])
        held = parameter(torch.zeros(1), torch.tensor([1.0 + rank]))
        if rank != 1:
            sum_gradients([held], transport, (0, 2))
        assert held.grad is not None
        return held.grad.item()

    assert run_strict(body, 3) == [4.0, 2.0, 4.0]


def test_broadcast_overwrites_whatever_a_model_holds() -> None:
    def values() -> list[Tensor]:
        return [
            torch.tensor([True, False, True]),
            torch.tensor(7),  # num_batches_tracked
            torch.tensor([1.5, float("nan"), -0.0]),
            torch.tensor([[1.5]], dtype=torch.bfloat16),
            torch.arange(6.0).view(2, 3).t(),
            torch.arange(5, dtype=torch.uint8),
            torch.tensor([1 + 2j]),
            torch.empty(0),
            torch.empty(0, 3, dtype=torch.int64),
            nn.Parameter(torch.ones(2, 2)),
        ]

    def body(rank: int, transport: Transport) -> list[Tensor]:
        held = values()
        if rank != 1:
            with torch.no_grad():
                for tensor in held:
                    tensor.zero_()
        broadcast(held, transport, "data", 1)
        return held

    for held in on_replicas(body):
        for tensor, wanted in zip(held, values(), strict=True):
            assert tensor.dtype == wanted.dtype
            assert tensor.stride() == wanted.stride()
            assert tensor.requires_grad == wanted.requires_grad
            bits = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, wanted))
            assert torch.equal(*bits)


def test_broadcast_of_nothing_is_nothing() -> None:
    broadcast([], LocalTransport(), "data", 0)
