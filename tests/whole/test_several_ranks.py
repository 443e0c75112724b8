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
from fxpipe import PartitionError, Topology
from tests.harness import Engine, accumulate, assert_same, cut, distributed, local, replica_of, rows_of, strict
from tests.pool import Pool
from tests.random_models import RandomModel, batch
from tests.thinned import ALL

GRAPHS = 40 if ALL else 8
IN_PROCESSES = 12 if ALL else 3
STEPS = 5
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
    for seed in range(1000 * number, 1000 * number + 1000):
        draw, model = random.Random(seed), RandomModel(seed)
        if not model(**batch(0)).requires_grad:
            continue  # everything is detached
        try:
            stages = fxpipe.compile(model, Topology([("pipe", 1)])).stages
        except PartitionError:
            continue
        if len(stages) < fewest_ranks:
            continue
        ranks = draw.randint(fewest_ranks, min(4, len(stages)))
        alone = [*range(ranks), *(draw.randrange(ranks) for _ in range(len(stages) - ranks))]
        draw.shuffle(alone)
        places: list[int | tuple[int, ...]] = list(alone)
        for stage in stages:
            several = tuple(draw.sample(range(ranks), draw.randint(2, ranks)))
            if not stage.returns_result and draw.random() < 0.6:
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


OPTIONS: Sequence[dict[str, Any]] = [
    {"zero": 0},
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
