"""A rank that is killed mid-training, between steps or amid a reduction: every other one ends with an error soon."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from tests.pool import forking
from tests.whole import test_batch_axes

SECONDS = 200.0  # for all of a test, starting four processes included; transports wait for five minutes
RANKS = 4
OPERATION = r"waited for (an? |the )?[\w-]+ (of|over) \S+"
"""Such as "all-reduce of 65792 elements over shard" and "1B3 of stage `b`"."""


class Buckets(nn.Module):
    """Two stages of three layers; each layer fills a bucket of 0.2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(fxpipe.stage_boundary(self.a(x))).mean()


def die(*_: object) -> None:
    """Dies once the others have had the time to come to what they cannot do alone."""
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def between_steps(is_victim: bool) -> Callable[[], object]:
    """The first step, and the second one to be taken."""
    topology = fxpipe.Topology([("pipe", 2), ("data", 2)])
    forward_backward = fxpipe.compile(Buckets(), topology, microbatches=4)
    forward_backward(torch.ones(8, 256))
    if is_victim:
        die()
    return lambda: forward_backward(torch.ones(8, 256))


def amid_a_reduction(is_victim: bool, topology: fxpipe.Topology, options: Mapping[str, Any]) -> Callable[[], object]:
    """The same; the victim dies before its last gradient of the second step, behind buckets that are on their way."""
    forward_backward = fxpipe.compile(Buckets(), topology, microbatches=4, **options)
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    forward_backward(torch.ones(8, 256))
    optimizer.step()
    optimizer.zero_grad()
    if is_victim:
        first, *_ = forward_backward.parameters()
        calls = iter([lambda *_: None] * 3 + [die])  # of the last micro-batch
        first.register_post_accumulate_grad_hook(lambda parameter: next(calls)())
    return lambda: forward_backward(torch.ones(8, 256))


def work(
    rank: int, victim: int, store: Path, told: Connection, make: Callable[..., Callable[[], object]], *args: Any
) -> None:
    """One process: tells what the second step came to."""
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS)
    step = make(rank == victim, *args)
    try:
        step()
    except fxpipe.RunError as error:
        told.send(str(error))


def what_the_others_say(victim: int, store: Path, make: Callable[..., Any], *args: Any) -> list[str]:
    """Each survivor's error; all processes have ended, and only one was killed."""
    context = forking()
    ends, workers = [], []
    for rank in range(RANKS):
        end, told = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(rank, victim, store, told, make, *args))
        worker.start()
        told.close()
        ends.append(end)
        workers.append(worker)
    try:
        deadline = time.monotonic() + SECONDS
        said = []
        for rank, end in enumerate(ends):
            assert wait([end], deadline - time.monotonic()), f"rank {rank} hangs"
            if rank != victim:
                said.append(end.recv())
        for worker in workers:
            worker.join(deadline - time.monotonic())
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL if r == victim else 0 for r in range(RANKS)]
        return said
    finally:
        for worker in workers:
            worker.kill()


def test_the_other_ranks_end_with_an_error(tmp_path: Path) -> None:
    victim = 3
    for text in what_the_others_say(victim, tmp_path / "store", between_steps):
        assert re.match(
            rf"rank {victim} \(pipe {victim // 2}, data {victim % 2}\) is gone: its process has ended; ", text
        )


def amid_experts(is_victim: bool) -> Callable[[], object]:
    """The victim dies in a forward, whose tokens its partner waits for."""
    step = test_batch_axes.compiled(test_batch_axes.PIPE_EXPERT)
    topology = step.topology
    part = test_batch_axes.mine(test_batch_axes.batch(0, topology.data_size), topology)
    step(**part)
    if is_victim:
        torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: die() if isinstance(module, test_batch_axes.Experts) else None
        )
    return lambda: step(**part)


def test_a_killed_expert_rank_is_named_and_not_its_partner(tmp_path: Path) -> None:
    victim = 3
    for text in what_the_others_say(victim, tmp_path / "store", amid_experts):
        assert re.match(rf"rank {victim} \(pipe 1, expert 1\) is gone: its process has ended; ", text), text


REDUCTIONS: list[tuple[int, fxpipe.Topology, dict[str, Any]]] = [
    (0, fxpipe.Topology([("data", 4)], ranks_per_node=2), {"zero": 1}),  # reduce-scatter, across nodes
    (3, fxpipe.Topology([("pipe", 2), ("data", 2)]), {"zero": 1}),  # in the last stage
]
"""(victim, topology, options)."""


def test_a_rank_killed_during_a_reduction_is_named_with_the_operation(tmp_path: Path) -> None:
    """At the same time, for all that they do is to wait some seconds for the victim's answer."""
    with ThreadPoolExecutor() as threads:
        worlds = [
            threads.submit(what_the_others_say, case[0], tmp_path / f"store{place}", amid_a_reduction, *case[1:])
            for place, case in enumerate(REDUCTIONS)
        ]
    for (victim, *_), world in zip(REDUCTIONS, worlds, strict=True):
        for text in world.result():
            assert re.match(
                rf"rank {victim} \(.*?\) is gone: its process has ended; rank \d \(.*?\) {OPERATION}", text
            ), text
