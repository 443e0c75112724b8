"""State dicts in the plain model's names: a file saved by either loads in the other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.pool import Pool


class Model(nn.Module):
    """Two stages, running statistics, a parameter that nobody uses, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 1)
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(fxpipe.stage_boundary(self.first(x))).square().mean() * self.passing.sum()


def train_and_save(folder: Path) -> list[str]:
    """One step; saves the whole model's state dict from every rank; the names that this rank holds."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Model(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    optimizer = forward_backward.optimizer(torch.optim.SGD, lr=0.1)
    forward_backward(torch.arange(24.0).view(6, 4))
    optimizer.step()
    torch.save(forward_backward.state_dict(full=True), folder / f"full{os.getpid()}.pt")
    return list(forward_backward.state_dict())


def plain_step() -> Model:
    torch.manual_seed(0)
    model = Model()
    for rows in torch.arange(24.0).view(6, 4).chunk(2):
        (model(rows) * 0.5).backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=0.1).step()
    return model


@pytest.mark.parametrize("processes", [1, 2])
def test_the_full_state_dict_of_every_rank_loads_in_the_plain_model(pool: Pool, tmp_path: Path, processes: int) -> None:
    held = [train_and_save(tmp_path)] if processes == 1 else pool.run(train_and_save, tmp_path, ranks=2)
    expected = plain_step().state_dict()
    files = list(tmp_path.glob("full*.pt"))
    assert len(files) == processes
    for file in files:
        plain = Model()
        plain.load_state_dict(torch.load(file))
        for name, tensor in plain.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    names = [name for part in held for name in part]
    assert sorted(names) == sorted(expected)
    assert all(not {"spare", "first.0.weight"} & set(part) or processes == 1 for part in held[1:])
