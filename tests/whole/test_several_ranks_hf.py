"""A tiny LLaVA, unmodified, its vision tower on all ranks beside the language stages; resumed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe import Packed, Topology
from tests.harness import accumulate, assert_same
from tests.pool import Pool
from tests.thinned import ALL

pytest.importorskip("transformers")

from tests.hf import IMAGE_TOKEN, NONE_LEFT, PATCHES, llava
from tests.whole.test_gathered_hf import batch

IMAGES = [[1, 0, 2, 1, 0, 3, 1, 1], [0, 1, 1, 0, 3, 0, 0, 2], [2, 0, 0, 1, 1, 1, 3, 0]]
"""Of each row, step by step: no micro-batch of two rows is without one."""
STEPS = 5
TOWER = "model.vision_tower"
CUTS = ["model.multi_modal_projector", "model.language_model.layers.1", "model.language_model.layers.2", "lm_head"]
LANGUAGE: dict[str, Any] = {name: rank for rank, name in enumerate(CUTS)}
EVERYWHERE, ONE_EACH = LANGUAGE | {TOWER: "all"}, LANGUAGE | {TOWER: 0}


def batches() -> list[dict[str, Any]]:
    return [batch(IMAGES[step % len(IMAGES)]) for step in range(STEPS)]


def compiled(frozen: bool, placement: dict[str, Any]) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    model = llava().double()
    model.get_submodule(TOWER).requires_grad_(not frozen)
    return fxpipe.compile(
        model,
        Topology([("pipe", 4)]),
        microbatches=4,
        boundaries=CUTS,
        placement=placement,
        batch_dim={"pixel_values": Packed(lambda input_ids: (input_ids == IMAGE_TOKEN).sum(1) // PATCHES)},
        example_kwargs=double(batch(IMAGES[0])),
        zero=1,
        tracer="record",
    )


def double(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"pixel_values": given["pixel_values"].double()}


def train(frozen: bool, folder: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three steps with the tower everywhere, saved and loaded again with a rank for each stage."""
    losses = []
    for placement, steps in ((EVERYWHERE, slice(0, 3)), (ONE_EACH, slice(3, STEPS))):
        forward_backward = compiled(frozen, placement)
        optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=1e-3)
        if placement is ONE_EACH:
            fxpipe.load(folder, forward_backward, optimizer)
        for given in batches()[steps]:
            optimizer.zero_grad()
            losses.append(forward_backward(**double(given)))
            forward_backward.clip_grad_norm_(1.0)
            optimizer.step()
        if placement is EVERYWHERE:
            fxpipe.save(folder, forward_backward, optimizer, step=steps.stop)
    return losses, dict(forward_backward.state_dict(full=True))


@pytest.mark.parametrize(
    "frozen", [False, True] if ALL else [False], ids=lambda frozen: "frozen" if frozen else "trained"
)
def test_llava_with_its_vision_tower_on_all_ranks(frozen: bool, pool: Pool, tmp_path: Path) -> None:
    results = pool.run(train, frozen, str(tmp_path / "run"), ranks=4)
    torch.manual_seed(0)
    plain = llava().double()
    plain.get_submodule(TOWER).requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step, given in enumerate(map(double, batches())):
        optimizer.zero_grad()
        per_row, parts = IMAGES[step % len(IMAGES)], []
        counted = {"num_items_in_batch": (given["labels"][:, 1:] != NONE_LEFT).sum() / 4}
        for row in range(0, 8, 2):
            images = slice(sum(per_row[:row]), sum(per_row[: row + 2]))
            rows = {name: given[name][row : row + 2] for name in ("input_ids", "labels")}
            parts.append(rows | counted | {"pixel_values": given["pixel_values"][images]})
        wanted, _ = accumulate(lambda _, part: plain(**part).loss, parts, [2.0] * 4)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        for losses, _ in results:
            assert_same(losses[step], wanted, f"the loss of step {step}", 1e-5)
    for _, state in results:
        for name, value in plain.state_dict().items():
            gap, scale = (state[name] - value).abs().max(), value.abs().max().clamp(min=1e-3)
            assert gap <= 1e-5 * scale, f"{name} is off by {gap:.3g}"  # k_proj's bias is noise: softmax cancels it
