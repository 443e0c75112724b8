"""Does a run that is killed again and again end with the same bits as one that is not, and does either of them grow?

    python examples/benchmarks/soak.py                          # 20,000 steps, 20 kills, two stages on two processes
    python examples/benchmarks/soak.py --steps 300 --kills 3

The steps have sequences of changing lengths, with dropout; every 10th one is followed by an evaluation and a
checkpoint, half of which are written while training goes on. The second run is ended by SIGKILL, of one process or of
both, at steps drawn at random, and is started again. Printed are, for each start, the first rank's resident memory,
open files (sockets are among them) and threads after its first 40 steps, and how much they grew until its end; and of
each run the digest of the parameters, buffers and optimizer state that it ends with. They must be equal.
"""

import argparse
import hashlib
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from killed_ranks import Ranks
from long_run import Held
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

RANKS, ROUND, WARM = 2, 10, 40
WORDS, WIDTH, ROWS = 50, 16, 8


class Model(nn.Module):
    """An embedding and a normalisation with running statistics in one stage, a prediction of words in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.normal = nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        x = self.normal(self.embedding(words).transpose(1, 2)).transpose(1, 2)
        scores = self.last(fxpipe.stage_boundary(x))
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """The words of a step, in all runs and on all ranks."""
    draw = torch.Generator().manual_seed(step)
    length = int(torch.randint(2, 32, (), generator=draw))
    return torch.randint(WORDS, (ROWS, length), generator=draw)


def digest(forward_backward: Any, optimizer: Any) -> str:
    """Of everything that the next step depends on, on this rank."""
    found = hashlib.sha256()
    for name, value in sorted(forward_backward.state_dict().items()):
        found.update(name.encode() + value.numpy().tobytes())
    for name, state in sorted(optimizer.state_dict()["state"].items()):
        found.update(repr((name, sorted((key, value.tolist()) for key, value in state.items()))).encode())
    return found.hexdigest()


def work(rank: int, reports: Any, folder: str, steps: int) -> None:
    """Goes on from the newest checkpoint, and reports each round, with what it holds, and the digest at the end."""
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Model(), fxpipe.Topology([("pipe", RANKS)]), microbatches=4)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    first: int = fxpipe.load(folder, forward_backward, optimizer, required=False)["step"]
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        forward_backward(batch(step))
        optimizer.step()
        if step % ROUND == 0:
            forward_backward.evaluate(batch(step), outputs="loss")
            later = step % (2 * ROUND) == 0 and step < steps
            fxpipe.save(folder, forward_backward, optimizer, step=step, block=not later)
            if rank == 0:  # a thread that writes has files open
                reports.send((step, None if later else Held.now()))
    reports.send((steps, digest(forward_backward, optimizer)))


def reported(pipe: Any) -> Iterator[tuple[int, Any]]:
    """What a process reports, until it ends."""
    try:
        while pipe.poll(120):
            yield pipe.recv()
    except EOFError:
        return
    raise RuntimeError("no round of steps within 120 s")


def run(steps: int, kills: list[tuple[int, list[int]]]) -> tuple[list[list[tuple[int, Held | None]]], str]:
    """Of each start what the first rank held, round by round; and the digests at the end. ``kills``: behind the report
    of which step which ranks are killed."""
    lives: list[list[tuple[int, Held | None]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for last, victims in [*kills, (steps, [])]:
            ranks = Ranks(RANKS, work, folder, steps)
            lives.append([])
            ends: list[str] = []
            for step, found in reported(ranks.reports[0]):
                if isinstance(found, str):
                    ends.append(found)
                else:
                    lives[-1].append((step, found))
                if step >= last and victims:
                    ranks.kill(victims)
                    break
            if not victims:
                ends += [found for _, found in reported(ranks.reports[1]) if isinstance(found, str)]
            ranks.end()
    if len(ends) < RANKS:
        sys.exit("a process of the last start ended before its steps")
    return lives, hashlib.sha256("".join(ends).encode()).hexdigest()[:16]


def rows(name: str, lives: list[list[tuple[int, Held | None]]]) -> Iterator[list[object]]:
    """A row for each start: what it held behind its first steps, and how much that grew until its end."""
    for life in filter(None, lives):
        begin = life[0][0] - ROUND
        measured = [held for step, held in life if held and step >= begin + WARM]
        pairs = zip(measured[0][:3], measured[-1][:3], strict=True) if measured else ()
        growth = [f"{before:.0f} {after - before:+.1f}" for before, after in pairs]
        yield [name, f"{begin} to {life[-1][0]}", *growth]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    # each start comes further than the one before it: a checkpoint or two behind
    bounds = [args.steps * number // (args.kills + 1) for number in range(args.kills + 1)]
    kills = [(draw.randrange(low, high) + ROUND, draw.choice([[0], [1], [0, 1]])) for low, high in pairwise(bounds)]
    table, digests = [], {}
    for name, these in (("undisturbed", []), ("killed", kills)):
        lives, digests[name] = run(args.steps, these)
        table += list(rows(name, lives))
    print(tabulate(table, ["run", "steps", "memory, MB", "open files", "threads"], disable_numparse=True))
    print("\n".join(f"{name}: {found}" for name, found in digests.items()))
    if len(set(digests.values())) > 1:
        sys.exit("the two runs end with other numbers")


if __name__ == "__main__":
    main()
