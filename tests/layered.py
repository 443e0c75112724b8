"""What tests of captures share: a model of layers, its cuts, and a run beside plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.harness import accumulate, assert_same, cut, gradients_of
from tests.models import Inputs

WIDTH = 8


def vectors(number: int, rows: int = 8) -> Inputs:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "y")}


def compiled(model: nn.Module, batch: Inputs, boundaries: Any = (), ranks: int = 2, **options: Any) -> Any:
    topology, options = fxpipe.Topology([("pipe", ranks)]), {"microbatches": 2, **options}
    return fxpipe.compile(model, topology, boundaries=boundaries, example_kwargs=batch, **options)


def assert_trains(
    make: Callable[[], nn.Module],
    batches: Sequence[Inputs],
    boundaries: Any = (),
    stages: int | None = None,
    tolerance: float = 0.0,
    **options: Any,
) -> fxpipe.ForwardBackward:
    """Captured with the first batch, it computes for the others what plain PyTorch does, micro-batch by micro-batch."""
    torch.manual_seed(0)
    model = make().train()
    plain = copy.deepcopy(model)
    forward_backward: fxpipe.ForwardBackward = compiled(model, batches[0], boundaries, **options)
    if stages is not None:
        assert len(forward_backward.stages) == stages, str(forward_backward.stages)
    for batch in batches[1:]:
        forward_backward.zero_grad()
        plain.zero_grad()
        loss = forward_backward(**batch)
        wanted_loss, _ = accumulate(lambda _, part: loss_of(plain(**part)), cut(batch, options.get("microbatches", 2)))
        assert_same(loss, wanted_loss, "loss", tolerance)
        wanted = gradients_of(plain.named_parameters(remove_duplicate=False))
        for name, gradient in gradients_of(forward_backward.named_parameters()).items():
            assert_same(gradient, wanted[name], name, tolerance)
    return forward_backward


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Layers(nn.Module):
    """Four layers in a row; the subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.run(self.first(x)), y)

    def run(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


TRACERS = ["symbolic", "export", "record", "auto"]
