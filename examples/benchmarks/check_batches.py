"""What comparing batches costs: steps with `check_batches` and without, in turn, on two processes.

    python examples/benchmarks/check_batches.py                # about a minute

A convolutional network in two stages reads images of 224 × 224. Both ways are compiled in the same processes and take
turns, step by step, the first of a pair now one and now the other. Times are of the slower rank: the median step, which
is one without a comparison (the first 3 steps and every 100th are compared), and what a compared step takes beyond it,
from `Digest` and the comparison alone, so that the mean over 100 steps can be told.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.batch_check import EVERY
from fxpipe.batch_digest import Digest

ROWS, SIDE, CLASSES = 16, 224, 10


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.above = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.above(fxpipe.stage_boundary(self.below(image))), label)


def slowest(seconds: float) -> float:
    times = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, seconds)
    return max(times)


def work(pairs: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    topo = fxpipe.Topology([("pipe", 2)])
    steps = {on: fxpipe.compile(Network(), topo, microbatches=4, check_batches=on) for on in (True, False)}
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)
    label = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    for step in steps.values():
        for _ in range(4):  # which are compared, and captured
            step(image, label)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            start = time.perf_counter()
            steps[on](image, label)
            seconds[on].append(slowest(time.perf_counter() - start))
    checks = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        numbers = Digest([{"image": image, "label": label}]).numbers()
        dist.all_gather_object([None, None], numbers)
        checks.append(slowest(time.perf_counter() - start))
    if dist.get_rank() == 0:
        report(seconds, statistics.median(checks))


def report(seconds: dict[bool, list[float]], check: float) -> None:
    medians = {on: statistics.median(times) for on, times in seconds.items()}
    rows = [(f"check_batches={on}", f"{1e3 * medians[on]:.2f}", len(seconds[on])) for on in (True, False)]
    print(tabulate(rows, headers=("", "median step ms", "steps"), disable_numparse=True))
    median = medians[True] / medians[False] - 1
    print(f"median step: {100 * median:+.2f} %")
    print(f"a comparison takes {1e3 * check:.2f} ms: {100 * check / medians[False] / EVERY:.3f} % of {EVERY} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=150, help="steps of each way")
    fxpipe.launch(work, 2, parser.parse_args().pairs)


if __name__ == "__main__":
    main()
