"""Regions kept whole whose inputs have another length each time: a few captures hold for all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.plan import captures
from tests.harness import assert_same, compiled, strict
from tests.models import WIDTH, Case, linear


class Loudest(nn.Module):
    """The positions of each row that are loud in any; how many depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        kept = [place for place in range(x.shape[1]) if x[:, place].sum().item() > 0] or [0]
        return self.inner(x[:, kept])


class Long(nn.Module):
    """Code in front of a region and behind it asks for lengths, its own and the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.behind, self.head = linear(), Loudest(), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.before(x)) - torch.arange(x.shape[1])[:, None] / x.shape[1]
        loud = self.region(h)
        quiet = self.behind(loud.mean(1, keepdim=True).expand(-1, x.shape[1], -1) + h)
        return (self.head(quiet) - y).square().mean() * (loud.shape[1] / x.shape[1])


CASE = Case(Long, lambda rows, g: batch_of(7, g), stages=3, ranks=3, rows=6, microbatches=2)
RULES: Any = {"region": "whole", "reg[i]on": "before", "behind": "before"}


def batch_of(length: int, g: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(6, length, WIDTH, generator=g) for name in ("x", "y")}


def test_a_hundred_lengths_into_a_region_take_three_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    capture = captures.capture
    monkeypatch.setattr(captures, "capture", lambda *args: made.append(args) or capture(*args))
    model = CASE.model()
    forward_backward = compiled(CASE, boundaries=RULES, tracer="export", example_kwargs=CASE.batch())
    g, lengths = torch.Generator().manual_seed(0), random.Random(0)
    for _ in range(100):
        batch = batch_of(lengths.randint(2, 64), g)
        forward_backward.zero_grad()
        model.zero_grad()
        loss, wanted = forward_backward(**batch), torch.zeros(())
        for place in range(2):
            part = model(**{name: value[3 * place : 3 * place + 3] for name, value in batch.items()}) / 2
            part.backward()
            wanted += part.detach()
        assert_same(loss, wanted, "loss")
        for name, parameter in forward_backward.named_parameters():
            assert_same(parameter.grad, model.get_parameter(name).grad, name)
    assert len(made) in (2, 3)


def test_on_ranks_of_their_own_lengths_travel_likewise() -> None:
    losses, model = strict(0)(3, several_lengths), CASE.model()
    for length, *found in zip(LENGTHS, *losses, strict=True):
        batch = batch_of(length, torch.Generator().manual_seed(length))
        parts = [{name: value[place : place + 3] for name, value in batch.items()} for place in (0, 3)]
        wanted = (model(**parts[0]) / 2 + model(**parts[1]) / 2).detach()
        for loss in found:
            assert_same(loss, wanted, "loss")


LENGTHS = (9, 5, 12, 6, 3)


def several_lengths() -> list[Tensor]:
    forward_backward = compiled(CASE, boundaries=RULES, tracer="export", example_kwargs=CASE.batch())
    return [forward_backward(**batch_of(length, torch.Generator().manual_seed(length))) for length in LENGTHS]
