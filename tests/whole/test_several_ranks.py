"""Stages on several ranks train as in plain PyTorch, whatever the model, the placement, the rows and their weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import PartitionError, RunError, Topology, stage_boundary
from tests.harness import Engine, accumulate, assert_same, cut, distributed, local, replica_of, rows_of, strict
from tests.pool import Pool
from tests.random_models import RandomModel, batch, staged
from tests.thinned import ALL

GRAPHS = 40 if ALL else 5
IN_PROCESSES = 12 if ALL else 2
STEPS = 3
FAMILIES = ["1f1b", "gpipe", "zb_h1", "greedy", "interleaved_1f1b"]


@dataclass(frozen=True)
class Draw:
    """A model, and where and how its stages run. ``light``: micro-batches that have no weight."""

    seed: int
    ranks: int
    placement: tuple[tuple[str, int | tuple[int, ...]], ...]
    microbatches: int
    family: str
    light: tuple[int, ...]
    data: int = 1
    zero: int = 0
    clip: float | None = None

    @property
    def topology(self) -> Topology:
        return Topology([("pipe", self.ranks), ("data", self.data)])

    def weight(self, x: Tensor, z: Tensor, y: Tensor) -> float:
        """Of a micro-batch, which its target's first number tells."""
        return 0.0 if int(y[0, 0]) in self.light else float(len(x))


def drawn(number: int, fewest_ranks: int = 2, **options: Any) -> Draw:
    for seed, stages in staged(number, fewest_ranks):
        draw = random.Random(seed)
        ranks = draw.randint(fewest_ranks, min(4, len(stages)))
        places: list[int | tuple[int, ...]] = [*range(ranks)]
        places += [draw.randrange(ranks) for _ in range(len(stages) - ranks)]
        draw.shuffle(places)
        for stage in stages:
            several = tuple(draw.sample(range(ranks), draw.randint(2, ranks)))
            if draw.random() < 0.6:
                places[stage.index] = several
        used = {rank for place in places for rank in ([place] if isinstance(place, int) else place)}
        if len(used) == ranks and any(isinstance(place, tuple) for place in places):
            m = draw.randint(1, 7)
            light = tuple(place for place in range(m) if draw.random() < 0.2)
            placement = tuple(zip(stages.names, places, strict=True))
            family = FAMILIES[number % len(FAMILIES)]
            return dataclasses.replace(Draw(seed, ranks, placement, m, family, light), **options)
    raise AssertionError("no model with stages in 1000")


def batches(draw: Draw, replica: int) -> list[dict[str, Tensor]]:
    """A batch for each step; in the targets, each micro-batch's number in its first place."""
    made = []
    for step in range(STEPS):
        given = {name: value.double() for name, value in batch(100 * replica + step).items()}
        for place, part in enumerate(given["y"].tensor_split(draw.microbatches)):
            if len(part):
                part[0, 0] = place
        made.append(given)
    return made


Trained = tuple[list[Tensor], dict[str, Tensor]]
"""The losses, and the parameters that a rank holds."""


def trained(draw: Draw) -> Trained:
    forward_backward = fxpipe.compile(
        RandomModel(draw.seed).double(),
        draw.topology,
        microbatches=draw.microbatches,
        placement=dict(draw.placement),
        schedule=draw.family,
        loss_weight=draw.weight,
        zero=draw.zero,
        bucket_cap_mb=0.0002 if draw.seed % 2 else 25.0,  # many buckets, or one of each kind
    )
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.01)
    losses = []
    for given in batches(draw, replica_of(draw.topology) if draw.data > 1 else 0):
        optimizer.zero_grad()
        losses.append(forward_backward(**given))
        if draw.clip is not None:
            forward_backward.clip_grad_norm_(draw.clip)
        optimizer.step()
    return losses, {name: parameter.detach().clone() for name, parameter in forward_backward.named_parameters()}


def plain(draw: Draw) -> Trained:
    model = RandomModel(draw.seed).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for given in zip(*(batches(draw, replica) for replica in range(draw.data)), strict=True):
        optimizer.zero_grad()
        parts = [part for one in given for part in cut(one, draw.microbatches)]
        parts = [part for part in parts if rows_of(part)]
        loss, _ = accumulate(lambda _, part: model(**part), parts, [draw.weight(**part) for part in parts])
        losses.append(loss)
        if draw.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), draw.clip)
        optimizer.step()
    return losses, dict(model.named_parameters())


def check(draw: Draw, engine: Engine) -> None:
    story = f"{RandomModel(draw.seed)}\n{draw}"
    if len(draw.light) == draw.microbatches:
        draw = dataclasses.replace(draw, light=())
    try:
        results: Sequence[Trained] = engine(draw.ranks * draw.data, trained, draw)
    except Exception as error:
        raise AssertionError(f"{error}\n{story}") from error
    wanted_losses, wanted = plain(draw)
    first: dict[str, Tensor] = {}
    for losses, held in results:
        for loss, known in zip(losses, wanted_losses, strict=True):
            assert_same(loss, known, f"the loss on\n{story}\n", 1e-6)
        for name, parameter in held.items():
            assert_same(parameter, wanted[name].detach(), f"{name} on\n{story}\n", 1e-6)
            assert torch.equal(first.setdefault(name, parameter), parameter), f"{name} differs on its ranks: {story}"
    assert first.keys() == wanted.keys(), story


@pytest.mark.parametrize("number", range(GRAPHS))
def test_random_models_train_as_in_plain_pytorch(number: int) -> None:
    draw = drawn(number)
    for engine in (local, strict(number)) if ALL or number % 2 else (strict(number),):
        check(draw, engine)
    check(dataclasses.replace(draw, data=2, zero=number % 3, clip=0.5), strict(number))


def test_two_runs_have_the_same_bits_whoever_goes_first() -> None:
    draw = dataclasses.replace(drawn(0), data=2, zero=1)
    one, other = (strict(seed)(2 * draw.ranks, trained, draw) for seed in (0, 7))
    for (losses, held), (same_losses, same) in zip(one, other, strict=True):
        assert all(map(torch.equal, losses, same_losses))
        assert all(torch.equal(parameter, same[name]) for name, parameter in held.items())


OPTIONS: Sequence[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "data": 2, "ranks": 2, "clip": 0.5},
    {"zero": 1, "data": 2, "ranks": 2, "clip": 0.5},
    {"zero": 0, "data": 2, "ranks": 2},
]


@pytest.mark.parametrize("number", range(IN_PROCESSES))
def test_random_models_train_as_in_plain_pytorch_in_four_processes(number: int, pool: Pool) -> None:
    options = dict(OPTIONS[number % len(OPTIONS)])
    if options.pop("ranks", 4) == 2:
        draw = next(draw for draw in map(drawn, range(100 * number + 100, 100 * number + 200)) if draw.ranks == 2)
    else:
        draw = drawn(100 * number + 100, fewest_ranks=4)
    check(dataclasses.replace(draw, **options), distributed(pool))


# --- what its ranks hold, and what they must not do ---


class TwoTowers(nn.Module):
    """``image`` → ``joined`` → ``head``; a norm of the user's in the first."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 4))
        self.joined, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = stage_boundary(self.image(x))
        return (self.head(stage_boundary(torch.tanh(self.joined(features)))) - y).square().mean()


ROWS = torch.ones(8, 4), torch.ones(8, 1)


def two_towers(norm: nn.Module | None = None, **options: Any) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    placement: dict[str, Any] = {"image": "all", "joined": 0, "head": 1}
    topology = Topology([("pipe", options.pop("ranks", 2))])
    model = TwoTowers(nn.Identity() if norm is None else norm)
    return fxpipe.compile(model, topology, **{"microbatches": 4, "placement": placement, **options})


def elements_of_state(zero: int) -> int:
    forward_backward = two_towers(zero=zero)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.1)
    forward_backward(*ROWS)
    optimizer.step()
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def test_zero_shards_the_optimizer_state_over_all_holders() -> None:
    image, others = (4 * 6 + 6) + (6 * 4 + 4), (4 * 4 + 4) + (4 + 1)
    whole = strict(0)(2, elements_of_state, 0)
    assert sum(whole) == 2 * image + others
    parts = strict(0)(2, elements_of_state, 1)
    assert sum(parts) == image + others
    assert all(part < total for part, total in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    ("norm", "options", "said"),
    [
        (nn.BatchNorm1d(6), {}, "'image' is on ranks 0, 1, and its forward writes image.1.num_batches"),
        (None, {"zero": 3}, "zero=3 shards what one rank holds; write zero=2"),
        (None, {"parallelize": lambda *_: None, "example_args": ROWS}, "parallelize= works on what one rank holds"),
        (None, {"placement": {"image": (0, 2), "joined": 0, "head": 1}}, r"uses ranks \[0, 1, 2\]; with 2 pipe ranks"),
        (None, {"placement": {"image": "all", "joined": 0, "head": 0}, "ranks": 3, "schedule": "zb_v"}, "zb_v"),
    ],
)
def test_what_its_ranks_could_not_keep_equal_is_refused(norm: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=said):
        strict(0)(options.get("ranks", 2), lambda: two_towers(norm, **options))


class Renormed(nn.Module):
    """Keeps a weight at length 1 in forward, as SwAV's prototypes, or in the rows that are looked up."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.rows = by_hand, nn.Embedding(6, 6, max_norm=None if by_hand else 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            with torch.no_grad():
                self.rows.weight.copy_(nn.functional.normalize(self.rows.weight, dim=-1))
            return x @ self.rows.weight
        return x + self.rows(x.argmax(-1))


@pytest.mark.parametrize(("by_hand", "tracer"), [(True, "export"), (False, "record")], ids=["by hand", "max_norm"])
def test_a_parameter_that_its_forward_writes_is_refused(by_hand: bool, tracer: str) -> None:
    with pytest.raises(PartitionError, match=r"is on ranks 0, 1, and its forward writes image\.1\.rows\.weight"):
        two_towers(Renormed(by_hand), example_args=ROWS, tracer=tracer)


class Annealed(nn.Module):
    """Counts its calls in Python and goes by the count, as the capacity of PyTorch-VAE's BetaVAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_iter = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_iter += 1
        return x * min(1.0, self.num_iter / 10)


def test_an_opaque_region_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"is on ranks 0, 1, and its forward writes image\.1\.num_iter"):
        two_towers(Annealed(), example_args=ROWS, boundaries={"image.1": "whole"})


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


def test_a_buffer_that_such_a_stage_writes_is_found_in_the_step() -> None:
    stages = {"image": nn.Sequential(nn.Linear(4, 4), Counting()), "loss": lambda x: x.square().mean()}
    graph = fxpipe.StageGraph.from_callables(stages, [("image", "loss")], {"image": ["x"]})
    placement: dict[str, Any] = {"image": "all", "loss": 1}
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=2, placement=placement)
    with pytest.raises(RunError, match=r"'image' is on ranks 0, 1, and its forward writes image\.1\.calls"):
        forward_backward(ROWS[0])


def test_a_frozen_batch_norm_only_reads() -> None:
    assert two_towers(nn.BatchNorm1d(6).eval())(*ROWS) > 0


# --- a last stage on several ranks ---


class Head(nn.Module):
    """Returns outputs, and a loss with metrics; ``counted``: as a ``Sum``."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted, self.body, self.head = counted, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        out = self.head(stage_boundary(torch.tanh(self.body(x))))
        wrong = (out - y).square().sum()
        loss: Any = fxpipe.Sum(wrong, y.numel()) if self.counted else wrong / y.numel()
        return {"loss": loss, "wrong": wrong.detach(), "out": out}


def steps_and_outputs(counted: bool, head: Any, microbatches: int) -> list[Any]:
    torch.manual_seed(0)
    topology, placement = Topology([("pipe", 3)]), {"body": (0, 1, 2), "head": head}
    forward_backward = fxpipe.compile(Head(counted), topology, microbatches=microbatches, placement=placement)
    found: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for rows in (12, 5):
        given = {"x": torch.randn(rows, 4, generator=generator), "y": torch.randn(rows, 2, generator=generator)}
        found += [forward_backward(**given), dict(forward_backward.metrics)]
        found += [forward_backward.evaluate(**given, outputs=outputs) for outputs in ("all", "loss", "last")]
    return found


@pytest.mark.parametrize(("counted", "microbatches"), [(False, 2), (True, 4)], ids=["mean", "sum"])
def test_losses_metrics_and_outputs_of_several_ranks_are_those_of_one(counted: bool, microbatches: int) -> None:
    one_each = strict(0)(3, steps_and_outputs, counted, 2, microbatches)
    for number, engine in enumerate((local, strict(1))):
        several = engine(3, steps_and_outputs, counted, (2, 0), microbatches)
        for rank, found in enumerate(several):
            for place, (got, wanted) in enumerate(zip(found, one_each[2], strict=True)):
                if number and place % 5 == 4 and rank == 1:
                    assert got is None  # "last": only the ranks of the last stage
                    continue
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
