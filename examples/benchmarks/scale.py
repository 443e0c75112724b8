"""What large worlds cost in one process: processor seconds and MiB, now and before.

    python examples/benchmarks/scale.py preview                     # a Llama of 405B on 16,384 ranks: 1 minute
    python examples/benchmarks/scale.py preview --ranks 131072 --layers 32
    python examples/benchmarks/scale.py schedule                    # 1F1B of 512 stages × 2,048 micro-batches: 20 s
    python examples/benchmarks/scale.py schedule --before FOLDER --rounds 3
    python examples/benchmarks/scale.py heartbeat --before FOLDER   # what ranks ask of the store of rank 0: 1 minute

``preview``: pipe 16 × tensor 8 × data, on the meta device, with the costs of an H100. ``schedule``: the
table of a chain with a rank for each stage, built and verified. ``--before FOLDER`` measures an earlier checkout in
turns, and prints the ratio last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from turns import Figures, in_turns, table


def preview(arguments: argparse.Namespace) -> Figures:
    """The processor seconds of a preview."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fxpipe

    large = {"vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    large |= {"num_key_value_heads": 8, "max_position_embeddings": 8192, "num_hidden_layers": arguments.layers}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**large, use_cache=False))
    ids = torch.zeros(arguments.microbatches, 8192, dtype=torch.long, device="meta")
    topology = fxpipe.Topology([("pipe", 16), ("tensor", 8), ("data", arguments.ranks // 128)], ranks_per_node=8)
    begin = time.process_time()
    fxpipe.preview(
        model,
        topology,
        boundaries={"model.layers.*": {"every": -(-arguments.layers // 16)}},
        microbatches=arguments.microbatches,
        precision=fxpipe.Precision(),
        zero=1,
        hardware="h100",
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    return {"seconds": time.process_time() - begin}


def schedule(arguments: argparse.Namespace) -> Figures:
    """The processor seconds and the most MiB that a table takes."""
    from fxpipe.schedules import build

    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    table = build(arguments.family, tuple(pairwise(range(arguments.stages))), 4 * arguments.stages)
    seconds, most = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"actions": sum(map(len, table.rows)), "seconds": seconds, "MiB": (most - idle) / 2**10}


def heartbeat(arguments: argparse.Namespace) -> Figures:
    """What all ranks together ask of the store in a second: MB, and the part of a core that its process takes.

    One rank of pipe 16 × data N / 16 exchanges as often as it can with the store of a process of its own, in which its
    peers have reports like its own. A world's figures are this rank's times N, divided by the period.
    """
    import torch.distributed as dist

    import fxpipe
    from fxpipe.distributed.activity import Call, here, phase
    from fxpipe.distributed.watchdog import Watchdog

    server, store = store_of_its_own()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    figures = {}
    for size in (16, 64, 1024, 16384):
        with mock.patch.object(dist, "get_world_size", lambda size=size: size), phase("forward_backward, step 1234"):
            watchdog = Watchdog()
            watchdog.watch(1, fxpipe.Topology([("pipe", min(16, size // 2)), ("data", max(2, size // 16))]))
        here.calls = tuple(Call(i, i, f"forward_backward, step {1219 + i}") for i in range(16))
        beats = watchdog._heartbeat
        beats.refresh()
        for peer in beats.wanted:
            beats._store.set(f"rank/{peer}", beats._store.get("rank/0"))
        counted = beats._store = Counted(beats._store)
        beats._thread.join(0)
        exchanges = 200 + 100_000 // (10 + len(beats.wanted))
        beats._exchange()
        counted.bytes, before = 0, seconds_of(server)
        for number in range(exchanges):
            here.calls = (*here.calls[1:], Call(number, number, f"forward_backward, step {number}"))
            beats._exchange()
        each = size / getattr(beats, "period", getattr(beats, "_period", 0.0)) / exchanges
        figures[f"{size} ranks: MB/s"] = each * counted.bytes / 1e6
        figures[f"{size} ranks: part of a core"] = each * (seconds_of(server) - before)
        watchdog.stop()
    dist.destroy_process_group()
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return figures


class Counted:
    """A store that counts the bytes of values that pass, both ways."""

    def __init__(self, store: Any) -> None:
        self._store, self.bytes = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = getattr(self._store, name)(*given)
            values = [*given[1:], *(result if isinstance(result, list) else [result])]
            self.bytes += sum(len(value) for value in values if isinstance(value, bytes))
            return result

        return call


def store_of_its_own() -> tuple[int, Any]:
    """The number of a process that serves a store, and a client of it."""
    from torch.distributed import TCPStore

    receiver, sender = os.pipe()
    server = os.fork()
    if not server:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(sender, str(store.port).encode())
        signal.pause()
    return server, TCPStore("127.0.0.1", int(os.read(receiver, 9)), None, False, wait_for_workers=False)


def seconds_of(process: int) -> float:
    """The processor seconds that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


WHAT: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "preview": preview,
    "schedule": schedule,
    "heartbeat": heartbeat,
}


def parsed() -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and those of them that say what to measure."""
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("what", choices=WHAT)
    which.add_argument("--ranks", type=int, default=16384, help="of a preview")
    which.add_argument("--layers", type=int, default=126, help="of the previewed model")
    which.add_argument("--microbatches", type=int, default=64)
    which.add_argument("--stages", type=int, default=512, help="of a schedule, with four times as many micro-batches")
    which.add_argument("--family", default="1f1b")
    passed_on = [action.dest for action in which._actions[1:]]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[which])
    parser.add_argument("--before", type=Path, help="an earlier checkout")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="measure in this process, and print JSON")
    arguments = parser.parse_args()
    return arguments, [arguments.what, *(f"--{name}={vars(arguments)[name]}" for name in passed_on)]


def main() -> None:
    arguments, which = parsed()
    if arguments.once:
        print(json.dumps(WHAT[arguments.what](arguments)))
        return
    print(table(in_turns(__file__, ["--once", *which], arguments.before, arguments.rounds)))


if __name__ == "__main__":
    main()
