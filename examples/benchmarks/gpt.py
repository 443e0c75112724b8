"""A GPT in two halves, on two processes: fxpipe, torch.distributed.pipelining's 1F1B and a loop written by hand.

    python examples/benchmarks/gpt.py                                # 8 layers of width 512, 2 rows of 128 tokens
    python examples/benchmarks/gpt.py --width 256 --rows 4 --length 64 --microbatches 16

The same stages from the same seed, one thread a process. The contestants take turns in the same processes, a step
each, a different one first each round; the gradients of their first steps are compared. Told is the wall time of the
slowest rank: medians over the rounds, with quartiles, and the ratios to torch's and to the loop's, of the medians and,
since the machine's speed drifts, the median of the rounds' own ratios. The loop by hand is that of `overhead.py`.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import Took, by_hand, in_turns
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from zero_bubble import Layer

import fxpipe

VOCABULARY = 1024


class Half(nn.Module):
    """Half of the layers, with the embedding in front, or the head behind."""

    def __init__(self, layers: int, width: int, is_first: bool) -> None:
        super().__init__()
        self.ends = nn.Embedding(VOCABULARY, width) if is_first else nn.Linear(width, VOCABULARY, bias=False)
        self.layers, self.is_first = nn.ModuleList(Layer(width) for _ in range(layers // 2)), is_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x) if self.is_first else x
        for layer in self.layers:
            x = layer(x)
        return x if self.is_first else self.ends(x)


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Half(layers, width, True), Half(layers, width, False)

    def forward(self, ids: Tensor) -> Tensor:
        return loss_of(self.last(fxpipe.stage_boundary(self.first(ids))), ids)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run(layers: int, width: int, rows: int, length: int, microbatches: int, rounds: int, path: str) -> None:
    torch.set_num_threads(1)
    fxpipe.init()
    rank = dist.get_rank()
    ids = torch.randint(0, VOCABULARY, (microbatches * rows, length), generator=torch.Generator().manual_seed(1))
    topology = fxpipe.Topology([("pipe", 2)])
    ours = fxpipe.compile(GPT(layers, width), topology, microbatches=microbatches, example_args=(ids,))
    theirs, hand = ((GPT(layers, width).first, GPT(layers, width).last)[rank] for _ in range(2))
    schedule = Schedule1F1B(PipelineStage(theirs, rank, 2, torch.device("cpu")), microbatches, loss_fn=loss_of)
    steps = {
        "fxpipe": ours,
        "torch": schedule.step if rank == 0 else lambda ids: schedule.step(target=ids),
        "by hand": by_hand(2, rank, hand, (rows, length, width), loss_of, microbatches),
    }
    for step in steps.values():
        step(ids)
    gradients = [parameter.grad for parameter in ours.parameters()]
    for other in (theirs, hand):
        torch.testing.assert_close(gradients, [parameter.grad for parameter in other.parameters()])
    took = in_turns(steps, ids, rounds)
    if rank == 0:
        Path(path).write_text(json.dumps(took))
    ours.close()


def rows_of(took: dict[str, list[Took]]) -> list[dict[str, Any]]:
    rows = []
    for name, times in took.items():
        mine = [1e3 * wall for wall, _ in times]
        low, middle, high = statistics.quantiles(mine, n=4)
        row: dict[str, Any] = {"what": name, "ms": middle, "quartiles": (low, high)}
        for other in ("torch", "by hand"):
            theirs = [1e3 * wall for wall, _ in took[other]]
            row[f"vs_{other}"] = middle / statistics.median(theirs)
            row[f"rounds_vs_{other}"] = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = {"layers": 8, "width": 512, "rows": 2, "length": 128, "microbatches": 8, "rounds": 15}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} if not given")
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/took.json"
        fxpipe.launch(run, 2, *(getattr(arguments, name) for name in options), path)
        rows = rows_of(json.loads(Path(path).read_text()))
    print(", ".join(f"{name} {getattr(arguments, name)}" for name in options))
    ratios = ("vs_torch", "rounds_vs_torch", "vs_by hand", "rounds_vs_by hand")
    grid = [
        [row["what"], f"{row['ms']:.1f}", "{:.1f}-{:.1f}".format(*row["quartiles"]), *(f"{row[r]:.3f}" for r in ratios)]
        for row in rows
    ]
    head = ["", "ms a step", "quartiles", "÷ torch", "by rounds", "÷ hand", "by rounds"]
    print(tabulate(grid, headers=head, disable_numparse=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"options": vars(arguments), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
