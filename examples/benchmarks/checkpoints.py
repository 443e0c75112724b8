"""What a checkpoint costs: ``fxpipe.save`` and ``fxpipe.load`` beside torch's ``dcp.save`` and ``dcp.load`` of the same
tensors, and a step while an asynchronous save runs beside one without.

    python examples/benchmarks/checkpoints.py                     # 500 MB, one process
    python examples/benchmarks/checkpoints.py --ranks 2 --mb 200  # over two ranks, which share the machine

The two are timed in turns, now one first and now the other, in new folders on one disk. Told are the medians, the ratio
of the medians, and the median of the ratios of neighbours, which a disk that is shared shakes less.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpipe

LAYERS = 8


class Stack(nn.Module):
    """Square layers, in two stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == LAYERS // 2 - 1:
                x = fxpipe.stage_boundary(x)
        return x.square().mean()


def timed(run: Callable[[], object]) -> float:
    """Seconds, on the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    run()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def added(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def told(what: str, mine: list[float], theirs: list[float], other: str) -> None:
    pairs = [a / b for a, b in zip(mine, theirs, strict=True)]
    one, two = statistics.median(mine), statistics.median(theirs)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{what:<22} {one:8.3f} s   {other:<18} {two:8.3f} s   {one / two:5.2f} ×, by pairs", end=" ")
        print(f"{statistics.median(pairs):5.2f} ×", flush=True)


def measure(mb: float, rounds: int, rows: int, steps: int) -> None:
    """``mb``: of parameters and moments together, in units of 10^6 bytes."""
    warnings.filterwarnings("ignore", message=".*(disabled|existing checkpoint).*")
    torch.set_num_threads(1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    width = int((mb * 1e6 / 12 / LAYERS) ** 0.5)
    torch.manual_seed(0)
    topology = fxpipe.Topology([("pipe", 2 if ranks > 1 else 1), ("data", max(1, ranks // 2))])
    forward_backward = fxpipe.compile(Stack(width), topology, microbatches=2)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
    batch = torch.randn(rows, width)

    def step() -> None:
        optimizer.zero_grad()
        forward_backward(batch)
        optimizer.step()

    step()
    folder = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    state = {"model": forward_backward, "optim": optimizer}
    times: dict[str, list[float]] = {name: [] for name in ("save", "dcp.save", "load", "dcp.load")}
    for number in range(rounds + 1):
        mine, theirs = Path(folder[0], f"mine{number}"), Path(folder[0], f"theirs{number}")
        tasks = {
            "save": partial(fxpipe.save, mine, forward_backward, optimizer, step=number),
            "dcp.save": partial(dcp.save, state, checkpoint_id=theirs),
            "load": partial(fxpipe.load, mine, forward_backward, optimizer),
            "dcp.load": partial(dcp.load, state, checkpoint_id=theirs),
        }
        names = list(tasks) if number % 2 else ["dcp.save", "save", "dcp.load", "load"]
        for name in names:
            seconds = timed(tasks[name])
            times[name] += [seconds] * (number > 0)  # the first is for whatever is made once
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(theirs)
            shutil.rmtree(mine)
            os.sync()
    told("fxpipe.save", times["save"], times["dcp.save"], "dcp.save")
    told("fxpipe.load", times["load"], times["dcp.load"], "dcp.load")
    told("save and load", added(times["save"], times["load"]), added(times["dcp.save"], times["dcp.load"]), "dcp")

    mine = Path(folder[0], "beside")
    copying, beside, alone = [], [], []
    for number in range(rounds):
        alone += [timed(step) for _ in range(steps)]
        start = time.perf_counter()
        later = fxpipe.save(mine, forward_backward, optimizer, step=number, keep=1, block=False)
        copying.append(time.perf_counter() - start)
        during = []
        while not all_done(later) or not during:
            during.append(timed(step))
        beside.append(statistics.median(during[:-1] or during))
    told("step while it is saved", beside, [statistics.median(alone)] * len(beside), "alone")
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"save(block=False) itself {statistics.median(copying):.3f} s")
        shutil.rmtree(folder[0])


def all_done(later: Future[Path]) -> bool:
    """Whether it is complete, the same answer on all ranks."""
    done = torch.tensor([float(later.done())])
    if dist.is_initialized():
        dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=500, help="parameters and moments, 10^6 bytes")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256, help="of a batch: how long a step takes")
    parser.add_argument("--steps", type=int, default=3, help="without a save, in each round")
    args = parser.parse_args()
    if args.ranks == 1:
        measure(args.mb, args.rounds, args.rows, args.steps)
    else:
        fxpipe.launch(measure, args.ranks, args.mb, args.rounds, args.rows, args.steps)


if __name__ == "__main__":
    main()
