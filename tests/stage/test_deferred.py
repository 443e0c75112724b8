"""Deferred gradients: the two halves of a call's backward, against the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import RunError
from fxpipe.stage.deferred import Deferred, deferring


class Scaled(nn.Module):
    """What a listed call may look like: a value made from parameters alone among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.tensor(0.5))

    def value(self) -> Tensor:
        return self.weight * self.scale


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def whole(model: Scaled, x: Tensor) -> Tensor:
    weight = model.value()
    return F.linear(torch.tanh(F.linear(x, weight)), weight)


def in_halves(model: Scaled, deferred: Deferred, x: Tensor) -> Tensor:
    weight, roots = model.value(), (model.weight, model.scale)
    linear = deferring(F.linear, "linear")
    hidden = torch.tanh(linear(deferred, None, roots, (weight,), x, weight))
    result: Tensor = linear(deferred, None, roots, (weight,), hidden, weight)
    return result


def batch() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def test_the_first_half_makes_the_inputs_gradients_and_the_second_the_parameters() -> None:
    model, x = scaled(), batch()
    whole(model, x).square().sum().backward()
    wanted, wanted_x = gradients(model), x.grad

    model, x, deferred = scaled(), batch(), Deferred()
    loss = in_halves(model, deferred, x).square().sum()
    with deferred.collecting():
        loss.backward()
    assert wanted_x is not None
    assert x.grad is not None
    assert torch.equal(x.grad, wanted_x)
    assert gradients(model) == [None, None]
    assert [tuple(one.shape) for one in deferred.pending] == [(6, 4), (6, 4)]
    deferred.accumulate()
    assert all(map(torch.equal, gradients(model), wanted))
    assert deferred.pending == []
    before = copy.deepcopy(gradients(model))
    deferred.accumulate()
    assert all(map(torch.equal, gradients(model), before))


def test_hooks_of_a_parameter_see_its_whole_gradient_in_the_second_half() -> None:
    model, deferred = scaled(), Deferred()
    seen: list[Tensor] = []
    model.weight.register_hook(seen.append)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter))
    loss = in_halves(model, deferred, batch()).sum()
    with deferred.collecting():
        loss.backward()
    assert seen == []
    deferred.accumulate()
    assert len(seen) == 2
    assert torch.equal(seen[0], model.weight.grad)


def test_what_needs_no_gradient_at_all_leaves_nothing() -> None:
    model, deferred = scaled(), Deferred()
    with torch.no_grad():
        assert torch.equal(in_halves(model, deferred, batch()), whole(model, batch()))
    loss = in_halves(model.requires_grad_(False), deferred, batch()).sum()
    with deferred.collecting():
        loss.backward()
    assert deferred.pending == []


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_forward_takes_of_its_own_values_is_an_error_not_a_gradient_twice(create_graph: bool) -> None:
    x = batch()
    result = in_halves(scaled(), Deferred(), x).sum()
    with pytest.raises(RunError, match=r'forward differentiates its own values.*write schedule="1f1b"'):
        torch.autograd.grad(result, x, create_graph=create_graph)


def test_an_input_written_behind_the_call_is_an_error_as_in_plain_pytorch() -> None:
    model, deferred = scaled(), Deferred()
    hidden = batch() * 2
    linear: Callable[..., Tensor] = deferring(F.linear, "linear")
    result = linear(deferred, None, (model.weight,), (model.weight,), hidden, model.weight)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), deferred.collecting():
        result.sum().backward()
