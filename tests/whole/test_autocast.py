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


class Asks(nn.Module):
    """Asks torch in forward what is set around the call."""

    def forward(self, x: Tensor) -> Tensor:
        on, half = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu") is torch.float16
        wide, exact = torch.get_default_dtype() is torch.float64, torch.are_deterministic_algorithms_enabled()
        return x * (1 + on + 2 * (on and half) + 4 * wide + 8 * exact)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Asks()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(stage_boundary(Asks()(self.first(x)))).float().square().mean()


@contextlib.contextmanager
def setting(change: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


AMBIENT: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to another type": lambda: torch.autocast("cpu", torch.float16),
    "a default type": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
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
    in_turn(["local", "distributed"], ["symbolic", "export", "record", "auto"], list(AMBIENT)),
)
def test_what_forward_asks_torch_is_what_is_set_around_the_call(
    engine: str, tracer: str, around: str, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    plain, given, wanted = Asking(), batch()[0], []
    for entered in (contextlib.nullcontext, AMBIENT[around]):
        with entered():
            wanted += [sum(plain(part).detach() / 2 for part in given.chunk(2))] * 2
    assert wanted[2] > 2 * wanted[0]
    for found in engine_of(engine, lambda: request.getfixturevalue("pool"))(2, asked, tracer, around, given):
        for got, loss in zip(found, wanted, strict=True):
            assert_same(got, loss, around)
