"""Regions kept whole: their Python runs in every step, and the model trains as plain PyTorch does."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Run, assert_run, engine_of, reference, trained
from tests.models import Case, linear, vectors


class Selects(nn.Module):
    """Rows that are large by NumPy's word; how many depends on the values. Counts what it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        kept = [place for place, row in enumerate(x.detach().numpy()) if float(numpy.sum(row)) > 0] or [0]
        self.seen += len(kept)
        rows = torch.stack([x[place] for place in kept])
        hidden = checkpoint(self.first, rows, use_reentrant=False)
        if hidden.sum().item() > 0:
            hidden = self.second(hidden)
        return {"rows": hidden * scale, "mask": None, "kept": torch.tensor(kept)}


class Selecting(nn.Module):
    """A region amid the model: what comes out of it has a size of its own each time, here and two stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.behind, self.head = linear(), Selects(), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.region(self.before(x), scale=2.0)
        rows = found["rows"]
        assert found["mask"] is None
        h = torch.relu(self.behind(rows)) / rows.shape[0]
        return (self.head(h) - y[found["kept"]]).square().mean()


CUTS: Any = {"region": "whole", "reg[i]on": "before", "behind": "before", "head": "before"}
SELECTING = Case(Selecting, vectors)
TRACERS = ["symbolic", "export"]


class Twice(nn.Module):
    """One region that is called twice, and a method of the model that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.head = Selects(), linear()

    def positions(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.tensor([int(row.sum().item() > 0) for row in x]), None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places, nothing = self.positions(x)
        assert nothing is None
        one, other = self.region(x)["rows"], self.region(y, scale=0.5)["rows"]
        return self.head(one).square().mean() + self.head(other).square().mean() + (places[:, None] * x).mean()


ENGINES = ["local", "strict 1", "distributed"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_a_region_returns_has_another_size_each_time(engine: Any, tracer: str) -> None:
    batches = [SELECTING.batch(number) for number in range(3)]
    wanted, _ = reference(SELECTING, batches)
    sizes = {int(Selects()(batch["x"])["rows"].shape[0]) for batch in batches}
    runs = engine(4, _selecting, tracer)
    assert len(sizes) > 1
    assert_run(runs, wanted)


def _selecting(tracer: str) -> Run:
    batches = [SELECTING.batch(number) for number in range(3)]
    return trained(SELECTING, batches, boundaries=CUTS, tracer=tracer, example_kwargs=batches[0])


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_region_called_twice_and_a_method(tracer: str) -> None:
    case = Case(Twice, vectors, stages=2, ranks=2)
    batches = [case.batch(number) for number in range(2)]
    wanted, _ = reference(case, batches)
    rules = {"region": "whole", "positions": "whole", "head": "before"}
    run = trained(case, batches, boundaries=rules, tracer=tracer, example_kwargs=batches[0])
    assert_run([run], wanted, 1e-6)
