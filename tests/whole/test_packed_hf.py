"""Hugging Face's models with another number of images in each row, as their processors make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe import Packed, TraceError
from tests.harness import accumulate, assert_same
from tests.hf import IMAGE_TOKEN, LENGTH, NONE_LEFT, PATCHES, WORDS, llava

PER_ROW = [1, 0, 2, 1, 0, 3]


def batch(per_row: Sequence[int] = PER_ROW) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(3, WORDS - 3, (len(per_row), 3 * PATCHES + LENGTH), generator=generator)
    for row, images in enumerate(per_row):
        words[row, : images * PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": words,
        "labels": words.masked_fill(words == IMAGE_TOKEN, NONE_LEFT),
        "pixel_values": torch.randn(sum(per_row), 3, 8, 8, generator=generator),
    }


CUTS = ["model.multi_modal_projector", "model.language_model.layers.1"]


def compiled(example: dict[str, Any]) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    return fxpipe.compile(
        llava(),
        fxpipe.Topology([("pipe", 3)]),
        microbatches=3,
        boundaries=CUTS,
        batch_dim={"pixel_values": Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // PATCHES)},
        example_kwargs=example,
        tracer="record",
    )


def test_llava_trains_with_another_number_of_images_in_each_row() -> None:
    whole = batch()
    forward_backward = compiled(whole)
    loss = forward_backward(**whole)
    torch.manual_seed(0)
    plain = llava()
    counted = {"num_items_in_batch": (whole["labels"][:, 1:] != NONE_LEFT).sum() / 3}  # what each is given
    parts = []
    for row, images in [(0, slice(0, 1)), (2, slice(1, 4)), (4, slice(4, 7))]:
        rows = {name: whole[name][row : row + 2] for name in ("input_ids", "labels")}
        parts.append(rows | {"pixel_values": whole["pixel_values"][images]})
    wanted, _ = accumulate(lambda _, part: plain(**part, **counted).loss, parts, [2.0] * 3)
    assert_same(loss, wanted, "loss", 1e-6)
    for name, parameter in forward_backward.named_parameters():
        assert_same(parameter.grad, plain.get_parameter(name).grad, name, 1e-5)
    with pytest.raises(TraceError, match=r"a micro-batch in which 'pixel_values' has shape \[0, 3, 8, 8\]; where the"):
        forward_backward(**batch([1, 0, 0, 0, 2, 1]))  # CLIP makes .view(0, 5, -1, 4) of it
