"""Opaque regions whose inputs have another length each time: a few captures hold for all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.plan.capture import auto_opaque
from tests.harness import assert_same, compiled, engine_of, gradients_of, strict
from tests.models import WIDTH, Case, linear
from tests.thinned import every


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
    capture = auto_opaque.capture
    monkeypatch.setattr(auto_opaque, "capture", lambda *args: made.append(args) or capture(*args))
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


class Splits(nn.Module):
    """Patches in, a list of images out, as Qwen's vision tower returns them: list(torch.split(...))."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.inner = kind, linear()

    def forward(self, patches: Tensor, counts: Tensor) -> dict[str, Any]:
        h = self.inner(patches)
        return {"all": h.mean(), "images": self.kind(torch.split(h, counts.tolist()))}


class Images(nn.Module):
    """``how``: what is done with the list. A pair that another region returns is unpacked."""

    def __init__(self, how: str, kind: type) -> None:
        super().__init__()
        self.how, self.region, self.head = how, Splits(kind), linear()

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return (h, h / 2) if h.sum().item() > 0 else (h, -h)

    def forward(self, patches: Tensor, counts: Tensor, y: Tensor) -> Tensor:
        images = self.region(patches, counts)["images"]
        h = torch.cat(images, dim=-2) if self.how == "cat" else torch.stack([one.mean(0) for one in images])
        one, other = self.halves(self.head(h))
        return one.square().mean() + other.mean() + y.square().mean()


SPLIT: Any = {"region": "whole", "halves": "whole", "head": "before"}
PACKED = {
    "counts": fxpipe.Packed(lambda y: y[:, 0].long()),
    "patches": fxpipe.Packed(lambda counts: counts, of="counts"),
}
STEPS = [[2, 1, 1, 3], [1, 1, 2, 2], [3, 2, 4, 2], [1, 3, 1, 4], [2, 2, 5, 1]]
"""How many images each row has."""


def rows_of_images(images: list[int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(sum(images))
    counts, y = torch.randint(1, 5, (sum(images),), generator=g), torch.ones(len(images), WIDTH)
    y[:, 0] = torch.tensor(images)
    return {"patches": torch.randn(int(counts.sum()), WIDTH, generator=g), "counts": counts, "y": y}


def images_of(how: str, kind: type) -> Case:
    return Case(lambda: Images(how, kind), lambda rows, g: rows_of_images(STEPS[0]), ranks=2, microbatches=2)


def split_steps(how: str, kind: type, tracer: str) -> list[tuple[Tensor, dict[str, Any], Tensor]]:
    case = images_of(how, kind)
    step = compiled(case, boundaries=SPLIT, batch_dim=PACKED, tracer=tracer, example_kwargs=rows_of_images(STEPS[0]))
    ran = []
    for images in STEPS:
        step.zero_grad()
        loss = step(**rows_of_images(images))
        ran.append(
            (loss, gradients_of(step.named_parameters()), step.evaluate(**rows_of_images(images), outputs="all"))
        )
    return ran


def split_plainly(how: str, kind: type, images: list[int]) -> tuple[Tensor, dict[str, Any]]:
    model, batch, loss = images_of(how, kind).model(), rows_of_images(images), torch.zeros(())
    counts = batch["counts"].split([sum(images[:2]), sum(images[2:])])
    patches = batch["patches"].split([int(one.sum()) for one in counts])
    for place in range(2):
        part = model(patches[place], counts[place], batch["y"][2 * place : 2 * place + 2]) / 2
        part.backward()
        loss += part.detach()
    return loss, gradients_of(model.named_parameters())


@pytest.mark.parametrize(
    ("how", "kind", "tracer", "engine"),
    every(
        2,
        [
            ("cat", list, "export", "local"),
            ("each", list, "export", "distributed"),
            ("cat", tuple, "export", "distributed"),
            ("each", tuple, "export", "local"),
            ("cat", tuple, "symbolic", "local"),
        ],
    ),
)
def test_a_list_has_another_number_of_tensors_each_time(
    how: str, kind: type, tracer: str, engine: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    for ran in engine_of(engine, lambda: request.getfixturevalue("pool"))(2, split_steps, how, kind, tracer):
        for images, (loss, gradients, evaluated) in zip(STEPS, ran, strict=True):
            wanted, wanted_gradients = split_plainly(how, kind, images)
            assert_same(loss, wanted, "loss")
            assert_same(evaluated, wanted, "evaluated", 1e-6)
            for name, gradient in gradients.items():
                assert_same(gradient, wanted_gradients[name], name)
    looks = capfd.readouterr().err.count("forward looks at entries of a list that region returns")
    assert engine != "local" or (looks > 0) == (how == "each")


@pytest.mark.parametrize(("how", "most"), [("cat", 3), ("each", 10)])
def test_a_list_that_is_concatenated_takes_no_capture_for_each_length(
    how: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    capture = auto_opaque.capture
    monkeypatch.setattr(auto_opaque, "capture", lambda *args: made.append(args) or capture(*args))
    case = images_of(how, list)
    step = compiled(case, boundaries=SPLIT, batch_dim=PACKED, tracer="export", example_kwargs=rows_of_images(STEPS[0]))
    for images in STEPS * 2:
        step(**rows_of_images(images))
    assert len(made) <= most
