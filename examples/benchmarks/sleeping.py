"""Stages that sleep instead of computing, so that any number of processes share a few cores; and how long they take.

Shared by encoder_on_all_ranks.py, graph_vs_chain.py, uneven_microbatches.py, vlm.py and zero_bubble.py; it prints
nothing itself.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sleep(torch.autograd.Function):
    """The identity, which takes its seconds both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Stage(nn.Module):
    """The sum of its inputs after so many seconds; of the last stage a loss. Without ``trained`` it is frozen."""

    def __init__(self, forward: float, backward: float, is_last: bool = False, trained: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)
        self.seconds, self.is_last = (forward, backward), is_last

    def forward(self, *inputs: Tensor) -> Tensor:
        y = Sleep.apply(sum(inputs) * self.scale, *self.seconds)
        return y.square().mean() if self.is_last else y


def timed_step(step: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """The seconds of a step that all ranks begin together, on the slowest of them, and what it returned here; called by
    all ranks."""
    dist.barrier()
    start = time.perf_counter()
    returned = step(*args)
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item(), returned


def in_turns(
    contestants: Mapping[str, Callable[[Tensor], object]],
    x: Tensor,
    rounds: int,
    behind: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds of each round's step of each contestant, on the slowest rank; called by all ranks.

    Contestants take turns. One round more comes first, to warm up. ``behind``: called behind each round that counts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, step in contestants.items():
            taken, _ = timed_step(step, x)
            if number:
                seconds[name].append(taken)
        if number:
            behind()
    return seconds
