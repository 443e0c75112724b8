"""On a GPU: a step of the local engine beside a plain micro-batch loop, and whether it ever waits for the device.

    python examples/benchmarks/gpu.py                          # GPT-2 124M and CLIP ViT-B/32 in bfloat16, on cuda
    python examples/benchmarks/gpu.py --device cpu --small     # that the script works: its figures say nothing of a GPU

One process plays both ranks. The two take turns, a step each, timed from an idle device to an idle one: medians, with
quartiles, and the median of the rounds' ratios. Losses of the two are held against each other before. A step after that
runs under ``torch.cuda.set_sync_debug_mode("error")``, which raises where the host waits for the device. On a CPU there
is nothing to wait for, and what a step takes beside its kernels is hidden by none: neither goal of this script, a ratio
of 1.03 and no synchronisation, is shown there. The last column is the most memory of a step, and with offload of all
activations. The script needs transformers.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CLIPConfig, CLIPModel, GPT2Config

import fxpipe

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.offloading import Offloading

MICROBATCHES = 8
Made = tuple[nn.Module, dict[str, Tensor], dict[str, Any], Any]
"""A model, its inputs, options of a call, and where it is cut."""


def gpt2(small: bool) -> Made:
    """124M parameters; small: the widths and depths of a test."""
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256} if small else {}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(use_cache=False, **sizes, **drops)
    ids = torch.randint(0, config.vocab_size, (MICROBATCHES * (2 if small else 4), config.n_positions))
    half = f"transformer.h.{config.n_layer // 2}"
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}, {}, [half]


def clip(small: bool) -> Made:
    """ViT-B/32, a loss for each micro-batch; small: the same of a test's size."""
    text: dict[str, Any] = {"num_hidden_layers": 12}
    image: dict[str, Any] = {"num_hidden_layers": 12}
    if small:
        text = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
        image = {**text, "image_size": 64}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=image))
    rows, side = MICROBATCHES * (4 if small else 32), image.get("image_size", 224)
    tokens = torch.randint(0, 49000, (rows, 16 if small else 77))
    inputs = {"input_ids": tokens, "pixel_values": torch.randn(rows, 3, side, side)}
    inputs["attention_mask"] = torch.ones_like(tokens)
    half = text["num_hidden_layers"] // 2
    cuts = [f"vision_model.encoder.layers.{half}", f"text_model.encoder.layers.{half}"]
    return model, inputs, {"return_loss": True}, cuts


MODELS: dict[str, Callable[[bool], Made]] = {"GPT-2 124M": gpt2, "CLIP ViT-B/32": clip}


def plain_loop(model: nn.Module, inputs: dict[str, Tensor], given: dict[str, Any]) -> Tensor:
    parts = {name: value.chunk(MICROBATCHES) for name, value in inputs.items()}
    losses = []
    for place in range(MICROBATCHES):
        output = model(**{name: part[place] for name, part in parts.items()}, **given)
        loss = output.loss / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tried(name: str, device: torch.device, small: bool, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs, given, cuts = MODELS[name](small)
    model = model.to(device, torch.bfloat16).train()
    inputs = {
        key: value.to(device, torch.bfloat16 if value.is_floating_point() else None) for key, value in inputs.items()
    }
    options = {"boundaries": cuts, "microbatches": MICROBATCHES, "example_kwargs": {**inputs, **given}}
    topology = fxpipe.Topology([("pipe", 2)])
    ours = fxpipe.compile(model, topology, **options)
    steps = {"fxpipe": lambda: ours(**inputs, **given), "loop": lambda: plain_loop(model, inputs, given)}
    losses = {what: step().float().item() for what, step in steps.items()}
    if abs(losses["fxpipe"] - losses["loop"]) > 0.01 * abs(losses["loop"]):
        raise SystemExit(f"{name}: losses differ, {losses}")
    seconds: dict[str, list[float]] = {what: [] for what in steps}
    for number in range(rounds + 2):  # the first two warm up
        for what, step in list(steps.items())[:: 1 if number % 2 else -1]:
            waited(device)
            start = time.perf_counter()
            step()
            waited(device)
            if number > 1:
                seconds[what].append(time.perf_counter() - start)
    offloaded = fxpipe.compile(model, topology, schedule=Offloading("1f1b"), **options)
    memory = [most_of(partial(step, **inputs, **given), device) for step in (ours, offloaded)]
    return {"model": name, "seconds": seconds, "waits": waits_of(steps["fxpipe"], device), "memory": memory}


def most_of(step: Callable[[], object], device: torch.device) -> str:
    """The most memory of the GPU in a second step, in MiB."""
    step()
    if device.type != "cuda":
        return "?"
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f}"


def waits_of(step: Callable[[], object], device: torch.device) -> str:
    """Where the host waits for the device in a step."""
    if device.type != "cuda":
        return "not shown without a GPU"
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return f"it waits: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="models of a test's size")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="a file for the figures")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --small shows that the script works, and nothing of a GPU")
    found = [tried(name, device, arguments.small, arguments.rounds) for name in MODELS]
    grid = []
    for one in found:
        ours, loop = one["seconds"]["fxpipe"], one["seconds"]["loop"]
        ratios = [a / b for a, b in zip(ours, loop, strict=True)]
        cells = [f"{1e3 * m:.1f} ({1e3 * low:.1f}-{1e3 * high:.1f})" for low, m, high in map(_of, (ours, loop))]
        grid.append([one["model"], *cells, f"{statistics.median(ratios):.3f}", one["waits"], " → ".join(one["memory"])])
    head = ["", "fxpipe, ms (quartiles)", "loop, ms (quartiles)", "÷ loop, by rounds", "synchronisations in a step"]
    head.append("MiB → with offload")
    print(f"{device}{', small models' if arguments.small else ''}, {MICROBATCHES} micro-batches, bfloat16")
    print(tabulate(grid, headers=head, disable_numparse=True))
    if device.type != "cuda":
        print("On a CPU this shows that the script works. Neither a GPU's ratio nor its synchronisations are shown.")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


def _of(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4)


if __name__ == "__main__":
    main()
