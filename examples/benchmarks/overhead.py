"""What a step costs beside its computing: fxpipe, torch.distributed.pipelining and a loop written by hand.

    python examples/benchmarks/overhead.py                    # 1, 2 and 4 processes: 1F1B, GPipe, interleaved 1F1B
    python examples/benchmarks/overhead.py --ranks 2 --schedule 1f1b --rounds 41
    python examples/benchmarks/overhead.py --json figures.json
    python examples/benchmarks/overhead.py --ranks 1 --schedule 1f1b --before FOLDER   # an earlier checkout, in turns

A chain of ``Linear(8, 8)``, one or (interleaved) two stages a rank, 64 micro-batches of 4 rows, so that next to
nothing is computed. The contestants take turns in the same processes, a step each, a different one first each round.
Told are, per micro-batch, the wall time of the slowest rank and the processor time of all ranks together: medians over
the rounds, with quartiles, and their ratio to torch's and to the loop by hand. That one is 1F1B with the next receive
posted before an action runs, and nothing else; on one rank it is the plain loop. By default torch's schedule also
keeps and concatenates the last stage's outputs, which fxpipe's step does not: ``torch, no outputs`` is called with
``return_outputs=False``. ``host`` is fxpipe in one process that
plays all the ranks, over a transport that moves nothing: what its Python takes, for each action.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from turns import in_turns as checkouts_in_turns
from turns import table

import fxpipe

WIDTH, ROWS, MICROBATCHES = 8, 4, 64
TORCHS = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved_1f1b": ScheduleInterleaved1F1B}
OTHERS = ("torch", "torch, no outputs", "by hand")
Step = Callable[[Tensor], object]


class Chain(nn.Module):
    """So many layers, each a stage of its own, and a loss."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x if place == 0 else fxpipe.stage_boundary(x))
        return loss_of(x)


def loss_of(output: Tensor, target: object = None) -> Tensor:
    return output.square().mean()


def stages_of(schedule: str, ranks: int) -> int:
    return ranks * (2 if schedule == "interleaved_1f1b" else 1)


def by_fxpipe(schedule: str, ranks: int, close: list[Any]) -> Step:
    model, topology = Chain(stages_of(schedule, ranks)), fxpipe.Topology([("pipe", ranks)])
    names = fxpipe.preview(model, topology, microbatches=MICROBATCHES).graph.names
    in_turn = {name: stage % ranks for stage, name in enumerate(names)}
    one = fxpipe.compile(model, topology, microbatches=MICROBATCHES, schedule=schedule, placement=in_turn)
    close.append(one)
    return one


def by_torch(schedule: str, ranks: int, **options: bool) -> Step:
    rank, count = dist.get_rank(), stages_of(schedule, ranks)
    device = torch.device("cpu")
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), place, count, device) for place in range(rank, count, ranks)]
    made = TORCHS[schedule](stages if count > ranks else stages[0], MICROBATCHES, loss_fn=loss_of)
    first, last = rank == 0, rank == ranks - 1
    target = torch.zeros(MICROBATCHES * ROWS, WIDTH)

    def step(x: Tensor) -> object:
        return made.step(*([x] if first else []), **({"target": target} if last else {}), **options)

    return step


def by_hand(
    ranks: int,
    rank: int,
    layer: nn.Module,
    shape: tuple[int, ...],
    loss_of: Callable[[Tensor, Tensor], Tensor] = loss_of,
    microbatches: int = MICROBATCHES,
) -> Step:
    """1F1B on a chain of one layer a rank. Each receive is posted one action ahead; sends are waited for at the end.

    ``shape``: of what a layer passes on. ``loss_of``: of the last one's output and its part of the batch.
    """
    if ranks == 1:

        def loop(x: Tensor) -> None:
            for part in x.chunk(microbatches):
                (loss_of(layer(part), part) / microbatches).backward()

        return loop
    forth, back = dist.new_group(), dist.new_group()
    first, last = rank == 0, rank == ranks - 1
    warm_up = min(ranks - rank, microbatches)

    def posted(peer: int, group: Any) -> tuple[Any, Tensor]:
        buffer = torch.empty(shape)
        return dist.irecv(buffer, peer, group=group), buffer

    def step(x: Tensor) -> None:
        parts = x.chunk(microbatches)
        works: list[Any] = []
        held: list[tuple[Tensor, Tensor]] = []
        coming = None if first else posted(rank - 1, forth)
        gradient = None if last else posted(rank + 1, back)

        def forward(place: int) -> None:
            nonlocal coming
            if first:
                entered = parts[place]
            else:
                work, entered = coming  # type: ignore[misc]
                coming = posted(rank - 1, forth) if place + 1 < microbatches else None
                work.wait()
                entered.requires_grad_()
            left = layer(entered)
            if last:
                left = loss_of(left, parts[place]) / microbatches
            else:
                works.append((dist.isend(left.detach(), rank + 1, group=forth), left))
            held.append((entered, left))

        def backward(place: int) -> None:
            nonlocal gradient
            entered, left = held[place]
            held[place] = (entered, entered)
            if last:
                left.backward()
            else:
                work, seed = gradient  # type: ignore[misc]
                gradient = posted(rank + 1, back) if place + 1 < microbatches else None
                work.wait()
                left.backward(seed)
            if not first:
                works.append((dist.isend(entered.grad, rank - 1, group=back), entered))

        for place in range(warm_up):
            forward(place)
        for place in range(microbatches):
            backward(place)
            if place + warm_up < microbatches:
                forward(place + warm_up)
        for work, _ in works:
            work.wait()

    return step


class Took(NamedTuple):
    """Seconds a step: of the slowest rank by the wall, and of all ranks together by the processors."""

    wall: float
    processor: float


def timed(step: Step, x: Tensor) -> Took:
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step(x)
    took = torch.tensor([time.perf_counter() - wall, time.process_time() - processor], dtype=torch.float64)
    dist.all_reduce(took[:1], dist.ReduceOp.MAX)
    dist.all_reduce(took[1:])
    return Took(*took.tolist())


def in_turns(steps: Mapping[str, Step], x: Tensor, rounds: int) -> dict[str, list[Took]]:
    """What each took, a step a round, a different one first each time."""
    took: dict[str, list[Took]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # the first two warm up
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            one = timed(steps[name], x)
            if number > 1:
                took[name].append(one)
    return took


def run(ranks: int, schedule: str, rounds: int, path: str) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    close: list[Any] = []
    steps: dict[str, Step] = {
        "fxpipe": by_fxpipe(schedule, ranks, close),
        "torch": by_torch(schedule, ranks),
        "torch, no outputs": by_torch(schedule, ranks, return_outputs=False),
    }
    if schedule == "1f1b":
        steps["by hand"] = by_hand(ranks, dist.get_rank(), nn.Linear(WIDTH, WIDTH), (ROWS, WIDTH))
    x = torch.ones(MICROBATCHES * ROWS, WIDTH)  # the same on all ranks
    took = in_turns(steps, x, rounds)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(took))
    for one in close:
        one.close()


def host(ranks: int, rounds: int) -> dict[str, float]:
    """Seconds for each action: of fxpipe in one process, of the stages' own functions, and of the difference."""
    torch.set_num_threads(1)
    model = Chain(ranks)
    one = fxpipe.compile(model, fxpipe.Topology([("pipe", ranks)]), microbatches=MICROBATCHES)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)

    def bare(x: Tensor) -> None:
        for part in x.chunk(MICROBATCHES):
            values, roots = part, []
            for layer in model.layers:
                entered = values if not roots else values.detach().requires_grad_()
                values = layer(entered)
                roots.append((entered, values))
            (loss_of(values) / MICROBATCHES).backward()
            gradient = entered.grad
            for entered, values in reversed(roots[:-1]):
                values.backward(gradient)
                gradient = entered.grad

    seconds: dict[str, list[float]] = {"fxpipe": [], "bare": []}
    for number in range(rounds + 2):
        for name, step in (("fxpipe", one), ("bare", bare)):
            start = time.process_time()
            step(x)
            if number > 1:
                seconds[name].append(time.process_time() - start)
    one.close()
    actions = 2 * ranks * MICROBATCHES
    medians = {name: statistics.median(times) / actions for name, times in seconds.items()}
    return {**medians, "above": medians["fxpipe"] - medians["bare"]}


def rows_of(ranks: int, schedule: str, took: dict[str, list[Took]]) -> list[dict[str, Any]]:
    rows = []
    for name, times in took.items():
        row: dict[str, Any] = {"ranks": ranks, "schedule": schedule, "what": name}
        for what in Took._fields:
            mine = [getattr(Took(*one), what) / MICROBATCHES * 1e6 for one in times]
            low, middle, high = statistics.quantiles(mine, n=4)
            row[what], row[f"{what}_quartiles"] = middle, (low, high)
            for other in OTHERS:
                if other in took:
                    theirs = statistics.median(getattr(Took(*one), what) for one in took[other]) / MICROBATCHES * 1e6
                    row[f"{what}_vs_{other}"] = middle / theirs
        rows.append(row)
    return rows


def shown(rows: list[dict[str, Any]]) -> str:
    def cells(row: dict[str, Any], what: str) -> list[str]:
        """The median, the quartiles and the ratios."""
        low, high = row[f"{what}_quartiles"]
        ratios = [row.get(f"{what}_vs_{other}") for other in OTHERS]
        return [f"{row[what]:.0f}", f"{low:.0f}-{high:.0f}", *("" if one is None else f"{one:.2f}" for one in ratios)]

    grid = [[row["ranks"], row["schedule"], row["what"], *cells(row, "wall"), *cells(row, "processor")] for row in rows]
    ratios = [f"÷ {other}" for other in OTHERS]
    head = ["wall µs", "quartiles", *ratios, "processor µs", "quartiles", *ratios]
    return tabulate(grid, headers=["ranks", "schedule", "", *head], disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--schedule", nargs="*", default=list(TORCHS), choices=list(TORCHS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--before", type=Path, help="a folder with an earlier checkout, to measure in turns")
    parser.add_argument("--figures", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before:
        options = ["--ranks", *map(str, arguments.ranks), "--schedule", *arguments.schedule, "--figures"]
        print("processor µs a micro-batch")
        print(table(checkouts_in_turns(__file__, options, arguments.before, rounds=5)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in arguments.ranks:
            for schedule in arguments.schedule:
                path = f"{folder}/{ranks}{schedule}.json"
                fxpipe.launch(run, ranks, ranks, schedule, arguments.rounds, path)
                rows += rows_of(ranks, schedule, json.loads(Path(path).read_text()))
    if arguments.figures:
        keys = {"": "processor"} | {f" ÷ {other}": f"processor_vs_{other}" for other in OTHERS}
        own = [row for row in rows if row["what"] == "fxpipe"]
        names = {f"{row['ranks']} {row['schedule']}": row for row in own}
        figures = {f"{name}{end}": row[key] for name, row in names.items() for end, key in keys.items() if key in row}
        print(json.dumps(figures))
        return
    hosts = {ranks: host(ranks, arguments.rounds) for ranks in arguments.ranks}
    print(shown(rows))
    for ranks, figures in hosts.items():
        told = ", ".join(f"{name} {1e6 * seconds:.1f}" for name, seconds in figures.items())
        print(f"host, {ranks} ranks in one process, processor µs an action: {told}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": rows, "host": hosts}, indent=1))


if __name__ == "__main__":
    main()
