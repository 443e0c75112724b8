"""ZB-H1 against 1F1B: stages that sleep, and a GPT that computes.

    python examples/benchmarks/zero_bubble.py           # 5 and 2 processes, about 3 minutes
    python examples/benchmarks/zero_bubble.py sleep     # the first of the two

1. Two branches meet in a join, A1 → A2 → J ← B2 ← B1, on 5 ranks with 8 micro-batches. Stages sleep instead of
   computing, 60 ms each for F, I and W: so 1F1B takes 30 of these units, ZB-H1 26.
2. A GPT of 8 layers on 2 ranks, with 2 to 8 micro-batches. ZB-H1 saves (p − 1)(2 W) of the bubble, if W = I, and pays
   for it: calls that are cut off, a second pass of autograd, what a cache has forgotten until W.

The contestants take turns within one run; times are medians over the rounds, of the slowest rank. Below stand the costs
that ZB-H1's actions had, and the time that their table takes at these.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

UNIT = 0.060  # seconds
SCHEDULES = ("1f1b", "zb_h1")


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(UNIT)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        time.sleep(UNIT)
        return gradient


class Sleeper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x)


def sleep(gradient: Tensor) -> None:
    """W, as a hook of a parameter."""
    time.sleep(UNIT)


class Branches(nn.Module):
    """Two branches of two stages and a join. ``gather``: how its boundaries gather, as ``stage_boundary`` takes it."""

    def __init__(self, **gather: Any) -> None:
        super().__init__()
        self.gather = gather
        self.sleepers = nn.ModuleList(Sleeper() for _ in range(5))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(5))
        for scale in self.scales:
            scale.register_hook(sleep)

    def forward(self, x: Tensor) -> Tensor:
        ends = []
        for first in (0, 2):
            h = fxpipe.stage_boundary(self.sleepers[first](x * self.scales[first]))
            ends.append(fxpipe.stage_boundary(self.sleepers[first + 1](h * self.scales[first + 1]), **self.gather))
        return self.sleepers[4]((ends[0] + ends[1]) * self.scales[4]).square().mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """8 layers; the cut is where the head's work makes the halves alike."""

    def __init__(self, width: int = 512, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for place, layer in enumerate(self.layers):
            x = layer(fxpipe.stage_boundary(x) if place == 4 else x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def run(model: type[nn.Module], ranks: int, microbatches: int, batch: Tensor, rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    topology = fxpipe.Topology([("pipe", ranks)])
    contestants = {}
    for name in SCHEDULES:
        torch.manual_seed(0)
        contestants[name] = fxpipe.compile(
            model(), topology, microbatches=microbatches, schedule=name, example_args=(batch,)
        )
    contestants["zb_h1"].record_timeline()
    seconds = timed(contestants, batch, rounds)
    costs = contestants["zb_h1"].timeline().costs
    if dist.get_rank() == 0:
        report(ranks, microbatches, seconds, costs, {n: step.schedule for n, step in contestants.items()})
    for step in contestants.values():
        step.close()


def timed(
    contestants: Mapping[str, fxpipe.ForwardBackward], batch: Tensor, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Each contestant's steps in seconds, of the slowest rank. They take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round in range(rounds + warm_up):
        for name, step in contestants.items():
            step.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round >= warm_up:
                seconds[name].append(slowest.item())
    return seconds


def report(
    ranks: int,
    microbatches: int,
    seconds: dict[str, list[float]],
    costs: fxpipe.schedules.Costs,
    tables: dict[str, fxpipe.Schedule],
) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            f"{1e3 * tables[name].simulate(costs).makespan:.1f}",
            f"{1e3 * medians[name]:.1f}",
            f"{1e3 * min(seconds[name]):.1f}-{1e3 * max(seconds[name]):.1f}",
            f"{medians[name] / medians['1f1b']:.3f}",
        )
        for name in SCHEDULES
    ]
    print(f"\n{ranks} ranks, {microbatches} micro-batches, {len(seconds['1f1b'])} rounds")
    headers = ("", "simulated ms", "median ms", "range", "median / 1F1B's")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 4)))
    each = zip(costs.forward, costs.input, costs.weight, strict=True)
    print("F, I, W in ms: " + "; ".join(", ".join(f"{1e3 * cost:.1f}" for cost in stage) for stage in each), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["sleep", "gpt"])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    arguments.parts = arguments.parts or ["sleep", "gpt"]
    if "sleep" in arguments.parts:
        fxpipe.launch(run, 5, Branches, 5, 8, torch.ones(8 * 128, 128), arguments.rounds)
    for microbatches in (2, 4, 8) if "gpt" in arguments.parts else ():
        ids = torch.randint(0, 1024, (2 * microbatches, 128), generator=torch.Generator().manual_seed(0))
        fxpipe.launch(run, 2, GPT, 2, microbatches, ids, arguments.rounds)


if __name__ == "__main__":
    main()
