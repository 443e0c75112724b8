"""Figures of steps reach the writers that people log with, once, and they are plain PyTorch's or what was measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import RunError, Topology
from tests.pool import Pool
from tests.strict_transport import current_seat, run_strict

Written = dict[Any, dict[str, float]]
"""A step → what was written of it, by a recording fake of each interface:"""


def tensorboard(to: Written) -> Any:
    add = lambda tag, scalar_value, global_step=None: to.setdefault(global_step, {}).update({tag: scalar_value})  # noqa: E731
    return SimpleNamespace(add_scalar=add)


def wandb(to: Written) -> Any:
    return SimpleNamespace(log=lambda data, step=None, commit=None: to.update({step: data}))


def mlflow(to: Written) -> Any:
    return SimpleNamespace(log_metrics=lambda metrics, step=None, synchronous=None: to.update({step: metrics}))


def function(to: Written) -> Any:
    return lambda numbers, step: to.update({step: numbers})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.b(fxpipe.stage_boundary(self.a(x)).relu())
        return {"loss": y.square().mean(), "right": (y > 0).sum()}


X = torch.linspace(-1, 1, 12).view(4, 3)


def plain() -> tuple[float, int, float]:
    """The loss, the metric and the gradient's norm."""
    net = Net()
    output = net(X)
    output["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return output["loss"].item(), int(output["right"].item()), norm.item()


def compiled(ranks: int = 1) -> fxpipe.ForwardBackward:
    return fxpipe.compile(Net(), Topology([("pipe", ranks)]), microbatches=2)


@pytest.mark.parametrize("kind", [tensorboard, wandb, mlflow, function])
def test_each_writer_gets_loss_metrics_norm_communication_and_memory(kind: Callable[[Written], Any]) -> None:
    written, step = Written(), compiled()
    fxpipe.log_to(kind(written))(step, step(X), 7)
    loss, right, norm = plain()
    assert written[7].pop("fxpipe/memory_bytes") > 0
    names = ["loss", "metrics/right", "gradient_norm", "exposed_seconds"]
    expected = dict(zip([f"fxpipe/{name}" for name in names], [loss, right, norm, 0.0], strict=True))
    assert written == {7: pytest.approx(expected)}
    assert all(type(value) is float for value in written[7].values())


def test_the_norm_is_the_norm_before_clipping_and_absent_without_gradients() -> None:
    written, step = Written(), compiled()
    log = fxpipe.log_to(function(written))
    loss = step(X)
    step.clip_grad_norm_(plain()[2] / 10)
    log(step, loss, 0)
    loss = step(X)
    step.zero_grad()
    log(step, loss, 1)
    assert [each.get("fxpipe/gradient_norm") for each in written.values()] == [pytest.approx(plain()[2]), None]


def test_seconds_of_a_step_are_the_mean_since_the_write_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes 4 steps apart, at 10 s and 16 s: 1.5 s a step. Steps that run backwards have no time."""
    moments = iter([10.0, 16.0, 20.0])
    monkeypatch.setattr("fxpipe.run.log_to.perf_counter", lambda: next(moments))
    written, step = Written(), compiled()
    log = fxpipe.log_to(function(written), every=2)
    for number in (2, 3, 5, 6, 4):
        log(step, step(X), number)
    assert {each: numbers.get("fxpipe/step_seconds") for each, numbers in written.items()} == {2: None, 6: 1.5, 4: None}


@pytest.mark.parametrize("with_writer", [(0, 1), (1,)])
def test_the_first_rank_with_a_writer_writes_the_most_bytes_and_the_recorded_bubble(
    with_writer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxpipe.run.log_to.peak_bytes", lambda device: 30 + 10 * getattr(current_seat(), "rank", 0))
    written = [Written(), Written()]

    def body(rank: int) -> float:
        step, log = compiled(2), fxpipe.log_to(function(written[rank]) if rank in with_writer else None)
        step.record_timeline()
        log(step, step(X), 0)
        bubble = step.timeline().bubble
        step.record_timeline(False)
        log(step, step(X), 1)
        return bubble

    bubble, _ = run_strict(body, 2)
    assert [len(each) for each in written] == [2 * (rank == with_writer[0]) for rank in (0, 1)]
    first, second = written[with_writer[0]].values()
    assert first["fxpipe/memory_bytes"] == 40
    assert [each.get("fxpipe/bubble") for each in (first, second)] == [pytest.approx(bubble), None]


def norm_of_shards(zero: Any) -> list[float]:
    topology, written = Topology([("pipe", 2), ("data", 2)]), Written()
    step = fxpipe.compile(Net(), topology, microbatches=2, zero=zero)
    optimizer = step.optimizer(torch.optim.SGD, lr=0.0)
    loss = step(X)
    optimizer.step()
    fxpipe.log_to(function(written))(step, loss, 0)
    return [numbers["fxpipe/gradient_norm"] for numbers in written.values()]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_norm_of_shards_is_the_whole_models(zero: int, pool: Pool) -> None:
    assert pool.run(norm_of_shards, zero) == [[pytest.approx(plain()[2])], [], [], []]


@pytest.mark.parametrize("writer", [object(), SimpleNamespace, logging.getLogger("fxpipe")])
def test_a_writer_without_a_known_method_is_refused_before_any_step(writer: Any) -> None:
    with pytest.raises(RunError, match=r"writer is .*; it has add_scalar.*log_metrics.*log\(.*\(numbers, step\)"):
        fxpipe.log_to(writer)


def test_wrong_arguments_are_refused() -> None:
    step, log = compiled(), fxpipe.log_to(function({}))
    calls: dict[str, Callable[[], Any]] = {
        "every is 0": lambda: fxpipe.log_to(None, every=0),
        "no rank has a writer": lambda: fxpipe.log_to(None)(step, step(X), 0),
        "step is 1.5": lambda: log(step, step(X), 1.5),  # type: ignore[arg-type]
        "loss is tensor": lambda: log(step, torch.ones(2), 0),
    }
    for match, call in calls.items():
        with pytest.raises(RunError, match=match):
            call()


def rank_0_alone() -> None:
    step, log = compiled(2), fxpipe.log_to(function({}))
    loss = step(X)
    if step.topology.rank == 0:
        log(step, loss, 0)
    else:
        step(X)


def test_a_rank_that_does_not_log_is_named_and_nobody_waits_for_ever(pool: Pool) -> None:
    errors = [str(outcome.error) for outcome in pool.outcomes(rank_0_alone, ranks=2)]
    assert any("log of step 0" in error and "forward_backward, step 1" in error for error in errors)
