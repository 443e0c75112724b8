"""A run of two processes is killed at random moments while it writes checkpoints: does the latest always load, and how
old is it?

    python examples/benchmarks/checkpoint_kills.py              # 60 kills, half of them with block=False
    python examples/benchmarks/checkpoint_kills.py --kills 10

Each process of a round goes on from the newest checkpoint, and then saves after every step, until one of them, or both,
is ended by SIGKILL within a time drawn anew. Told are how many rounds left nothing but whole checkpoints, the latest
among them; how many kills fell into a save; and by how many steps the newest checkpoint is behind the last that was
told to be complete, which must be 0, and behind the last step that was made: at most 1, or 2 with block=False, where
one is on its way.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from killed_ranks import Ranks
from torch import Tensor, nn

import fxpipe
from fxpipe.checkpoint.files import commands, run_folder
from fxpipe.errors import CheckpointError

RANKS = 2


class Model(nn.Module):
    """1.6 million numbers, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(400, 2000), nn.Linear(2000, 400)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(fxpipe.stage_boundary(self.first(x)).relu()).square().mean()


def work(rank: int, told: Any, folder: str, block: bool) -> None:
    """Goes on from the newest checkpoint, and tells each step that it has made and each that it has saved."""
    forward_backward = fxpipe.compile(Model(), fxpipe.Topology([("pipe", RANKS)]), microbatches=2)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    step = fxpipe.load(folder, forward_backward, optimizer, required=False)["step"]
    told.send(("loaded", step))
    while True:
        optimizer.zero_grad()
        forward_backward(torch.randn(4, 400))
        optimizer.step()
        step += 1
        told.send(("made", step))
        later = fxpipe.save(folder, forward_backward, optimizer, step=step, block=block)
        later.add_done_callback(lambda done, step=step: done.exception() or told.send(("saved", step)))


def last_told(pipe: Any, known: dict[str, int]) -> None:
    """Reads what a process has told, to the end."""
    try:
        while pipe.poll():
            what, step = pipe.recv()
            known[what] = step
    except (EOFError, OSError):
        pass


def one_round(number: int, folder: str, draw: random.Random) -> tuple[dict[str, int], bool]:
    """Starts the processes, kills some, ends the rest; what rank 0 has told, and whether it fell into a save."""
    ranks = Ranks(RANKS, work, folder, number % 2 == 0)
    known: dict[str, int] = {}
    while "made" not in known:  # the first step behind the start
        if not ranks.reports[0].poll(120):
            raise RuntimeError(f"round {number}: no step in 120 s")
        last_told(ranks.reports[0], known)
    time.sleep(draw.uniform(0.0, 0.6))
    ranks.kill([[0], [1], [0, 1]][number % 3])
    inside = any(path.suffix == ".partial" for path in Path(folder).iterdir())
    ranks.end()
    last_told(ranks.reports[0], known)
    return known, inside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, folder = random.Random(args.seed), tempfile.mkdtemp()
    whole, inside, behind, lost = 0, 0, Counter[int](), Counter[int]()
    for number in range(args.kills):
        known, fell = one_round(number, folder, draw)
        inside += fell
        if "saved" not in known and "loaded" not in known:
            continue
        newest = run_folder.checkpoints(Path(folder))
        if not newest:
            continue
        try:
            commands.verify(Path(folder))
            commands.verify(Path(folder, "latest"))
            whole += 1
        except CheckpointError as error:
            print(f"round {number}: {error}")
        step = commands.Manifest.read(newest[0]).step
        lost[max(0, known.get("saved", known["loaded"]) - step)] += 1
        behind[known["made"] - step] += 1
        print(f"\r{number + 1} kills, {whole} whole", end="", flush=True)
    print(
        f"\r{args.kills} kills, {inside} of them inside a save: {whole} times all that is there is whole, latest, too"
    )
    print(f"saved, and not there: {dict(sorted(lost.items()))}; made, and not there: {dict(sorted(behind.items()))}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
