"""Ranks that were given other options, numbers or batches; what compile refuses of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.strict_transport import run_strict
from tests.two_ranks import TWO, Pooled, Two


def test_a_later_capture_that_fails_on_one_rank_fails_on_all() -> None:
    class Picky(Two):
        picky = False

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            if self.picky and mode == "other":
                raise ValueError("not on this rank")
            return super().forward(x, mode)

    def body(rank: int) -> str:
        model = Picky()
        model.picky = rank == 1
        forward_backward = fxpipe.compile(model, TWO, microbatches=2)
        forward_backward(torch.ones(4, 4))
        with pytest.raises(fxpipe.FxpipeError) as error:
            forward_backward(torch.ones(4, 4), mode="other")
        forward_backward(torch.ones(4, 4))
        return str(error.value)

    assert all("not on this rank" in text for text in run_strict(body, 2))


def test_constants_made_with_different_seeds_are_told_apart() -> None:
    class Noisy(Two):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.randn(4)  # registered nowhere

        def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
            return super().forward(x + self.noise, mode)

    def body(rank: int) -> None:
        torch.manual_seed(rank)
        fxpipe.compile(Noisy(), TWO, microbatches=2)

    with pytest.raises(fxpipe.RunError, match=r"different programs(.|\n)*constant \[4\]"):
        run_strict(body, 2)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_batch_of_other_strides_or_under_autocast_is_another_kind(autocast: bool) -> None:
    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(Two(), TWO, microbatches=2)
        x = torch.arange(16.0).view(4, 4)
        losses = [forward_backward(x)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(forward_backward(x.t().contiguous().t()))
        return losses

    for one, other in run_strict(body, 2):
        assert torch.allclose(one, other.float(), rtol=0.05)


def test_gradients_of_several_calls_add_up_bit_for_bit_for_a_new_kind_of_batch() -> None:
    torch.manual_seed(0)
    model = Two()
    batches = [torch.randn(rows, 4) for rows in (4, 6, 8)]
    for x in batches:
        for part in x.tensor_split(2):
            (model(part) * (len(part) / len(x))).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    forward_backward = fxpipe.compile(model, TWO, microbatches=2)
    for x in batches:
        forward_backward(x)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fxpipe.compile(Two(), TWO).step_microbatches([]), "at least one micro-batch"),
        (lambda: fxpipe.compile(Pooled(), TWO, loss_fn=torch.dist)(1, 2), "the target is passed as target="),
        (lambda: fxpipe.compile(Two(), TWO, batch_dim={"y": None}), "batch_dim names 'y', which is no input"),
        (lambda: fxpipe.compile(by_hand(), TWO, loss_fn=torch.dist), "loss_fn= is for traced models"),
        (lambda: by_hand("a.b"), "'a.b' cannot name a stage"),
        (
            lambda: fxpipe.compile(Two(), TWO).load_state_dict({"c.weight": torch.ones(1)}),
            "the model has no 'c.weight'",
        ),
        (lambda: fxpipe.compile(Two(), TWO, microbatches=0), "a whole number of at least 1"),
    ],
    ids=["no micro-batch", "target by position", "batch_dim", "loss_fn", "stage name", "state dict", "microbatches"],
)
def test_what_would_be_ignored_or_obscure_is_refused(make: Any, text: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=text):
        make()


def by_hand(name: str = "a") -> fxpipe.StageGraph:
    return fxpipe.StageGraph.from_callables(
        {name: nn.Linear(4, 4), "b": lambda y: y.mean()}, [(name, "b")], {name: ["x"]}
    )
