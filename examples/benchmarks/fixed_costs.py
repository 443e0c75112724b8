"""The fixed costs of a step and of an evaluation on two replicas, beside DDP's: processor time and collective calls.

    python examples/benchmarks/fixed_costs.py                                  # 2 and 100 parameters: two minutes
    python examples/benchmarks/fixed_costs.py --parameters 2 --before FOLDER   # and an earlier checkout, in turns

The model adds ``x @ w`` to ``x`` for each of its parameters of 16 × 16, in one bucket. fxpipe and DDP take turns in the
same two processes. Processor time is that of both ranks together, in ms: medians over the calls of a process, then over
the processes. DDP evaluates without communication; fxpipe's ``evaluate`` returns the loss over both replicas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import Figures, in_turns, table

import fxpipe

CALLS = 40
Call = Callable[[], object]


class Adds(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(parameters))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def contestants(parameters: int) -> tuple[dict[str, Call], fxpipe.ForwardBackward]:
    """What to measure, each behind a clearing of its gradients."""
    x, own, theirs = torch.randn(4, 16), Adds(parameters), DistributedDataParallel(Adds(parameters))
    numbers = torch.zeros(8)
    step = fxpipe.compile(own, fxpipe.Topology([("pipe", 1), ("data", 2)]), microbatches=1)

    def ddp_evaluates() -> None:
        theirs.eval()
        with torch.no_grad():
            theirs(x)
        theirs.train()

    calls: dict[str, Call] = {
        "step": lambda: step(x),
        "DDP's step": lambda: theirs(x).backward(),
        "evaluate": lambda: step.evaluate(x, outputs="loss"),
        "DDP's evaluate": ddp_evaluates,
        "an all-reduce of 8 numbers": lambda: dist.all_reduce(numbers),
    }
    for _ in range(5):
        for call in calls.values():
            call()
        step.zero_grad()
        theirs.zero_grad()
    return calls, step


def measure(parameters: int) -> Figures:
    """Runs on each rank."""
    torch.set_num_threads(1)
    calls, step = contestants(parameters)
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(CALLS):
        for name in [*calls][number % 2 :] + [*calls][: number % 2]:
            dist.barrier()
            start = time.process_time()
            calls[name]()
            took[name].append(time.process_time() - start)
        step.zero_grad()
    medians = torch.tensor([1e3 * statistics.median(times) for times in took.values()], dtype=torch.float64)
    dist.all_reduce(medians)
    figures = dict(zip(took, medians.tolist(), strict=True))
    for name in ("step", "evaluate"):
        calls[name]()
        rows = step.traffic().rows
        figures[f"{name}: collective calls"] = sum(row.count for row in rows)
        figures[f"{name} ÷ DDP's"] = figures[name] / figures[f"DDP's {name}"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="*", default=[2, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="a folder with an earlier checkout, to measure in turns")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(fxpipe.launch(measure, 2, arguments.measure)[0]))
        return
    for parameters in arguments.parameters:
        print(f"\n{parameters} parameters, processor ms of both ranks")
        print(table(in_turns(__file__, ["--measure", str(parameters)], arguments.before, arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
