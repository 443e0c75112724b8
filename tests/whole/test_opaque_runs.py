"""Opaque regions with other lengths each time, random numbers, sharded weights, evaluation, and gathered rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.harness import (
    Engines,
    Run,
    Steps,
    accumulate,
    assert_gradients,
    assert_run,
    assert_same,
    assert_steps,
    assert_trains,
    compiled,
    cut,
    distributed,
    gradients_of,
    steps_of,
    strict,
    trained,
)
from tests.models import WIDTH, Case, Layers, linear, vectors
from tests.pool import Pool
from tests.thinned import in_turn

# --- lengths: a few captures hold for all ---


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


LONG = Case(Long, lambda rows, g: batch_of(7, g), stages=3, ranks=3, rows=6, microbatches=2)
LONG_RULES: Any = {"region": "whole", "reg[i]on": "before", "behind": "before"}


def batch_of(length: int, g: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(6, length, WIDTH, generator=g) for name in ("x", "y")}


def test_many_lengths_into_a_region_take_three_captures(captured: list[Any]) -> None:
    generator, lengths = torch.Generator().manual_seed(0), random.Random(0)
    batches = [batch_of(lengths.randint(2, 64), generator) for _ in range(20)]
    forward_backward = compiled(LONG, boundaries=LONG_RULES, tracer="export", example_kwargs=LONG.batch())
    assert_steps([steps_of(forward_backward, batches)], LONG.model(), batches, 2)
    assert len(captured) in (2, 3)


class Splits(nn.Module):
    """Patches in, a list of images out, as Qwen's vision tower returns them: list(torch.split(...))."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.inner = kind, linear()

    def forward(self, patches: Tensor, counts: Tensor) -> dict[str, Any]:
        h = self.inner(patches)
        return {"all": h.mean(), "images": self.kind(torch.split(h, counts.tolist()))}


class Images(nn.Module):
    """``how``: what is done with the list. A pair that another region returns is unpacked,
    as ``cos, sin`` of transformers' ``Phi3RotaryEmbedding``."""

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
IMAGES_OF = [[2, 1, 1, 3], [3, 1, 1, 1]]
"""How many images each row has."""


def rows_of_images(images: list[int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(sum(images))
    counts, y = torch.randint(1, 5, (sum(images),), generator=g), torch.ones(len(images), WIDTH)
    y[:, 0] = torch.tensor(images)
    return {"patches": torch.randn(int(counts.sum()), WIDTH, generator=g), "counts": counts, "y": y}


def images_of(how: str, kind: type) -> Case:
    return Case(lambda: Images(how, kind), lambda rows, g: rows_of_images(IMAGES_OF[0]), ranks=2, microbatches=2)


def split_steps(how: str, kind: type, tracer: str) -> Steps:
    case, batches = images_of(how, kind), list(map(rows_of_images, IMAGES_OF))
    step = compiled(case, boundaries=SPLIT, batch_dim=PACKED, tracer=tracer, example_kwargs=batches[0])
    found = steps_of(step, batches)
    for batch, (loss, _) in zip(batches, found, strict=True):
        assert_same(step.evaluate(**batch, outputs="all"), loss, "evaluated", 1e-6)
    return found


@pytest.mark.parametrize(
    ("how", "kind", "tracer", "engine", "most"),
    [
        ("cat", list, "export", "local", 3),
        ("each", list, "export", "local", 5),
        ("cat", tuple, "symbolic", "distributed", 0),
    ],
)
def test_a_list_has_another_number_of_tensors_each_time(
    how: str,
    kind: type,
    tracer: str,
    engine: str,
    most: int,
    engines: Engines,
    captured: list[Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where it is concatenated, no capture is needed for each number. ``most``: captures in this process."""
    runs, model = engines(engine)(2, split_steps, how, kind, tracer), images_of(how, kind).model()
    for step, batch in enumerate(map(rows_of_images, IMAGES_OF)):
        model.zero_grad()
        first = int(batch["y"][:2, 0].sum())
        counts = batch["counts"].split([first, len(batch["counts"]) - first])
        patches = batch["patches"].split([int(one.sum()) for one in counts])
        parts = list(zip(patches, counts, batch["y"].chunk(2), strict=True))
        wanted, _ = accumulate(lambda place, _, parts=parts: model(*parts[place]), cut({"y": batch["y"]}, 2))  # type: ignore[misc]
        for loss, gradients in (run[step] for run in runs):
            assert_same(loss, wanted, "loss")
            assert_gradients(gradients, model)
    assert len(captured) <= most
    looks = capfd.readouterr().err.count("forward looks at entries of a list that region returns")
    assert engine != "local" or (looks > 0) == (how == "each")


# --- random numbers: torch's, Python's and NumPy's follow from step, stage and micro-batch alone ---


class Masks(nn.Module):
    """Drops and scales by random numbers of all kinds, as SpecAugment and layerdrop do."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.inner, self.own = linear(), (np.random.default_rng(3), random.Random(4)) if own else None
        self.generators = [*self.own] if self.own is not None else []

    def forward(self, x: Tensor) -> Tensor:
        numpy, python = self.generators or (np.random, random)
        kept = torch.from_numpy(numpy.permutation(WIDTH) > 1).to(x.device)
        return F.dropout(self.inner(x) * kept, 0.3) * (2 if python.random() < 0.5 else 1)


class Masked(nn.Module):
    """A region amid a model, and one that is a method and has what it draws from with the model."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.before, self.region, self.head = linear(), Masks(own), linear()
        self.numpy = np.random.default_rng(5) if own else None

    def noise(self, x: Tensor) -> Tensor:
        drawn = np.random.randn(WIDTH) if self.numpy is None else self.numpy.standard_normal(WIDTH)
        return x + torch.from_numpy(drawn).to(x)

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

        run.losses.append(accumulate(call, cut(batch, MASKED.microbatches))[0])
        run.metrics.append({})
        run.gradients.append(gradients_of(model.named_parameters()))
        optimizer.step()
    run.state = model.state_dict()
    return run


def in_stages(**options: Any) -> Run:
    return trained(MASKED, BATCHES, boundaries=RULES, example_kwargs=BATCHES[0], **options)


@pytest.mark.parametrize("options", [{"recompute": True}, {"schedule": "zb_h1"}, {"tracer": "record"}])
def test_pythons_and_numpys_numbers_are_seeded_as_torchs_are(options: dict[str, Any]) -> None:
    assert_run([in_stages(**{"tracer": "export"} | options)], plain(), 1e-6)


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


def test_generators_of_its_own_draw_the_same_when_it_is_recomputed() -> None:
    """They are put back ahead of the second run, and behind it."""
    own = Case(lambda: Masked(own=True), vectors, stages=3, ranks=3)
    options: Any = {"boundaries": RULES, "example_kwargs": BATCHES[0], "tracer": "record"}
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


# --- zero=3 on a data axis ---


class Chooses(nn.Module):
    """Which layers it uses depends on values, and is not the same on all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gain = linear(), linear(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kept = x[[place for place, row in enumerate(x) if row.sum().item() > -3]]
        return self.second(kept) * self.gain if kept.sum().item() > 0 else self.first(kept)


class Sharded(nn.Module):
    """A region; a method that uses a parameter of the model and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.used, self.head = linear(), Chooses(), linear(), linear()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def scaled(self, x: Tensor) -> Tensor:
        return self.used(x) if x.mean().item() > 0.02 else x * self.scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.scaled(self.region(self.before(x)))).square().mean() + y.mean()


SHARDED = Case(Sharded, vectors, stages=3, rows=9, microbatches=3, tolerance=1e-5)
SHARDED_RULES: Any = {"region": "whole", "scaled": "whole", "reg[i]on": "before", "head": "before"}


def sharded_batch(step: int, replica: int) -> dict[str, Tensor]:
    """More rows in the last step, for which it is captured anew."""
    batch = SHARDED.batch(7 * step + replica, rows=SHARDED.rows + 3 * (step == 2))
    return {**batch, "x": batch["x"] + (1 - 2 * replica)}


@pytest.mark.parametrize(("tracer", "recompute"), [("export", False), ("symbolic", True)])
def test_its_parameters_are_gathered_and_reduced_whatever_branches_replicas_take(
    pool: Pool, tracer: str, recompute: bool
) -> None:
    """What a replica has not used counts as zeros; how often a collective runs goes by the table alone."""
    batches = [tuple(sharded_batch(step, replica) for replica in (0, 1)) for step in range(3)]
    options = {"tracer": tracer, "recompute": recompute, "boundaries": SHARDED_RULES, "example_kwargs": batches[0][0]}
    topology, placement = Topology([("pipe", 2), ("data", 2)]), {"before": 0, "region": 1, "head": 0}
    assert_trains(SHARDED, distributed(pool), batches, topology=topology, placement=placement, zero=3, **options)


# --- in evaluation ---


class Judges(Layers):
    """A loss in training; in evaluation what a region makes of the prediction, as a detector's boxes."""

    names = "inner head"

    def boxes(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"box": row * (2 if row.sum().item() > 0 else 3)} for row in x.unbind()]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        found = self.head(torch.relu(self.inner(x)))
        return (found - y).square().mean() if self.training else self.boxes(found)


REGION: Any = {"region": "whole", "head": "before"}
TWO: Any = {"stages": 2, "ranks": 2, "microbatches": 2}
JUDGES = Case(Judges, vectors, **TWO)


def _judged() -> Any:
    forward_backward = compiled(JUDGES, boundaries={"boxes": "whole", "head": "before"}, example_kwargs=JUDGES.batch())
    forward_backward(**JUDGES.batch())
    return forward_backward.evaluate(**JUDGES.batch(), outputs="all")


def test_a_region_may_be_called_in_evaluation_alone(pool: Pool) -> None:
    wanted = JUDGES.model().eval()(**JUDGES.batch())
    for found in pool.run(_judged, ranks=2):
        for got, one in zip(found, wanted, strict=True):
            assert_same(got["box"], one["box"], "box", 1e-6)


class WithAuxiliary(Layers):
    """Its region returns a loss of its own in training, and None in evaluation."""

    names = "inner head"

    def region(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.inner(x) if x.sum().item() > -1e9 else x
        return h, h.mean() if self.training else None

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h, loss = self.region(x)
        out = self.head(h)
        error = (out - y).square().mean()
        return {"loss": error if loss is None else error + loss, "out": out}


def test_a_region_may_return_another_thing_in_evaluation() -> None:
    case = Case(WithAuxiliary, vectors, rows=8, **TWO)
    model, batch = case.model(), case.batch()
    forward_backward = compiled(case, boundaries=REGION, tracer="export", example_kwargs=batch)
    forward_backward(**batch)
    assert_same(forward_backward.evaluate(**batch)["out"], model.eval()(**batch)["out"].detach(), "out", 1e-6)
    forward_backward(**batch)


# --- a loss over the whole batch behind a region ---


class Contrasts(nn.Module):
    """Two towers, of which one looks at numbers, unless it ``runs_on_shapes``; and a loss over all rows."""

    def __init__(self, runs_on_shapes: bool = False) -> None:
        super().__init__()
        self.tower, self.other, self.runs_on_shapes = linear(), linear(), runs_on_shapes

    def region(self, x: Tensor) -> Tensor:
        return self.tower(x * 2 if self.runs_on_shapes or x.sum().item() < 1e9 else x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        v, t = fxpipe.stage_boundary((self.region(x), self.other(y)), name="loss", gather="batch")
        return nn.functional.cross_entropy(v @ t.T, torch.arange(v.shape[0]))


@pytest.mark.parametrize(
    ("tracer", "runs_on_shapes", "found"),
    [("record", False, "record"), ("auto", False, "symbolic"), ("auto", True, "symbolic")],
)
def test_a_stage_gathers_what_comes_out_of_a_region(tracer: str, runs_on_shapes: bool, found: str) -> None:
    case = Case(lambda: Contrasts(runs_on_shapes), vectors, stages=3, ranks=3, rows=WIDTH + 2, microbatches=4)
    batch, model = case.batch(1), case.model()
    options: Any = {"boundaries": {"region": "whole"}, "tracer": tracer, "example_kwargs": case.batch()}
    forward_backward = compiled(case, **options)
    assert f"captured by the {found} tracer" in str(forward_backward.stages)
    loss = model(**batch)
    loss.backward()
    assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-6)
    for name, parameter in forward_backward.named_parameters():
        assert torch.allclose(parameter.grad, model.get_parameter(name).grad, atol=1e-6), name


# --- gradients that are needed at times ---


class Sometimes(Layers):
    """As a text model that sees images: zeros, which need no gradient, where there is nothing to see."""

    names = "before see behind head"

    def region(self, x: Tensor) -> Tensor:
        return self.see(x) if float(x.sum()) > 0 else torch.zeros(x.shape)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.region(x)
        return self.head(self.behind(seen + self.before(y))).square().mean()


SOMETIMES: Any = {"region": "whole", "before": "after", "behind": "before", "head": "before"}
TRACERS = ["symbolic", "export", "record"]
NOTHING, SEEN = ({"x": torch.full((4, WIDTH), number), "y": torch.ones(4, WIDTH)} for number in (-1.0, 1.0))


def assert_sometimes(build: Callable[[], nn.Module], batches: Sequence[Any], tracer: str) -> None:
    """As in plain PyTorch, captured with the first batch."""
    case = Case(build, vectors, stages=4, ranks=4, rows=4, microbatches=2)
    options: Any = {"boundaries": SOMETIMES, "tracer": tracer, "example_kwargs": batches[0]}
    assert_trains(case, strict(1), batches, **options)


@pytest.mark.parametrize(
    ("tracer", "order"),
    in_turn(TRACERS, [(NOTHING, SEEN), (SEEN, NOTHING)]),
    ids=lambda value: str(value)[:8],
)
def test_what_a_region_returns_needs_a_gradient_in_some_steps_only(order: Any, tracer: str) -> None:
    assert_sometimes(Sometimes, order, tracer)


def test_what_needs_a_gradient_at_times_goes_through_a_frozen_stage() -> None:
    def build() -> nn.Module:
        model = Sometimes()
        model.behind.requires_grad_(False)
        model.before.requires_grad_(False)
        return model

    both = {name: torch.cat([NOTHING[name][:2], SEEN[name][:2]]) for name in SEEN}
    assert_sometimes(build, (SEEN, both, NOTHING), "record")
