"""Does a Llama of 70B parameters fit on pipe 8 × data 8, in bfloat16 with zero=1? And what others would count for it.

    python examples/benchmarks/fits.py                  # under a minute, on the meta device
    python examples/benchmarks/fits.py --hardware b200 --zero 2

What is printed: the preview, with the seconds and memory that it took; and the same configuration by the formulas of
Megatron-LM (megatron/training/theoretical_memory_usage.py) and DeepSpeed (estimate_zero2_model_states_mem_needs and
estimate_zero3_model_states_mem_needs, without offload, for the parameters of one stage, as they know of no pipeline).
"""

import argparse
import resource
import time

import torch
from tabulate import tabulate
from transformers import AutoModelForCausalLM, LlamaConfig

import fxpipe

PIPE, DATA, MICROBATCHES, TOKENS = 8, 8, 32, 4096
LAYERS, WIDTH, INNER, HEADS, GROUPS, WORDS = 80, 8192, 28672, 64, 8, 128256
GIB = 2.0**30


def llama() -> torch.nn.Module:
    """Llama 3 70B."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def previewed(hardware: str, zero: int) -> fxpipe.Preview:
    tokens = torch.zeros(MICROBATCHES, TOKENS, dtype=torch.int64, device="meta")
    return fxpipe.preview(
        llama(),
        fxpipe.Topology([("pipe", PIPE), ("data", DATA)], ranks_per_node=8),
        boundaries={"model.layers.*": {"every": LAYERS // PIPE}},
        microbatches=MICROBATCHES,
        tracer="export",
        precision=fxpipe.Precision(),
        zero=zero,
        hardware=hardware,
        example_kwargs={"input_ids": tokens, "labels": tokens},
    )


def by_megatron() -> tuple[float, float]:
    """Bytes of weights with gradients and optimizer, and of activations, on the most loaded rank: the first. With a
    distributed optimizer, sequence parallelism and selective recomputation, on one tensor rank."""
    layer = 2 * WIDTH * (1.5 * INNER + 1) + 2 * WIDTH**2 * (1 + GROUPS / HEADS)
    parameters = (layer * LAYERS + WIDTH) / PIPE + WIDTH * WORDS
    activations = LAYERS * TOKENS * WIDTH * (18 + 4 * INNER / WIDTH) + 8 * TOKENS * PIPE + TOKENS * WIDTH * PIPE
    return parameters * (6 + 12 / DATA), activations * min(1, MICROBATCHES / PIPE)


def by_deepspeed(parameters: int, largest: int) -> tuple[float, float]:
    """Bytes of model states with ZeRO-2, and with ZeRO-3, whose largest layer lies whole."""
    return 4 * parameters + 16 * parameters / DATA, 4 * largest + 18 * parameters / DATA


def others(told: fxpipe.Preview) -> str:
    stages = [sum(parameter.numel() for parameter in stage.parameters.values()) for stage in told.graph]
    rank = max(told.ranks, key=lambda rank: rank.total)
    states = rank.parameters + rank.gradients + rank.optimizer + rank.whole
    weights, activations = by_megatron()
    zero_2, zero_3 = by_deepspeed(max(stages), WIDTH * WORDS)
    rows = [
        ("fxpipe.preview, fullest rank", states, rank.activations, rank.messages),
        ("Megatron-LM, most loaded rank", weights, activations, None),
        ("DeepSpeed, ZeRO-2, a stage", zero_2, None, None),
        ("DeepSpeed, ZeRO-3, a stage", zero_3, None, None),
    ]
    shown = [
        (name, *("not counted" if size is None else f"{size / GIB:.1f}" for size in sizes)) for name, *sizes in rows
    ]
    headers = ("GiB", "parameters, gradients, optimizer", "activations", "messages")
    return tabulate(shown, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--zero", type=int, default=1)
    options = parser.parse_args()
    start = time.perf_counter()
    told = previewed(options.hardware, options.zero)
    seconds = time.perf_counter() - start
    print(told)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"previewed in {seconds:.1f} s")
    print(f"peak memory {peak:.2f} GiB\n")
    print(others(told))


if __name__ == "__main__":
    main()
