"""A graph of stages against the same stages as a chain, and against torch.distributed.pipelining on that chain.

    python examples/benchmarks/graph_vs_chain.py               # 5, 9 and 13 processes, about 2 minutes
    python examples/benchmarks/graph_vs_chain.py 2x2x16        # 2 branches of 2 stages, 16 micro-batches

Branches meet in a join: A1 → A2 → J ← B2 ← B1 on 5 ranks, two branches of four on 9, four branches of three on 13.
Stages sleep instead of computing (20 ms forward, 40 ms backward), so that any number of them can share a few cores, and
pass tensors of 64 KiB. The contestants take turns within one run; times are medians over the rounds, of the slowest
rank.

As a graph the step is 3, 5 or 4 stages deep, as a chain 5, 9 or 13. What keeps the graph from its simulated time is
then told by `fxpipe.compare`, of the median step; its steps are recorded. torch's Schedule1F1B takes no fewer
micro-batches than stages: with fewer its ScheduleGPipe runs, which on a balanced chain takes as long.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from sleeping import Stage, in_turns
from tabulate import tabulate
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fxpipe

FORWARD, BACKWARD = 0.020, 0.040  # seconds
ROWS, COLUMNS = 128, 128  # of a micro-batch: 64 KiB in float32


def stage_graph(names: list[str], edges: list[tuple[str, str]]) -> fxpipe.StageGraph:
    """The stages with these edges; those that none feeds read the batch."""
    fed = {target for _, target in edges}
    stages = {name: Stage(FORWARD, BACKWARD, is_last=name == "J") for name in names}
    return fxpipe.StageGraph.from_callables(stages, edges, {name: ["x"] for name in names if name not in fed})


def torch_chain(ranks: int, microbatches: int) -> Callable[[Tensor], object]:
    """The same chain under torch.distributed.pipelining."""
    rank = dist.get_rank()
    stage = PipelineStage(Stage(FORWARD, BACKWARD), rank, ranks, torch.device("cpu"))
    kind = Schedule1F1B if microbatches >= ranks else ScheduleGPipe
    schedule = kind(stage, microbatches, loss_fn=lambda output, target: output.square().mean())
    if rank == 0:
        return schedule.step
    if rank == ranks - 1:
        return lambda x: schedule.step(target=x)
    return lambda x: schedule.step()


def run(count: int, length: int, microbatches: int, rounds: int, path: str) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    branches = [[f"{chr(65 + branch)}{place}" for place in range(1, length + 1)] for branch in range(count)]
    names = [*(name for branch in branches for name in branch), "J"]
    ranks = len(names)
    graph_edges = [edge for branch in branches for edge in zip(branch, [*branch[1:], "J"], strict=True)]
    chain_edges = list(pairwise(names))

    topology = fxpipe.Topology([("pipe", ranks)])
    graph = fxpipe.compile(stage_graph(names, graph_edges), topology, microbatches=microbatches)
    chain = fxpipe.compile(stage_graph(names, chain_edges), topology, microbatches=microbatches)
    contestants: dict[str, Callable[[Tensor], object]] = {
        "fxpipe, graph": graph,
        "fxpipe, chain": chain,
        "torch.distributed.pipelining, chain": torch_chain(ranks, microbatches),
    }
    x = torch.ones(microbatches * ROWS, COLUMNS)
    timelines: list[fxpipe.Timeline] = []
    graph.record_timeline()
    seconds = in_turns(contestants, x, rounds, lambda: timelines.append(graph.timeline()))

    if dist.get_rank() == 0:
        plan, chain_plan = (one.schedule.simulate(FORWARD, BACKWARD) for one in (graph, chain))
        simulated = {name: (plan if name == "fxpipe, graph" else chain_plan).makespan for name in contestants}
        report(ranks, microbatches, seconds, simulated)
        Path(path).write_text(json.dumps({"ranks": ranks, "m": microbatches, "seconds": seconds, "plan": simulated}))
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


def shape_of(text: str) -> tuple[int, ...]:
    numbers = tuple(int(number) if number.isdigit() else 0 for number in text.split("x"))
    if len(numbers) != 3 or 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text}: branches x stages of each x micro-batches, as in 2x2x8")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=shape_of, nargs="*", help="such as 2x2x8: branches x stages x micro-batches")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for count, length, microbatches in arguments.runs or [(2, 2, 8), (2, 4, 8), (4, 3, 8)]:
            given = (count, length, microbatches, arguments.rounds, f"{folder}/figures.json")
            fxpipe.launch(run, count * length + 1, *given)
            figures.append(json.loads(Path(given[-1]).read_text()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
