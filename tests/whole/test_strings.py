"""Strings among the inputs: what reads them is opaque, and other strings are no new kind of batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.plan.capture import capturing
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


class Branching(Captioned):
    """Its forward looks at a size, which symbolic cannot follow, and passes strings on one by one."""

    def forward(self, x: Tensor, texts: Any) -> Tensor:
        words = self.words([*texts]) if x.shape[0] == len(texts) else x
        return (self.above(self.below(x) + words) - x).square().mean()


def batch(kind: type[Captioned], step: int) -> Batch:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
    captions = [f"row {row} of step {step} {'x' * (row + step)}" for row in range(ROWS)]
    return x, {"x": x, "captions": captions} if kind is InDict else captions


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
    rule: Any = {"captions": fxpipe.Packed(1)} if kind is InDict else fxpipe.Packed(1)
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
    found, original = list[object](), capturing.capture_in_part

    def noting(request: Any, *others: Any) -> Any:
        found.append(request)
        return original(request, *others)

    monkeypatch.setattr(capturing, "capture_in_part", noting)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("whole", [{}, {"words": "whole"}], ids=["by itself", "named"])
@pytest.mark.parametrize("kind", [Captioned, InDict, Branching])
def test_other_strings_take_no_capture(kind: Any, whole: Any, ranks: int, made: list[object]) -> None:
    boundaries, counts = {"above": "before", **whole}, []
    for steps in (1, STEPS):
        made.clear()
        runs = run_strict(lambda rank: trained(kind, boundaries, steps), 2) if ranks == 2 else []  # noqa: B023
        for losses in runs or [trained(kind, boundaries, steps)]:
            torch.testing.assert_close(losses, plain(kind)[:steps])
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def sized(step: int, rows: int) -> Batch:
    x, texts = batch(Captioned, step)
    return torch.cat([x, x])[:rows], [*texts, *texts][:rows]


class Asking(Branching):
    """Its own forward looks at a string, so that no program holds for all."""

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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "options"), WAYS)
def test_batches_of_other_sizes_hold_for_any_strings_too(
    kind: Any, options: dict[str, Any], ranks: int, made: list[object]
) -> None:
    def losses(batches: list[Batch]) -> list[Tensor]:
        given: dict[str, Any] = {"boundaries": {"above": "before"}, "microbatches": 2, "example_args": sized(0, 8)}
        run = fxpipe.compile(kind(), TWO, batch_dim={"texts": fxpipe.Packed(1)}, **{**given, **options})
        found = [loss for one in batches for loss in (run(*one), run.evaluate(*one, outputs="all"))]
        counts.append(len(made))
        return found

    model, counts = kind(), list[int]()
    batches = [sized(step + 1, rows) for step, rows in enumerate(SIZES)]
    halves = [[(x[:half], t[:half]), (x[half:], t[half:])] for x, t in batches for half in [len(x) // 2]]
    wanted = [torch.stack([model(*one).detach() / 2 for one in parts]).sum() for parts in halves]
    for more in [[]] if kind is Asking else [[], [sized(9, 12)]]:
        made.clear()
        runs = run_strict(lambda rank: losses([*batches, *more]), 2) if ranks == 2 else []  # noqa: B023
        for got in runs or [losses([*batches, *more])]:
            torch.testing.assert_close(got[: 2 * len(wanted)], [loss for loss in wanted for _ in range(2)])
    if kind is not Asking:
        assert counts[0] == counts[-1] > 0, "of a size that was met before, with other strings"


def test_the_tenth_capture_names_the_input_whose_strings_change(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Captioned, {"above": "before"}, steps=6, tracer="export")
    told = capsys.readouterr().err
    assert "10 captures by now: strings or numbers of Python's in 'texts' change" in told
    assert "pad batches" not in told
