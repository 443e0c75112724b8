"""Sizes that depend on values, and values that are written in place."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError, stage_boundary
from tests.strict_transport import run_strict
from tests.two_ranks import TWO, WIDTH


class Selects(nn.Module):
    """A submodule whose result has as many rows as its numbers say."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, h: Tensor, n: Tensor) -> Tensor:
        return self.how(self.layer(h), n)


class Selecting(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.chosen, self.c = nn.Linear(4, 4), Selects(how), nn.Linear(4, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.chosen(stage_boundary(torch.tanh(self.a(x))), n)
        return self.c(h).square().sum() / h.shape[0]


@pytest.mark.parametrize(
    "how",
    [
        lambda h, n: h.repeat_interleave(n, 0),
        lambda h, n: h[n == 3],
        lambda h, n: h[h[:, 0] > 1],
        lambda h, n: torch.cat([h, torch.stack([h[0]] * int(n.max()))]) if int(n.max()) else h,
    ],
    ids=["repeated", "equal", "above", "padded to the most"],
)
def test_a_size_that_depends_on_values_is_refused(how: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(64, 4), torch.randint(1, 5, (64,)))
    with pytest.raises(TraceError, match="looks at the values of a tensor"):
        fxpipe.compile(Selecting(how), TWO, tracer="record", microbatches=2, example_args=batch)


@pytest.mark.parametrize("engine", ["local", "strict"])
def test_a_size_that_only_rare_values_change_is_an_error_when_it_changes(engine: str) -> None:
    """No made-up number shows it."""
    x, n = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)

    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = Selecting(lambda h, n: h[n < 1000])
        forward_backward = fxpipe.compile(model, TWO, tracer="record", microbatches=2, example_args=(x, n))
        forward_backward(x, n)
        forward_backward(x, torch.tensor([0, 0, 2000, 0] * 2))

    told = r"chosen returned tensors of shapes \(3, 4\), but was captured with \(4, 4\)"
    with pytest.raises(fxpipe.RunError, match=told):
        run(0) if engine == "local" else run_strict(run, 2, 1)


class Counts(nn.Module):
    """From its fourth call on it gives a row less."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(h)[int(self.calls > 3) :]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.counts, self.c = nn.Linear(4, 4), Counts(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.counts(stage_boundary(torch.tanh(self.a(x))))
        return self.c(h).square().sum() / h.shape[0]


def test_a_size_that_depends_on_earlier_calls_is_an_error_when_it_changes() -> None:
    x = torch.randn(8, 4)
    forward_backward = fxpipe.compile(Counting(), TWO, tracer="record", microbatches=2, example_args=(x,))
    forward_backward(x)
    with pytest.raises(fxpipe.RunError, match="counts returned tensors of shapes"):
        forward_backward(x)


class Statistics(nn.Module):
    """Uses a statistic that each micro-batch's batch norm writes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.one(x))
        return self.two(stage_boundary(self.scaled(h))).square().mean()

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.norm.running_var


class StatisticsInPlace(Statistics):
    def scaled(self, h: Tensor) -> Tensor:
        return h.mul_(self.norm.running_var.view(1, WIDTH))


@pytest.mark.parametrize("kind", [Statistics, StatisticsInPlace])
@pytest.mark.parametrize("tracer", fxpipe.TRACERS)
def test_a_backward_sees_a_statistic_as_its_own_micro_batch_did(kind: type[nn.Module], tracer: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, WIDTH)
    plain = copy.deepcopy(model)
    for part in x.chunk(4):
        (plain(part) / 4).backward()
    fxpipe.compile(model, TWO, microbatches=4, tracer=tracer, example_args=(x,), check_capture=False)(x)
    for (name, wanted), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted.grad), name
