"""Strings among the inputs: what reads them is opaque, and other strings are no new kind of batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.plan.capture import captures
from tests.strict_transport import run_strict

STEPS, ROWS, TWO = 5, 8, fxpipe.Topology([("pipe", 2)])
Batch = tuple[Tensor, Any]


class Words(nn.Module):
    """A frozen encoder that takes captions, as latent diffusion's does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(64, 8), nn.Linear(8, 8)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, captions: list[str]) -> Tensor:
        ids = [torch.tensor([ord(letter) % 64 for letter in caption]) for caption in captions]
        return self.linear(self.embed(nn.utils.rnn.pad_sequence(ids, batch_first=True))).mean(1)


class Captioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.below, self.above = Words(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        return (self.above(self.below(x) + self.words(texts)) - x).square().mean()


class InDict(Captioned):
    """Strings beside tensors in one input."""

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        return (self.above(self.below(texts["x"]) + self.words(texts["captions"])) - x).square().mean()


def batch(kind: type[Captioned], step: int) -> Batch:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    captions = [f"row {row} of step {step} {'x' * (row + step)}" for row in range(ROWS)]
    return x, captions if kind is Captioned else {"x": x, "captions": captions}


def part(texts: Any, rows: slice) -> Any:
    return {name: value[rows] for name, value in texts.items()} if isinstance(texts, dict) else texts[rows]


def plain(kind: type[Captioned]) -> list[Tensor]:
    model, losses = kind(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, texts = batch(kind, step)
        found = [model(x[rows], part(texts, rows)) / 2 for rows in (slice(0, 4), slice(4, 8))]
        torch.stack(found).sum().backward()
        optimizer.step()
        losses.append(torch.stack(found).sum().detach())
    return losses


def trained(kind: type[Captioned], boundaries: Any, steps: int = STEPS, **options: Any) -> list[Tensor]:
    rule: Any = fxpipe.Packed(1) if kind is Captioned else {"captions": fxpipe.Packed(1)}
    given = {"microbatches": 2, "batch_dim": {"texts": rule}, "example_args": batch(kind, 0), **options}
    run = fxpipe.compile(kind(), TWO, boundaries=boundaries, **given)
    optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(run(*copy.deepcopy(batch(kind, step))))
        optimizer.step()
    return losses


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each capture."""
    found, original = list[object](), captures.capture_in_part

    def noting(request: Any, *others: Any) -> Any:
        found.append(request)
        return original(request, *others)

    monkeypatch.setattr(captures, "capture_in_part", noting)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("whole", [{}, {"words": "whole"}], ids=["by itself", "named"])
@pytest.mark.parametrize("kind", [Captioned, InDict])
def test_other_strings_take_no_capture(kind: Any, whole: Any, ranks: int, made: list[object]) -> None:
    boundaries, counts = {"above": "before", **whole}, []
    for steps in (1, STEPS):
        made.clear()
        runs = run_strict(lambda rank: trained(kind, boundaries, steps), 2) if ranks == 2 else []  # noqa: B023
        for losses in runs or [trained(kind, boundaries, steps)]:
            torch.testing.assert_close(losses, plain(kind)[:steps])
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def test_the_tenth_capture_names_the_input_whose_strings_change(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Captioned, {"above": "before"}, steps=6, tracer="export")
    told = capsys.readouterr().err
    assert "10 captures by now: strings or numbers of Python's in 'texts' change" in told
    assert "pad batches" not in told
