"""A gradient on its way to another stage is not added to by the next micro-batch's, whatever views it is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.run.actions.actions import give_own_memory, without_gradient
from tests.strict_transport import run_strict

MICROBATCHES = 4


class Positions(nn.Module):
    """Each stage adds a view of a parameter that is as large as a micro-batch of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.of_first, self.of_second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(torch.tanh(self.first(x) + self.of_first.view(1, 4)))
        x = fxpipe.stage_boundary(x + self.of_second.unsqueeze(0))
        return self.last(x).square().mean()


class Sum(nn.Module):
    """One gradient goes to two stages, each of which adds a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.of_left, self.of_right = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        left = fxpipe.stage_boundary(self.left(x) * 2 + self.of_left.view(1, 4))
        right = fxpipe.stage_boundary(self.right(x) * 3 + self.of_right.view(1, 4))
        return self.last(left + right).square().mean()


def summed(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The micro-batches' gradients, each with memory of its own."""
    total: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for part in x.chunk(MICROBATCHES):
        gradients = torch.autograd.grad(model(part) / MICROBATCHES, list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] = total[name] + gradient if name in total else gradient
    return total


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("make", [Positions, Sum])
def test_views_of_parameters_get_gradients_of_their_own(make: type[nn.Module], schedule: str) -> None:
    model = make().double()
    x = torch.randn(MICROBATCHES, 4, dtype=torch.float64)
    expected = summed(copy.deepcopy(model), x)

    def gradients() -> dict[str, Tensor | None]:
        forward_backward = fxpipe.compile(
            copy.deepcopy(model), fxpipe.Topology([("pipe", 3)]), microbatches=MICROBATCHES, schedule=schedule
        )
        forward_backward(x)
        return {name: parameter.grad for name, parameter in forward_backward.named_parameters()}

    on_ranks = run_strict(lambda rank: gradients(), 3)
    for found in gradients(), {name: one for rank in on_ranks for name, one in rank.items()}:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_only_what_shares_memory_is_copied() -> None:
    sharing, apart, without = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    passing = torch.arange(4.0).view(1, 4)
    new = without_gradient([sharing, apart, without])
    sharing.grad, apart.grad = passing.view(4), torch.ones(4)
    kept = apart.grad
    give_own_memory(new, ([passing, None, True], {"sparse": passing.to_sparse()}))
    passing.zero_()
    assert sharing.grad.tolist() == [0, 1, 2, 3]
    assert apart.grad is kept
    assert without.grad is None


class Running(nn.Module):
    """Sends a view of a buffer that its next forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x, self.mean.view(1, 4)


def scaled(sent: tuple[Tensor, Tensor]) -> Tensor:
    x, mean = sent
    return (x * mean).square().mean()


def test_a_buffer_that_is_sent_is_as_it_was_then() -> None:
    start, x = Running(), torch.randn(MICROBATCHES, 4)
    plain = copy.deepcopy(start)
    expected = sum(scaled(plain(part)).detach() / MICROBATCHES for part in x.chunk(MICROBATCHES))

    def loss() -> Tensor:
        stages = fxpipe.StageGraph.from_callables(
            {"start": copy.deepcopy(start), "end": scaled}, [("start", "end")], {"start": ["x"]}
        )
        topology = fxpipe.Topology([("pipe", 2)])
        return fxpipe.compile(stages, topology, microbatches=MICROBATCHES, schedule="gpipe")(x)

    assert [loss(), *run_strict(lambda rank: loss(), 2)] == [expected] * 3


class Bias(nn.Module):
    """A loss whose gradient, handed on as a view, becomes that of a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(self.layer(x))
        return self.bias.sum() + x.square().mean()


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_loss_begins_with_is_no_parameters_gradient(kept: bool) -> None:
    model, x = Bias(), torch.randn(8, 4)
    wanted = summed(copy.deepcopy(model), x)
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=MICROBATCHES)
    for step in range(3):
        if not kept:
            forward_backward.zero_grad()
        forward_backward(x)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name] * (step + 1 if kept else 1))
