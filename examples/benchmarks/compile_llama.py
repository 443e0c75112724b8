"""Compiling Llamas: processor seconds over those of ``torch.export``, and what ``check_capture`` takes of them.

    python examples/benchmarks/compile_llama.py                      # three minutes of a core
    python examples/benchmarks/compile_llama.py 16x512 --rounds 1    # layers x width
    python examples/benchmarks/compile_llama.py --before FOLDER      # an earlier checkout, in turns

A model is cut in two, with 4 micro-batches of 2 rows of 32 tokens. Each figure is of a process of its own, forked from
one that has imported torch, transformers and fxpipe. ``peak``: the resident memory that ``fxpipe.compile``
takes at most, over the parameters' bytes; where it is measured, freed memory goes back to the system at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import turns
from torch import nn

import fxpipe

SIZES = ["32x64", "16x64", "32x512", "16x512"]


def llama(size: str) -> tuple[nn.Module, dict[str, Any], str]:
    """A model, a batch, and the layer of the second stage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width = map(int, size.split("x"))
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **shape)
    ids = torch.randint(0, 256, (8, 32))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, f"model.layers.{layers // 2}"


def compiled(size: str, check: bool = True) -> Callable[[], object]:
    model, batch, cut = llama(size)
    options: dict[str, Any] = {"boundaries": [cut], "microbatches": 4, "example_kwargs": batch}
    options |= {} if check else turns.without_checks()
    return lambda: fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), **options)


def exported(size: str) -> Callable[[], object]:
    model, batch, _ = llama(size)
    part = {name: tensor[:2] for name, tensor in batch.items()}
    return lambda: torch.export.export(model, (), part, strict=False)


def seconds(make: Callable[..., Callable[[], object]], *given: Any) -> float:
    run = make(*given)
    start = time.process_time()
    run()
    return time.process_time() - start


def peak(size: str) -> float:
    """Bytes over the parameters' bytes."""
    ctypes.CDLL("libc.so.6").mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    model, *_ = llama(size)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    del model
    run = compiled(size)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / parameters


def forked(function: Callable[..., float], *given: Any) -> float:
    def run() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            sender.send(function(*given))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run)
    process.start()
    sender.close()
    figure: float = receiver.recv()
    process.join()
    return figure


def figures(size: str) -> turns.Figures:
    llama("2x16")  # imports transformers
    whole, plain = forked(seconds, compiled, size), forked(seconds, compiled, size, False)
    return {
        f"{size}: compile ÷ torch.export": whole / forked(seconds, exported, size),
        f"{size}: the check, s": whole - plain,
        f"{size}: peak ÷ parameters": forked(peak, size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES, help="layers x width")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--point", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.point:
        print(json.dumps(figures(arguments.sizes[0])))
    else:
        medians: dict[str, turns.Figures] = {}
        for size in arguments.sizes:
            medians |= turns.in_turns(__file__, [size, "--point"], arguments.before, arguments.rounds)
        print(turns.table(medians))


if __name__ == "__main__":
    main()
