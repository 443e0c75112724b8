"""ZB-H1 against 1F1B: stages that sleep, and a GPT that computes, with a profile.

    python examples/benchmarks/zero_bubble.py           # 5, 2 processes and one, about 5 minutes
    python examples/benchmarks/zero_bubble.py sleep     # the first of the three

1. Two branches meet in a join, A1 → A2 → J ← B2 ← B1, on 5 ranks with 8 micro-batches. Stages sleep instead of
   computing, 60 ms each for F, I and W: so 1F1B takes 30 of these units, ZB-H1 26.
2. A GPT of 8 layers on 2 ranks, with 2 to 8 micro-batches. A step of 1F1B takes (m + p − 1)(F + B), one of ZB-H1
   m(F + I + W) + (p − 1)(F + I − W): it saves (p − 1)(B − I + W), which is (p − 1) 2 W where B = I + W, and pays
   m(I + W − B) for what halves cost more than a whole. So with 2 ranks it wins for less than 2 W / (I + W − B)
   micro-batches.
3. Where that goes: operators of a step of this GPT, whole and in halves, one process playing both ranks.

The contestants take turns within one run; times are medians over the rounds, of the slowest rank. Below stand the costs
that their actions had; simulated is what each table takes at its own.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sleeping import timed_step
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


def run(model: Callable[[], nn.Module], ranks: int, microbatches: int, batch: Tensor, rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    topology = fxpipe.Topology([("pipe", ranks)])
    contestants = {}
    for name in SCHEDULES:
        torch.manual_seed(0)
        contestants[name] = fxpipe.compile(
            model(), topology, microbatches=microbatches, schedule=name, example_args=(batch,)
        )
    for step in contestants.values():
        step.record_timeline()
    seconds = timed(contestants, batch, rounds)
    timelines = {name: step.timeline() for name, step in contestants.items()}
    if dist.get_rank() == 0:
        report(ranks, microbatches, seconds, timelines)
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
            taken, _ = timed_step(step, batch)
            if round >= warm_up:
                seconds[name].append(taken)
    return seconds


def report(
    ranks: int, microbatches: int, seconds: dict[str, list[float]], timelines: dict[str, fxpipe.Timeline]
) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            f"{1e3 * timelines[name].schedule.simulate(timelines[name].costs).makespan:.1f}",
            f"{1e3 * medians[name]:.1f}",
            f"{1e3 * min(seconds[name]):.1f}-{1e3 * max(seconds[name]):.1f}",
            f"{medians[name] / medians['1f1b']:.3f}",
        )
        for name in SCHEDULES
    ]
    print(f"\n{ranks} ranks, {microbatches} micro-batches, {len(seconds['1f1b'])} rounds")
    headers = ("", "simulated ms", "median ms", "range", "median / 1F1B's")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 4)))
    whole, halves = (timelines[name].costs for name in SCHEDULES)
    each = {
        "1f1b: F, B": (whole.forward, whole.backward),
        "zb_h1: F, I, W": (halves.forward, halves.input, halves.weight),
    }
    for name, costs in each.items():
        stages = "; ".join(", ".join(f"{1e3 * cost:.1f}" for cost in stage) for stage in zip(*costs, strict=True))
        print(f"{name} in ms, by stage: {stages}", flush=True)


KINDS = {"products": ("mm", "bmm"), "attention": ("flash_attention",), "copies, sums": ("copy_", "add_", "sum", "add")}
"""Operators by what their names end with, less ``_backward``; all others are "other operators"."""


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::").removesuffix("_backward").removesuffix("_for_cpu")
    return next((kind for kind, ends in KINDS.items() if name.endswith(ends)), "other operators")


def profile(width: int, microbatches: int, batch: Tensor, rounds: int) -> None:
    """Prints what a step's operators take, in ms, of the fastest round; the rest is Python and autograd itself."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        topology = fxpipe.Topology([("pipe", 2)])
        options = {"microbatches": microbatches, "schedule": schedule, "example_args": (batch,)}
        step = fxpipe.compile(GPT(width), topology, **options)
        step(batch)
        found[schedule] = min((operators(step, batch) for _ in range(rounds)), key=lambda one: one["in all"])
    kinds = sorted({kind for one in found.values() for kind in one}, key=lambda kind: found["1f1b"].get(kind, 0.0))
    rows = [
        (
            kind,
            *(f"{found[name].get(kind, 0.0):.1f}" for name in SCHEDULES),
            f"{found['zb_h1'].get(kind, 0.0) - found['1f1b'].get(kind, 0.0):+.1f}",
        )
        for kind in kinds
    ]
    print(f"\na step of {microbatches} micro-batches, ms")
    print(tabulate(rows, headers=("", *SCHEDULES, "more"), disable_numparse=True, colalign=("left", *("right",) * 3)))


def operators(step: fxpipe.ForwardBackward, batch: Tensor) -> dict[str, float]:
    """Kind of operator → ms of a step."""
    step.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        step(batch)
        took = 1e3 * (time.perf_counter() - start)
    spent = {"in all": took}
    for event in profiler.key_averages():
        if event.key.startswith("aten::"):
            kind = kind_of(event.key)
            spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total / 1e3
    return spent | {"outside of operators": took - sum(ms for kind, ms in spent.items() if kind != "in all")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="sleep, gpt, profile")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--width", type=int, default=512, help="of the GPT, a multiple of 64")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts or ["sleep", "gpt", "profile"]
    if "sleep" in arguments.parts:
        fxpipe.launch(run, 5, Branches, 5, 8, torch.ones(8 * 128, 128), arguments.rounds)
    for microbatches in (2, 4, 8) if "gpt" in arguments.parts else ():
        fxpipe.launch(run, 2, partial(GPT, arguments.width), 2, microbatches, ids_of(microbatches), arguments.rounds)
    if "profile" in arguments.parts:
        profile(arguments.width, 4, ids_of(4), min(arguments.rounds, 3))


def ids_of(microbatches: int) -> Tensor:
    return torch.randint(0, 1024, (2 * microbatches, 128), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    main()
