"""300 random branching models with random boundaries and placements: no hang, and they train as in plain PyTorch.

A model is made from its seed alone, and printed where it fails.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe import Topology
from fxpipe.graph.operators import handoff, private
from fxpipe.tensors.dtensors import whole_of
from tests.harness import (
    Engine,
    accumulate,
    assert_same,
    cut,
    distributed,
    gradients_of,
    local,
    replica_of,
    rows_of,
    strict,
)
from tests.pool import Pool
from tests.random_models import RandomModel, batch, staged
from tests.sharding.test_parallelize import in_a_new_world
from tests.thinned import ALL

MODELS = 300 if ALL else 10
IN_PROCESSES = 20 if ALL else 2
ON_SEVERAL_RANKS = 40 if ALL else 5
STEPS = 3
FAMILIES = ["1f1b", "gpipe", "zb_h1", "greedy", "interleaved_1f1b"]


# --- which of them, and where they run ---


@dataclass(frozen=True)
class Draw:
    """A model, and where and how its stages run. ``light``: micro-batches that have no weight. ``exact``: whether it is
    compared to the last bit."""

    seed: int
    ranks: int
    placement: tuple[tuple[str, int | tuple[int, ...]], ...]
    exact: bool = False
    microbatches: int = 3
    family: str = "1f1b"
    light: tuple[int, ...] = ()
    data: int = 1
    zero: int = 0
    clip: float | None = None

    @property
    def topology(self) -> Topology:
        return Topology([("pipe", self.ranks), ("data", self.data)])

    def weight(self, x: Tensor, z: Tensor, y: Tensor) -> float:
        """Of a micro-batch, which its target's first number tells."""
        return 0.0 if int(y[0, 0]) in self.light else float(len(x))


@cache
def drawn(number: int, fewest_ranks: int = 2) -> Draw:
    """Each stage is on one rank."""
    seed, stages = next(staged(number, fewest_ranks))
    draw = random.Random(seed)
    ranks = draw.randint(fewest_ranks, min(4, len(stages)))
    places = [*range(ranks), *(draw.randrange(ranks) for _ in range(len(stages) - ranks))]
    draw.shuffle(places)
    return Draw(seed, ranks, tuple(zip(stages.names, places, strict=True)), _is_exact(stages))


@cache
def drawn_on_several(number: int, fewest_ranks: int = 2) -> Draw:
    """Some stages are on several ranks, and some micro-batches have no weight."""
    for seed, stages in staged(number, fewest_ranks):
        draw = random.Random(seed)
        ranks = draw.randint(fewest_ranks, min(4, len(stages)))
        places: list[int | tuple[int, ...]] = [*range(ranks)]
        places += [draw.randrange(ranks) for _ in range(len(stages) - ranks)]
        draw.shuffle(places)
        for stage in stages:
            if draw.random() < 0.6:
                places[stage.index] = tuple(draw.sample(range(ranks), draw.randint(2, ranks)))
        used = {rank for place in places for rank in ([place] if isinstance(place, int) else place)}
        if len(used) == ranks and any(isinstance(place, tuple) for place in places):
            m = draw.randint(1, 7)
            light = tuple(place for place in range(m) if draw.random() < 0.2)
            placement = tuple(zip(stages.names, places, strict=True))
            family = FAMILIES[number % len(FAMILIES)]
            return Draw(seed, ranks, placement, False, m, family, light if len(light) < m else ())
    raise AssertionError("no model with stages in 1000")


def _is_exact(stages: fxpipe.StageGraph) -> bool:
    """Whether autograd can add up every gradient in plain PyTorch's order.

    Not where several stages own a parameter, and not where a stage uses a value more than once that it does not make
    and that is used elsewhere, too.
    """
    owners = [name for stage in stages for name in stage.parameters]
    if len(owners) != len(set(owners)):
        return False
    for stage in stages:
        nodes = [node for node in stage.module.graph.nodes if node.op == "placeholder"]
        for node, edge in zip(nodes, stage.inputs, strict=True):
            if isinstance(edge, fxpipe.graph.stage_graph.Edge) and _uses(node) > 1 and _is_used_elsewhere(stages, edge):
                return False
    return True


def _is_used_elsewhere(stages: fxpipe.StageGraph, edge: fxpipe.graph.stage_graph.Edge) -> bool:
    node = next(node for node in stages[edge.source].module.graph.nodes if node.name == edge.value)
    by_its_maker = any(user.op != "output" and user.target is not handoff for user in node.users)
    targets = {other.target for other in stages.edges if (other.source, other.value) == (edge.source, edge.value)}
    return by_its_maker or len(targets) > 1


def _uses(node: fx.Node) -> int:
    """How often a value is an argument."""
    count = 0
    for user in node.users:
        found: list[fx.Node] = []
        fx.node.map_arg((user.args, user.kwargs), found.append)
        count += _uses(user) if user.target is private else found.count(node)
    return count


# --- running them ---


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


@dataclass
class Trained:
    """Losses and gradients of the steps, and the parameters in the end, of a rank or of plain PyTorch."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    parameters: dict[str, Tensor]


def trained(draw: Draw) -> Trained:
    forward_backward = fxpipe.compile(
        RandomModel(draw.seed).double(),
        draw.topology,
        microbatches=draw.microbatches,
        placement=dict(draw.placement),
        schedule=draw.family,
        loss_weight=draw.weight if draw.light else None,
        # many buckets, or one of each kind
        zero=fxpipe.Zero(draw.zero, bucket_mb=0.0002 if draw.seed % 2 else 25.0),
    )
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.01)
    found = Trained([], [], {})
    for given in batches(draw, replica_of(draw.topology)):
        optimizer.zero_grad()
        found.losses.append(forward_backward(**given))
        found.gradients.append(gradients_of(forward_backward.named_parameters()))
        if draw.clip is not None:
            forward_backward.clip_grad_norm_(draw.clip)
        optimizer.step()
    named = forward_backward.named_parameters()
    found.parameters = {name: whole_of(tensor.detach()).clone() for name, tensor in named}
    return found


@in_a_new_world
def trained_in_shards(draw: Draw) -> Trained:
    return trained(draw)


def plain(draw: Draw) -> Trained:
    model, found = RandomModel(draw.seed).double(), Trained([], [], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for given in zip(*(batches(draw, replica) for replica in range(draw.data)), strict=True):
        optimizer.zero_grad()
        parts = [part for each in given for part in cut(each, draw.microbatches) if rows_of(part)]
        weights = [draw.weight(**part) for part in parts]
        found.losses.append(accumulate(lambda _, part: model(**part), parts, weights)[0])
        found.gradients.append(gradients_of(model.named_parameters()))
        if draw.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), draw.clip)
        optimizer.step()
    found.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found


def check(draw: Draw, engine: Engine) -> None:
    story = f"on\n{RandomModel(draw.seed)}\n{draw}\n"
    run = trained_in_shards if draw.zero == 3 else trained
    try:
        results: Sequence[Trained] = engine(draw.ranks * draw.data, run, draw)
    except Exception as error:
        raise AssertionError(f"{error} {story}") from error
    wanted, first = plain(draw), dict[str, Tensor]()
    tolerance = 0.0 if draw.exact else 1e-6
    for found in results:
        for step, loss in enumerate(wanted.losses):
            assert_same(found.losses[step], loss, f"loss of step {step} {story}", tolerance)
            for name, gradient in found.gradients[step].items() if draw.data == 1 and not draw.zero else ():
                assert_same(gradient, wanted.gradients[step][name], f"gradient of {name} {story}", tolerance)
        for name, parameter in found.parameters.items():
            assert_same(parameter, wanted.parameters[name], f"{name} {story}", tolerance)
            assert torch.equal(first.setdefault(name, parameter), parameter), f"{name} differs on its ranks {story}"
    assert first.keys() == wanted.parameters.keys(), story


@pytest.mark.parametrize("part", range(MODELS // 10))
def test_random_models_train_as_in_plain_pytorch(part: int) -> None:
    """On one process that plays all ranks and on ranks in a random order, with whole backwards and in halves."""
    for number in range(10 * part, 10 * part + 10):
        both = [local, strict(number)]
        for engine in both if ALL else [both[number % 2]]:
            for family in ("1f1b", "zb_h1") if ALL else (("1f1b", "zb_h1")[number // 2 % 2],):
                check(dataclasses.replace(drawn(number), family=family), engine)


@pytest.mark.parametrize("number", range(IN_PROCESSES))
def test_random_models_train_as_in_plain_pytorch_in_four_processes(number: int, pool: Pool) -> None:
    draw = dataclasses.replace(drawn(number, fewest_ranks=4), family=("1f1b", "zb_h1")[number % 2])
    check(draw, distributed(pool))


def test_most_random_models_are_compared_to_the_last_bit() -> None:
    draws = [drawn(number) for number in range(MODELS)]
    assert sum(draw.exact for draw in draws) > MODELS // 2
    assert {draw.ranks for draw in draws} == {2, 3, 4}


# --- stages on several ranks ---


@pytest.mark.parametrize("number", range(ON_SEVERAL_RANKS))
def test_stages_on_several_ranks_train_as_in_plain_pytorch(number: int) -> None:
    draw = drawn_on_several(number)
    for engine in (local, strict(number)) if ALL or number % 2 else (strict(number),):
        check(draw, engine)
    check(dataclasses.replace(draw, data=2, zero=number % 3, clip=0.5), strict(number))


OPTIONS: Sequence[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "data": 2, "ranks": 2, "clip": 0.5},
    {"zero": 1, "data": 2, "ranks": 2, "clip": 0.5},
    {"zero": 0, "data": 2, "ranks": 2},
    {"zero": 3, "data": 2, "ranks": 2, "clip": 0.5},
]


@pytest.mark.parametrize("number", range(15 if ALL else 2))
def test_stages_on_several_ranks_train_as_in_plain_pytorch_in_four_processes(number: int, pool: Pool) -> None:
    options, first = dict(OPTIONS[number % len(OPTIONS)]), 100 * number + 100
    if options.pop("ranks", 4) == 2:
        draw = next(draw for draw in map(drawn_on_several, range(first, first + 100)) if draw.ranks == 2)
    else:
        draw = drawn_on_several(first, fewest_ranks=4)
    check(dataclasses.replace(draw, **options), distributed(pool))
