"""The best plans of published models on 8, 64 and 512 ranks, as ``fxpipe.choose`` finds them.

    python examples/benchmarks/choose.py                     # all, on the meta device: some minutes
    python examples/benchmarks/choose.py llama_70b --ranks 64
    python examples/benchmarks/choose.py llama_70b --ranks 64 --preview  # and one preview, to compare their times

Models are on the meta device, in bfloat16 with float32 masters, on nodes of 8 H100s. Printed are the table, the call to
paste, and the processor time and memory that this took; at the end a table of the best plans.
"""

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import transformers
from tabulate import tabulate
from torch import nn
from vlm_models import VLMS

import fxpipe

Batch = Mapping[str, torch.Tensor]


class Case(NamedTuple):
    """A model, a batch of one row, and the rows of a batch on 64 ranks."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    rows: int = 512


def causal(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokens(length: int) -> Batch:
    ids = torch.zeros(1, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def llama(width: int, inner: int, layers: int, groups: int, words: int) -> nn.Module:
    return causal(
        transformers.LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=width // 128,
            num_key_value_heads=groups,
            max_position_embeddings=4096,
            use_cache=False,
        )
    )


def qwen() -> nn.Module:
    """Qwen3-30B-A3B: 128 experts, of which a token takes 8."""
    return causal(
        transformers.Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            use_cache=False,
        )
    )


class Contrastive(nn.Module):
    """CLIP ViT-L/14 that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        vision |= {"patch_size": 14, "image_size": 224}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)
        self.clip = transformers.CLIPModel(config)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        logits = self.clip(input_ids=input_ids, pixel_values=pixel_values).logits_per_text
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss: torch.Tensor = nn.functional.cross_entropy(logits, labels)
        return loss


def whisper() -> nn.Module:
    """Whisper large."""
    config = transformers.WhisperConfig(
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


def llava_batch() -> Batch:
    shapes = VLMS["LLaVA-1.5-7B"].build().batch
    return {name: torch.zeros(shape, dtype=None if name == "image" else torch.int64) for name, shape in shapes.items()}


CASES: Mapping[str, Case] = {
    "llama_7b": Case(lambda: llama(4096, 11008, 32, 32, 32000), lambda: tokens(4096)),
    "llama_70b": Case(lambda: llama(8192, 28672, 80, 8, 128256), lambda: tokens(4096)),
    "qwen3_30b_a3b": Case(qwen, lambda: tokens(4096)),
    "llava_7b": Case(lambda: VLMS["LLaVA-1.5-7B"].build().model, llava_batch),
    "clip_vit_l": Case(
        Contrastive,
        lambda: {"input_ids": torch.zeros(1, 77, dtype=torch.int64), "pixel_values": torch.zeros(1, 3, 224, 224)},
        4096,
    ),
    "whisper_large": Case(
        whisper,
        lambda: {"input_features": torch.zeros(1, 128, 3000), "labels": torch.zeros(1, 448, dtype=torch.int64)},
    ),
}


def chosen(case: Case, ranks: int, also_preview: bool) -> tuple[object, ...]:
    """Prints the plans. Returns the best of them, as a row of ``HEADERS`` without the model."""
    with torch.device("meta"):
        model, batch = case.make().train(), dict(case.batch())
    start = time.process_time()
    choice = fxpipe.choose(
        model,
        ranks=ranks,
        rows=case.rows * ranks // 64,
        hardware="h100",
        ranks_per_node=8,
        precision=fxpipe.Precision(),
        example_kwargs=batch,
    )
    seconds = time.process_time() - start
    print(choice)
    for plan, why in choice.refused.items():
        print(f"refused: {plan}: {why.splitlines()[0][:100]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"chosen in {seconds:.1f} s of processor time, peak memory {peak:.2f} GiB")
    best = choice.best
    given = [f"{name}={value}" for name, value in best.options.items() if name in ("recompute", "offload")]
    given.insert(0, f"zero={best.options['zero'].level}")
    if also_preview:
        start = time.process_time()
        rows = best.rows * best.options["microbatches"]
        example = {name: tensor.expand(rows, *tensor.shape[1:]).contiguous() for name, tensor in batch.items()}
        alone = fxpipe.preview(model, best.topo, example_kwargs=example, **{**best.given, **best.options})
        alike = "the same figures" if alone.as_dict() == best.preview.as_dict() else "OTHER FIGURES"
        print(f"a preview of the best plan: {time.process_time() - start:.1f} s of processor time, {alike}")
    fits = f"{best.bytes / 2**30:.1f}" + ", too much" * (not best.fits)
    axes, count = " × ".join(f"{name} {size}" for name, size in best.topo.axes), best.options["microbatches"]
    plan = f"{axes}, {count} x {best.rows}, {', '.join(given)}"
    bubble = f"{best.preview.timeline.bubble:.0%}"
    return ranks, case.rows * ranks // 64, plan, f"{best.seconds:.3g}", bubble, fits, f"{seconds:.0f}", f"{peak:.1f}"


HEADERS = ["model", "ranks", "rows", "best plan", "a step, s", "bubble", "GiB", "chosen in, s", "by, GiB"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(CASES)}; all")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512])
    parser.add_argument("--preview", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.models or CASES:
        for ranks in options.ranks:
            print(f"\n{name} on {ranks} ranks\n")
            rows.append((name, *chosen(CASES[name], ranks, options.preview)))
    print(f"\n{tabulate(rows, headers=HEADERS, tablefmt='github', disable_numparse=True)}")


if __name__ == "__main__":
    main()
