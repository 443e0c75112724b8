"""Random numbers of opaque regions: torch's, Python's and NumPy's follow from step, stage and micro-batch alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.harness import Run, accumulate, assert_run, assert_same, compiled, cut, gradients_of, strict, trained
from tests.models import WIDTH, Case, linear, vectors


class Masks(nn.Module):
    """Drops and scales by random numbers of all kinds, as SpecAugment and layerdrop do."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.inner, self.own = linear(), (np.random.default_rng(3), random.Random(4)) if own else None
        self.generators = [*self.own] if self.own is not None else []

    def forward(self, x: Tensor) -> Tensor:
        numpy, python = self.generators or (np.random, random)
        kept = torch.from_numpy(numpy.permutation(WIDTH) > 1)
        return F.dropout(self.inner(x) * kept, 0.3) * (2 if python.random() < 0.5 else 1)


class Masked(nn.Module):
    """A region amid a model, and one that is a method and has what it draws from with the model."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.before, self.region, self.head = linear(), Masks(own), linear()
        self.numpy = np.random.default_rng(5) if own else None

    def noise(self, x: Tensor) -> Tensor:
        drawn = np.random.randn(WIDTH) if self.numpy is None else self.numpy.standard_normal(WIDTH)
        return x + torch.from_numpy(drawn).float()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.noise(self.noise(self.region(self.before(x))))) - y).square().mean()


MASKED = Case(Masked, vectors, stages=3, ranks=3)
RULES: Any = {"region": "whole", "reg[i]on": "before", "noise": "whole", "head": "before"}
BATCHES = [MASKED.batch(number) for number in range(2)]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def plain() -> Run:
    """Plain PyTorch; ahead of each micro-batch all are seeded as in the stage that draws."""
    seed = compiled(MASKED, boundaries=RULES, tracer="symbolic", example_kwargs=BATCHES[0]).seed
    model, run = MASKED.model(), Run()
    optimizer = MASKED.optimizer(model.parameters(), **MASKED.optimizer_options)
    for step, batch in enumerate(BATCHES):
        optimizer.zero_grad()

        def call(place: int, part: Any, step: int = step) -> Any:
            seed_all(seed(1, place, step))
            return model(**part)

        loss, metrics = accumulate(call, cut(batch, MASKED.microbatches))
        run.losses.append(loss)
        run.metrics.append(metrics)
        run.gradients.append(gradients_of(model.named_parameters()))
        optimizer.step()
    run.state = model.state_dict()
    return run


def in_stages(**options: Any) -> Run:
    return trained(MASKED, BATCHES, boundaries=RULES, example_kwargs=BATCHES[0], **options)


@pytest.mark.parametrize(
    "options", [{"schedule": "gpipe"}, {"recompute": True}, {"schedule": "zb_h1"}, {"tracer": "record"}]
)
def test_pythons_and_numpys_numbers_are_seeded_as_torchs_are(options: dict[str, Any]) -> None:
    assert_run([in_stages(**{"tracer": "export", "check_capture": True} | options)], plain(), 1e-6)


def test_ranks_that_have_drawn_more_of_their_own_draw_the_same() -> None:
    wanted = plain()
    assert_run(strict(1)(3, in_stages), wanted)


def test_behind_a_step_the_users_own_numbers_go_on() -> None:
    forward_backward = compiled(MASKED, boundaries=RULES, example_kwargs=BATCHES[0])
    seed_all(7)
    wanted = random.random(), random.gauss(0, 1), np.random.randn(3).tolist()
    seed_all(7)
    forward_backward(**BATCHES[0])
    assert (random.random(), random.gauss(0, 1), np.random.randn(3).tolist()) == wanted


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_generators_of_its_own_draw_the_same_when_it_is_recomputed(tracer: str) -> None:
    """They are put back ahead of the second run, and behind it."""
    own = Case(lambda: Masked(own=True), vectors, stages=3, ranks=3)
    options: Any = {"boundaries": RULES, "example_kwargs": BATCHES[0], "tracer": tracer}
    wanted, run = (trained(own, BATCHES, recompute=again, **options) for again in (False, True))
    for step, gradients in enumerate(wanted.gradients):
        assert_same(run.losses[step], wanted.losses[step], "loss")
        for name, gradient in gradients.items():
            assert_same(run.gradients[step][name], gradient, name)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random() + np.random.rand()


def test_stages_that_the_user_gives_are_seeded_likewise() -> None:
    noisy, x = Noisy(2, 2), torch.ones(2, 2)
    stages: dict[str, Any] = {"noisy": noisy, "loss": lambda h: h.square().mean()}
    graph = fxpipe.StageGraph.from_callables(stages, [("noisy", "loss")], {"noisy": ["x"]})
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=1)
    for step in range(2):
        loss = forward_backward(x)
        seed_all(forward_backward.seed("noisy", 0, step))
        assert_same(loss, noisy(x).square().mean().detach(), "loss")
