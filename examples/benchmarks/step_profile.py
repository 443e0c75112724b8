"""A step by category: where its time goes on each rank, and what the floor is of what stands outside of actions.

    python examples/benchmarks/step_profile.py              # 5, 2 and 5 processes, about a minute
    python examples/benchmarks/step_profile.py sleep        # the first of the three

1. Stages that sleep (20 ms forward, 40 ms backward), two branches and a join on 5 ranks with 8 micro-batches: what is
   not sleep is what a step costs.
2. A GPT of 8 layers that computes, on 2 ranks with 4 micro-batches.
3. What gloo takes for two numbers of each of 5 ranks, which come to it at once: an all-gather, a maximum, a broadcast.

Of the first two the median step is printed, and medians over steps: "outside" is the step, from the moment when the
last rank has called until the last one returns, less the makespan of its actions.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from graph_vs_chain import COLUMNS, ROWS, stage_graph
from tabulate import tabulate
from torch import Tensor
from zero_bubble import GPT, ids_of

import fxpipe

EDGES = [("A1", "A2"), ("A2", "J"), ("B1", "B2"), ("B2", "J")]
NAMES = ["A1", "A2", "B1", "B2", "J"]


def run(part: str, rounds: int, width: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    torch.manual_seed(0)
    if part == "sleep":
        model, batch = stage_graph(NAMES, EDGES), torch.ones(8 * ROWS, COLUMNS)
    else:
        model, batch = GPT(width), ids_of(4)
    topology = fxpipe.Topology([("pipe", dist.get_world_size())])
    microbatches = 8 if part == "sleep" else 4
    step = fxpipe.compile(model, topology, microbatches=microbatches, example_args=(batch,) if part == "gpt" else None)
    timelines = recorded(step, batch, rounds)
    if dist.get_rank() == 0:
        report(part, timelines)
    step.close()


def recorded(step: fxpipe.ForwardBackward, batch: Tensor, rounds: int, warm_up: int = 4) -> list[fxpipe.Timeline]:
    """Ranks compare the first batches of a kind, and exchange descriptions: those steps are not told."""
    step.record_timeline()
    timelines = []
    for number in range(rounds + warm_up):
        step.zero_grad()
        dist.barrier()
        step(batch)
        if number >= warm_up:
            timelines.append(step.timeline())
    return timelines


def outside(timeline: fxpipe.Timeline) -> float:
    """Seconds from the last rank's call to the last one's return in which no action was under way on any rank."""
    ranks = [[spell for spell in timeline.spells if spell.ranks == one.ranks] for one in timeline.spent]
    return max(spells[-1].end for spells in ranks) - max(spells[0].start for spells in ranks) - timeline.makespan


def report(part: str, timelines: list[fxpipe.Timeline]) -> None:
    walls = [max(one.wall for one in timeline.spent) for timeline in timelines]
    typical = timelines[walls.index(statistics.median_high(walls))]
    print(f"\n{part}, {len(timelines)} rounds; the median step")
    print(typical)
    rows = []
    for rank in range(len(typical.spent)):
        each = [timeline.spent[rank] for timeline in timelines]
        medians = [statistics.median(one.seconds[category] for one in each) for category in each[0].seconds]
        rows.append([rank, *(f"{1e3 * seconds:.2f}" for seconds in medians)])
    print("medians over the rounds, ms")
    print(tabulate(rows, headers=["rank", *typical.spent[0].seconds], disable_numparse=True))
    told = sorted(1e3 * outside(timeline) for timeline in timelines)
    print(f"outside of actions: median {statistics.median(told):.1f} ms, {told[0]:.1f} to {told[-1]:.1f}", flush=True)


def collectives(rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    ranks, numbers = dist.get_world_size(), torch.zeros(2, dtype=torch.int64)
    everyone = [torch.zeros_like(numbers) for _ in range(ranks)]
    contestants: dict[str, Callable[[], object]] = {
        "all-gather": lambda: dist.all_gather(everyone, numbers),
        "maximum": lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(numbers, ranks - 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
    if dist.get_rank() == 0:
        told = (f"{name} {1e3 * statistics.median(times):.2f}" for name, times in seconds.items())
        print(f"\ntwo numbers of each of {ranks} ranks, median ms of the slowest: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="sleep, gpt, collectives")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512, help="of the GPT, a multiple of 64")
    arguments = parser.parse_args()
    parts = arguments.parts or ["sleep", "gpt", "collectives"]
    if "sleep" in parts:
        fxpipe.launch(run, 5, "sleep", arguments.rounds, arguments.width)
    if "gpt" in parts:
        fxpipe.launch(run, 2, "gpt", arguments.rounds, arguments.width)
    if "collectives" in parts:
        fxpipe.launch(collectives, 5, 10 * arguments.rounds)


if __name__ == "__main__":
    main()
