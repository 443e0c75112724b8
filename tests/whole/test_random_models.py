"""300 random branching models with random boundaries and placements: no hang, and the gradients of plain PyTorch.

A model is made from its seed alone, and printed where it fails.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import fxpipe
from fxpipe import Topology
from fxpipe.graph.operators import handoff, private
from tests.harness import Engine, Steps, accumulate, cut, distributed, gradients_of, local, steps_of, strict
from tests.pool import Pool
from tests.random_models import RandomModel, batch, staged
from tests.thinned import ALL

MODELS = 300 if ALL else 10
IN_PROCESSES = 20 if ALL else 2
MICROBATCHES, STEPS = 3, 2
TOLERANCE = 1e-6  # of the largest gradient, where a sum is in another order


# --- which of them, and where they run ---


@dataclass(frozen=True)
class Draw:
    """A model that compiles into two stages or more, and where its stages are placed."""

    seed: int
    ranks: int
    placement: tuple[tuple[str, int], ...]
    exact: bool
    """Whether it is compared to the last bit."""


@cache
def drawn(number: int, fewest_ranks: int = 2) -> Draw:
    seed, stages = next(staged(number, fewest_ranks))
    draw = random.Random(seed)
    ranks = draw.randint(fewest_ranks, min(4, len(stages)))
    places = [*range(ranks), *(draw.randrange(ranks) for _ in range(len(stages) - ranks))]
    draw.shuffle(places)
    return Draw(seed, ranks, tuple(zip(stages.names, places, strict=True)), _is_exact(stages))


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


def steps(draw: Draw, schedule: str) -> Steps:
    """The loss and this rank's gradients of two steps: the second knows what its messages look like."""
    forward_backward = fxpipe.compile(
        RandomModel(draw.seed),
        Topology([("pipe", draw.ranks)]),
        microbatches=MICROBATCHES,
        placement=dict(draw.placement),
        schedule=schedule,
    )
    return steps_of(forward_backward, [batch(number) for number in range(STEPS)])


def plain_steps(seed: int) -> Steps:
    model = RandomModel(seed)
    done = []
    for number in range(STEPS):
        model.zero_grad()
        loss, _ = accumulate(lambda _, part: model(**part), cut(batch(number), MICROBATCHES))
        done.append((loss, gradients_of(model.named_parameters())))
    return done


def check(draw: Draw, engine: Engine, name: str, schedule: str) -> None:
    story = f"{RandomModel(draw.seed)}\nplacement {dict(draw.placement)}, {name} engine, {schedule}"
    try:
        results = engine(draw.ranks, steps, draw, schedule)
    except Exception as error:
        raise AssertionError(f"{error}\n{story}") from error
    wanted = plain_steps(draw.seed)
    for rank, result in enumerate(results):
        for step in range(STEPS):
            _compare(result[step], wanted[step], 0.0 if draw.exact else TOLERANCE, f"rank {rank}\n{story}")
    owned = set().union(*(gradients for result in results for _, gradients in result))
    assert owned == wanted[0][1].keys(), story


def _compare(got: Any, wanted: Any, tolerance: float, story: str) -> None:
    (loss, gradients), (wanted_loss, wanted_gradients) = got, wanted
    largest = max(g.abs().max().item() for g in wanted_gradients.values() if g is not None)
    assert torch.equal(loss, wanted_loss), f"loss {loss} instead of {wanted_loss} on {story}"
    for name, gradient in gradients.items():
        known = wanted_gradients[name]
        assert (gradient is None) == (known is None), f"gradient of {name} is {gradient}, not {known}, on {story}"
        if gradient is not None and known is not None and not torch.equal(gradient, known):
            gap = (gradient - known).abs().max().item()
            assert gap <= tolerance * largest, f"gradient of {name} is off by {gap:.3g} on {story}"


@pytest.mark.parametrize("part", range(MODELS // 10))
def test_random_models_have_the_gradients_of_plain_pytorch(part: int) -> None:
    """On one process that plays all ranks and on ranks in a random order, with whole backwards and in halves."""
    for number in range(10 * part, 10 * part + 10):
        both = [(local, "local"), (strict(number), f"strict {number}")]
        for engine, name in both if ALL else [both[number % 2]]:
            for schedule in ("1f1b", "zb_h1") if ALL else (("1f1b", "zb_h1")[number // 2 % 2],):
                check(drawn(number), engine, name, schedule)


@pytest.mark.parametrize("number", range(IN_PROCESSES))
def test_random_models_have_the_gradients_of_plain_pytorch_in_four_processes(number: int, pool: Pool) -> None:
    check(drawn(number, fewest_ranks=4), distributed(pool), "distributed", ("1f1b", "zb_h1")[number % 2])


def test_most_random_models_are_compared_to_the_last_bit() -> None:
    draws = [drawn(number) for number in range(MODELS)]
    assert sum(draw.exact for draw in draws) > MODELS // 2
    assert {draw.ranks for draw in draws} == {2, 3, 4}
