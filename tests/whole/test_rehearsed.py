"""Submodules that look at values: what they do is known at every depth, for every batch, whichever rank holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import engine_of
from tests.pool import Pool

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


class Experts(nn.Module):
    """A sparse mixture: an expert is called with the rows that are routed to it, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        rows = h.flatten(0, -2)
        score, choice = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().flatten()
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * score[mine, None])
        return out.view_as(h)


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


class Masking(nn.Module):
    """Takes the columns that a buffer names, and lengths from another."""

    keep: Tensor
    lengths: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", torch.tensor([True, False, True, True]))
        self.register_buffer("lengths", torch.tensor([3, 1]))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        first, second = h.split(self.lengths.tolist(), -1)
        return torch.cat([first, second * 2], -1)[..., self.keep].repeat_interleave(2, -1)[..., :4]


class Between(Masking):
    """Its boundary lets it be traced through: what it asks of values, it asks between submodules."""

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        h = stage_boundary(h) * 1
        assert h.isfinite().all(), f"not finite: {h}"
        if not (h.abs() < 1e6).all():
            raise ValueError(f"too large: {h.max()}")
        likely = torch.distributions.Normal(h, h.exp()).log_prob(torch.zeros(4))
        pairs = (h.unsqueeze(-1) * h.unsqueeze(-2))[..., torch.ones(4, 4).tril(-1).bool()]
        return torch.cat([likely[..., self.keep], pairs[..., 1:2]], -1)


class Alias(nn.Module):
    """Returns a view of what it is given, which the model then writes."""

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h.flatten(0, -2) if h.isfinite().all() else h.flatten(0, -2) * 0


class Dropping(nn.Module):
    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.later = later

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return nn.functional.dropout(h) if self.calls > 4 * self.later else h


def dropping_later() -> nn.Module:
    return Dropping(later=True)


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
        if looked.dim() < k.dim():
            looked.mul_(2)
            looked = k
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


@pytest.mark.parametrize(("engine", "depth"), [("local", 1), ("distributed", 2)])
@pytest.mark.parametrize("kind", [Masked, Experts, Quantiser, Masking, Between, Alias])
def test_what_looks_at_values_does_what_it_does_in_plain_pytorch(
    kind: Callable[[], nn.Module], engine: str, depth: int, request: pytest.FixtureRequest
) -> None:
    def pool() -> Pool:
        found = request.getfixturevalue("pool")
        assert isinstance(found, Pool)
        return found

    losses, gradients, state, evaluated = plainly(kind, depth)
    for found in engine_of(engine, pool)(2, by_fxpipe, kind, depth):
        mine = {name: gradients[name] for name in found[1]}
        torch.testing.assert_close(found, (losses, mine, state, evaluated), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", [Dropping, dropping_later])
def test_what_is_drawn_at_any_depth_does_not_depend_on_the_processs_generator(
    kind: Callable[[], nn.Module], depth: int
) -> None:
    first, *_ = batches()
    found = []
    for seed in (3, 4):
        torch.manual_seed(0)
        forward_backward = fxpipe.compile(
            model_of(kind, depth), TWO, microbatches=2, tracer="record", example_kwargs=first
        )
        found.append([])
        for step in range(6):
            torch.manual_seed(seed + step)
            found[-1].append(forward_backward(**first).item())
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
