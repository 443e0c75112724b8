"""Plain optimizers in checkpoints: saving changes nothing, and loading fills whatever there is already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim.lr_scheduler import StepLR

import fxpipe
from fxpipe.errors import CheckpointError
from fxpipe.run.run_state import PlainOptimizer
from tests.run.test_loading import Two

Made = tuple[Any, torch.optim.Optimizer]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "dampened SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
}


def made(name: str, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    model = fxpipe.compile(Two(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    return model, OPTIMIZERS[name](model.parameters())


def losses(run: Made, first: int, last: int) -> list[float]:
    model, optimizer = run
    found = []
    for step in range(first, last):
        optimizer.zero_grad()
        found.append(float(model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))))
        optimizer.step()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path, name: str) -> None:
    wanted = losses(made(name), 0, 4)
    run = made(name)
    StepLR(run[1], 100)  # which wraps its step
    fxpipe.save(tmp_path, *run, step=0)
    assert not run[1].state
    assert losses(run, 0, 4) == wanted
    run = made(name, seed=1)
    fxpipe.load(tmp_path, *run)
    assert losses(run, 0, 4) == wanted


def test_lbfgs_is_refused() -> None:
    model, _ = made("AdamW")
    with pytest.raises(CheckpointError, match="LBFGS keeps what it has of all parameters with the first"):
        PlainOptimizer(model.module, torch.optim.LBFGS(model.parameters())).state_to_fill(())


def test_the_names_are_those_of_torchs_helper() -> None:
    run = made("AdamW")
    losses(run, 0, 1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    wanted = get_optimizer_state_dict(run[0].module, run[1], options=options)
    state = PlainOptimizer(run[0].module, run[1]).state_to_fill(())
    found = {
        f"{part}.{name}.{key}": value
        for part in state
        for name in state[part]
        for key, value in state[part][name].items()
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items() if isinstance(value, Tensor))
