"""Train two Hugging Face models as pipelines on four processes, without a change to either.

    python examples/finetune_hf.py                              # starts four processes
    torchrun --nproc-per-node 4 examples/finetune_hf.py         # the same
    python examples/finetune_hf.py gpt2                         # one of the two

The models are transformers' own CLIPModel and GPT2LMHeadModel, small and with random weights, so that nothing is
downloaded; put `from_pretrained` in their place. Where they are cut is told by names of submodules. CLIP learns
handwritten digits and what they are called; GPT-2 learns to write Python's documentation, byte by byte. The trained
weights then go into a plain model, which must find the same loss for what neither has seen.

The script needs transformers, and scikit-learn for the images.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice

import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, StackDataset

import fxpipe

RANKS, MICROBATCHES, ROWS = 4, 4, 64
Batch = dict[str, Tensor | bool]


@dataclass(frozen=True)
class Task:
    """``data``: inputs of the model, many rows each; ``options``: inputs that are the same for every batch."""

    build: Callable[[], nn.Module]
    boundaries: Mapping[str, str]
    data: Callable[[], dict[str, Tensor]]
    options: Mapping[str, bool]
    steps: int


# --- CLIP on handwritten digits ---

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["<pad>", "<start>", "a", "handwritten", *DIGITS, "<end>"]
CAPTION = 5  # words, with those at its start and end
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def clip() -> nn.Module:
    text = {"vocab_size": len(WORDS), "max_position_embeddings": CAPTION, "num_hidden_layers": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS.index("<end>")}
    vision = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_hidden_layers": 4}
    config = transformers.CLIPConfig(
        text_config={**TOWER, **text, **ends}, vision_config={**TOWER, **vision}, projection_dim=64
    )
    return transformers.CLIPModel(config)


def digits() -> dict[str, Tensor]:
    """Images of 8 × 8 numbers in [0, 1], and for each the words of "a handwritten seven"."""
    numbers = load_digits()
    captions = [["<start>", "a", "handwritten", digit, "<end>"] for digit in DIGITS]
    ids = torch.tensor([[WORDS.index(word) for word in caption] for caption in captions])
    images = torch.tensor(numbers.images, dtype=torch.float32).unsqueeze(1) / 16
    return {"pixel_values": images, "input_ids": ids[torch.tensor(numbers.target)]}


# --- GPT-2 on Python's documentation ---

MODULES = "argparse ast asyncio calendar collections csv datetime decimal difflib enum fractions functools heapq"
MODULES += " http.client inspect json logging pathlib random socket statistics string subprocess textwrap unittest"
BYTES = 64  # of a row


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=BYTES, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def documentation() -> dict[str, Tensor]:
    """What these modules, their classes and functions say of themselves, in rows of ``BYTES`` bytes."""
    modules = [import_module(name) for name in MODULES.split()]
    documented = [part for module in modules for _, part in sorted(vars(module).items()) if callable(part)]
    text = "\n\n".join(dict.fromkeys(filter(None, map(inspect.getdoc, [*modules, *documented])))).encode()
    rows = torch.tensor(list(text[: len(text) // BYTES * BYTES])).view(-1, BYTES)
    return {"input_ids": rows, "labels": rows}


TASKS = {
    "clip": Task(
        clip,
        boundaries={
            "vision_model.encoder.layers.2": "before",
            "visual_projection": "after",
            "text_projection": "after",
        },
        data=digits,
        options={"return_loss": True},
        steps=60,
    ),
    "gpt2": Task(
        gpt2,
        boundaries={"transformer.h.1": "before", "transformer.h.2": "before", "transformer.h.3": "before"},
        data=documentation,
        options={},
        steps=60,
    ),
}

# --- training ---


def batches(task: Task, topo: fxpipe.Topology, device: torch.device) -> Iterator[Batch]:
    """Epoch after epoch, in an order that is the same on all ranks of a pipe group."""
    dataset = StackDataset(**task.data())
    sampler = topo.sampler(dataset, shuffle=True)
    loader = DataLoader(dataset, ROWS, sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)
        for batch in loader:
            yield {**{name: value.to(device) for name, value in batch.items()}, **task.options}


def plain_loss(model: nn.Module, batch: Batch) -> float:
    """Of the same micro-batches, in plain PyTorch."""
    parts = [
        {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
        for rows in torch.arange(ROWS).chunk(MICROBATCHES)
    ]
    with torch.no_grad():
        return sum(model.eval()(**part).loss.item() for part in parts) / MICROBATCHES


def train(name: str) -> None:
    task, rank = TASKS[name], int(os.environ.get("RANK", 0))
    start = time.perf_counter()
    topo = fxpipe.Topology([("pipe", RANKS)])
    device = fxpipe.init()  # before a sampler asks which rank this is
    *training, held_out = islice(batches(task, topo, device), task.steps + 1)
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(
        task.build().to(device),
        topo,
        boundaries=task.boundaries,
        microbatches=MICROBATCHES,
        example_kwargs=training[0],
    )
    if rank == 0:
        print(forward_backward.stages)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=2e-3)
    losses = []
    for batch in training:
        optimizer.zero_grad()
        losses.append(forward_backward(**batch))
        optimizer.step()
    piped = forward_backward.evaluate(**held_out, outputs="all")["loss"]
    state = forward_backward.state_dict(full=True)  # collective: every rank takes part
    forward_backward.close()
    if rank == 0:
        seconds = time.perf_counter() - start
        print(f"{name}: loss {losses[0]:.3f} → {losses[-1]:.3f} in {task.steps} steps and {seconds:.0f} s")
        plain = task.build().to(device)
        plain.load_state_dict(state)
        print(f"held out: {piped:.5f} as a pipeline, {plain_loss(plain, held_out):.5f} as a plain model\n")


def run() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or TASKS:
        train(name)


if __name__ == "__main__":
    if "RANK" in os.environ:
        run()
    else:
        fxpipe.launch(run, RANKS)
