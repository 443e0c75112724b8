"""Tables for a loss of the whole batch, on stages that sleep, against their simulated time.

    python examples/benchmarks/gathered.py    # 5 processes, about 2 minutes

Two branches meet in a join, A1 → A2 → J ← B2 ← B1, on 5 ranks; the join is gathered: it runs once for a group of
micro-batches, and takes F and B once a group. Stages sleep instead of computing, 60 ms forward and 120 ms backward, as
in `zero_bubble.py`. With 8 micro-batches there is one group, with 16 there are four of four. The tables take turns
within one run; times are medians over the rounds, of the slowest rank.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
from tabulate import tabulate
from zero_bubble import UNIT, Branches, timed

import fxpipe

ROWS = 128  # of a micro-batch


def run(microbatches: int, group: int, schedules: tuple[str, ...], rounds: int) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    batch = torch.ones(microbatches * ROWS, 128)
    contestants = {
        name: fxpipe.compile(
            Branches(gather="batch", group=group),
            fxpipe.Topology([("pipe", 5)]),
            microbatches=microbatches,
            schedule=name,
            example_args=(batch,),
            tracer=fxpipe.Tracing(check=False),
        )
        for name in schedules
    }
    seconds = timed(contestants, batch, rounds)
    if dist.get_rank() == 0:
        report(microbatches, group, seconds, {name: one.schedule for name, one in contestants.items()})
    for one in contestants.values():
        one.close()


def report(microbatches: int, group: int, seconds: dict[str, list[float]], tables: dict[str, fxpipe.Schedule]) -> None:
    rows = []
    for name, table in tables.items():
        plan, median = table.simulate(UNIT, 2 * UNIT), statistics.median(seconds[name])
        figures = (plan.makespan / UNIT, 1e3 * plan.makespan, 1e3 * median)
        extremes = f"{1e3 * min(seconds[name]):.0f}-{1e3 * max(seconds[name]):.0f}"
        rows.append(
            [
                name,
                *(f"{x:.0f}" for x in figures),
                extremes,
                f"{median / plan.makespan:.3f}",
                max(plan.peak_in_flight[:4]),
            ]
        )
    print(f"\n5 ranks, {microbatches} micro-batches in groups of {group}, {len(seconds[name])} rounds")
    headers = ("", "units", "simulated ms", "median ms", "range", "median / simulated", "peak in flight, towers")
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *("right",) * 6)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    fxpipe.launch(run, 5, 8, 8, ("store_all", "cached"), rounds)
    fxpipe.launch(run, 5, 16, 4, ("store_all", "group_interleaved", "cached"), rounds)


if __name__ == "__main__":
    main()
