"""Strings among the inputs: what reads them is opaque, and other strings are no new kind of batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capturing
from tests.harness import accumulate
from tests.strict_transport import run_strict
from tests.thinned import in_turn, pairwise

STEPS, ROWS, TWO = 3, 8, fxpipe.Topology([("pipe", 2)])
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


class Branching(Captioned):
    """Its forward looks at a size, which symbolic cannot follow, and passes strings on one by one."""

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        words = self.words([*texts]) if x.shape[0] == len(texts) else x
        return (self.above(self.below(x) + words) - x).square().mean()


def batch(kind: type[Captioned], step: int) -> Batch:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    captions = [f"row {row} of step {step} {'x' * (row + step)}" for row in range(ROWS)]
    return x, {"x": x, "captions": captions} if kind is InDict else captions


def cut(given: Batch) -> list[Batch]:
    """Two micro-batches."""
    x, texts = given
    halves = [slice(len(x) // 2), slice(len(x) // 2, None)]
    if isinstance(texts, dict):
        return [(x[rows], {name: value[rows] for name, value in texts.items()}) for rows in halves]
    return [(x[rows], texts[rows]) for rows in halves]


def plain(kind: type[Captioned], batches: Sequence[Batch]) -> list[Tensor]:
    """The loss of each step, and that of an evaluation behind it."""
    model, losses = kind(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for given in batches:
        optimizer.zero_grad()
        loss, _ = accumulate(lambda _, part: model(*part.values()), [dict(enumerate(part)) for part in cut(given)])
        optimizer.step()
        losses += [loss, sum(model(*part).detach() / 2 for part in cut(given))]
    return losses


def trained(kind: type[Captioned], batches: Sequence[Batch], **options: Any) -> list[Tensor]:
    rule: Any = {"captions": fxpipe.Packed(1)} if kind is InDict else fxpipe.Packed(1)
    given = {"microbatches": 2, "batch_dim": {"texts": rule}, "example_args": batch(kind, 0), **options}
    run = fxpipe.compile(kind(), TWO, **given)
    optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
    for x, texts in copy.deepcopy(batches):
        optimizer.zero_grad()
        losses.append(run(x, texts))
        optimizer.step()
        losses.append(run.evaluate(x, texts, outputs="all"))
    return losses


def assert_no_captures_of_later_ones(
    kind: type[Captioned],
    batches: Sequence[Batch],
    later: Sequence[Batch],
    ranks: int,
    made: list[object],
    options: Any,
) -> None:
    """Losses are plain PyTorch's; with the ``later`` batches there are as many captures as without."""
    counts = []
    for given in [[*batches], [*batches, *later]]:
        made.clear()
        runs = run_strict(lambda rank: trained(kind, given, **options), 2) if ranks == 2 else []  # noqa: B023
        for losses in runs or [trained(kind, given, **options)]:
            torch.testing.assert_close(losses, plain(kind, given))
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each capture."""
    found, original = list[object](), capturing.capture_in_part

    def noting(request: Any, *others: Any) -> Any:
        found.append(request)
        return original(request, *others)

    monkeypatch.setattr(capturing, "capture_in_part", noting)
    return found


@pytest.mark.parametrize(
    ("kind", "whole", "ranks"), pairwise([Captioned, InDict, Branching], [{}, {"words": "whole"}], [1, 2])
)
def test_other_strings_take_no_capture(kind: Any, whole: Any, ranks: int, made: list[object]) -> None:
    first, *later = [batch(kind, step) for step in range(STEPS)]
    assert_no_captures_of_later_ones(kind, [first], later, ranks, made, {"boundaries": {"above": "before", **whole}})


def sized(step: int, rows: int) -> Batch:
    x, texts = batch(Captioned, step)
    return torch.cat([x, x])[:rows], [*texts, *texts][:rows]


class Asking(Branching):
    """Its own forward asks whether it was given strings, as UniPHD's does."""

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        h = self.below(x) + (self.words([*texts]) if isinstance(texts[0], str) else 0)
        return (self.above(h) - x).square().mean()


class Tokens(Words):
    """A vector for each letter: how many there are, strings decide."""

    @torch.no_grad()
    def forward(self, captions: list[str]) -> Tensor:
        ids = [torch.tensor([ord(letter) % 64 for letter in caption]) for caption in captions]
        return self.linear(self.embed(nn.utils.rnn.pad_sequence(ids, batch_first=True)))


class Attending(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.words = Tokens()

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        words = self.words([*texts]) if x.shape[0] == len(texts) else x[:, None]
        h = nn.functional.scaled_dot_product_attention(self.below(x)[:, None], words, words)[:, 0]
        return (self.above(h) - x).square().mean()


NAMED = {"above": "before", "words": "whole"}
SIZES = [8, 12, 12, 8]
WAYS: list[tuple[type[Captioned], dict[str, Any]]] = [
    (Branching, {}),
    (Attending, {}),
    (Attending, {"boundaries": NAMED, "tracer": "export"}),
    (Branching, {"boundaries": NAMED, "tracer": "record"}),
    (Captioned, {"boundaries": NAMED, "tracer": "record"}),
    (Asking, {}),
]


@pytest.mark.parametrize(("way", "ranks"), in_turn(WAYS, [1, 2]))
def test_batches_of_other_sizes_hold_for_any_strings_too(way: Any, ranks: int, made: list[object]) -> None:
    """Of a size that was met before, other strings take no capture."""
    kind, options = way
    batches = [sized(step + 1, rows) for step, rows in enumerate(SIZES)]
    options = {"boundaries": {"above": "before"}, "example_args": sized(0, 8), **options}
    assert_no_captures_of_later_ones(kind, batches, [sized(9, 12)], ranks, made, options)


def test_one_of_many_captures_names_the_input_whose_strings_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capturing, "MANY", 4)
    batches = [batch(Captioned, step) for step in range(3)]
    trained(Captioned, batches, boundaries={"above": "before"}, tracer="export")
    told = capsys.readouterr().err
    assert "4 captures by now: strings or numbers of Python's in 'texts' change" in told
    assert "pad batches" not in told
