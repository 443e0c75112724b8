"""What micro-batches of different costs cost a pipeline: their order, and more of them in flight.

    python examples/benchmarks/uneven_microbatches.py               # by simulation, a few seconds
    python examples/benchmarks/uneven_microbatches.py --processes   # in 6 processes, two minutes
    python examples/benchmarks/uneven_microbatches.py --models      # LLaVA and Llama in 2 processes, two minutes

Two encoders, of images and of sound, feed a language model, with a stage on each rank. A sample has 0 to 8 images, 0 to
2 pieces of sound, and text of a log-normal length; or all three are spread more widely. Each stage takes the same time
in the mean: an F of 1, and a B of 2. Prints, for the mean of 10 batches, the makespan and how many times as fast it is
as ``1f1b`` on samples as they come.

With ``--processes`` the stages sleep for these times, in 6 processes with 32 micro-batches of 2 samples, spread widely.
The ways take turns on the same batches. Prints the seconds of a step on the slowest rank, and the simulated times.

With ``--models`` transformers' models train on 2 processes: LLaVA on samples of 0 to 3 images, and Llama on texts of
log-normal lengths, packed two to a row. All ways begin with the same weights and take the same batches in turns.
Prints the seconds of a step, the part of the step in which a rank waits, and how far the losses are apart.
"""

from __future__ import annotations

import argparse
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from sleeping import timed_step
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from fxpipe.schedules import Costs, build, pyramid

IMAGES, LOGNORMAL = SPREADS = ("images 0 to 8", "log-normal, widely")
SIZES = {4: (16, 4), 6: (32, 2), 8: (32, 2)}
"""Ranks → micro-batches, and samples in each."""
CHAINS = {4: ([0], [1], [2, 3]), 6: ([0], [1], [2, 3, 4, 5]), 8: ([0, 1], [2], [3, 4, 5, 6, 7])}
"""Ranks → the stages of the image encoder, of the sound encoder, and of the language model."""
IN_ORDER, DEEPER, BOTH, BOUND = ROWS = ("in order", "2x in flight", "in order, 2x in flight", "lower bound")
AS_THEY_COME = "as samples come"
OFFLOADED = "in order, 2x in flight, offloaded"
UNIT = 0.02
"""The seconds of a mean F in a process."""

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


# --- in processes ---


class Works(torch.autograd.Function):
    """The identity, which sleeps for the work of a micro-batch, and for twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Tensor) -> Tensor:
        ctx.seconds = UNIT * work.abs().sum().item()
        time.sleep(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor, work: Tensor) -> Tensor:
        return Works.apply(x * self.scale, work)


class Model(nn.Module):
    """Two encoders and a language model of four stages. A row of ``work`` has the work of a sample at the three."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.sound = Stage(), Stage()
        self.language = nn.ModuleList(Stage() for _ in range(4))

    def forward(self, work: Tensor) -> Tensor:
        images, sound, language = work.unbind(1)
        x = images.new_ones(len(work), 256)
        h = fxpipe.stage_boundary(self.images(x, images)) + fxpipe.stage_boundary(self.sound(x, sound))
        for number, stage in enumerate(self.language):
            h = stage(fxpipe.stage_boundary(h) if number else h, language)
        return h.square().mean()


def cost(work: Tensor) -> float:
    """The work of a micro-batch at the six stages, each of which has the same mean."""
    images, sound, language = work.sum(0).tolist()
    return images + sound + 4 * language


WAYS: dict[str, dict[str, Any]] = {
    AS_THEY_COME: {},
    IN_ORDER: {"microbatch_cost": cost},
    DEEPER: {"in_flight": "2x"},
    BOTH: {"microbatch_cost": cost, "in_flight": "2x"},
    OFFLOADED: {"microbatch_cost": cost, "in_flight": "2x", "offload": True},
}


def in_processes(rounds: int, seed: int) -> None:
    """Prints a row for each way, on the first rank."""
    fxpipe.init()
    microbatches, size = SIZES[6]
    topology, steps = fxpipe.Topology([("pipe", 6)]), dict[str, Any]()
    for way, options in WAYS.items():
        example = torch.full((microbatches * size, 3), 1e-3)
        hardware = fxpipe.Hardware(flops=1e12, host_link=1e12)
        options = {"microbatches": microbatches, "hardware": hardware, "example_args": (example,), **options}
        steps[way] = fxpipe.compile(Model(), topology, tracer=fxpipe.Tracing("record", check=False), **options)
    planned: dict[str, list[float]] = {way: [] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number, forward in enumerate(batches(6, LOGNORMAL, rounds + 1, seed)):
        work = torch.tensor([forward[kind] for kind in (0, 1, 2)], dtype=torch.float64).t()
        rows = (work / size).repeat_interleave(size, 0)
        for way, step in steps.items():
            order = (
                pyramid(list(map(cost, rows.split(size)))) if "microbatch_cost" in WAYS[way] else range(microbatches)
            )
            times = [[UNIT * row[number] for number in order] for row in forward]
            plan = step.schedule.simulate(Costs.of(6, times, copy=0))  # activations are small, and on the host anyway
            taken, _ = timed_step(step, rows)
            if number:  # the first round warms up
                seconds[way].append(taken)
                planned[way].append(plan.makespan)
    if dist.get_rank() == 0:
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        figures = [
            [
                way,
                f"{medians[way]:.2f}",
                f"×{statistics.median(map(operator.truediv, seconds[AS_THEY_COME], each)):.2f}",
                f"{statistics.median(planned[way]):.2f}",
                f"×{statistics.median(map(operator.truediv, planned[AS_THEY_COME], planned[way])):.2f}",
                " ".join(map(str, steps[way].schedule.simulate().peak_in_flight)),
            ]
            for way, each in seconds.items()
        ]
        headers = ["", "seconds", "", "simulated", "", "most in flight, by stage"]
        print(f"medians of {rounds} batches, in turns")
        print(tabulate(figures, headers, disable_numparse=True))


# --- transformers' models ---

Microbatches = list[dict[str, Tensor]]


def llama_of_packed_texts(
    generator: random.Random,
) -> tuple[nn.Module, Callable[[], Microbatches], Callable[..., float]]:
    """A model, a function that draws a batch of 12 micro-batches, and what a micro-batch costs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, max_position_embeddings=2048, use_cache=False))

    def texts() -> dict[str, Tensor]:
        lengths = [min(2048, 16 + int(96 * generator.lognormvariate(0, 1))) for _ in range(2)]
        ids = torch.randint(512, (1, sum(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {"input_ids": ids, "labels": ids, "position_ids": positions}

    return model, lambda: [texts() for _ in range(12)], lambda input_ids, *others: input_ids.numel()


def llava_of_images(generator: random.Random) -> tuple[nn.Module, Callable[[], Microbatches], Callable[..., float]]:
    """As ``llama_of_packed_texts``. Micro-batches have 2 samples, in the order in which they are drawn."""
    sys.path.append(str(Path(__file__).parents[1]))
    import train_vlm

    (images, digits), _ = train_vlm.load_pictures()

    def samples() -> dict[str, Tensor]:
        counts = [generator.randint(1, 3), generator.randint(0, 3)]  # the tower refuses a batch of no images
        drawn = [generator.sample(range(len(digits)), count) for count in counts]
        return train_vlm.collate([train_vlm.sample(images[each], digits[each]) for each in drawn])

    def cost(*inputs: Any) -> float:
        return sum(len(value) for value in inputs if isinstance(value, Tensor) and value.dim() == 4)

    return train_vlm.llava(lora=False), lambda: [samples() for _ in range(12)], cost


MODELS = {"Llama, packed": llama_of_packed_texts, "LLaVA, 0 to 3 images": llava_of_images}


def on_models(rounds: int, seed: int) -> None:
    """Prints a row for each model and way, on the first rank."""
    torch.set_num_threads(1)
    fxpipe.init()
    topology, rows = fxpipe.Topology([("pipe", 2)]), list[Any]()
    for name, make in MODELS.items():
        steps, losses = dict[str, Any](), dict[str, list[float]]()
        for way in (AS_THEY_COME, IN_ORDER, BOTH):
            torch.manual_seed(seed)
            model, draw, microbatch_cost = make(random.Random(seed))
            options = {} if way == AS_THEY_COME else {"microbatch_cost": microbatch_cost}
            options |= {"in_flight": "2x"} if way == BOTH else {}
            options |= {"boundaries": "auto", "batch_dim": {"pixel_values": None}, "example_kwargs": draw()[0]}
            step = fxpipe.compile(model, topology, microbatches=12, **options)
            step.record_timeline()
            steps[way], losses[way] = (step, step.optimizer(torch.optim.SGD, lr=0.05)), []
        torch.manual_seed(seed)
        batches = [draw() for _ in range(rounds + 2)]
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        waits: dict[str, list[float]] = {way: [] for way in steps}
        for number, batch in enumerate(batches):
            for way, (step, optimizer) in steps.items():
                optimizer.zero_grad()
                taken, loss = timed_step(step.step_microbatches, [((), inputs) for inputs in batch])
                optimizer.step()
                losses[way].append(loss.item())
                spent = step.timeline().spent
                if number > 1:  # the first rounds capture
                    seconds[way].append(taken)
                    waits[way].append(fmean(each.seconds["waiting"] / each.wall for each in spent))
        apart = max((max(each) - min(each)) / min(each) for each in zip(*losses.values(), strict=True))
        for way, each in seconds.items():
            ratio = statistics.median(map(operator.truediv, seconds[AS_THEY_COME], each))
            wait = f"{statistics.median(waits[way]):.0%}"
            rows.append([name, way, f"{statistics.median(each):.3f}", f"×{ratio:.2f}", wait, f"{apart:.0e}"])
    if dist.get_rank() == 0:
        headers = ["", "", "seconds", "", "waiting", "losses apart"]
        print(f"medians of {rounds} batches, in turns")
        print(tabulate(rows, headers, disable_numparse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=10, help="how many; 10")
    parser.add_argument("--seed", type=int, default=1, help="of the samples; 1")
    parser.add_argument("--models", action="store_true", help="train transformers' models in 2 processes")
    parser.add_argument("--processes", action="store_true", help="run 6 processes whose stages sleep")
    arguments = parser.parse_args()
    if arguments.models:
        fxpipe.launch(on_models, 2, arguments.batches, arguments.seed)
        return
    if arguments.processes:
        fxpipe.launch(in_processes, 6, arguments.batches, arguments.seed)
        return
    columns = [(ranks, spread) for ranks in (4, 8) for spread in SPREADS]
    found = [makespans(ranks, spread, arguments.batches, arguments.seed) for ranks, spread in columns]
    headers = ["", *[f"{ranks} ranks, {SIZES[ranks][0]} micro-batches, {spread}" for ranks, spread in columns]]
    rows = [[way, *[f"{each[way]:.1f} ×{each[AS_THEY_COME] / each[way]:.2f}" for each in found]] for way in found[0]]
    print(tabulate(rows, headers, maxheadercolwidths=24, disable_numparse=True))


if __name__ == "__main__":
    main()
