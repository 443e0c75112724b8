"""Recomputation: a stage's forward runs again in front of its backward, and nothing that anybody sees is another."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import Schedule, StageGraph, Topology
from fxpipe.schedules.kinds import Kind
from tests.harness import assert_same, assert_trains, compiled, gradients_of, trained
from tests.models import CASES, RANDOM, WIDTH
from tests.thinned import in_turn


def with_recomputation(schedule: Schedule) -> Schedule:
    """The table with an R right in front of each backward."""
    rows = [
        [one for action in row for one in ([action._replace(kind=Kind.R)] if action.kind is Kind.B else []) + [action]]
        for row in schedule.rows
    ]
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


BATCH = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))

# --- stages of all kinds; test_transparency trains models of all kinds with recomputation ---

RUNS: Counter[str] = Counter()


class Amid(nn.Module):
    """The middle stage of three: what it does beside computing its result has a name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.calls = kind, nn.Linear(WIDTH, WIDTH), 0
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.seen: list[float] = []
        self.generator = torch.Generator().manual_seed(3) if kind == "draws from a generator of its own" else None
        self.begins = False
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

    def counted_later(self, x: Tensor) -> float:
        return self.counted(x) if self.begins else 1.0

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
    "begins to count": Amid.counted_later,
    "begins to write a buffer": lambda amid, x: amid.changed(lambda scale: scale.mul_(1.1 if amid.begins else 1)),
    "unseen, begins to write a buffer": lambda amid, x: amid.changed(
        lambda scale: scale.data.mul_(1.1) if amid.begins else None
    ),
    "draws Python's and NumPy's numbers": lambda amid, x: random.random() + np.random.rand(),
    "differentiates": Amid.inner_gradient,
    "maps": lambda amid, x: torch.vmap(torch.sin)(x),
    "checkpoints": lambda amid, x: checkpoint(amid.region, x, use_reentrant=False),
    "checkpoints, reentrant": lambda amid, x: checkpoint(amid.region, x, use_reentrant=True),
    "counts outside": count_outside,
    "permutes by a global generator": lambda amid, x: torch.randperm(WIDTH, generator=GENERATOR),
}
GENERATOR = torch.Generator().manual_seed(3)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor, h: Tensor) -> Tensor:
        return F.mse_loss(self.layer(h), y)


def three_stages(amid: nn.Module | Callable[..., Any]) -> StageGraph:
    torch.manual_seed(0)
    stages = {"first": nn.Linear(WIDTH, WIDTH), "amid": amid, "last": Last()}
    return StageGraph.from_callables(stages, [("first", "amid"), ("amid", "last")], {"first": ["x"], "last": ["y"]})


def seed_everything() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    OUTSIDE[0] = 0
    GENERATOR.manual_seed(3)
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
        amid.begins = step > 0
        seen.append(forward_backward(*(torch.randn(8, WIDTH, generator=generator) for _ in range(2))))
        seen += [parameter.grad.clone() for parameter in forward_backward.parameters() if parameter.grad is not None]
        seen += [tensor.clone() for tensor in forward_backward.state_dict().values()]
        seen += [torch.tensor([amid.calls, len(amid.seen)])]
    return [*seen, torch.tensor([random.random(), np.random.rand()]), torch.rand(1)]


@pytest.mark.parametrize(
    ("kind", "schedule"), in_turn([kind for kind in KINDS if "outside" not in kind], ["1f1b", "gpipe"])
)
def test_a_stage_that_does_more_than_compute_does_it_once(kind: str, schedule: str) -> None:
    wanted = three_steps(kind, schedule, again=False)
    once = RUNS[kind]
    for got, expected in zip(three_steps(kind, schedule, again=True), wanted, strict=True):
        assert_same(got, expected, kind)
    assert once == 12
    assert RUNS[kind] in (24, 25), "12 forwards, and 12 again; one more where the graph was needed in the first"


@pytest.mark.parametrize("kind", ["checkpoints", "checkpoints, reentrant"])
def test_what_the_model_checkpoints_runs_twice_and_not_three_times(kind: str) -> None:
    three_steps(kind, "1f1b", again=False)
    assert RUNS["region"] == 24
    three_steps(kind, "1f1b", again=True)
    assert RUNS["region"] == 24


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "outside" in kind])
def test_a_stage_that_cannot_be_run_again_is_refused_in_the_first_step(kind: str) -> None:
    told = r"stage 'amid' cannot be recomputed.*leave the stage out of recompute="
    with pytest.raises(fxpipe.RunError, match=told) as caught:
        three_steps(kind, "1f1b", again=True)
    assert "in the recomputation of stage 1 `amid`, micro-batch 0, step 0" in str(caught.value.__notes__)


class BeginsToWrite(nn.Linear):
    """Writes a buffer from the middle of its second step on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 5:
            self.scale.mul_(2.0)
        return super().forward(x) * self.scale.clone()


def test_a_stage_that_begins_to_write_later_is_refused_when_it_does() -> None:
    graph, batch = three_stages(BeginsToWrite()), [torch.randn(8, WIDTH) for _ in range(2)]
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 3)]), microbatches=4, recompute=["amid"])
    forward_backward(*batch)
    with pytest.raises(fxpipe.RunError, match=r"'amid' has written a tensor of shape \[6\] .* leave it out of recomp"):
        forward_backward(*batch)


class Rows(nn.Embedding):
    """Returns what was looked up of each row: the rows renormed or as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(1))


def look_up(**options: Any) -> nn.Embedding:
    return Rows(WIDTH, WIDTH, **options)


def descend(module: nn.Module, *_: object) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(0.1)


def trained_in_backward(
    first: nn.Module, makes_steps: bool, recompute: bool | Sequence[str] = ("first",)
) -> list[Tensor]:
    """Three micro-batches; a hook may write the parameters in each backward."""
    stages = {"first": first, "last": Last()}
    graph = StageGraph.from_callables(stages, [("first", "last")], {"first": ["x"], "last": ["y"]})
    options = {"microbatches": 3, "schedule": "gpipe", "recompute": recompute}
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), **options)
    if makes_steps:
        first.register_full_backward_pre_hook(descend)
    forward_backward(*(torch.randn(6, WIDTH) for _ in range(2)))
    return [parameter.grad for parameter in first.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:Full backward hook")  # torch's, of an embedding's hook
def test_weights_that_are_written_between_a_forward_and_its_second_run_are_an_error() -> None:
    with pytest.raises(fxpipe.RunError, match="'first' cannot be recomputed: its parameters were written since"):
        trained_in_backward(look_up(), makes_steps=True)
    assert trained_in_backward(look_up(max_norm=1.0), makes_steps=False), "what forward itself renorms"


class Counts(nn.Linear):
    """Counts the micro-batches whose first number is positive."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += int(x[0, 0] > 0)
        return super().forward(x)


def test_what_only_some_forwards_change_is_changed_once() -> None:
    first, batch = Counts(), torch.ones(8, WIDTH)
    batch[:4] = -1  # the first forwards of a step change nothing
    graph = StageGraph.from_callables(
        {"first": first, "last": Last()}, [("first", "last")], {"first": ["x"], "last": ["y"]}
    )
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=4, recompute=["first"])
    for step in (1, 2):
        forward_backward(batch, BATCH)
        assert first.count == 2 * step


class Renews(nn.Linear):
    """Writes a parameter of its own in forward."""

    def __init__(self, way: Callable[[Renews, Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mean, self.way = nn.Parameter(torch.ones(WIDTH), requires_grad=False), way

    def forward(self, x: Tensor) -> Tensor:
        self.way(self, x)
        return super().forward(x)


def test_a_parameter_that_a_forward_writes_unseen_is_refused() -> None:
    with pytest.raises(fxpipe.RunError, match=r"'first' cannot be recomputed: run again .* parameter by \.data"):
        trained_in_backward(Renews(lambda one, x: one.weight.data.mul_(0.9)), makes_steps=False)


def ema(one: Renews, x: Tensor) -> None:
    with torch.no_grad():
        one.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


def replaced(one: Renews, x: Tensor) -> None:
    one.mean.data = one.mean.data * 0.9 + x.mean(0) * 0.1


def normalised(one: Renews, x: Tensor) -> None:
    with torch.no_grad():
        one.weight.div_(one.weight.norm())


@pytest.mark.parametrize("way", [ema, replaced, normalised])
def test_a_parameter_that_forward_writes_is_written_once(way: Callable[[Renews, Tensor], None]) -> None:
    seen = []
    for recompute in (False, ["first"]):
        torch.manual_seed(0)
        first = Renews(way)
        trained_in_backward(first, makes_steps=False, recompute=recompute)
        seen.append([first.mean, first.weight])
    for got, wanted in zip(*seen, strict=True):
        assert_same(got, wanted, "what forward writes")


def test_an_input_that_is_written_meanwhile_is_refused() -> None:
    """Both stages are given one input of the batch, and the last writes it."""

    def last(x: Tensor, h: Tensor) -> Tensor:
        x.add_(1.0)
        return h.sum()

    stages = {"amid": nn.Linear(WIDTH, WIDTH), "last": last}
    graph = StageGraph.from_callables(stages, [("amid", "last")], {"amid": ["x"], "last": ["x"]})
    told = "stage 'amid' cannot be recomputed: what it was given was written in place"
    topology = Topology([("pipe", 1)])
    forward_backward = fxpipe.compile(graph, topology, microbatches=4, schedule="gpipe", recompute=["amid"])
    with pytest.raises(fxpipe.RunError, match=told):
        forward_backward(torch.randn(8, WIDTH))


def test_a_method_is_recomputed_with_what_its_module_was() -> None:
    seen = []
    for recompute in (False, ["amid"]):
        norm = nn.BatchNorm1d(WIDTH, affine=False)
        forward_backward = fxpipe.compile(
            three_stages(norm.forward), Topology([("pipe", 3)]), microbatches=4, schedule="gpipe", recompute=recompute
        )
        assert bool(forward_backward.stages.recomputed) == bool(recompute)
        seen.append([forward_backward(BATCH, BATCH), *norm.buffers()])
    for got, wanted in zip(*seen, strict=True):
        assert_same(got, wanted, "loss and statistics")


# --- a step's other sides ---


def test_a_micro_batch_without_weight_is_not_run_again() -> None:
    batch, seen = BATCH.clone(), []
    batch[2:4] = 0
    RUNS.clear()
    for recompute in (False, True):
        torch.manual_seed(0)
        graph, options = three_stages(Amid("counts in an attribute")), {"loss_weight": lambda x, y: float(x.any())}
        forward_backward = fxpipe.compile(
            graph, Topology([("pipe", 3)]), schedule="gpipe", microbatches=4, recompute=recompute, **options
        )
        assert bool(forward_backward.stages.recomputed) == recompute
        losses = [forward_backward(batch, batch) for _ in range(2)]
        seen.append([losses, gradients_of(forward_backward.named_parameters()), forward_backward.state_dict()])
    for wanted, got in zip(*map(pytree.tree_leaves, seen), strict=True):
        assert_same(got, wanted, "with recomputation")
    assert RUNS["counts in an attribute"] == 2 * 4 + 2 * (4 + 3)


def test_compiled_stages_are_recomputed() -> None:
    assert_trains(CASES["chain"], recompute=True, stage_compiler=partial(torch.compile, backend="aot_eager"))


def test_an_evaluation_runs_forwards_alone() -> None:
    graph, batch = three_stages(Amid("counts in an attribute")), [torch.randn(8, WIDTH) for _ in range(2)]
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 3)]), microbatches=4, recompute=True)
    RUNS.clear()
    forward_backward.evaluate(*batch)
    assert RUNS["counts in an attribute"] == 4
    forward_backward(*batch)
    assert RUNS["counts in an attribute"] == 4 + 8


def test_an_r_may_come_long_before_its_gradient() -> None:
    """Right behind its forward."""
    case = RANDOM["dropout"]
    table = with_recomputation(compiled(case, schedule="gpipe").schedule)
    rows = [
        [
            one
            for a in row
            if a.kind is not Kind.R
            for one in ([a, a._replace(kind=Kind.R)] if a.kind is Kind.F else [a])
        ]
        for row in table.rows
    ]
    early = dataclasses.replace(table, rows=tuple(map(tuple, rows)))
    run, wanted = (trained(case, case.batches(), schedule=one) for one in (early, "gpipe"))
    for step, loss in enumerate(wanted.losses):
        assert_same(run.losses[step], loss, "loss")
        for name, gradient in wanted.gradients[step].items():
            assert_same(run.gradients[step][name], gradient, name)
