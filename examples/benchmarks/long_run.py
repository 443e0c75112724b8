"""Does a long run grow? Steps with three kinds of batch, evaluations, state dicts, recordings and checkpoints.

    python examples/benchmarks/long_run.py                 # 2,000 steps on four processes: two stages, two replicas
    python examples/benchmarks/long_run.py --ranks 1       # one process plays both stages

Told are, for the first rank, resident memory, open files (sockets are among them), threads and Python objects, and at
the end by how much each grew in the second half of the run. The first half holds whatever is made once.
"""

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe

WIDTH = 64
ROWS = 16  # of a batch
ROUND = 20  # steps, in which everything comes once


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = fxpipe.stage_boundary(self.below(x).tanh())
        h = self.above(h) if mask is None else self.above(h) * mask
        return h.square().mean()


class Held(NamedTuple):
    """What a process holds. ``memory``: resident, in MB of 10^6 bytes."""

    memory: float
    files: int
    threads: int
    objects: int

    @staticmethod
    def now() -> "Held":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return Held(memory, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(gc.get_objects()))


def held_over(steps: int, samples: int = 8) -> list[tuple[int, Held]]:
    """What this rank holds after as many steps as are told with it."""
    torch.manual_seed(0)
    replicas = max(1, (dist.get_world_size() if dist.is_initialized() else 1) // 2)
    topology = fxpipe.Topology([("pipe", 2), ("data", replicas)])
    forward_backward = fxpipe.compile(Residual(), topology, microbatches=4, zero=1)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(topology.data_rank)
    found = []
    with tempfile.TemporaryDirectory() as own:
        folder = Path(own, "run")
        if dist.is_initialized():
            shared = [str(folder)]
            dist.broadcast_object_list(shared)
            folder = Path(shared[0])
        for step in range(1, steps + 1):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            forward_backward.record_timeline(step % ROUND == 0)
            optimizer.zero_grad()
            match step % 3:
                case 0:
                    forward_backward(x)
                case 1:
                    forward_backward(x, mask=torch.ones(ROWS, 1))
                case 2:
                    forward_backward.step_microbatches([((part,), {}) for part in x.split([3, 5, 6, 2])])
            forward_backward.clip_grad_norm_(1.0)
            optimizer.step()
            if step % ROUND == 0:
                forward_backward.timeline(), forward_backward.traffic()
                forward_backward.evaluate(x, outputs="all")
                forward_backward.state_dict(full=True), optimizer.state_dict()
            if step % (steps // samples) == 0:
                found.append((step, Held.now()))
            if step % (5 * ROUND) == 0:
                fxpipe.save(folder, forward_backward, optimizer, step=step, keep=1, block=False)
        fxpipe.save(folder, forward_backward, optimizer, step=steps, keep=1)  # waits for the one before it
        if dist.is_initialized():
            dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Look whether a long run grows.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = held_over(args.steps) if args.ranks == 1 else fxpipe.launch(held_over, args.ranks, args.steps)[0]
    print(tabulate([(step, *held) for step, held in found], ("steps", *(f"{n}" for n in Held._fields)), floatfmt=".1f"))
    half, end = found[len(found) // 2 - 1][1], found[-1][1]
    grown = ", ".join(
        f"{name} {after / before - 1:+.2%}" for name, before, after in zip(Held._fields, half, end, strict=True)
    )
    print(f"in the second half: {grown}")


if __name__ == "__main__":
    main()
