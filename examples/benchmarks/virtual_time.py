"""In virtual time, on simulated GPUs: a step beside its plan, and a launch-bound step beside torch's.

    python examples/benchmarks/virtual_time.py plan            # each family on 4 ranks, messages from 0 to 2 F
    python examples/benchmarks/virtual_time.py host            # 1F1B, interleaved and ZB-H1, launches of 5 and 20 us
    python examples/benchmarks/virtual_time.py host --schedules 1f1b --microbatches 8

The script needs a CPU build of torch, a C++ compiler and a checkout, for it runs on the tests' simulated GPUs: four
processes, whose kernels, copies, events and messages have a clock of their own, the same in every run.

``plan``: stages whose work takes exactly F = 1 and B = 2 ms, or other times, and nothing else takes any. Of each row
the makespan that ``schedule.simulate(comm=)`` says, and the step's.

``host``: a transformer block of width 32 a stage, all of whose kernels take 3 us: the host is the bottleneck. It spends
the launch time on each kernel, copy and message, a fifth of it on each event, and no time in Python. ``launches more``
is by how many launches an action the step is longer than that of torch.distributed.pipelining. Below, what each puts on
its streams.

What neither shows: how fast kernels are, NCCL itself, the processors of a GPU that communication takes from kernels,
fragmentation, and, in ``host``, Python's own time (``overhead.py`` measures that).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the simulated GPUs of the tests

from tests import simulated_gpu  # isort: skip  # before torch

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed import pipelining

import fxpipe

RANKS, WIDTH, HEADS, TOKENS = 4, 32, 4, 8
TORCHS = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zb_h1": pipelining.ScheduleInterleavedZeroBubble,
}
LAUNCHES = (5e-6, 20e-6)
KINDS = ("kernels", "copies", "events", "messages", "host waits")


# --- plan ---


def plan() -> None:
    from tests.virtual_work import Setting, chain, slowest, steps_of

    alike, folded = (1.0,) * RANKS, (0, 1, 2, 3, 3, 2, 1, 0)
    settings = [
        *(Setting(name, 16, alike, chain(4), (0, 1, 2, 3)) for name in ("gpipe", "1f1b", "zb_h1", "greedy")),
        Setting("interleaved_1f1b", 16, alike * 2, chain(8), (0, 1, 2, 3) * 2),
        Setting("zb_v", 16, alike * 2, chain(8), folded),
        Setting("1f1b", 16, (1, 0.5, 1, 0.2), chain(4), (0, 1, 2, 3)),
        Setting("gpipe", 16, alike, chain(4), (0, 1, 2, 3), frozen=1),
        Setting("1f1b", 16, (0.5, 0.5, 1, 2), ((), (0,), (), (1, 2)), (0, 1, 2, 3)),
        Setting("1f1b", 16, (0.5, *alike), chain(5), ((0, 1, 2, 3), 0, 1, 2, 3)),
    ]
    results = fxpipe.launch(steps_of, RANKS, settings, (0, 0.5, 1.2, 2))
    rows = [(*row, f"{row[3] / row[2] - 1:+.1e}") for row in slowest(results)]
    headers = ("schedule, m, F of each stage < what it reads, ranks", "comm", "planned ms", "virtual ms", "more")
    print(tabulate(rows, headers=headers, floatfmt=("", "g", ".3f", ".3f")))


# --- host ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        seen = ((q @ k.transpose(-1, -2)) * 0.35).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def part(index: int) -> nn.Module:
    return nn.Sequential(*([nn.Embedding(16, WIDTH)] if index == 0 else []), Block())


class Whole(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(part, range(stages)))

    def forward(self, x: Tensor) -> Tensor:
        for index, one in enumerate(self.parts):
            x = one(fxpipe.stage_boundary(x, name=f"s{index}") if index else x)
        return loss_of(x)


def loss_of(output: Tensor, target: object = None) -> Tensor:
    return output.square().mean()


def by_fxpipe(schedule: str, stages: int, microbatches: int, ids: Tensor) -> Callable[[], object]:
    placement = {f"s{index}" if index else "parts.0": index % RANKS for index in range(stages)}
    torch.manual_seed(0)
    model = Whole(stages).to(ids.device)
    topology = fxpipe.Topology([("pipe", RANKS)])
    step = fxpipe.compile(
        model,
        topology,
        microbatches=microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        placement=placement,
    )
    return partial(step, ids)


def by_torch(schedule: str, stages: int, microbatches: int, ids: Tensor) -> Callable[[], object]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    mine = [
        pipelining.PipelineStage(part(index).to(ids.device), index, stages, ids.device)
        for index in range(rank, stages, RANKS)
    ]
    table: Any = TORCHS[schedule]
    runs = table(mine[0] if schedule == "1f1b" else mine, microbatches, loss_fn=loss_of)
    last = {"target": torch.zeros(microbatches, device=ids.device), "losses": []} if rank == RANKS - 1 else {}
    return lambda: runs.step(*([ids] if rank == 0 else []), **last)


def kind_of(what: str) -> str:
    if what.startswith("copy"):
        return "copies"
    return {"event": "events", "nccl": "messages", "host waits": "host waits"}.get(what, "kernels")


def measured(schedules: Sequence[str], microbatches: int) -> list[tuple[str, str, list[float], Counter[str], int]]:
    """(schedule, whose, seconds of a step for each launch time, what a step puts on this rank's streams, actions)."""
    return list(_measured(schedules, microbatches))


def _measured(schedules: Sequence[str], microbatches: int) -> Iterator[tuple[str, str, list[float], Counter[str], int]]:
    ids = torch.randint(0, 16, (microbatches, TOKENS), device="cuda")
    torch.distributed.broadcast(ids, 0)
    times = {"kernel": 3e-6, "flops": 1e18, "bytes": 1e18, "p2p_bytes": 1e12, "wire_latency": 0}
    for schedule in schedules:
        stages = RANKS * (2 if schedule.startswith("interleaved") else 1)
        actions = microbatches * (stages // RANKS) * (3 if schedule == "zb_h1" else 2)
        for whose, make in (("fxpipe", by_fxpipe), ("torch", by_torch)):
            step, seconds = make(schedule, stages, microbatches, ids), list[float]()
            for _ in range(4):  # fxpipe checks the first batches of a plan
                step()
            for launch in LAUNCHES:
                simulated_gpu.costs(**times, launch=launch, event=launch / 5)
                start = simulated_gpu.align()
                before = Counter(simulated_gpu.counts())
                step()
                made = Counter(simulated_gpu.counts()) - before
                seconds.append(simulated_gpu.now() - start)
            yield schedule, whose, seconds, made, actions


def host(schedules: Sequence[str], microbatches: int) -> None:
    ranks = fxpipe.launch(measured, RANKS, schedules, microbatches)
    steps, puts, differing = [], [], []
    for ours, torchs in zip(*(zip(*(found[one::2] for found in ranks), strict=True) for one in (0, 1)), strict=True):
        schedule, actions = ours[0][0], ours[0][4]
        for place, launch in enumerate(LAUNCHES):
            mine, theirs = (max(seconds[place] for _, _, seconds, _, _ in each) for each in (ours, torchs))
            more = (mine - theirs) / launch / actions
            steps.append((schedule, launch * 1e6, mine * 1e3, theirs * 1e3, mine / theirs, more))
        for rank, pair in enumerate(zip(ours, torchs, strict=True)):
            for _, whose, _, made, _ in pair:
                each = [sum(made[what] for what in made if kind_of(what) == kind) for kind in KINDS]
                puts.append((schedule, rank, whose, *each, sum(each) / actions))
            extra = {what: pair[0][3][what] - pair[1][3][what] for what in sorted(pair[0][3] | pair[1][3])}
            differing.append(f"{schedule}, rank {rank}: {', '.join(f'{what} {n:+}' for what, n in extra.items() if n)}")
    headers = ("schedule", "launch us", "fxpipe ms", "torch ms", "ratio", "launches more")
    print(tabulate(steps, headers=headers, floatfmt=("", "g", ".3f", ".3f", ".3f", ".2f")))
    print(f"\nwhat a step of {microbatches} micro-batches puts on a rank's streams")
    print(tabulate(puts, headers=("schedule", "rank", "whose", *KINDS, "an action"), floatfmt=".1f"))
    print("\nof these fxpipe has more than torch", *differing, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "host"))
    parser.add_argument("--schedules", nargs="+", choices=tuple(TORCHS), default=tuple(TORCHS), help="of host")
    parser.add_argument("--microbatches", type=int, default=16, help="of host")
    args = parser.parse_args()
    if not simulated_gpu.is_active():
        parser.error("torch is there already: run the script by itself, or by python -m tests.simulated_gpu")
    plan() if args.what == "plan" else host(args.schedules, args.microbatches)
    print(
        "\nnot shown: how fast kernels are, NCCL itself, the processors that communication takes, fragmentation"
        + (", Python's own time" if args.what == "host" else "")
    )


if __name__ == "__main__":
    main()
