"""Process groups that a rank opens: calls of torch's ``new_group``, connections, and splits of NCCL's world.

    python examples/benchmarks/groups.py [--pipe 16 --data 1024] [--before FOLDER]      10 s, or a minute

``git worktree add FOLDER 02fdfe7a`` makes the checkout before a rank made only the groups that it is in. torch's fake
backend stands for the other processes. Their meeting and the watchdog are left out. gloo connects each rank of a group
to each other.
ncclCommSplit is a call of all ranks of its parent, and waits without end for a rank that makes fewer. A small world,
whose first and last stage share weights, shows which ranks make as many as rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import in_turns, table

import fxpipe
from fxpipe.distributed import torch_transport
from fxpipe.sharding.data_axis import data_groups

SMALL = 4, 2
"""The pipe ranks and replicas of the world whose splits are compared."""


class Opening:
    """What one rank asks of torch while it opens its groups, on a GPU or on a CPU."""

    def __init__(self, pipe: int, data: int, rank: int, on_gpu: bool) -> None:
        self.calls, self.splits, self.rank = 0, list[str](), rank
        self.topology = fxpipe.Topology([("pipe", pipe), ("data", data)], ranks_per_node=8)
        device, transport = torch.device("cuda:0" if on_gpu else "cpu"), torch_transport.DistributedTransport
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pipe * data)
        self.bound = device if on_gpu else None
        source = mock.Mock(perform_nocolor_split=lambda _: self.splits.append("other"))
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (dist, "new_group", self.new_group),
                (dist.distributed_c10d, "_get_split_source", lambda _: source if self.bound else None),
                (torch_transport, "watchdog", mock.Mock),
                (torch_transport, "default_store", FakeStore),
                (torch_transport, "served_device", lambda: device),
                (torch_transport, "Streams", mock.Mock),
                (transport, "_meet", lambda *_: None),
                (transport, "_apart", lambda _, connect: connect()),
                (transport, "open_more", lambda opened, pairs: opened._new_links(pairs)),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            start = time.process_time()
            opened = transport(self.topology)
            links = [pair for pair in ((0, 1), (1, 0)) if opened.pipe_rank in pair]
            opened.open(links, [(0, pipe - 1)], data_groups(self.topology, 1, "node"))
            self.seconds = time.process_time() - start
        self.connections = sum(dist.get_world_size(group) - 1 for group in {*opened.process_groups()})
        torch_transport._open.clear()
        dist.destroy_process_group()

    def new_group(self, ranks: list[int], backend: str = "", use_local_synchronization: bool = False, **_: Any) -> Any:
        self.calls += 1
        # ProcessGroupNCCL splits the world for its members; for the others torch's own code does, below
        if self.bound and self.rank in ranks and backend != "gloo" and not use_local_synchronization:
            self.splits.append("own")
        with self.unbound() if self.rank in ranks else contextlib.nullcontext():
            return NEW_GROUP(ranks, backend="fake")

    @contextlib.contextmanager
    def unbound(self) -> Iterator[None]:
        bound, self.bound = self.bound, None
        yield
        self.bound = bound


NEW_GROUP = dist.new_group


def in_step() -> int:
    """The number of ranks of the small world that split NCCL's world as often as rank 0."""
    pipe, data = SMALL
    by_rank = [Opening(pipe, data, rank, on_gpu=True).splits for rank in range(pipe * data)]
    return sum(len(splits) == len(by_rank[0]) for splits in by_rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipe", type=int, default=16)
    parser.add_argument("--data", type=int, default=1024)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--measure", action="store_true", help="print this checkout's figures as JSON")
    given = parser.parse_args()
    if not given.measure:
        arguments = ["--measure", "--pipe", str(given.pipe), "--data", str(given.data)]
        print(table(in_turns(__file__, arguments, given.before, rounds=3)))
        return
    opening = Opening(given.pipe, given.data, 0, on_gpu=False)
    figures = {
        "calls of new_group": opening.calls,
        "connections of rank 0": opening.connections,
        "processor seconds": opening.seconds,
        f"ranks in step, of pipe {SMALL[0]} x data {SMALL[1]}": in_step(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
