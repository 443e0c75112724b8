"""Hugging Face's models, unmodified, whose batches are not all alike: other lengths, numbers of images, outcomes.

What contrastive models project is gathered for a loss over the whole batch; a vision tower is on all ranks; what looks
at values is opaque. At length: ``lengths.py`` and ``opaque_regions.py`` in ``examples/benchmarks/``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe import Packed, Topology, TraceError
from tests.harness import Engines, accumulate, assert_gradients, assert_run, assert_same, cut, gradients_of, trained
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import ALL

pytest.importorskip("transformers")

from tests.hf import IMAGE_TOKEN, LENGTH, MODELS, NONE_LEFT, PATCHES, WORDS, layers, llava, text, trained_plainly
from tests.opaque_regions import HUBERT, STUDIES, furthest, plainly, spoken, train

ENDS = {"CLIP": ("visual_projection", "text_projection"), "SigLIP": ("vision_model", "text_model")}


@pytest.mark.parametrize(
    ("name", "microbatches", "rows", "schedule", "tracer"),
    [("CLIP", 4, 5, "cached", "record"), ("SigLIP", 3, 7, "group_interleaved", "record")],
)
def test_a_contrastive_model_trains_on_the_whole_batch(
    name: str, microbatches: int, rows: int, schedule: str, tracer: str
) -> None:
    case = MODELS[name]
    batch, plain = double(case.batch(0, rows)), case.model().double().train()
    loss = plain(**batch)["loss"]
    loss.backward()
    ends = {end: {"cut": "after", "gather": "batch"} for end in ENDS[name]}
    forward_backward = fxpipe.compile(
        case.model().double(),
        Topology([("pipe", 4)]),
        microbatches=microbatches,
        schedule=schedule,
        tracer=tracer,
        boundaries={"vision_model.encoder.layers.2": "before", **ends},
        example_kwargs=batch,
    )
    assert len(forward_backward.stages) == 4, str(forward_backward.stages)
    assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-10)
    wanted = gradients_of(plain.named_parameters())
    for name, gradient in gradients_of(forward_backward.named_parameters()).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-13)


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"pixel_values": batch["pixel_values"].double()}


# --- LLaVA with another number of images in each row, as its processor makes them ---


def images_in_rows(per_row: Sequence[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, WORDS - 3, (len(per_row), 3 * PATCHES + LENGTH), generator=generator)
    for row, images in enumerate(per_row):
        words[row, : images * PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": words,
        "labels": words.masked_fill(words == IMAGE_TOKEN, NONE_LEFT),
        "pixel_values": torch.randn(sum(per_row), 3, 8, 8, generator=generator),
    }


def pairs_of_rows(batch: dict[str, Any], per_row: Sequence[int]) -> list[dict[str, Any]]:
    """Micro-batches of two rows, with the number of items that each is given."""
    parts = []
    for row in range(0, len(per_row), 2):
        images = slice(sum(per_row[:row]), sum(per_row[: row + 2]))
        part = {name: batch[name][row : row + 2] for name in ("input_ids", "labels")}
        items = (batch["labels"][:, 1:] != NONE_LEFT).sum() / (len(per_row) // 2)
        parts.append(part | {"pixel_values": batch["pixel_values"][images], "num_items_in_batch": items})
    return parts


def seeded_llava() -> Any:
    torch.manual_seed(0)
    return llava()


COUNTED = {"pixel_values": Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // PATCHES)}


def test_llava_trains_with_another_number_of_images_in_each_row() -> None:
    per_row, plain = [1, 0, 2, 1, 0, 3], seeded_llava()
    batch = images_in_rows(per_row)
    options: Any = {"batch_dim": COUNTED, "example_kwargs": batch, "tracer": "record", "microbatches": 3}
    cuts = ["model.multi_modal_projector", "model.language_model.layers.1"]
    forward_backward = fxpipe.compile(seeded_llava(), Topology([("pipe", 3)]), boundaries=cuts, **options)
    wanted, _ = accumulate(lambda _, part: plain(**part).loss, pairs_of_rows(batch, per_row))
    assert_same(forward_backward(**batch), wanted, "loss", 1e-6)
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain, 1e-5)
    with pytest.raises(TraceError, match=r"cannot reshape tensor of 0 elements into shape \[0, 5, -1, 4\]"):
        forward_backward(**images_in_rows([1, 0, 0, 0, 2, 1]))  # a micro-batch without an image, in CLIP's .view


IMAGES = [[1, 0, 2, 0], [0, 2, 0, 1], [2, 0, 1, 0]]
"""Of each row, step by step: no micro-batch of two rows is without one."""
LANGUAGE: dict[str, Any] = {"model.multi_modal_projector": 0, "model.language_model.layers.2": 1}


def train_with_tower(folder: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps with the vision tower everywhere, saved and loaded again with a rank for each stage."""
    losses, batches = [], [double(images_in_rows(per_row)) for per_row in IMAGES]
    for tower, steps in (("all", batches[:2]), (0, batches[2:])):
        forward_backward = fxpipe.compile(
            seeded_llava().double(),
            Topology([("pipe", 2)]),
            microbatches=2,
            boundaries=list(LANGUAGE),
            placement=LANGUAGE | {"model.vision_tower": tower},
            batch_dim=COUNTED,
            example_kwargs=batches[0],
            zero=1,
            tracer="record",
        )
        optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
        if tower != "all":
            fxpipe.load(folder, forward_backward, optimizer)
        for given in steps:
            optimizer.zero_grad()
            losses.append(forward_backward(**given))
            forward_backward.clip_grad_norm_(1.0)
            optimizer.step()
        if tower == "all":
            fxpipe.save(folder, forward_backward, optimizer, step=2)
    return losses, dict(forward_backward.state_dict(full=True))


def test_llava_with_its_vision_tower_on_all_ranks_is_resumed_with_it_on_one(pool: Pool, tmp_path: Path) -> None:
    results, plain = pool.run(train_with_tower, str(tmp_path / "run"), ranks=2), seeded_llava().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step, per_row in enumerate(IMAGES):
        optimizer.zero_grad()
        parts = pairs_of_rows(double(images_in_rows(per_row)), per_row)
        wanted, _ = accumulate(lambda _, part: plain(**part).loss, parts)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        for losses, _ in results:
            assert_same(losses[step], wanted, f"the loss of step {step}", 1e-5)
    for _, state in results:
        for name, value in plain.state_dict().items():
            gap, scale = (state[name] - value).abs().max(), value.abs().max().clamp(min=1e-3)
            assert gap <= 1e-5 * scale, f"{name} is off by {gap:.3g}"  # k_proj's bias is noise: softmax cancels it


# --- any length and number of rows ---


def causal(rows: int, length: int, generator: torch.Generator) -> Inputs:
    """Every second row is one word shorter: where a mask is full, transformers takes another kernel."""
    batch = text(rows, generator, length)
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None] % 2).long()
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": mask * 5 + (1 - mask) * NONE_LEFT}


def two_layers() -> Any:
    model = MODELS["Llama"].build()
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return model


def batches_of_lengths(steps: int) -> list[Inputs]:
    """Random lengths, and random numbers of rows: even ones, of which two micro-batches have the same exact shares."""
    numbers, generator = random.Random(7), torch.Generator().manual_seed(7)
    return [causal(2 * numbers.randint(2, 4), numbers.randint(5, 31), generator) for _ in range(steps)]


def test_random_lengths_and_rows_take_three_captures_and_keep_every_bit(captured: list[Any]) -> None:
    """Of Llama with two layers; those of other families are in ``examples/benchmarks/lengths.py``."""
    case = replace(MODELS["Llama"], build=two_layers, microbatches=2, stages=2, ranks=2)
    case = replace(case, boundaries=layers("model.layers", 1))
    batches = batches_of_lengths(8 if ALL else 5)
    run = trained(case, batches, boundaries=case.boundaries, tracer="export", example_kwargs=batches[0])
    assert_run([run], trained_plainly(case, batches), 20 * case.tolerance)
    assert len(captured) <= 3
    assert len({tuple(batch["input_ids"].shape) for batch in batches}) > 3


# --- opaque regions ---

ROUNDING = 1e-5


@pytest.mark.parametrize(
    ("name", "engine", "data", "in_one", "tracer"),
    [
        ("Qwen2.5-VL", "local", 1, True, "record"),
        ("Longformer", "distributed", 1, False, "record"),
        ("wav2vec2", "distributed", 2, False, "export"),
    ],
)
def test_two_steps_are_those_of_plain_pytorch(
    name: str, engine: str, data: int, in_one: bool, tracer: str, engines: Engines
) -> None:
    """Each micro-batch has another number of images, or another length; layers of wav2vec2 are dropped at random."""
    runs = engines(engine)(4 if ALL else 2 * data, _trained, name, data, in_one, tracer)
    wanted = plainly(STUDIES[name], data, in_one)
    for run in runs:
        assert furthest(run, wanted) < ROUNDING
    assert len({float(loss) for loss in wanted["losses"]}) == len(wanted["losses"])


def _trained(name: str, data: int, in_one: bool, tracer: str) -> dict[str, Any]:
    return train(STUDIES[name], 4 // data if ALL else 2, data, data - 1, in_one, tracer=tracer)


@pytest.mark.long
@pytest.mark.parametrize(("name", "cut_at"), [("HuBERT", "hubert.encoder.layers.1"), ("Whisper", "model.encoder")])
def test_masks_of_spec_augment_are_drawn_anew_and_as_the_seed_says(name: str, cut_at: str) -> None:
    g = torch.Generator().manual_seed(1)
    without = HUBERT.model() if name == "HuBERT" else MODELS["Whisper"].model()
    batch = spoken((1, 2, 3, 4), g) if name == "HuBERT" else MODELS["Whisper"].batch(0, 4)
    vars(without.config).update(apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=4)
    model = type(without)(without.config).train()
    plain = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model, Topology([("pipe", 2)]), microbatches=2, boundaries={cut_at: "after"}, example_kwargs=batch
    )
    losses = [forward_backward(**batch) for _ in range(3)]
    for step, loss in enumerate(losses):

        def call(place: int, part: Inputs, step: int = step) -> Tensor:
            np.random.seed(forward_backward.seed(0, place, step) % 2**32)
            return plain(**part)["loss"]  # type: ignore[no-any-return]

        assert_same(loss, accumulate(call, cut(copy.deepcopy(batch), 2))[0], "loss", ROUNDING)
    assert len(set(map(float, losses))) == len(losses)


def test_a_model_that_looks_at_values_trains_without_a_rule(pool: Pool) -> None:
    """HuBERT's loss, with micro-batches of other outcomes."""
    wanted = plainly(HUBERT, 1, False)
    for run in pool.run(train, HUBERT, 3, 1, 0, False, ranks=3):
        assert furthest(run, wanted) < ROUNDING
        opaque = [line.split()[0] for line in run["stages"].splitlines() if "is opaque" in line]
        assert set(opaque) <= {"loss_function"}
