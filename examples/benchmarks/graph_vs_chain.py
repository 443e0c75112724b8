"""A graph of stages against the same stages as a chain, and against torch.distributed.pipelining on that chain.

    python examples/benchmarks/graph_vs_chain.py               # 5 and 9 processes, about 2 minutes
    python examples/benchmarks/graph_vs_chain.py 5x16          # 5 processes, 16 micro-batches

Two branches meet in a join: A1 → A2 → J ← B2 ← B1 on 5 ranks, and with branches of four on 9. Stages sleep instead of
computing (20 ms forward, 40 ms backward), so that any number of them can share a few cores, and pass tensors of 64 KiB.
The contestants take turns within one run; times are medians over the rounds, of the slowest rank.

As a graph the step is 3 or 5 stages deep, as a chain 5 or 9. What keeps the graph from its simulated time is then told
by `fxpipe.compare`, of the median step; its steps are recorded. torch's Schedule1F1B takes no fewer micro-batches than
stages, so that it sits out at 9 ranks and 8 micro-batches; a third run has 9.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fxpipe

FORWARD, BACKWARD = 0.020, 0.040  # seconds
ROWS, COLUMNS = 128, 128  # of a micro-batch: 64 KiB in float32


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradient


class Stage(nn.Module):
    def __init__(self, is_last: bool = False):
        super().__init__()
        self.scale, self.is_last = nn.Parameter(torch.ones(())), is_last

    def forward(self, *inputs: Tensor) -> Tensor:
        y = Sleep.apply(sum(inputs) * self.scale)
        return y.square().mean() if self.is_last else y


def stage_graph(names: list[str], edges: list[tuple[str, str]]) -> fxpipe.StageGraph:
    """The stages with these edges; those that none feeds read the batch."""
    fed = {target for _, target in edges}
    stages = {name: Stage(is_last=name == "J") for name in names}
    return fxpipe.StageGraph.from_callables(stages, edges, {name: ["x"] for name in names if name not in fed})


def torch_chain(ranks: int, microbatches: int) -> Callable[[Tensor], object]:
    """The same chain under torch.distributed.pipelining."""
    rank = dist.get_rank()
    stage = PipelineStage(Stage(), rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda output, target: output.square().mean())
    if rank == 0:
        return schedule.step
    if rank == ranks - 1:
        return lambda x: schedule.step(target=x)
    return lambda x: schedule.step()


def run(ranks: int, microbatches: int, rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    length = (ranks - 1) // 2
    branches = [[f"{branch}{place}" for place in range(1, length + 1)] for branch in "AB"]
    names = [*branches[0], *branches[1], "J"]
    graph_edges = [edge for branch in branches for edge in zip(branch, [*branch[1:], "J"], strict=True)]
    chain_edges = list(pairwise(names))

    topology = fxpipe.Topology([("pipe", ranks)])
    graph = fxpipe.compile(stage_graph(names, graph_edges), topology, microbatches=microbatches)
    chain = fxpipe.compile(stage_graph(names, chain_edges), topology, microbatches=microbatches)
    contestants: dict[str, Callable[[Tensor], object]] = {"fxpipe, graph": graph, "fxpipe, chain": chain}
    if microbatches >= ranks:
        contestants["torch.distributed.pipelining, chain"] = torch_chain(ranks, microbatches)
    x = torch.ones(microbatches * ROWS, COLUMNS)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    timelines: list[fxpipe.Timeline] = []
    graph.record_timeline()
    for round in range(rounds + 1):  # the first one warms up
        for name, step in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            step(x)
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if round:
                seconds[name].append(slowest.item())
        if round:
            timelines.append(graph.timeline())

    if dist.get_rank() == 0:
        plan, chain_plan = (one.schedule.simulate(FORWARD, BACKWARD) for one in (graph, chain))
        simulated = {name: (plan if name == "fxpipe, graph" else chain_plan).makespan for name in contestants}
        report(ranks, microbatches, seconds, simulated)
        times = seconds["fxpipe, graph"]
        typical = times.index(statistics.median_high(times))
        outside = times[typical] - timelines[typical].makespan
        print(f"\nThe median step: {1e3 * times[typical]:.1f} ms, of which {1e3 * outside:.1f} outside of actions.")
        print(f"{fxpipe.compare(plan, timelines[typical])}\n", flush=True)
    graph.close()
    chain.close()


def report(ranks: int, microbatches: int, seconds: dict[str, list[float]], simulated: dict[str, float]) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            f"{1e3 * simulated[name]:.0f}",
            f"{1e3 * median:.0f}",
            f"{1e3 * min(seconds[name]):.0f}-{1e3 * max(seconds[name]):.0f}",
            f"{median / simulated[name]:.3f}",
            f"{median / medians['fxpipe, graph']:.2f}",
        )
        for name, median in medians.items()
    ]
    print(f"{ranks} ranks, {microbatches} micro-batches, {len(seconds['fxpipe, graph'])} rounds")
    headers = ("", "simulated ms", "median ms", "range", "median / simulated", "median / graph's")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 5)))


def ranks_and_microbatches(text: str) -> tuple[int, int]:
    ranks, _, microbatches = text.partition("x")
    if not (ranks.isdigit() and microbatches.isdigit() and int(ranks) > 2 and int(ranks) % 2 and int(microbatches)):
        raise argparse.ArgumentTypeError(f"{text}: an odd number of processes from 3 on, x, micro-batches, as in 5x8")
    return int(ranks), int(microbatches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=ranks_and_microbatches, nargs="*", help="such as 5x8: processes x micro-batches")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    for ranks, microbatches in arguments.runs or [(5, 8), (9, 8), (9, 9)]:
        fxpipe.launch(run, ranks, ranks, microbatches, arguments.rounds)


if __name__ == "__main__":
    main()
