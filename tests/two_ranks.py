"""What several tests of two ranks share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpipe

ONE, TWO = fxpipe.Topology([("pipe", 1)]), fxpipe.Topology([("pipe", 2)])
WORDS, WIDTH = 11, 8


class Two(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mode: str = "plain") -> Tensor:
        h = fxpipe.stage_boundary(self.a(x * self.scale))
        return self.b(-h if mode == "negative" else h).square().mean()


class Pooled(nn.Module):
    """Returns a row per sample, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (positions, rows, 4) -> (rows, 3)
        return self.b(fxpipe.stage_boundary(self.a(x)).mean(0))
