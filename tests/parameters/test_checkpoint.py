"""State dicts in the plain model's names: a file saved by either loads in the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.pool import Pool
from tests.strict_transport import run_strict


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


class Fused(nn.Module):
    """A fused projection that state dicts hold in two parts, as torchtitan's wqkv in three."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(4, 8, bias=False)
        self.register_state_dict_post_hook(split)
        self.register_load_state_dict_pre_hook(join)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(x).chunk(2, -1)
        return left * right


def split(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    rows = state.pop(f"{prefix}both.weight")
    state[f"{prefix}even.weight"], state[f"{prefix}odd.weight"] = rows[::2].clone(), rows[1::2].clone()


def join(module: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
    parts = state.pop(f"{prefix}even.weight"), state.pop(f"{prefix}odd.weight")
    state[f"{prefix}both.weight"] = torch.stack(parts, 1).flatten(0, 1)


def fused() -> nn.Module:
    return nn.Sequential(Fused(), Fused(), nn.Linear(4, 1), Mean())


class Perceptual(nn.Module):
    """Leaves a frozen part out of its state dict, as models with a perceptual loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 4), nn.Linear(4, 1).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "frozen" not in name}

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(fxpipe.stage_boundary(self.linear(x))).square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_that_leaves_tensors_out_is_loaded(ranks: int) -> None:
    plain = Perceptual().state_dict()

    def run(rank: int) -> None:
        forward_backward = fxpipe.compile(Perceptual(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
        forward_backward.load_state_dict(plain)
        torch.testing.assert_close(forward_backward.state_dict(full=True), plain, rtol=0, atol=0)

    run_strict(run, 2) if ranks == 2 else run(0)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_state_dicts_hold_in_parts_is_saved_and_loaded(ranks: int, tmp_path: Path) -> None:
    plain = fused().state_dict()

    def run(rank: int) -> None:
        first, second = (
            fxpipe.compile(fused(), fxpipe.Topology([("pipe", 2)]), microbatches=2, boundaries=["1"]) for _ in range(2)
        )
        first.load_state_dict(plain)
        torch.testing.assert_close(first.state_dict(full=True), plain, rtol=0, atol=0)
        steppers = [each.optimizer(torch.optim.AdamW, lr=0.1) for each in (first, second)]
        first(torch.ones(4, 4))
        steppers[0].step()
        fxpipe.save(tmp_path, first, steppers[0], step=1)
        fxpipe.load(tmp_path, second, steppers[1])
        for mine, loaded in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(mine, loaded)

    run_strict(run, 2) if ranks == 2 else run(0)
