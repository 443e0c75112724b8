"""Tied parameters and gradients of several types, summed over their owners and the data axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import gradients_of, replica_of
from tests.replicas import PAIR, SQUARE, Kinds, Parts, assert_parts, compiled_alone, parts, refusals
from tests.strict_transport import run_strict
from tests.thinned import in_turn


class Complex(nn.Module):
    """The absolute value of a complex number times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.number * x).abs()


@pytest.mark.parametrize(("zero", "reduce"), in_turn([0, 1, 2], [torch.float32, torch.bfloat16]), ids=str)
def test_a_complex_gradient_keeps_its_imaginary_part(zero: int, reduce: torch.dtype) -> None:
    def body(rank: int) -> Parts:
        precision = fxpipe.Precision(reduce=reduce)
        step = compiled_alone(Complex(), PAIR, microbatches=1, zero=zero, precision=precision)
        step(torch.full((2, 2), 1.0 + rank))
        return parts(step)

    # the mean over elements of |n x|² has the gradient 2 n x² / 2 in n, here for x = 1 and x = 2
    number = Complex().number.detach()
    assert_parts(run_strict(body, 2), {"module.number": number * (1 + 4) / 2})


class MixedTie(nn.Module):
    """A float32 weight tied over two stages, and float64 parameters in one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(64, dtype=torch.float64))
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a((x.double() * self.wide).float())
        return self.b(stage_boundary(h)).square().mean()


def test_tied_gradients_are_clipped_to_the_same_bits_beside_other_types() -> None:
    def body(rank: int) -> list[Tensor]:
        step = fxpipe.compile(MixedTie(), Topology([("pipe", 2)]), microbatches=2)
        found = []
        for seed in range(8):
            step.zero_grad()
            step(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
            before = step.module.get_parameter("a.weight").grad.norm()
            assert step.clip_grad_norm_(0.01) > 0.01
            found.append(step.module.get_parameter("a.weight").grad.clone())
            assert found[-1].norm() < before
        return found

    first, second = run_strict(body, 2)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 8


HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_a_hook_on_a_weight_that_two_stages_use_is_refused(register: str, ranks: int, before: bool) -> None:
    """Plain PyTorch calls it with the sum of both uses."""

    def body(rank: int) -> None:
        model = MixedTie()
        if before:
            getattr(model.a.weight, register)(lambda given: None)
        step = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=2)
        getattr(step.module.get_parameter("a.weight"), register)(lambda given: None)
        step(torch.ones(4, 64))

    says = r"a\.weight would see parts of its gradient: each of the stages a, b uses it[\s\S]*in <lambda>"
    with pytest.raises(fxpipe.FxpipeError, match=says):
        run_strict(body, 2) if ranks == 2 else body(0)


def test_sums_do_not_travel_in_float16() -> None:
    def body(rank: int) -> None:
        precision = fxpipe.Precision(reduce=torch.float16)
        fxpipe.compile(Kinds(), SQUARE, microbatches=2, precision=precision)(torch.ones(4, 4), total=True)

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert "for which float16 has no room; write Precision(reduce=torch.bfloat16) or float32" in text


SIDE = 520  # a weight of 1.03 MiB, more than the first bucket holds


class TiedAndMore(nn.Module):
    """Two stages that share two weights; ``where``: which of them has a large one of its own, too."""

    def __init__(self, where: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.a, self.b, self.a2, self.b2 = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(5))
        self.small = nn.Linear(SIDE, 3)
        self.a2.weight, self.b2.weight = self.a.weight, self.b.weight
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x).tanh() if self.where == 0 else x
        x = stage_boundary(self.b(self.a(x).tanh()).tanh())
        x = self.own(x).tanh() if self.where == 1 else x
        return self.small(self.b2(self.a2(x).tanh())).square().sum(1).mean()


@pytest.mark.parametrize(("zero", "where"), in_turn([0, 1, 2], [0, 1]))
def test_owners_of_large_tied_weights_may_have_others_of_their_own(zero: int, where: int) -> None:
    model, x = TiedAndMore, torch.randn(4, SIDE)
    topology = SQUARE

    def body(rank: int) -> tuple[Parts, bool]:
        step = fxpipe.compile(model(where), topology, microbatches=2, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
        step(x.chunk(2)[replica_of(topology)])
        found = parts(step)
        optimizer.step()
        return found, all(bool(parameter.isfinite().all()) for parameter in step.parameters())

    plain = model(where)
    plain(x).backward()
    ranks = run_strict(body, topology.world_size)
    assert_parts([found for found, _ in ranks], gradients_of(plain.named_parameters()))
    assert all(finite for _, finite in ranks)


class TiedOverTwo(nn.Module):
    """Three stages, the first two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(5, 5, bias=False) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(stage_boundary(self.b(stage_boundary(self.a(x))))).square().mean()


UNEVEN_NODES = Topology([("pipe", 3), ("data", 2)], ranks_per_node=3)  # the second data group lies in two of them


def over_nodes(topology: Topology, x: Tensor, **way: Any) -> Parts:
    step = fxpipe.compile(TiedOverTwo(), topology, microbatches=2, **way)
    step(x.chunk(topology.size("data"))[replica_of(topology)])
    return parts(step)


def test_owners_in_nodes_that_cut_them_differently_are_refused_on_all_ranks() -> None:
    said = refusals(lambda rank: over_nodes(UNEVEN_NODES, torch.ones(4, 5), zero=1), 6)
    for text in said:
        assert text.startswith("TopologyError: ")
        assert "a.weight is tied over the pipe ranks [0, 1], whose data groups have [2, 1] ranks to a node" in text
        assert 'scope="data"' in text


@pytest.mark.parametrize(
    ("way", "replicas"),
    [({}, 4), ({"zero": fxpipe.Zero(2, scope="data")}, 2)],
    ids=str,
)
def test_nodes_that_cut_data_groups_differently_do_not_matter_otherwise(way: dict[str, Any], replicas: int) -> None:
    """Of three data groups the second lies in two nodes, one or two ranks in each."""
    topology = Topology([("pipe", 3), ("data", replicas)], ranks_per_node=3 * replicas // 2)
    x = torch.randn(8, 5)
    model = TiedOverTwo()
    model(x).backward()
    ranks = run_strict(lambda rank: over_nodes(topology, x, **way), topology.world_size)
    assert_parts(ranks, gradients_of(model.named_parameters()))
