"""On a GPU: the local engine trains without ever making the host wait. Skipped where there is none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.run.step.batch_check import Digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = fxpipe.stage_boundary(layer(x).relu())
        return self.layers[-1](x).square().mean()


class Counted(Chain):
    """A sum over a known number of items, with metrics of all kinds."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = super().forward(x)
        total = fxpipe.Sum(y * 64, 64)
        return {"loss": total, "rows": 8, "positive": (x > 0).sum(), "any": (x > 0).any()}


@pytest.mark.parametrize("model", [Chain, Counted])
def test_a_step_of_the_local_engine_makes_no_host_synchronisation(model: type[nn.Module]) -> None:
    forward_backward = fxpipe.compile(model().cuda(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
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


def test_a_recorded_step_is_timed_with_events_and_makes_no_host_synchronisation() -> None:
    forward_backward = fxpipe.compile(Chain().cuda(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
    batch = torch.randn(32, 64, device="cuda")
    forward_backward(batch)
    forward_backward.record_timeline()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    timeline = forward_backward.timeline()
    assert set(timeline.spans) == {action for row in timeline.schedule.rows for action in row}
    for row in timeline.schedule.rows:
        for first, second in pairwise(row):
            assert timeline.spans[first].end <= timeline.spans[second].start + 1e-6
    assert all(span.duration > 0 for span in timeline.spans.values())


def test_a_loss_that_is_nan_is_told_one_call_late() -> None:
    forward_backward = fxpipe.compile(Chain().cuda(), fxpipe.Topology([("pipe", 3)]), microbatches=4)
    batch = torch.randn(32, 64, device="cuda")
    spoilt = batch.clone()
    spoilt[10] = float("nan")
    forward_backward(spoilt)
    with pytest.warns(RuntimeWarning, match="the loss of step 0 is nan: micro-batch 1 is the first whose"):
        forward_backward(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_digest_is_the_same_as_on_the_cpu_and_makes_no_host_synchronisation(dtype: torch.dtype) -> None:
    x = (torch.randn(70, 5000) * 100).to(dtype)  # more than one piece
    there = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        digest = Digest([{"x": there}])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert digest.numbers() == Digest([{"x": x}]).numbers()
