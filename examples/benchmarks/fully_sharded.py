"""``zero=3`` and torch's FSDP2: memory of a step, and processor time of its parts.

    python examples/benchmarks/fully_sharded.py                    # 2 ranks, gloo: two minutes
    python examples/benchmarks/fully_sharded.py --before FOLDER    # an earlier checkout, too, in turns
    python examples/benchmarks/fully_sharded.py --ranks 4

Memory: 32 layers with AdamW and one micro-batch. A peak is the largest resident memory of a rank in
``forward_backward`` above the memory before the model was made, in units of the parameters. FSDP2 shards each layer.
Time: 100 parameters of 16 × 16, which FSDP2 shards together; medians of a rank's processor time, summed over the ranks.
Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns, table, without_checks

import fxpipe

MMAP_THRESHOLD = -3  # of glibc's mallopt: larger blocks go back to the system once they are freed
Parts = dict[str, Callable[[], object]]


class Stack(nn.Module):
    """Layers, each added to what it is given."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def of_fxpipe(layers: int, width: int) -> Parts:
    topology = fxpipe.Topology([("pipe", 1), ("data", dist.get_world_size())])
    forward_backward = fxpipe.compile(Stack(layers, width), topology, microbatches=1, zero=3, **without_checks())
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-4, foreach=True)
    x = torch.randn(4, width)
    return {
        "forward_backward": lambda: forward_backward(x),
        "clip": lambda: forward_backward.clip_grad_norm_(1.0),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }


def of_torch(layers: int, width: int, by_layer: bool) -> Parts:
    model, x = Stack(layers, width), torch.randn(4, width)
    for layer in model.layers if by_layer else ():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    return {
        "forward_backward": lambda: model(x).backward(),
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "step": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }


def over_ranks(value: float, by: dist.ReduceOp.RedOpType) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, by)
    return number.item()


def resident(field: str) -> float:
    """MiB: VmRSS, what is resident now; VmHWM, the most since ``clear_refs``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def peak(make: Callable[[], Parts]) -> float:
    """MiB above the memory before, in the third ``forward_backward``."""
    gc.collect()
    before, parts = resident("VmRSS"), make()
    for name in [*parts, *parts]:
        parts[name]()
    gc.collect()  # what compile has made may lie in reference cycles
    Path("/proc/self/clear_refs").write_text("5")
    parts["forward_backward"]()
    return over_ranks(resident("VmHWM") - before, dist.ReduceOp.MAX)


def measure(mib: int, rounds: int) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 2**16)
    width = int((mib * 2**20 / 4 / 32) ** 0.5)
    warm = of_fxpipe(2, 8), of_torch(2, 8, True)  # imports, and what is made once
    for part in [part for parts in warm for part in parts.values()]:
        part()
    ours, theirs = peak(lambda: of_fxpipe(32, width)) / mib, peak(lambda: of_torch(32, width, True)) / mib
    figures = {"FSDP2: peak": theirs, "zero=3: peak": ours, "peak ÷ FSDP2": ours / theirs}
    runs = {"zero=3": of_fxpipe(100, 16), "FSDP2": of_torch(100, 16, False)}
    took: dict[tuple[str, str], list[float]] = {(run, part): [] for run, parts in runs.items() for part in parts}
    for _ in range(rounds):
        for (run, part), times in took.items():
            dist.barrier()
            start = time.process_time()
            runs[run][part]()
            times.append(time.process_time() - start)
    medians = {key: over_ranks(statistics.median(times[2:]), dist.ReduceOp.SUM) for key, times in took.items()}
    for part in ("forward_backward", "clip", "step"):
        figures |= {f"{run}: {part}, ms": 1e3 * medians[run, part] for run in runs}
        figures[f"{part} ÷ FSDP2"] = medians["zero=3", part] / medians["FSDP2", part]
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128, help="of the parameters, for the memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the folder of an earlier checkout")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        fxpipe.launch(measure, args.ranks, args.mib, 15)
    else:
        sizes = ["--ranks", str(args.ranks), "--mib", str(args.mib)]
        print(table(in_turns(__file__, ["--measure", *sizes], args.before, args.rounds)))


if __name__ == "__main__":
    main()
