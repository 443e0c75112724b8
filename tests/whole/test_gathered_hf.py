"""Hugging Face's contrastive models, unmodified, on the whole batch: what their projections return is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe import Packed, Topology, TraceError
from tests.harness import accumulate, assert_same, gradients_of, replica_of
from tests.hf import IMAGE_TOKEN, LENGTH, NONE_LEFT, PATCHES, WORDS, llava
from tests.pool import Pool
from tests.thinned import ALL

pytest.importorskip("transformers")

from tests.hf import MODELS

Result = tuple[Tensor, dict[str, Tensor | None]]
ENDS = {"CLIP": ("visual_projection", "text_projection"), "SigLIP": ("vision_model", "text_model")}


def step(
    name: str, topology: Topology, gather: str, rows: tuple[int, ...], microbatches: int, schedule: Any, tracer: str
) -> Result:
    """A step on this replica's rows of the batch; and evaluation, on one replica."""
    case = MODELS[name]
    batch = case.batch(0, sum(rows))
    replica = replica_of(topology) if len(rows) > 1 else 0
    mine = {k: v.split(list(rows))[replica] if isinstance(v, Tensor) else v for k, v in batch.items()}
    cut = {"vision_model.encoder.layers.2": "before"}
    forward_backward = fxpipe.compile(
        case.model().double(),
        topology,
        microbatches=microbatches,
        schedule=schedule,
        tracer=tracer,
        boundaries={**cut, **{end: {"cut": "after", "gather": gather} for end in ENDS[name]}},
        example_kwargs=_double(case.batch(0, min(rows))),
    )
    assert len(forward_backward.stages) == 4, str(forward_backward.stages)
    loss = forward_backward(**_double(mine))
    return loss, gradients_of(forward_backward.named_parameters())


def _double(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"pixel_values": batch["pixel_values"].double()}


def assert_whole(name: str, results: list[Result], rows: int) -> None:
    """Plain PyTorch on the whole batch, of the model as it is."""
    case = MODELS[name]
    plain = case.model().double().train()
    loss = plain(**_double(case.batch(0, rows)))["loss"]
    loss.backward()
    wanted = gradients_of(plain.named_parameters())
    seen: set[str] = set()
    for got, gradients in results:
        assert abs(got - loss) <= 1e-10 * abs(loss)
        for parameter, gradient in gradients.items():
            other = wanted[parameter]
            if gradient is None or other is None:
                assert gradient is other is None, parameter
                continue
            assert (gradient - other).abs().max() <= 1e-10 * max(other.abs().max().item(), 1e-3), parameter
        seen |= gradients.keys()
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    ("name", "microbatches", "rows", "schedule", "tracer"),
    [
        ("CLIP", 8, 9, "cached", "export"),
        ("SigLIP", 3, 7, "group_interleaved", "record"),
    ],
)
def test_an_unmodified_model_trains_on_the_whole_batch(
    name: str, microbatches: int, rows: int, schedule: str, tracer: str
) -> None:
    result = step(name, Topology([("pipe", 4)]), "batch", (rows,), microbatches, schedule, tracer)
    assert_whole(name, [result], rows)


@pytest.mark.skipif(not ALL, reason="15 seconds of captures; tests/whole/test_gathered.py has it of a small model")
def test_an_unmodified_model_trains_on_the_rows_of_all_replicas(pool: Pool) -> None:
    topology, rows = Topology([("pipe", 2), ("data", 2)]), (5, 4)
    results = pool.run(step, "CLIP", topology, "global", rows, 2, "1f1b", "export", ranks=4)
    assert_whole("CLIP", results, sum(rows))


# --- Hugging Face's models with another number of images in each row, as their processors make them ---

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
