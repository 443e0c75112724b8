"""What it costs to look at every stage's output: steps with and without it, in turns.

    python examples/benchmarks/check_finite.py                 # a CPU or, where there is one, a GPU
    python examples/benchmarks/check_finite.py --rounds 400

One process plays two pipe ranks. A round is a step without the check and one with it, in an order that changes from
round to round; medians over the rounds, and the median of the rounds' ratios. On a CPU it is the process's own time
that counts, which what else runs on the machine moves less. The last column is what the host spends in the check, timed
by itself in further steps, as a part of the step: on a CPU all that it costs, and less at the mercy of noise. The
smallest model is here to show the price of a call; a stage is seldom as small.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.run.step.finite import Extremes, Watch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
clock = time.process_time if DEVICE.type == "cpu" else time.perf_counter


class Layers(nn.Module):
    """``depth`` encoder layers, cut in the middle."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(fxpipe.stage_boundary(x) if place == len(self.layers) // 2 else x)
        return x.square().mean()


class Linears(nn.Module):
    """Two linear layers and a boundary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x).relu())).square().mean()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Steps in which nothing is looked at."""
    with mock.patch.object(Watch, "begin", return_value=None):
        yield


def seconds(forward_backward: fxpipe.ForwardBackward, batch: Tensor, check: bool) -> float:
    """One step's, to the end of the work."""
    with contextlib.nullcontext() if check else unchecked():
        forward_backward.zero_grad()
        synchronise()
        start = clock()
        forward_backward(batch)
        synchronise()
        return clock() - start


def spent_in_check(forward_backward: fxpipe.ForwardBackward, batch: Tensor) -> float:
    """The host's seconds in the check, of one step."""
    spent = 0.0

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def body(*args: Any) -> None:
            nonlocal spent
            start = clock()
            call(*args)
            spent += clock() - start

        return body

    patches = [mock.patch.object(Extremes, name, timed(getattr(Extremes, name))) for name in ("on_end", "add_losses")]
    with patches[0], patches[1]:
        seconds(forward_backward, batch, check=True)
    return spent


def synchronise() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize(DEVICE)


def measured(model: nn.Module, batch: Tensor, rounds: int) -> tuple[float, float, float, float]:
    """Median seconds without and with the check, the median ratio, and the median seconds in the check."""
    topology = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(model.to(DEVICE), topology, microbatches=4, example_args=(batch.to(DEVICE),))
    batch = batch.to(DEVICE)
    for check in (False, True, False, True):
        seconds(forward_backward, batch, check)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        taken = {check: seconds(forward_backward, batch, check) for check in order}
        pairs.append((taken[False], taken[True]))
    without, with_check = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    spent = statistics.median(spent_in_check(forward_backward, batch) for _ in range(rounds))
    return without, with_check, ratio, spent


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=100)
    rounds = arguments.parse_args().rounds
    torch.manual_seed(0)
    cases: dict[str, tuple[nn.Module, Tensor]] = {
        "2 linear layers of 16, 4 rows": (Linears(16), torch.randn(16, 16)),
        "2 linear layers of 256, 64 rows": (Linears(256), torch.randn(256, 256)),
        "2 encoder layers of 128, 4 × 32 tokens": (Layers(2, 128), torch.randn(16, 32, 128)),
        "2 encoder layers of 256, 2 × 64 tokens": (Layers(2, 256), torch.randn(8, 64, 256)),
    }
    if DEVICE.type != "cpu":
        cases["8 encoder layers of 1024, 8 × 512 tokens"] = (Layers(8, 1024), torch.randn(32, 512, 1024))
    print(f"one step of 4 micro-batches on {DEVICE.type}, {rounds} rounds; ms, medians", flush=True)
    rows = []
    for name, (model, batch) in cases.items():
        without, with_check, ratio, spent = measured(model, batch, rounds)
        numbers = [f"{without * 1e3:.2f}", f"{with_check * 1e3:.2f}", f"{(ratio - 1) * 100:+.1f} %"]
        rows.append([name, *numbers, f"{spent / without * 100:.2f} %"])
        print(*rows[-1], sep="  ", flush=True)
    print(tabulate(rows, ["model, a micro-batch", "without", "with", "ratio", "check alone"], disable_numparse=True))


if __name__ == "__main__":
    main()
