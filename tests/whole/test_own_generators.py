"""Models that draw from random generators of their own: NumPy's, Python's or torch's, held by attributes or globals."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import PartitionError, Topology, TraceError
from fxpipe.seeds import state_of
from tests.harness import Engines, assert_run, assert_trains, compiled, stepped, trained
from tests.models import WIDTH, Case, linear, vectors
from tests.pool import Pool
from tests.thinned import in_turn

GLOBAL = np.random.default_rng(5)
KINDS = {
    "Generator": lambda: np.random.default_rng(5).random,
    "RandomState": lambda: np.random.RandomState(5).rand,
    "Random": lambda: random.Random(5).uniform,
    "torch": lambda: torch.Generator().manual_seed(5),
    "closure": lambda: closed_over(random.Random(5)),
    "builtin": lambda: random.Random(5).random,
    "object": lambda: Draws(random.Random(5)),
    "class": lambda: Draws.of_class(random.Random(5)),
}


def closed_over(generator: random.Random) -> Any:
    return lambda: generator.random()


class Draws:
    """An object whose method reads a global: the generator, or a class that holds it."""

    generator: random.Random

    def __init__(self, generator: random.Random) -> None:
        globals()["CURRENT"] = generator

    def __call__(self) -> float:
        return CURRENT.random()  # type: ignore[name-defined,no-any-return]  # noqa: F821

    @staticmethod
    def of_class(generator: random.Random) -> Any:
        Draws.generator = generator
        return lambda: Draws.generator.random()


class Guided(nn.Module):
    """Drops the condition of half of its calls, as models do that are trained for classifier-free guidance."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.null, self.inner, self.draw = nn.Parameter(torch.ones(WIDTH)), linear(), draw

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.draw, torch.Generator):
            drops = torch.rand(len(x), 1, generator=self.draw) < 0.5
            return self.inner(torch.where(drops, self.null, x))  # type: ignore[no-any-return]
        number = self.draw(0, 1) if getattr(self.draw, "__name__", "") == "uniform" else self.draw()
        return self.inner(self.null.expand_as(x) if number < 0.5 else x)  # type: ignore[no-any-return]


class Guiding(nn.Module):
    """``parts``: which of its two parts draw, from one generator."""

    def __init__(self, kind: str, parts: int = 1) -> None:
        super().__init__()
        draw = KINDS[kind]()
        self.first, self.second, self.head = linear(), Guided(draw), Guided(draw) if parts == 2 else linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.second(self.first(x)), name="head")
        return (self.head(h) - y).square().mean()


ONE = Case(partial(Guiding, "Generator"), vectors, stages=2, ranks=2, rows=8)
TWO = replace(ONE, build=partial(Guiding, "Generator", 2))
BATCH: Any = {"example_kwargs": ONE.batch()}


@pytest.mark.parametrize(
    ("kind", "options"),
    in_turn(list(KINDS), [{"tracer": "record", "recompute": True}, {"schedule": "zb_h1"}]),
)
def test_where_one_stage_draws_all_the_draws_are_those_of_plain_pytorch(kind: str, options: Any) -> None:
    assert_trains(replace(ONE, build=partial(Guiding, kind)), batches=ONE.batches(4), **BATCH, **options)


def test_on_two_ranks_they_are_too(pool: Pool) -> None:
    options: dict[str, Any] = {"recompute": True, "schedule": "zb_h1", **BATCH}
    engine: Any = lambda ranks, fn, *args: pool.run(fn, *args, ranks=ranks)  # noqa: E731
    assert_trains(ONE, engine, ONE.batches(4), **options)


def test_where_two_stages_draw_neither_schedule_nor_placement_changes_the_draws(engines: Engines) -> None:
    wanted = trained(TWO, TWO.batches(3), **BATCH)
    others: list[dict[str, Any]] = [{"schedule": "gpipe", "recompute": True}, {"schedule": "zb_h1", "tracer": "record"}]
    for engine, options in zip(["distributed", "strict 1"], others, strict=True):
        assert_run(engines(engine)(2, partial(trained, TWO, TWO.batches(3), **BATCH, **options)), wanted)


def test_a_generator_that_replaces_another_is_seeded_in_the_stages_behind_the_first_too() -> None:
    losses, options = [], list[dict[str, Any]]([{}, {"schedule": "gpipe", "recompute": True}])
    for each in options:
        model: Any = TWO.model()
        forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=4, **each, **BATCH)
        model.second.draw = model.head.draw = np.random.default_rng(9).random
        losses.append([float(forward_backward(**ONE.batch(number))) for number in range(3)])
    assert losses[0] == losses[1]


def test_the_stages_behind_the_first_draw_as_often_as_they_ought_to() -> None:
    """400 fair draws in a stage are within 5 standard deviations, 50, of 200."""
    model: Any = Guiding("Random", 2)
    dropped = {model.second.inner: 0, model.head.inner: 0}

    def count(module: Any, args: Any) -> None:
        dropped[module] += bool((args[0] == 1).all())

    for part in dropped:
        part.register_forward_pre_hook(count)
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=8, **BATCH)
    before = dict(dropped)
    for number in range(50):
        forward_backward(**ONE.batch(number))
    assert all(150 < dropped[part] - before[part] < 250 for part in dropped)


def test_compile_and_evaluate_draw_no_more_than_plain_pytorch_does() -> None:
    case, batch = ONE, ONE.batch()
    model: Any = case.model()
    generator, fresh = model.second.draw.__self__, np.random.default_rng(5)
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), microbatches=4, **BATCH)
    assert state_of(generator) == state_of(fresh)
    forward_backward.evaluate(**batch)
    fresh.random(4)  # a call for each micro-batch, as it also draws in evaluation
    assert state_of(generator) == state_of(fresh)


def saved(folder: Path) -> list[float]:
    """The losses behind a checkpoint that is made after two steps."""
    forward_backward = compiled(TWO, **BATCH)
    stepped(forward_backward, TWO, TWO.batches(2))
    fxpipe.save(folder, forward_backward, forward_backward.optimizer(torch.optim.SGD, lr=0.1), step=2)
    return [float(loss) for loss in stepped(forward_backward, TWO, TWO.batches(4)).losses]


def resumed(folder: Path) -> list[float]:
    forward_backward = compiled(TWO, **BATCH)
    fxpipe.load(folder, forward_backward, forward_backward.optimizer(torch.optim.SGD, lr=0.1))
    return [float(loss) for loss in stepped(forward_backward, TWO, TWO.batches(4)).losses]


def test_a_resumed_run_draws_on_where_it_was_saved(pool: Pool, tmp_path: Path) -> None:
    """On the ranks of the saved run, and in one process."""
    wanted = pool.run(saved, tmp_path, ranks=2)
    assert pool.run(resumed, tmp_path, ranks=2) == wanted
    assert resumed(tmp_path) == wanted[0]


class Between(nn.Module):
    """Draws in the forward that holds the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.generator = linear(), linear(), random.Random(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x) * GLOBAL.random() * self.generator.random()
        return (self.head(fxpipe.stage_boundary(h)) - y).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record", "auto"])
def test_a_draw_beside_a_boundary_is_refused(tracer: Any) -> None:
    with pytest.raises(TraceError, match=r"random numbers are drawn(.*\n)*.*test_own_generators\.py"):
        compiled(replace(ONE, build=Between), tracer=tracer, **BATCH)


def test_a_stage_on_two_ranks_may_not_draw() -> None:
    three = Topology([("pipe", 3)])
    with pytest.raises(PartitionError, match=r"its forward writes the random generator own 0: second\.draw"):
        compiled(ONE, topology=three, placement={"second": [0, 1], "head": 2}, **BATCH)


def test_stages_that_the_user_gives_draw_on_in_the_first_that_can() -> None:
    model: Any = Guiding("Generator")
    plain: Any = Guiding("Generator")
    plain.load_state_dict(model.state_dict())
    stages = {"second": model.second, "loss": lambda h: h.square().mean()}
    graph = fxpipe.StageGraph.from_callables(stages, [("second", "loss")], {"second": ["x"]})
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=1)
    for number in range(4):
        x = ONE.batch(number)["x"]
        assert torch.equal(forward_backward(x), plain.second(x).square().mean().detach())
