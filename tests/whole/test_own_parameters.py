"""Which parameters a rank holds, trains and lets go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.strict_transport import run_strict
from tests.two_ranks import TWO, Two


def test_a_rank_lets_go_of_the_other_stages_parameters() -> None:
    def body(rank: int) -> list[bool]:
        model = Two()
        alive = [weakref.ref(parameter) for parameter in (model.a.weight, model.b.weight, model.scale)]
        forward_backward = fxpipe.compile(model, TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        gc.collect()
        return [reference() is not None for reference in alive]

    assert run_strict(body, 2) == [[True, False, True], [False, True, False]]


def test_parameters_keep_the_models_order_and_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._model = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self._model.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self._model(x)
            for layer in self.layers:
                h = layer(h)
            return self.head(fxpipe.stage_boundary(h)).mean()

    model = Named()
    forward_backward = fxpipe.compile(model, TWO, microbatches=2)
    assert [name for name, _ in forward_backward.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(forward_backward.state_dict()) == list(model.state_dict())


def test_compiling_again_with_another_placement_says_who_has_the_parameters() -> None:
    def body(rank: int) -> None:
        model = Two()
        fxpipe.compile(model, TWO, microbatches=2)
        fxpipe.compile(model, TWO, microbatches=2, placement={"a": 1, "b": 0})

    with pytest.raises(fxpipe.RunError, match=r"an earlier fxpipe.compile gave it to another rank"):
        run_strict(body, 2)


def test_a_closed_one_says_so() -> None:
    def body(rank: int) -> str:
        forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        forward_backward.close()
        with pytest.raises(fxpipe.RunError) as error:
            forward_backward(torch.ones(4, 4))
        return str(error.value)

    assert all("closed" in text for text in run_strict(body, 2))


class SometimesTied(nn.Module):
    """One scale that three stages use, or fewer, as the inputs are given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> Tensor:
        h = fxpipe.stage_boundary(self.a(x) * self.scale)
        h = self.b(h)
        if second is not None:
            h = h * self.scale * second
        h = self.c(fxpipe.stage_boundary(h))
        return (h if third is None else h * self.scale * third).square().mean()


@pytest.mark.parametrize("later", [(False, False), (False, True), (True, False)])
def test_owners_of_a_parameter_that_a_batch_does_not_use_hear_of_its_gradient(later: tuple[bool, bool]) -> None:
    """All three hold a copy, and step it: each must have the gradient that plain PyTorch has."""
    one, x = torch.ones(4), torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def train(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for second, third in ((True, True), later):
            optimizer.zero_grad()
            step(x, one if second else None, one if third else None)
            optimizer.step()
        return next(p for name, p in model.named_parameters() if name == "scale").detach().clone()

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        topology = fxpipe.Topology([("pipe", 3)])
        compiled = fxpipe.compile(SometimesTied(), topology, microbatches=1, example_args=(x, one, one))
        return train(compiled, compiled.module, compiled.optimizer(torch.optim.SGD, lr=0.1))

    torch.manual_seed(0)
    model = SometimesTied()
    wanted = train(lambda *inputs: model(*inputs).backward(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    for scale in run_strict(body, 3):
        torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_no_optimizer_steps_are_named_once(frozen: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A pattern names some parameters, and means no others, as in the groups of torch's own optimizers."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    forward_backward = fxpipe.compile(model, TWO, boundaries=["1"], loss_fn=nn.functional.mse_loss)
    biases = forward_backward.optimizer(torch.optim.SGD, [{"params": "*.bias"}], lr=0.1)
    if frozen:
        for layer in model:
            layer.weight.requires_grad_(False)
    for _ in range(2):
        forward_backward(torch.ones(8, 2), target=torch.zeros(8, 1))
        biases.step()
    said = "fxpipe: no optimizer steps 2 of the model's trainable parameters, first '0.weight'"
    assert capsys.readouterr().err.count(said) == (not frozen)
    weights = forward_backward.optimizer(torch.optim.SGD, "*.weight", lr=0.1)
    weights.step()
    assert said not in capsys.readouterr().err


def test_sparse_gradients_are_stepped_on_several_ranks() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 1))
        before, weight = (layer.weight.detach().clone() for layer in model)
        one = fxpipe.compile(model, TWO, boundaries=["1"], microbatches=1, loss_fn=lambda y, target: y.sum())
        optimizer = one.optimizer(torch.optim.SGD, lr=0.1)
        one(torch.arange(4), target=None)
        optimizer.step()
        if rank == 0:
            torch.testing.assert_close(next(one.parameters()), before - 0.1 * weight)

    run_strict(body, 2)
