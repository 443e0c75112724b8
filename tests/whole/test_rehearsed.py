"""Submodules that look at values: what they do is known at every depth, for every batch, whichever rank holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import Engines

TWO = Topology([("pipe", 2)])


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Tensor) -> Any:
        return self.inner(*given)


class Masked(nn.Module):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + mask if mask.abs().max() > 0 else h


class Quantiser(nn.Module):
    """A vector quantiser whose codebook follows what it sees, from the first batch on."""

    code: Tensor
    begun: Tensor
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.randn(3, 4))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("order", torch.arange(3).flip(0))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        rows = h.flatten(0, -2)
        if self.training and not self.begun:
            self.code.copy_(rows.detach()[:3])
            self.begun.fill_(True)
        choice = self.order[torch.cdist(rows, self.code).argmin(1)]
        if self.training:
            with torch.no_grad():
                for number in choice.unique().tolist():
                    self.code[number] = self.code[number] * 0.5 + rows[choice == number].mean(0) * 0.5
        return h + (self.code[choice].view_as(h) - h).detach()


class Dropping(nn.Module):
    """From the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return nn.functional.dropout(h) if self.calls > 4 else h


class Looking(nn.Module):
    """A submodule that looks at values lies ``depth`` modules deep, and its codebook is read in another stage."""

    def __init__(self, kind: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.looks = kind()
        for _ in range(depth):
            self.looks = Around(self.looks)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.a(x))
        k = stage_boundary(h * 1)
        looked = self.looks(k, mask)
        h = self.b(looked)
        h = stage_boundary(h) * 2
        for name, code in self.named_buffers():
            h = h + code.sum() if name.endswith("code") else h
        y = self.c(h)
        return {"loss": y.square().mean(), "y": y}


def model_of(kind: Callable[[], nn.Module], depth: int) -> nn.Module:
    torch.manual_seed(1)
    return Looking(kind, depth)


def batches() -> list[dict[str, Tensor]]:
    """As many rows as the first batch has, fewer, and longer ones; there is nothing in the first batch's mask."""
    torch.manual_seed(2)
    shapes = [(8, 3, 4), (8, 3, 4), (6, 3, 4), (8, 5, 4)]
    return [{"x": torch.randn(shape), "mask": torch.randn(shape) * (place > 0)} for place, shape in enumerate(shapes)]


def by_fxpipe(kind: Callable[[], nn.Module], depth: int) -> Any:
    """(losses, gradients of all steps, buffers, what evaluation returned)"""
    first, *_ = given = batches()
    forward_backward = fxpipe.compile(model_of(kind, depth), TWO, microbatches=2, tracer="record", example_kwargs=first)
    assert len(forward_backward.stages) == 3
    losses = [forward_backward(**batch) for batch in given]
    forward_backward.module.eval()
    evaluated = [forward_backward.evaluate(**batch, outputs="all")["y"] for batch in given]
    gradients = {name: parameter.grad for name, parameter in forward_backward.named_parameters()}
    return losses, gradients, dict(forward_backward.state_dict(full=True)), evaluated


def plainly(kind: Callable[[], nn.Module], depth: int) -> Any:
    model = model_of(kind, depth)
    losses = []
    for batch in batches():
        losses.append(torch.zeros(()))
        for place in range(2):
            loss = model(**{name: value.tensor_split(2)[place] for name, value in batch.items()})["loss"] / 2
            loss.backward()
            losses[-1] += loss.detach()
    model.eval()
    with torch.no_grad():
        evaluated = [model(**batch)["y"] for batch in batches()]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, dict(model.state_dict()), evaluated


@pytest.mark.parametrize(("kind", "engine", "depth"), [(Masked, "distributed", 2), (Quantiser, "local", 1)])
def test_what_looks_at_values_does_what_it_does_in_plain_pytorch(
    kind: Callable[[], nn.Module], engine: str, depth: int, engines: Engines
) -> None:
    losses, gradients, state, evaluated = plainly(kind, depth)
    for found in engines(engine)(2, by_fxpipe, kind, depth):
        mine = {name: gradients[name] for name in found[1]}
        torch.testing.assert_close(found, (losses, mine, state, evaluated), rtol=1e-6, atol=1e-6)


def test_what_is_drawn_does_not_depend_on_the_processs_generator() -> None:
    first, *_ = batches()
    found = []
    for seed in (3, 4):
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(
            model_of(Dropping, 1), TWO, microbatches=2, tracer="record", example_kwargs=first
        )
        found.append([])
        for step in range(6):
            torch.manual_seed(seed + step)
            found[-1].append(forward_backward(**first).item())
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
