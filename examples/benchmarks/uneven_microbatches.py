"""What micro-batches of different costs cost a pipeline, by simulation: their order, and more of them in flight.

    python examples/benchmarks/uneven_microbatches.py               # a few seconds

Two encoders, of images and of sound, feed a language model, with a stage on each rank. A sample has 0 to 8 images, 0 to
2 pieces of sound, and text of a log-normal length; or all three are spread more widely. Each stage takes the same time
in the mean: an F of 1, and a B of 2. Prints, for the mean of 10 batches, the makespan and how many times as fast it is
as ``1f1b`` on samples as they come.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from tabulate import tabulate

from fxpipe.schedules import build, pyramid

IMAGES, LOGNORMAL = SPREADS = ("images 0 to 8", "log-normal, widely")
SIZES = {4: (16, 4), 8: (32, 2)}
"""Ranks → micro-batches, and samples in each."""
CHAINS = {4: ([0], [1], [2, 3]), 8: ([0, 1], [2], [3, 4, 5, 6, 7])}
"""Ranks → the stages of the image encoder, of the sound encoder, and of the language model."""
IN_ORDER, DEEPER, BOTH, BOUND = ROWS = ("in order", "2x in flight", "in order, 2x in flight", "lower bound")
AS_THEY_COME = "as samples come"

Sample = tuple[float, float, float]
"""The work of a sample at the image encoder, the sound encoder and the language model."""


def samples(generator: random.Random, count: int, spread: str) -> list[Sample]:
    """Samples whose numbers of images, pieces of sound and words are drawn at random."""
    drawn = []
    for _ in range(count):
        if spread == IMAGES:
            images, sound = generator.randint(0, 8), float(generator.choice((0, 0, 1, 2)))
            text = generator.lognormvariate(0, 0.5)
        else:
            images, sound = generator.choice((0, 1, 2, 4, 8)), generator.lognormvariate(0, 1)
            text = generator.lognormvariate(0, 1)
        drawn.append((float(images), sound, text + 0.25 * images + 0.2 * sound))
    return drawn


def edges(ranks: int) -> list[tuple[int, int]]:
    """The stage graph: both encoders feed the language model."""
    images, sound, language = CHAINS[ranks]
    return [*pairwise([*images, *language]), *pairwise([*sound, language[0]])]


def batches(ranks: int, spread: str, count: int, seed: int) -> Iterator[list[list[float]]]:
    """Yields the time of F for each batch: a row per stage, with a number per micro-batch, of mean 1."""
    microbatches, size = SIZES[ranks]
    means = [fmean(kind) for kind in zip(*samples(random.Random(0), 20_000, spread), strict=True)]
    generator = random.Random(seed)
    for _ in range(count):
        drawn = samples(generator, microbatches * size, spread)
        parts = [drawn[first : first + size] for first in range(0, len(drawn), size)]
        kinds = [[sum(sample[kind] for sample in part) / size / means[kind] for part in parts] for kind in range(3)]
        yield [kinds[kind] for kind, stages in enumerate(CHAINS[ranks]) for _ in stages]


def makespans(ranks: int, spread: str, count: int = 10, seed: int = 1) -> dict[str, float]:
    """Way to run a batch → its makespan, the mean of so many batches."""
    graph, (microbatches, _) = edges(ranks), SIZES[ranks]
    usual = build("1f1b", graph, microbatches)
    deeper = build("1f1b", graph, microbatches, in_flight="2x")
    times: dict[str, list[float]] = {way: [] for way in (AS_THEY_COME, *ROWS)}
    for forward in batches(ranks, spread, count, seed):
        order = pyramid([sum(column) for column in zip(*forward, strict=True)])  # each stage's mean is 1
        ordered = [[row[number] for number in order] for row in forward]
        plan = usual.simulate(forward)
        for way, makespan in {
            AS_THEY_COME: plan.makespan,
            IN_ORDER: usual.simulate(ordered).makespan,
            DEEPER: deeper.simulate(forward).makespan,
            BOTH: deeper.simulate(ordered).makespan,
            BOUND: plan.lower_bound,
        }.items():
            times[way].append(makespan)
    return {way: fmean(each) for way, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10, help="how many; 10")
    parser.add_argument("--seed", type=int, default=1, help="of the samples; 1")
    arguments = parser.parse_args()
    columns = [(ranks, spread) for ranks in SIZES for spread in SPREADS]
    found = [makespans(ranks, spread, arguments.batches, arguments.seed) for ranks, spread in columns]
    headers = ["", *[f"{ranks} ranks, {SIZES[ranks][0]} micro-batches, {spread}" for ranks, spread in columns]]
    rows = [[way, *[f"{each[way]:.1f} ×{each[AS_THEY_COME] / each[way]:.2f}" for each in found]] for way in found[0]]
    print(tabulate(rows, headers, maxheadercolwidths=24, disable_numparse=True))


if __name__ == "__main__":
    main()
