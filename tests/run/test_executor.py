"""The executor: what it does with micro-batches that have no weight, and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
import fxpipe.run.step.step
from fxpipe.run.actions.executor import NOT_MADE, Executor, Residuals
from tests.two_ranks import Two

TOPOLOGY = fxpipe.Topology([("pipe", 2)])


def weight(x: Tensor) -> float:
    """No weight for what is all zeros."""
    return float(x.any())


def end(x: Tensor, h: Tensor) -> Tensor:
    """A loss that needs no gradient where there is nothing to learn from."""
    return (h * x).mean() if x.any() else torch.zeros(())


def by_hand() -> tuple[nn.Linear, fxpipe.StageGraph]:
    torch.manual_seed(0)
    start = nn.Linear(4, 4)
    stages = {"start": start, "end": end}
    return start, fxpipe.StageGraph.from_callables(stages, [("start", "end")], {"start": ["x"], "end": ["x"]})


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    """The executors that the next kinds of batch are bound to."""
    made: list[Executor] = []

    def make(*args: Any, **others: Any) -> Executor:
        made.append(Executor(*args, **others))
        return made[-1]

    monkeypatch.setattr(fxpipe.run.step.step, "Executor", make)
    return made


@pytest.fixture
def batch() -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    x[2:4] = 0
    return x


def test_nothing_is_kept_of_a_micro_batch_without_weight(executors: list[Executor], batch: Tensor) -> None:
    forward_backward = fxpipe.compile(Two(), TOPOLOGY, microbatches=3, loss_weight=weight)
    forward_backward(batch)
    assert len(executors) == 2
    assert all(slot is NOT_MADE for executor in executors for slot in executor.slots)
    assert all(executor.residuals.values() for executor in executors)
    assert all(left == Residuals() for executor in executors for left in executor.residuals.values())


def test_a_micro_batch_without_weight_may_have_a_loss_without_gradient(batch: Tensor) -> None:
    start, graph = by_hand()
    loss = fxpipe.compile(graph, TOPOLOGY, microbatches=3, loss_weight=weight)(batch)
    got = start.weight.grad
    start, _ = by_hand()
    parts = [batch[:2], batch[4:]]
    wanted = sum(end(part, start(part)) / 2 for part in parts)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(got, start.weight.grad)


def test_a_loss_without_gradient_of_a_micro_batch_with_weight_is_refused(batch: Tensor) -> None:
    _, graph = by_hand()
    forward_backward = fxpipe.compile(graph, TOPOLOGY, microbatches=3)
    with pytest.raises(fxpipe.RunError, match="the loss needs no gradient"):
        forward_backward(batch)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> fxpipe.Sum:
        y = self.last(fxpipe.stage_boundary(self.table(x))).square()
        return fxpipe.Sum(y.sum(), y.numel())


@pytest.mark.parametrize("bad", [0, 3])
def test_a_step_that_fails_leaves_the_gradients_of_those_before_it(bad: int) -> None:
    forward_backward = fxpipe.compile(Summed(), fxpipe.Topology([("pipe", 2)]), microbatches=4)
    good, broken = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])
    broken[bad] = 4  # the table has no such row
    forward_backward(good)
    before = [parameter.grad.clone() for parameter in forward_backward.parameters() if parameter.grad is not None]
    with pytest.raises(IndexError):
        forward_backward(broken)
    after = [parameter.grad for parameter in forward_backward.parameters()]
    assert len(before) == len(after) == 3
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))  # type: ignore[arg-type]
    forward_backward(good)
    for one, other in zip(before, forward_backward.parameters(), strict=True):
        torch.testing.assert_close(other.grad, 2 * one)
