"""An encoder on all ranks, beside a chain of language stages, against the encoder in stage 0 and a chain cut evenly.

    python examples/benchmarks/encoder_on_all_ranks.py table     # simulated: 8 ranks, seconds
    python examples/benchmarks/encoder_on_all_ranks.py           # measured: 4 and 8 processes, 3 minutes
    python examples/benchmarks/encoder_on_all_ranks.py 8x16x2    # 8 ranks, 16 micro-batches, an encoder of F = 2

Each rank has a language stage of F = 1 and B = 2; the encoder in front of them has F = v and B = 2v, or, frozen, no
backward. It stands in stage 0, as torchtitan and Megatron-LM place it; or its work is spread evenly over a chain, as no
real model can be cut; or micro-batch i of it runs on rank i mod r: `placement={"encoder": "all", ...}`.

Measured stages sleep instead of computing, so that any number of them can share a few cores: 50 ms for F = 1, beside
which a hop of 2 ms between processes is small. Both placements take turns within one run; times are medians over the
rounds, of the slowest rank.
"""

import argparse
import statistics
from itertools import pairwise

import torch
import torch.distributed as dist
from sleeping import Stage, in_turns
from tabulate import tabulate

import fxpipe
from fxpipe.schedules import Costs, build, with_costs

UNIT = 0.050  # seconds of F = 1
ROWS, COLUMNS = 32, 128  # of a micro-batch: 16 KiB in float32


def costs(ranks: int, encoder: float) -> Costs:
    return Costs.of(ranks + 1, [encoder] + [1] * ranks, [2 * encoder] + [2] * ranks)


def simulated(ranks: int, microbatches: int, encoder: float, trained: bool, everywhere: bool) -> fxpipe.Timeline:
    """The plan of 1F1B, with the encoder on all ranks or in stage 0."""
    place = tuple(range(ranks)) if everywhere else 0
    edges = [(stage, stage + 1) for stage in range(ranks)]
    backward = [trained] + [True] * ranks
    at = costs(ranks, encoder)
    return build("1f1b", edges, microbatches, [place, *range(ranks)], backward=backward, costs=at).planned()


def table(ranks: int = 8) -> None:
    rows = []
    for microbatches in (8, 16, 32):
        for trained in (True, False):
            for encoder in (1, 2, 4):
                work = 3 * encoder if trained else encoder
                chain = (microbatches + ranks - 1) * (3 + work / ranks)
                stage_0, spread = (simulated(ranks, microbatches, encoder, trained, way) for way in (False, True))
                most = max(spread.peak_in_flight[1:]), spread.peak_in_flight[0]
                rows.append(
                    (
                        microbatches,
                        "trained" if trained else "frozen",
                        encoder,
                        f"{stage_0.makespan:g}",
                        f"{chain:g}",
                        f"{spread.makespan:g}",
                        f"{spread.lower_bound:g}",
                        f"{most[0]}, {most[1]}" if trained else f"{most[0]}",
                    )
                )
    headers = ("m", "encoder", "v", "in stage 0", "an even chain", "on all ranks", "lower bound", "peak in flight")
    print(f"simulated, {ranks} ranks, 1F1B; peak in flight: of language stages, and of the encoder on a rank")
    print(tabulate(rows, headers, disable_numparse=True, colalign=("right", "left", *("right",) * 6)))


def compiled(ranks: int, microbatches: int, encoder: float, everywhere: bool) -> fxpipe.ForwardBackward:
    names = ["encoder", *(f"language_{stage}" for stage in range(ranks))]
    stages = {"encoder": Stage(encoder * UNIT, 2 * encoder * UNIT)}
    stages |= {name: Stage(UNIT, 2 * UNIT, name == names[-1]) for name in names[1:]}
    graph = fxpipe.StageGraph.from_callables(stages, list(pairwise(names)), {"encoder": ["x"]})
    placement = {"encoder": "all" if everywhere else 0} | {name: stage for stage, name in enumerate(names[1:])}
    schedule = with_costs("1f1b", costs(ranks, encoder))
    topology = fxpipe.Topology([("pipe", ranks)])
    return fxpipe.compile(graph, topology, microbatches=microbatches, placement=placement, schedule=schedule)


def run(ranks: int, microbatches: int, encoder: float, rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    ways = {"in stage 0": False, "on all ranks": True}
    contestants = {name: compiled(ranks, microbatches, encoder, everywhere) for name, everywhere in ways.items()}
    x = torch.ones(microbatches * ROWS, COLUMNS)
    seconds = in_turns(contestants, x, rounds)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        rows = []
        for name, everywhere in ways.items():
            plan = simulated(ranks, microbatches, encoder, True, everywhere).makespan
            median = medians[name]
            ratio, times = median / (plan * UNIT), median / medians["on all ranks"]
            rows.append((name, f"{plan:g}", f"{median * 1e3:.0f}", f"{ratio:.3f}", f"{times:.2f}"))
        print(f"{ranks} ranks, {microbatches} micro-batches, an encoder of F = {encoder:g}, {rounds} rounds")
        headers = ("encoder", "simulated", "median ms", "median / simulated", "median / on all ranks'")
        print(tabulate(rows, headers, disable_numparse=True, colalign=("left", *("right",) * 4)), flush=True)
    for one in contestants.values():
        one.close()


def shape_of(text: str) -> tuple[int, ...]:
    numbers = tuple(int(number) if number.isdigit() else 0 for number in text.split("x"))
    if len(numbers) != 3 or 0 in numbers:
        raise argparse.ArgumentTypeError(f"{text}: ranks x micro-batches x the encoder's F, as in 8x16x2")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help='"table", or such as 8x16x2: ranks x micro-batches x the encoder\'s F')
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.runs == ["table"]:
        table()
        return
    for ranks, microbatches, encoder in map(shape_of, arguments.runs or ["4x16x2", "8x16x2"]):
        fxpipe.launch(run, ranks, ranks, microbatches, encoder, arguments.rounds)


if __name__ == "__main__":
    main()
