"""Autocast around a call: each stage's forward has a region of its own, and no backward runs inside one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary
from tests.device import DEVICE
from tests.harness import Engines, assert_gradients, assert_same, gradients_of
from tests.pool import Pool
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
        self.seen.append(torch.is_autocast_enabled(DEVICE))

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


def step(on: bool) -> tuple[Tensor, dict[str, Tensor | None], list[bool]]:
    compiled = model()
    forward_backward = fxpipe.compile(compiled, fxpipe.Topology([("pipe", 3)]), microbatches=4)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=on):
        loss = forward_backward(*batch())
        assert torch.is_autocast_enabled(DEVICE) == on
    return loss, gradients_of(forward_backward.named_parameters()), compiled.seen


@pytest.mark.parametrize(("engine", "on"), [("local", False), ("distributed", True)])
def test_loss_and_gradients_are_those_of_plain_pytorch(engine: str, on: bool, engines: Engines) -> None:
    plain = model()
    total = torch.zeros(())
    for x, y in zip(*(part.chunk(4) for part in batch()), strict=True):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=on):
            loss = plain(x, y)
        (loss * 0.25).backward()
        total = total + loss.detach() * 0.25
    for loss, gradients, seen in engines(engine)(3, step, on):
        assert_same(loss, total, "loss")
        assert not any(seen)
        assert_gradients(gradients, plain)
    assert (step(on=False)[0] != total) == on, "it changes the numbers"


def test_ranks_under_different_autocast_are_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="under different autocast"):
        pool.run(one_rank_differs, ranks=3)


def one_rank_differs() -> None:
    fxpipe.init()
    forward_backward = fxpipe.compile(model(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=torch.distributed.get_rank() == 1):
        forward_backward(*batch())


class Asks(nn.Module):
    """Asks torch in forward what is set around the call."""

    def forward(self, x: Tensor) -> Tensor:
        on, half = torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE) is torch.float16
        return x * (1 + on + 2 * (on and half) + 4 * (torch.get_default_dtype() is torch.float64))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Asks()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(stage_boundary(Asks()(self.first(x)))).float().square().mean()


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AMBIENT: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast to another type": lambda: torch.autocast(DEVICE, torch.float16),
    "a default type": double_by_default,
}


def asked(tracer: Any, around: str, given: Tensor) -> list[Tensor]:
    """The losses of a step and an evaluation, first under nothing and then under what is set ``around`` the call."""
    torch.manual_seed(0)
    example = None if tracer == "symbolic" else (given,)
    topology = fxpipe.Topology([("pipe", 2)])
    compiled = fxpipe.compile(Asking(), topology, microbatches=2, tracer=tracer, example_args=example)
    found = []
    for entered in (contextlib.nullcontext, AMBIENT[around]):
        with entered():
            found += [compiled(given), compiled.evaluate(given, outputs="all")]
    return found


@pytest.mark.parametrize(
    ("engine", "tracer", "around"),
    in_turn(["local", "distributed", "local"], ["symbolic", "export", "record"], list(AMBIENT)),
)
def test_what_forward_asks_torch_is_what_is_set_around_the_call(
    engine: str, tracer: str, around: str, engines: Engines
) -> None:
    plain, given, wanted = Asking(), batch()[0], []
    for entered in (contextlib.nullcontext, AMBIENT[around]):
        with entered():
            wanted += [sum(plain(part).detach() / 2 for part in given.chunk(2))] * 2
    assert wanted[2] > 2 * wanted[0]
    for found in engines(engine)(2, asked, tracer, around, given):
        for got, loss in zip(found, wanted, strict=True):
            assert_same(got, loss, around)
