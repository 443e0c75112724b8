"""What checking a capture against the model costs: seconds of ``fxpipe.compile`` with and without it.

    python examples/benchmarks/check_capture.py            # a minute
    python examples/benchmarks/check_capture.py --rounds 20

Each model is compiled on one process, in turn with ``Tracing(check=True)`` and without; the table has the medians, and
the median of the ratios of neighbours. The check runs the stages and the model forward and backward on two
micro-batches: its cost is that of about four steps of a micro-batch, and of the copies that put everything back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe import stage_boundary


class Chain(nn.Module):
    """Linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.relu(layer(stage_boundary(x) if place == len(self.layers) // 2 else x))
        return F.mse_loss(x, y)


class Language(nn.Module):
    """A transformer's encoder on tokens, with dropout."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for place, layer in enumerate(self.layers):
            x = layer(stage_boundary(x) if place == len(self.layers) // 2 else x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Images(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(depth)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for place, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            x = x + torch.relu(norm(block(stage_boundary(x) if place == len(self.blocks) // 2 else x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


Made = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, Callable[[], Made]] = {
    "8 linear layers of 64": lambda: (Chain(64, 8), {"x": torch.randn(32, 64), "y": torch.randn(32, 64)}),
    "8 linear layers of 1024": lambda: (Chain(1024, 8), {"x": torch.randn(32, 1024), "y": torch.randn(32, 1024)}),
    "4 transformer layers of 128": lambda: (Language(128, 4), {"ids": torch.randint(0, 1000, (16, 64))}),
    "8 convolutions of 32": lambda: (
        Images(32, 8),
        {"x": torch.randn(16, 3, 32, 32), "y": torch.randint(0, 10, (16,))},
    ),
}


def seconds(model: nn.Module, batch: dict[str, Any], tracer: str, check: bool) -> float:
    start = time.perf_counter()
    forward_backward = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 2)]),
        microbatches=4,
        tracer=fxpipe.Tracing(tracer, check=check),
        example_kwargs=batch,
    )
    end = time.perf_counter()
    assert ("checked against the model on 2 micro-batches" in str(forward_backward.stages)) == check
    return end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, build in MODELS.items():
        model, batch = build()
        for tracer in (tracer for tracer in fxpipe.TRACERS if tracer != "auto"):
            seconds(model, batch, tracer, check=True)  # imports, and what torch keeps
            pairs = [[seconds(model, batch, tracer, check) for check in (False, True)] for _ in range(rounds)]
            without, with_it = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(checked / plain for plain, checked in pairs)
            rows.append((name, tracer, f"{without:.3f}", f"{with_it:.3f}", f"{ratio:.2f}"))
    print(tabulate(rows, ["model", "tracer", "s without", "s with", "ratio"]))


if __name__ == "__main__":
    main()
