"""Autocast around a call: each stage's forward has a region of its own, and no backward runs inside one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.harness import assert_same, engine_of, gradients_of
from tests.thinned import in_turn

WIDTH = 8


class Casting(nn.Module):
    """Three layers; the backward of the second tells under which autocast it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen: list[bool] = []
        self.second.register_full_backward_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.seen.append(torch.is_autocast_enabled("cpu"))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = stage_boundary(torch.relu(self.first(x)))
        x = stage_boundary(torch.relu(self.second(x)))
        return F.mse_loss(self.third(x).float(), y)


def model() -> Casting:
    torch.manual_seed(0)
    return Casting()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def step(on: bool) -> tuple[Tensor, dict[str, Tensor | None], list[bool], Any]:
    compiled = model()
    forward_backward = fxpipe.compile(compiled, fxpipe.Topology([("pipe", 3)]), microbatches=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        loss = forward_backward(*batch())
        assert torch.is_autocast_enabled("cpu") == on
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        output = forward_backward.evaluate(*batch(), outputs="all")
    return loss, gradients_of(forward_backward.named_parameters()), compiled.seen, output


@pytest.mark.parametrize(("engine", "on"), in_turn(["local", "strict 1", "distributed"], [True, False]))
def test_loss_and_gradients_are_those_of_plain_pytorch(engine: str, on: bool, request: pytest.FixtureRequest) -> None:
    plain = model()
    total = torch.zeros(())
    for x, y in zip(*(part.chunk(4) for part in batch()), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = plain(x, y)
        (loss * 0.25).backward()
        total = total + loss.detach() * 0.25
    wanted = gradients_of(plain.named_parameters())
    for loss, gradients, seen, _ in engine_of(engine, lambda: request.getfixturevalue("pool"))(3, step, on):
        assert_same(loss, total, "loss")
        assert not any(seen)
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name], name)


def test_it_changes_the_numbers() -> None:
    """Without which the test above would show nothing."""
    assert step(on=True)[0] != step(on=False)[0]


def test_ranks_under_different_autocast_are_refused(request: pytest.FixtureRequest) -> None:
    with pytest.raises(AssertionError, match="under different autocast"):
        engine_of("distributed", lambda: request.getfixturevalue("pool"))(3, one_rank_differs)


def one_rank_differs() -> None:
    fxpipe.init()
    forward_backward = fxpipe.compile(model(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.distributed.get_rank() == 1):
        forward_backward(*batch())
