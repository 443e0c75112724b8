"""A Llama of 7B parameters, built on the meta device, traced, cut for 8 ranks and planned in one process.

    python examples/benchmarks/llama_7b.py                     # cut before every fourth layer; about 15 s with imports
    python examples/benchmarks/llama_7b.py --auto              # fxpipe balances the cut itself
    python examples/benchmarks/llama_7b.py --tracer record     # layers stay whole

No parameter is ever made: what is printed is the stage graph, with the parameters of each rank, and the table of a
step. Then what it took: seconds, and the peak of this process's memory. In a run each rank gives memory to its own
stages alone, by `fxpipe.compile(model, topo, …, init_fn=model._init_weights)`, or with `checkpoint="a folder of
safetensors"` beside it.
"""

import argparse
import resource
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fxpipe

RANKS, ROWS, TOKENS = 8, 32, 2048  # a row is a micro-batch


def llama() -> torch.nn.Module:
    """Llama 2 7B: 32 layers of width 4096, as the defaults of its configuration are."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(use_cache=False), dtype=torch.bfloat16).train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--auto", action="store_true", help="balance the cut")
    parser.add_argument("--tracer", default="export", choices=("export", "record"))
    options = parser.parse_args()
    imported = peak_gib()
    start = time.perf_counter()
    model = llama()
    built = time.perf_counter()
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="meta")
    plan = fxpipe.preview(
        model,
        fxpipe.Topology([("pipe", RANKS)]),
        boundaries="auto" if options.auto else {"model.layers.*": {"every": 32 // RANKS}},
        microbatches=ROWS,
        tracer=options.tracer,
        example_kwargs={"input_ids": tokens, "labels": tokens},
    )
    seconds = time.perf_counter() - built
    print(plan.graph)
    print(plan.schedule)
    parameters = list(model.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    count, size = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
    print(f"{count / 1e9:.2f}B parameters ({size / 2**30:.1f} GiB), none of them made")
    print(f"built on the meta device in {built - start:.1f} s; traced, cut and planned in {seconds:.1f} s")
    print(f"peak memory {peak_gib():.2f} GiB, {imported:.2f} GiB of it for imports")


def peak_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
