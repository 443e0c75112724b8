"""What comparing batches costs: steps with `check_batches` and without, in turn, on two processes.

    python examples/benchmarks/check_batches.py                # about a minute

A convolutional network in two stages reads images of 224 × 224. Both ways take turns, step by step, the first of a pair
now one and now the other; they are one compiled object whose check is switched, for two compiled alike differ by more
than is to be found, by where their memory lies. The median step is one without a comparison, which come in the first 3
steps and every 100th; what they take is told beside it. Seconds are those of the clock, of the slower rank, and those
of the CPU, of both ranks together, which other work on the machine moves less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.run.step.batch_check import EVERY, FIRST, Digest

ROWS, SIDE, CLASSES = 16, 224, 10


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU())
        self.above = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES))

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.above(fxpipe.stage_boundary(self.below(image))), label)


class Taken(NamedTuple):
    """Seconds."""

    clock: float
    cpu: float


def timed(call: Callable[[], object]) -> Taken:
    """Of a call that all ranks make."""
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    call()
    mine = Taken(time.perf_counter() - clock, time.process_time() - cpu)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return Taken(max(taken.clock for taken in everyone), sum(taken.cpu for taken in everyone))


def work(pairs: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    topo = fxpipe.Topology([("pipe", 2)])
    forward_backward = fxpipe.compile(Network(), topo, microbatches=4)
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)
    label = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    for _ in range(FIRST + 1):
        forward_backward(image, label)
    taken: dict[bool, list[Taken]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            forward_backward._steps._check.on = on
            taken[on].append(timed(partial(forward_backward, image, label)))
    compared = [timed(partial(compare, image=image, label=label)) for _ in range(20)]
    if dist.get_rank() == 0:
        report(taken, compared)


def compare(**batch: Tensor) -> None:
    """What a comparison takes in all."""
    dist.all_gather_object([None, None], Digest([batch]).numbers())


def report(taken: dict[bool, list[Taken]], compared: list[Taken]) -> None:
    rows = []
    for column in Taken._fields:
        on, off, check = (
            statistics.median(getattr(one, column) for one in some) for some in (taken[True], taken[False], compared)
        )
        differences = (f"{100 * (on / off - 1):+.2f} %", f"{1e3 * check:.2f}", f"{100 * check / off / EVERY:.2f} %")
        rows.append((column, f"{1e3 * on:.2f}", f"{1e3 * off:.2f}", *differences))
    headers = ("ms", "checked", "unchecked", "difference", "a comparison", f"of {EVERY} steps")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=150, help="steps of each way")
    fxpipe.launch(work, 2, parser.parse_args().pairs)


if __name__ == "__main__":
    main()
