"""What large worlds cost in one process: processor seconds and MiB, now and before.

    python examples/benchmarks/scale.py preview                     # a Llama of 405B on 16,384 ranks: 1 minute
    python examples/benchmarks/scale.py preview --ranks 131072 --layers 32
    python examples/benchmarks/scale.py schedule                    # 1F1B of 512 stages × 2,048 micro-batches: 20 s
    python examples/benchmarks/scale.py schedule --before FOLDER --rounds 3

``preview``: pipe 16 × tensor 8 × data, on the meta device, with the costs of an H100. ``schedule``: the
table of a chain with a rank for each stage, built and verified. ``--before FOLDER`` measures an earlier checkout in
turns, and prints the ratio last.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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


WHAT: dict[str, Callable[[argparse.Namespace], Figures]] = {"preview": preview, "schedule": schedule}


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
