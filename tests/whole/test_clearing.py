"""Gradients that are cleared, to zero or to None, by whichever way a loop has."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import Topology
from tests.harness import gradients_of
from tests.replicas import PAIR, Parts, assert_parts, compiled_alone, every_zero, linear, parts
from tests.strict_transport import run_strict
from tests.thinned import every


def zero_each(step: fxpipe.ForwardBackward) -> None:
    for parameter in step.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARS: dict[str, Callable[[fxpipe.ForwardBackward, Any], object]] = {
    "optimizer": lambda step, optimizer: optimizer.zero_grad(set_to_none=False),
    "forward_backward": lambda step, optimizer: step.zero_grad(set_to_none=False),
    "module": lambda step, optimizer: step.module.zero_grad(set_to_none=False),
    "each": lambda step, optimizer: zero_each(step),
}


@pytest.mark.parametrize(
    ("by", "per_node", "zero", "earlier"),  # shards of one or of two by the last two
    every(5, list(product(CLEARS, [None, 1], [0, 1, 2], [(True, True), (False,), (True, False)]))),
    ids=str,
)
def test_whoever_clears_gradients_to_zero_clears_them(
    zero: int, per_node: int | None, by: str, earlier: tuple[bool, ...]
) -> None:
    """``earlier``: whether the calls before it are synchronised."""
    topology = Topology([("pipe", 1), ("data", 2)], per_node)

    def body(rank: int) -> Parts:
        step = compiled_alone(nn.Sequential(linear(), linear()), topology, microbatches=1, zero=zero)
        optimizer = step.optimizer(torch.optim.SGD, lr=0.0)
        for sync in earlier:
            step.set_requires_gradient_sync(sync)
            step(torch.full((2, 4), 1.0 + rank))
        CLEARS[by](step, optimizer)
        step.set_requires_gradient_sync(True)
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients_of(model.named_parameters("module")))


@every_zero
@pytest.mark.parametrize("earlier", [(True,), (False,), (True, False)], ids=str)
def test_a_gradient_cleared_to_zero_alone_leaves_the_others(zero: int, earlier: tuple[bool, ...]) -> None:
    def clear(module: nn.Module) -> None:
        first = module.get_submodule("0").weight.grad
        assert first is not None
        first.zero_()

    def body(rank: int) -> Parts:
        module = nn.Sequential(linear(), linear())
        step = compiled_alone(module, PAIR, microbatches=1, zero=zero)
        for sync in earlier:
            step.set_requires_gradient_sync(sync)
            step(torch.ones(2, 4))
        clear(module)
        step.set_requires_gradient_sync(True)
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    for _ in earlier:
        model(torch.ones(2, 4)).square().mean().backward()
    clear(model)
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients_of(model.named_parameters("module")))


@every_zero
@pytest.mark.parametrize("total", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, 1.0)], ids=str)
def test_one_optimizers_zero_grad_leaves_what_another_ones_parameters_have(
    zero: int, total: bool, weights: tuple[float, float]
) -> None:
    """Gradients of an unsynchronised call in which one replica has no weight, perhaps."""
    x = torch.randn(2, 4)

    def body(rank: int) -> Parts:
        module = nn.Sequential(linear(), linear())
        options = {"loss_weight": lambda x: float(bool(x[0, 0])), "total": total, "zero": zero}
        step = compiled_alone(module, PAIR, microbatches=1, **options)
        first, _second = (step.optimizer(torch.optim.SGD, [f"module.{place}.weight"], lr=0.1) for place in (0, 1))
        step.set_requires_gradient_sync(False)
        step(x if weights[rank] else torch.zeros(2, 4))
        step.set_requires_gradient_sync(True)
        first.zero_grad()
        step(torch.ones(2, 4))
        return parts(step)

    model = nn.Sequential(linear(), linear())
    model(x).square().mean().backward()  # the mean of as many of them as have any weight
    model[0].weight.grad = None
    model(torch.ones(2, 4)).square().mean().backward()
    assert_parts(run_strict(body, 2), gradients_of(model.named_parameters("module")))
