"""Every model of the tests trains as plain PyTorch does, whichever tracer captures it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError
from fxpipe.stage.modes import ambient_autocast
from fxpipe.trace import NEED_SHAPES
from tests.capturing import assert_trains_alike, capture_by, run_stages, staged
from tests.device import DEVICE
from tests.harness import Run, assert_run, assert_same, local, reference, replica_of, trained
from tests.models import CASES, RANDOM, WIDTH, Callables, Case, Inputs, Layers, linear
from tests.pool import Pool
from tests.thinned import ALL, every, in_turn
from tests.trace.test_small_models import CASES as SMALL

STEPS = 2
BY_EACH = ("named as graphs are", "sets attributes")
TRACED: Mapping[str, Case] = {name: case for name, case in CASES.items() if case.build is not Callables}
REFUSED = {("BatchNorm", "export"): "branches on the value of a tensor, or asks for it"}
"""With momentum=None its share in the running mean is one over a number of calls, which is a tensor's value."""


def batches_of(case: Case) -> list[Inputs]:
    return [case.batch(number) for number in range(STEPS)]


def train(case: Case, tracer: str) -> Run:
    batches = batches_of(case)
    options: dict[str, Any] = {"tracer": tracer, "example_kwargs": batches[0]}
    return trained(case, batches, **options)


@pytest.mark.parametrize(
    ("name", "tracer"),
    dict.fromkeys([*in_turn(every(2, list(TRACED)), sorted(NEED_SHAPES)), *product(BY_EACH, sorted(NEED_SHAPES))]),
)
def test_two_steps_equal_plain_pytorch(name: str, tracer: str) -> None:
    case = TRACED[name]
    if (name, tracer) in REFUSED:
        with pytest.raises(TraceError, match=REFUSED[name, tracer]):
            train(case, tracer)
        return
    assert_run(local(case.ranks, train, case, tracer), reference(case, batches_of(case))[0], case.tolerance)


@pytest.mark.parametrize(("name", "tracer"), in_turn(list(RANDOM), sorted(NEED_SHAPES)))
def test_random_numbers_are_those_of_the_symbolic_tracer(name: str, tracer: str) -> None:
    """Whose numbers are those of a loop that is reseeded for each stage and micro-batch; see test_transparency."""
    case = RANDOM[name]
    (wanted,) = local(case.ranks, train, case, "symbolic")
    assert_run(local(case.ranks, train, case, tracer), wanted, case.tolerance)


def train_replica(name: str, tracer: str, zero: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps and an evaluation on a grid of 2 pipe ranks and 2 replicas; the last batch has another shape."""
    case, topology = CASES[name], fxpipe.Topology([("pipe", 2), ("data", 2)])
    replica = replica_of(topology)
    example = {key: value.chunk(2)[replica] for key, value in case.batch(rows=8).items()}
    forward_backward = fxpipe.compile(
        case.model(), topology, microbatches=2, tracer=tracer, zero=zero, example_kwargs=example
    )
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.01)
    losses = []
    for step, rows in enumerate((8, 12)):
        batch = {key: value.chunk(2)[replica] for key, value in case.batch(step, rows=rows).items()}
        optimizer.zero_grad()
        losses.append(forward_backward(**batch))
        optimizer.step()
    forward_backward.evaluate(**batch)
    return losses, forward_backward.state_dict(full=True)


def train_replica_with_each(name: str, zero: int, tracers: Sequence[str]) -> list[Any]:
    return [train_replica(name, tracer, zero) for tracer in tracers]


@pytest.mark.parametrize(
    ("name", "zero", "tracers"),
    [
        ("tied", 1, ["export"]),
        *([("tied", 0, ["record"]), ("tied", 2, ["record"])] if ALL else []),  # each capture takes a second
        ("buffer in backward", 3, ["record", "export"] if ALL else ["record"]),
    ],
)
def test_over_replicas_it_trains_as_with_the_symbolic_tracer(
    name: str, zero: int, tracers: list[str], pool: Pool
) -> None:
    """Which is compared with DDP, ZeroRedundancyOptimizer and FSDP2 elsewhere."""
    for (wanted_losses, wanted), *others in pool.run(train_replica_with_each, name, zero, ["symbolic", *tracers]):
        assert len(others) == len(tracers)
        for losses, state in others:
            for loss, wanted_loss in zip(losses, wanted_losses, strict=True):
                assert_same(loss, wanted_loss, "loss", 1e-6)
            for key, tensor in wanted.items():
                assert_same(state[key], tensor, key, 1e-5)


@functools.lru_cache
def cached(rows: int) -> Tensor:
    return torch.arange(float(rows))


def cached_in_runs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers' ``compile_compatible_method_lru_cache``, by which DETR and others keep their positions."""
    kept = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        return function(*args) if torch.compiler.is_compiling() else kept(*args)

    return call


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    @functools.lru_cache  # noqa: B019
    def columns(self) -> Tensor:
        return torch.arange(3.0)

    @cached_in_runs
    def shifts(self) -> Tensor:
        return torch.arange(3.0) / 2

    @staticmethod
    @functools.lru_cache
    def scale() -> Tensor:
        return torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(fxpipe.stage_boundary(self.a(x)))
        h = h * cached(x.shape[0])[:, None] * self.columns() + self.shifts()
        return (h * self.scale()).square().mean()


@pytest.mark.parametrize("tracer", sorted(NEED_SHAPES))
def test_what_a_capture_leaves_in_a_cache_of_the_users_is_not_met_later(
    tracer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, topology, given = Cached(), fxpipe.Topology([("pipe", 2)]), torch.randn(10, 3)
    plain = Cached()
    plain.load_state_dict(model.state_dict())
    compiled = fxpipe.compile(model, topology, microbatches=2, tracer=tracer, example_args=(given[:4],))
    for rows in (4, 6, 10):
        # made anew, as where a notebook's cell is run again
        monkeypatch.setitem(globals(), "cached", functools.lru_cache(cached.__wrapped__))
        wanted = sum(plain(part).detach() / 2 for part in given[:rows].chunk(2))
        assert_same(compiled(given[:rows]), wanted, f"{rows} rows")
        kept = cached(rows // 2), model.columns(), model.shifts(), model.scale()
        assert set(map(type, kept)) == {Tensor}


class Tries(Layers):
    """Asks torch for what fails, as code does that finds out whether shapes go together."""

    names, width = "below above", 4

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.below(x))
        try:
            h = h @ h.new_zeros(7, 7)
        except RuntimeError:
            h = h.relu()
        return self.above(h).mean()


@pytest.mark.parametrize("how", [*sorted(NEED_SHAPES), "preview"])
def test_what_torch_logs_of_fake_tensors_does_not_reach_the_user(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    options: dict[str, Any] = {"boundaries": "auto", "example_args": (torch.randn(8, 4),)}
    with contextlib.suppress(TraceError):  # record does not follow it
        if how == "preview":
            fxpipe.preview(Tries(), fxpipe.Topology([("pipe", 2)]), **options)
        else:
            fxpipe.compile(Tries(), fxpipe.Topology([("pipe", 2)]), tracer=how, **options)
    assert logged == []


EACH = pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])


class Scaled(nn.Module):
    """A loss with a frozen parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * self.scale


@EACH
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(torch.rand(WIDTH)), Scaled()])
def test_a_loss_is_captured_too_and_what_it_holds_is_constant(loss: nn.Module, tracer: str) -> None:
    model, (of_the_loss,) = nn.Sequential(linear()), loss.state_dict().values()
    batch = {"input": torch.randn(4, WIDTH), "target": torch.randint(0, WIDTH, (4,))}
    program = capture_by(tracer, model, batch, loss_fn=loss)
    assert [torch.equal(constant, of_the_loss) for constant in program.constants.values()] == [True]
    result = run_stages(staged(program), batch)
    assert torch.equal(result, loss(model(batch["input"]), batch["target"]))


@pytest.mark.parametrize("tracer", sorted(NEED_SHAPES))
def test_autocast_around_the_call_is_no_part_of_the_program(tracer: str) -> None:
    name = "modes" if tracer == "record" else "written behind a boundary"
    model, plain, batch = SMALL[name].model(), SMALL[name].model(), SMALL[name].batch(0)
    with torch.autocast(DEVICE, torch.bfloat16):
        ambient = ambient_autocast()
    program = capture_by(tracer, model, batch, autocast=ambient)
    assert name == "modes" or not any("modes" in node.meta for node in program.graph.nodes)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_trains_alike(staged(program), model, plain, batch)
