"""On a GPU: the local engine trains without ever making the host wait. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = fxpipe.stage_boundary(layer(x).relu())
        return self.layers[-1](x).square().mean()


def test_a_step_of_the_local_engine_makes_no_host_synchronisation() -> None:
    forward_backward = fxpipe.compile(Chain().cuda(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    batch = torch.randn(32, 64, device="cuda")
    forward_backward(batch)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.zero_grad()
        loss = forward_backward(batch)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.device.type == "cuda"
    assert torch.isfinite(loss)
