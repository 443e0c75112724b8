"""A run with opaque regions, saved and loaded: it goes on bit for bit, on these ranks, on others, and in plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.models import WIDTH, linear
from tests.pool import Pool
from tests.thinned import every

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Halves(nn.Module):
    """Looks at numbers, counts rows in a buffer, and adds the half of a parameter for each that is large."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = linear(), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        large = [float(row.sum().item() > 0) for row in x]
        self.rows += sum(large)
        return self.inner(x) + torch.tensor(large)[:, None] * self.shift / 2


class Whole(nn.Module):
    """A submodule and a method that are opaque, amid layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.behind, self.head = linear(), Halves(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * (2.0 if x.sum().item() > 0 else 1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.behind(self.region(self.before(x))))
        return (self.head(self.scaled(h)) - y).square().mean()


REGIONS: Any = {"region": "whole", "scaled": "whole"}
CUTS: dict[int, Any] = {2: {"behind": "before"}, 1: {"region": ["whole", "before"], "head": "before"}}
"""By the number of pipe ranks: another cut on each."""
Layout = tuple[int, int, int]
"""(pipe, data, zero)."""


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, WIDTH, generator=generator), "y": torch.randn(8, WIDTH, generator=generator)}


def plain(seed: int = 0) -> Whole:
    torch.manual_seed(seed)
    return Whole()


def run(layout: Layout, seed: int) -> tuple[Any, Any]:
    pipe, data, zero = layout
    topology = Topology([("pipe", pipe), ("data", data)])
    forward_backward = fxpipe.compile(
        plain(seed),
        topology,
        boundaries=REGIONS | CUTS[pipe],
        microbatches=2,
        zero=zero,
        example_kwargs=batch(0),
        check_batches=False,
    )
    return forward_backward, forward_backward.optimizer(torch.optim.AdamW, lr=0.1)


def steps(forward_backward: Any, optimizer: Any, numbers: range) -> list[float]:
    """The same rows on all replicas, so that each topology computes the same numbers."""
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        losses.append(forward_backward(**batch(step)).item())
        optimizer.step()
    return losses


Outcome = tuple[list[float], dict[str, Tensor]]


def saves(layout: Layout, folder: Path) -> Outcome:
    forward_backward, optimizer = run(layout, seed=0)
    steps(forward_backward, optimizer, range(2))
    fxpipe.save(folder / "own", forward_backward, optimizer, step=2)
    dcp.save({"model": forward_backward, "optim": optimizer}, checkpoint_id=folder / "dcp")
    losses = steps(forward_backward, optimizer, range(2, 4))
    return losses, forward_backward.state_dict(full=True)


def loads(layout: Layout, folder: Path, how: str) -> Outcome:
    forward_backward, optimizer = run(layout, seed=1)
    if how == "own":
        fxpipe.load(folder / "own", forward_backward, optimizer)
    else:
        dcp.load({"model": forward_backward, "optim": optimizer}, checkpoint_id=folder / "dcp")
    losses = steps(forward_backward, optimizer, range(2, 4))
    return losses, forward_backward.state_dict(full=True)


def assert_alike(got: Outcome, wanted: Outcome, tolerance: float = 0.0) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=0.0)
    assert got[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert torch.allclose(got[1][name], value, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("zero", every(2, [1, 0]))
def test_training_goes_on_bit_for_bit_and_elsewhere_as_well(pool: Pool, tmp_path: Path, zero: int) -> None:
    layout = (2, 1 + zero, zero)
    wanted = pool.run(saves, layout, tmp_path, ranks=2 * (1 + zero))
    for how in ("own", "dcp"):
        for rank, got in enumerate(pool.run(loads, layout, tmp_path, how, ranks=2 * (1 + zero))):
            assert_alike(got, wanted[rank])
        assert_alike(loads((1, 1, 0), tmp_path, how), wanted[0], 1e-5)
    model = plain(seed=2)
    model.load_state_dict(wanted[0][1])
    assert model.region.rows.item() > 0
    fresh = plain(seed=0).state_dict()
    assert all(not torch.equal(fresh[name], value) for name, value in wanted[0][1].items())


def test_what_was_trained_is_what_plain_pytorch_trains(tmp_path: Path) -> None:
    model, (forward_backward, optimizer) = plain(), run((1, 1, 0), seed=0)
    reference = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        reference.zero_grad()
        for rows in (slice(0, 4), slice(4, 8)):
            (model(**{name: value[rows] for name, value in batch(step).items()}) / 2).backward()
        reference.step()
    steps(forward_backward, optimizer, range(2))
    for name, value in model.state_dict().items():
        assert torch.allclose(forward_backward.state_dict(full=True)[name], value, atol=1e-6), name
