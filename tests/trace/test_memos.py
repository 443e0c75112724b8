"""Memos: attributes that are None until the first forward sets them, as transformers' ``config.problem_type``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.harness import assert_same, gradients_of, strict
from tests.models import WIDTH, linear


class Config:
    """Settings that forward completes."""

    def __init__(self) -> None:
        self.kind: str | None = None


class Classifier(nn.Module):
    """Chooses its loss by the type of the first labels, and keeps the choice, in a config or in its own attribute."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.config, self.own = Config(), own
        self.kind: str | None = None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.second(fxpipe.stage_boundary(torch.tanh(self.first(x))))
        keeper: Any = self if self.own else self.config
        if keeper.kind is None:
            keeper.kind = "single" if labels.dtype is torch.long else "several"
        if keeper.kind == "single":
            return F.cross_entropy(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels)


def batch(seed: int = 0, several: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, WIDTH, generator=generator)
    return x, torch.rand(8, WIDTH, generator=generator) if several else torch.randint(WIDTH, (8,), generator=generator)


def compiled(model: nn.Module, tracer: str = "export", **options: Any) -> fxpipe.ForwardBackward:
    two = fxpipe.Topology([("pipe", 2)])
    return fxpipe.compile(model, two, microbatches=2, tracer=tracer, example_args=batch(), **options)


def plain_step(model: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    total = torch.zeros(())
    for part in zip(*(value.chunk(2) for value in given), strict=True):
        loss = model(*part) / 2
        loss.backward()
        total = total + loss.detach()
    return total, gradients_of(model.named_parameters())


def assert_step(run: fxpipe.ForwardBackward, plain: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    wanted, gradients = plain_step(plain, given)
    run.zero_grad()
    assert_same(run(*given), wanted, "loss")
    for name, gradient in gradients_of(run.named_parameters()).items():
        assert_same(gradient, gradients[name], name)


def pair(own: bool) -> tuple[Classifier, Classifier]:
    model, plain = Classifier(own), Classifier(own)
    plain.load_state_dict(model.state_dict())
    return model, plain


@pytest.mark.parametrize("own", [False, True])
def test_a_memo_is_set_as_the_first_forward_sets_it(own: bool) -> None:
    model, plain = pair(own)
    run = compiled(model)
    for seed in range(2):
        assert_step(run, plain, batch(seed))
    assert (model.kind, model.config.kind) == (plain.kind, plain.config.kind)
    assert "single" in (model.kind, model.config.kind)
    assert len(run.captures.entries) == 1


@pytest.mark.parametrize("own", [False, True])
def test_the_first_batchs_memo_decides_for_later_kinds_as_in_plain_pytorch(own: bool) -> None:
    model, plain = pair(own)
    run = compiled(model)
    for several in (False, True, False):  # cross_entropy takes probabilities, too
        assert_step(run, plain, batch(1, several))


@pytest.mark.parametrize("own", [False, True])
def test_another_value_of_a_memo_takes_another_capture(own: bool) -> None:
    model, plain = pair(own)
    run = compiled(model)
    assert_step(run, plain, batch())
    for each in (model, plain):
        (each if own else each.config).kind = None
    assert_step(run, plain, batch(2, several=True))
    assert f"Classifier.{'kind' if own else 'config'} has changed" in run.captures.entries[-1].why
    for each in (model, plain):
        (each if own else each.config).kind = "single"
    assert_step(run, plain, batch(3))
    assert len(run.captures.entries) == 2  # the first is valid again


def test_a_preview_leaves_a_memo_as_it_is() -> None:
    model = Classifier()
    fxpipe.preview(model, fxpipe.Topology([("pipe", 2)]), tracer="export", example_args=batch())
    assert model.config.kind is None


class Counter(Classifier):
    """A memo that the second call changes."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.config.kind = "once" if self.config.kind is None else "twice"
        return F.cross_entropy(self.second(fxpipe.stage_boundary(self.first(x))), labels)


class First(Classifier):
    """Computes something else in its first call."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind, x = "called", 2 * x
        return F.cross_entropy(self.second(fxpipe.stage_boundary(self.first(x))), labels)


class OfASize(Classifier):
    """Keeps the number of rows of each batch."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.config.kind = f"{len(x)} rows"
        return F.cross_entropy(self.second(fxpipe.stage_boundary(self.first(x))), labels)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counter, "forward changes Counter.config, which would happen once"),
        (First, "forward sets kind in its first call, and does something else in its second call"),
    ],
)
def test_what_the_second_call_does_otherwise_is_refused(kind: type[Classifier], message: str) -> None:
    with pytest.raises(fxpipe.TraceError, match=message):
        compiled(kind())


def test_an_attribute_that_a_later_batch_changes_is_refused_then() -> None:
    run = compiled(OfASize())
    run(*batch())
    with pytest.raises(fxpipe.TraceError, match=r"forward changes OfASize\.config, which would happen once"):
        run(*(value[:6] for value in batch()))


def on_rank(state: dict[str, Tensor]) -> tuple[list[Tensor], str | None]:
    model = Classifier()
    model.load_state_dict(state)
    run = compiled(model, "auto")
    return [run(*batch(seed, several)) for seed, several in ((0, False), (1, True))], model.config.kind


def test_each_rank_sets_the_memo_in_its_own_model() -> None:
    plain = Classifier()
    ranks = strict(1)(2, on_rank, plain.state_dict())
    wanted = [plain_step(plain, batch(seed, several))[0] for seed, several in ((0, False), (1, True))]
    for losses, kind in ranks:
        assert kind == "single"
        for loss, right in zip(losses, wanted, strict=True):
            assert_same(loss, right, "loss")
