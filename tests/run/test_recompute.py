"""Recomputation: a stage's forward runs again in front of its backward, and nothing that anybody sees is another."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import Schedule, StageGraph, Topology
from fxpipe.schedules.action import Op
from tests.harness import Run, assert_run, assert_same, compiled, engine_of, reference, trained
from tests.models import CASES, RANDOM, WIDTH
from tests.thinned import every
from tests.whole.test_transparency import EVERY, batches_of


def with_recomputation(schedule: Schedule) -> Schedule:
    """The table with an R right in front of each backward."""
    rows = [
        [one for action in row for one in ([action._replace(op=Op.R)] if action.op is Op.B else []) + [action]]
        for row in schedule.rows
    ]
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def train_again(name: str, schedule: str, **options: Any) -> Run:
    """As ``train_case``, with every stage recomputed."""
    case = EVERY[name]
    table = with_recomputation(compiled(case, schedule=schedule).schedule)
    return trained(case, batches_of(case), **options | {"schedule": table, "placement": None})


# --- every model ---


@pytest.mark.parametrize("name", every(2, list(CASES)))
def test_three_steps_equal_plain_pytorch(name: str) -> None:
    case = CASES[name]
    assert_run([train_again(name, "gpipe")], reference(case, batches_of(case))[0], case.tolerance)


@pytest.mark.parametrize("of", ["strict 0", "distributed"])
@pytest.mark.parametrize("name", ["BatchNorm", "two towers, image first"])
def test_so_they_do_on_every_engine(name: str, of: str, request: pytest.FixtureRequest) -> None:
    case, engine = CASES[name], engine_of(of, lambda: request.getfixturevalue("pool"))
    runs = engine(case.ranks, train_again, name, "1f1b")
    assert_run(runs, reference(case, batches_of(case))[0], case.tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", RANDOM)
def test_what_is_drawn_is_drawn_again(name: str, schedule: str) -> None:
    case = RANDOM[name]
    wanted = trained(case, batches_of(case))
    run = train_again(name, schedule)
    for step, gradients in enumerate(wanted.gradients):
        assert_same(run.losses[step], wanted.losses[step], "loss")
        for parameter, gradient in gradients.items():
            assert_same(run.gradients[step][parameter], gradient, parameter)


# --- stages of all kinds ---

RUNS: Counter[str] = Counter()


class Amid(nn.Module):
    """The middle stage of three: what it does beside computing its result has a name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.calls = kind, nn.Linear(WIDTH, WIDTH), 0
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []
        self.generator = torch.Generator().manual_seed(3) if kind == "draws from a generator of its own" else None
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        RUNS[self.kind] += 1
        factor: Tensor = KINDS[self.kind](self, x)
        return F.dropout(self.layer(x), 0.3) * factor

    def changed(self, change: Callable[[Tensor], Any]) -> Tensor:
        change(self.scale)
        return self.scale.clone()

    def replaced(self, x: Tensor) -> Tensor:
        self.scale = self.scale * 1.1
        return self.scale

    def counted(self, x: Tensor) -> float:
        self.calls += 1
        return self.calls

    def listed(self, x: Tensor) -> float:
        self.seen.append(x.sum().item())
        return sum(self.seen)

    def inner_gradient(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)[0]

    def region(self, x: Tensor) -> Tensor:
        RUNS["region"] += 1
        return F.dropout(torch.tanh(self.inside(x)), 0.3)


OUTSIDE = [0]


def count_outside(amid: Amid, x: Tensor) -> float:
    OUTSIDE[0] += 1
    return OUTSIDE[0]


KINDS: dict[str, Callable[[Amid, Tensor], Any]] = {
    "counts in an attribute": Amid.counted,
    "appends to a list": Amid.listed,
    "replaces a buffer": Amid.replaced,
    "writes a buffer": lambda amid, x: amid.changed(lambda scale: scale.mul_(1.1)),
    "writes a buffer unseen": lambda amid, x: amid.changed(lambda scale: scale.data.mul_(1.1)),
    "draws from a generator of its own": lambda amid, x: torch.rand(WIDTH, generator=amid.generator),
    "draws Python's and NumPy's numbers": lambda amid, x: random.random() + np.random.rand(),
    "differentiates": Amid.inner_gradient,
    "maps": lambda amid, x: torch.vmap(torch.sin)(x),
    "checkpoints": lambda amid, x: checkpoint(amid.region, x, use_reentrant=False),
    "checkpoints, reentrant": lambda amid, x: checkpoint(amid.region, x, use_reentrant=True),
    "counts outside": count_outside,
}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor, h: Tensor) -> Tensor:
        return F.mse_loss(self.layer(h), y)


def three_stages(amid: nn.Module) -> StageGraph:
    torch.manual_seed(0)
    stages = {"first": nn.Linear(WIDTH, WIDTH), "amid": amid, "last": Last()}
    return StageGraph.from_callables(stages, [("first", "amid"), ("amid", "last")], {"first": ["x"], "last": ["y"]})


def seed_everything() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    OUTSIDE[0] = 0
    RUNS.clear()


def three_steps(kind: str, schedule: str, again: bool, microbatches: int = 4) -> list[Tensor]:
    """Losses, gradients and buffers of three steps, and what is drawn behind them."""
    torch.manual_seed(0)
    amid, topology, options = Amid(kind), Topology([("pipe", 3)]), {"microbatches": microbatches, "schedule": schedule}
    table = fxpipe.compile(three_stages(Amid(kind)), topology, **options).schedule
    forward_backward = fxpipe.compile(
        three_stages(amid), topology, **options | ({"schedule": with_recomputation(table)} if again else {})
    )
    seed_everything()
    seen: list[Tensor] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        forward_backward.zero_grad()
        seen.append(forward_backward(*(torch.randn(8, WIDTH, generator=generator) for _ in range(2))))
        seen += [parameter.grad.clone() for parameter in forward_backward.parameters() if parameter.grad is not None]
        seen += [tensor.clone() for tensor in forward_backward.state_dict().values()]
        seen += [torch.tensor([amid.calls, len(amid.seen)])]
    return [*seen, torch.tensor([random.random(), np.random.rand()]), torch.rand(1)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "counts outside"])
def test_a_stage_that_does_more_than_compute_does_it_once(kind: str, schedule: str) -> None:
    wanted = three_steps(kind, schedule, again=False)
    once = RUNS[kind]
    for got, plain in zip(three_steps(kind, schedule, again=True), wanted, strict=True):
        assert_same(got, plain, kind)
    assert once == 12
    assert RUNS[kind] in (24, 25), "12 forwards, and 12 again; one more where the graph was needed in the first"


@pytest.mark.parametrize("kind", ["checkpoints", "checkpoints, reentrant"])
def test_what_the_model_checkpoints_runs_twice_and_not_three_times(kind: str) -> None:
    three_steps(kind, "1f1b", again=False)
    assert RUNS["region"] == 24
    three_steps(kind, "1f1b", again=True)
    assert RUNS["region"] == 24


def test_a_stage_that_cannot_be_run_again_is_refused_in_the_first_step() -> None:
    with pytest.raises(fxpipe.RunError, match=r"stage 'amid' cannot be recomputed.*leave the stage out of recompute="):
        three_steps("counts outside", "1f1b", again=True)
