"""Whether Hugging Face's causal models run in stages the attention that they run without fxpipe.

    python examples/benchmarks/attention.py                            # a step of Llama, 2 minutes
    python examples/benchmarks/attention.py --models Llama Qwen2 --length 1024 --rows padded --before FOLDER
    python examples/benchmarks/attention.py preview                    # the activations of Llama 3 8B: a minute
    python examples/benchmarks/attention.py operators --only GPT-2 T5  # of the families of compatibility.py

A step has two micro-batches of a row on one rank. Its processor time is that of fxpipe over plain PyTorch's, in turns
in a process of its own. ``--before``: an earlier checkout, in turns with this one. ``operators`` prints the operators
that a family's step runs more or less often than plain PyTorch. Without ``--only`` that takes 15 minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn
from turns import Figures, in_turns, table

import fxpipe

ONE = fxpipe.Topology([("pipe", 1)])
MICROBATCHES = 2
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 32}
SPEECH = {"d_model": 256, "vocab_size": 256, "decoder_layers": 4, "encoder_layers": 1, "decoder_ffn_dim": 512}
SPEECH |= {"encoder_ffn_dim": 512, "decoder_attention_heads": 8, "encoder_attention_heads": 8, "pad_token_id": 0}
SPEECH |= {
    "max_source_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"), DECODER),
    "GPTNeoX": SIZES,
    "Whisper": SPEECH,
}
"""The name of a model of transformers → its options; Whisper's decoder has 448 positions."""
META_LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
META_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8}


def built(name: str, length: int) -> nn.Module:
    torch.manual_seed(0)
    places = {"max_position_embeddings": length} if name != "Whisper" else {}
    config = getattr(transformers, f"{name}Config")(**MODELS[name], **places, use_cache=False)
    kind = "ForConditionalGeneration" if name == "Whisper" else "ForCausalLM"
    return getattr(transformers, f"{name}{kind}")(config)


def batch_of(name: str, length: int, rows: str) -> dict[str, Tensor]:
    """``rows``: "plain", without a mask; "full", with a mask of ones; "padded": the last quarter of the first is."""
    ids = torch.randint(3, 256, (MICROBATCHES, min(length, 448) if name == "Whisper" else length))
    if name == "Whisper":
        return {"input_features": torch.randn(MICROBATCHES, 80, 128), "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, length * 3 // 4 :] = rows != "padded"
    return {"input_ids": ids, "labels": ids} | ({} if rows == "plain" else {"attention_mask": mask})


def step(name: str, length: int, rows: str, tracer: Any, rounds: int) -> Figures:
    """The processor time of a step and the bytes kept for backward, over plain PyTorch's, and one more than the number
    of gradients whose bits differ: a ratio of counts needs no 0."""
    model, batch = built(name, length), batch_of(name, length, rows)
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(model, ONE, microbatches=MICROBATCHES, tracer=tracer, example_kwargs=batch)

    def in_stages() -> None:
        forward_backward.zero_grad()
        forward_backward(**batch)

    def by_hand() -> None:
        plain.zero_grad()
        for row in range(MICROBATCHES):
            (plain(**{key: value[row : row + 1] for key, value in batch.items()}).loss / MICROBATCHES).backward()

    kept = [bytes_kept(call) for call in (in_stages, by_hand)]
    pairs = zip(forward_backward.named_parameters(), plain.parameters(), strict=True)
    trained = [(ours.grad, theirs.grad) for (_, ours), theirs in pairs if theirs.grad is not None]
    differ = sum(not torch.equal(*both) for both in trained)
    ratios = []
    for turn in range(rounds):
        took = {call: seconds(call) for call in ((in_stages, by_hand), (by_hand, in_stages))[turn % 2]}
        ratios.append(took[in_stages] / took[by_hand])
    return {
        "step": statistics.median(ratios),
        "bytes kept": kept[0] / kept[1],
        "gradients that differ, plus 1": differ + 1.0,
    }


def seconds(call: Any) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def bytes_kept(call: Any) -> int:
    """The bytes of the storages that autograd keeps in a call."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def preview(length: int) -> Figures:
    """GiB of activations of the first rank of Llama 3 8B on 4 pipe ranks, by the preview on the meta device."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**META_LLAMA, use_cache=False))
        ids = torch.zeros(16, length, dtype=torch.long)
    plan = fxpipe.preview(
        model,
        fxpipe.Topology([("pipe", 4)]),
        boundaries={"model.layers.*": {"every": 8}},
        microbatches=16,
        precision=fxpipe.Precision(),
        hardware="h100",
        example_kwargs={"input_ids": ids, "labels": ids},
    )
    return {"GiB of activations": plan.ranks[0].activations / 2**30}


def differing(name: str, dtype: torch.dtype = torch.float32) -> dict[str, tuple[int, int]]:
    """Operator → its calls in a step of a family of compatibility.py, and in plain PyTorch, where these differ."""
    sys.path.append(str(Path(__file__).parents[2]))
    from families import FAMILIES

    from tests.whole.test_same_operators import counted, full

    family = FAMILIES[name]
    model = family.model().to(dtype)
    plain, batch = copy.deepcopy(model), full(family.batch(0, torch.Generator().manual_seed(0)))
    options = {"batch_dim": family.rules, "loss_fn": family.loss, "tracer": fxpipe.Tracing(check=False)}
    forward_backward = fxpipe.compile(model, ONE, microbatches=1, example_kwargs=batch, **options)
    forward_backward.step_microbatches([((), batch)])  # the first step captures
    forward_backward.zero_grad()
    ours = counted(lambda: forward_backward.step_microbatches([((), batch)]))
    theirs = counted(lambda: family.loss_of(plain, batch).backward())
    return {key: (ours[key], theirs[key]) for key in ours | theirs if ours[key] != theirs[key]}


def operators(only: list[str]) -> None:
    """Prints a row for each operator of a family that a step runs more or less often than plain PyTorch."""
    from families import FAMILIES

    rows: list[tuple[Any, ...]] = []
    for name in only or FAMILIES:
        try:
            found = differing(name)
        except (ImportError, fxpipe.FxpipeError) as error:
            found, rows = {}, [*rows, (name, type(error).__name__, "", "")]
        rows += [(name, key, *counts) for key, counts in found.items()]
        print(name, found, file=sys.stderr, flush=True)
    print(tabulate(rows, headers=["family", "operator", "in stages", "plain"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["step", "preview", "operators"], default="step")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama"])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", choices=["plain", "full", "padded"], default="plain")
    parser.add_argument("--tracer", choices=[*fxpipe.TRACERS], default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="steps of a process, in turns")
    parser.add_argument("--turns", type=int, default=1, help="processes of each checkout")
    parser.add_argument("--before", type=Path, help="the folder of an earlier checkout")
    parser.add_argument("--only", nargs="+", default=[], help="families for operators")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.what == "operators":
        operators(options.only)
    elif options.here:
        how = options.length, options.rows, options.tracer, options.rounds
        print(json.dumps(preview(options.length) if options.what == "preview" else step(options.models[0], *how)))
    else:
        for name in options.models if options.what == "step" else ["Llama 3 8B"]:
            arguments = [options.what, "--here", "--length", str(options.length), "--rows", options.rows]
            arguments += ["--tracer", options.tracer, "--rounds", str(options.rounds)]
            arguments += ["--models", name] if options.what == "step" else []
            print(f"{name}\n{table(in_turns(__file__, arguments, options.before, options.turns))}", flush=True)


if __name__ == "__main__":
    main()
