"""Real models on batches of any length and number of rows; at length: ``examples/benchmarks/lengths.py``."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.harness import assert_run, trained
from tests.hf import MODELS, NONE_LEFT, layers, pixels, text, trained_plainly
from tests.models import Inputs
from tests.thinned import ALL, every


def causal(rows: int, length: int, generator: torch.Generator) -> Inputs:
    """Every second row is one word shorter: where a mask is full, transformers takes another kernel."""
    batch = text(rows, generator, length)
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None] % 2).long()
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": mask * 5 + (1 - mask) * NONE_LEFT}


def translated(rows: int, length: int, generator: torch.Generator) -> Inputs:
    labels = causal(rows, 3 + length // 2, generator)["labels"]
    return text(rows, generator, length) | {"labels": labels}


def pairs(rows: int, length: int, generator: torch.Generator) -> Inputs:
    """CLIP's loss takes ``len()`` of its rows."""
    return text(rows, generator, 3 + length % 7) | {"pixel_values": pixels(rows, generator), "return_loss": True}


STRETCHED: dict[str, Callable[[int, int, torch.Generator], Inputs]] = {
    "Llama": causal,
    "GPT-2": causal,
    "T5": translated,
    "CLIP": pairs,
}


def two_layers() -> Any:
    model = MODELS["Llama"].build()
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return model


def batches_of(name: str, steps: int) -> list[Inputs]:
    """Random lengths, and random numbers of rows: even ones, of which two micro-batches have the same exact shares."""
    numbers, generator = random.Random(7), torch.Generator().manual_seed(7)
    return [STRETCHED[name](2 * numbers.randint(2, 4), numbers.randint(5, 31), generator) for _ in range(steps)]


@pytest.mark.parametrize("name", every(4, list(STRETCHED)))
def test_random_lengths_and_rows_take_three_captures_and_keep_every_bit(name: str, captured: list[Any]) -> None:
    case = replace(MODELS[name], microbatches=2)
    if name == "Llama" and not ALL:  # its layers are alike, and each takes half a second of a capture
        case = replace(case, build=two_layers, boundaries=layers("model.layers", 1), stages=2, ranks=2)
    batches = batches_of(name, 8 if ALL else 5)
    run = trained(case, batches, boundaries=case.boundaries, tracer="export", example_kwargs=batches[0])
    assert_run([run], trained_plainly(case, batches), 20 * case.tolerance)  # of tied models, step after step
    assert len(captured) <= 3
    assert len({tuple(batch["input_ids"].shape) for batch in batches}) > 3
