"""Hugging Face's models with an opaque region; nine of them, at length: ``examples/benchmarks/opaque_regions.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import engine_of

pytest.importorskip("transformers")

from tests.opaque_regions import AS_THEY_COME, LORA, STUDIES, furthest, plainly, train
from tests.thinned import ALL, every

ROUNDING = 1e-5


@pytest.mark.parametrize(
    ("name", "engine", "data", "in_one", "tracer"),
    [
        ("Qwen2.5-VL", "local", 1, True, "export"),
        ("Longformer", "distributed", 1, False, "record"),
        ("wav2vec2", "distributed", 2, False, "export"),
    ],
)
def test_two_steps_are_those_of_plain_pytorch(
    name: str, engine: str, data: int, in_one: bool, tracer: str, request: pytest.FixtureRequest
) -> None:
    """Each micro-batch has another number of images, or another length; layers of wav2vec2 are dropped at random."""
    start = engine_of(engine, lambda: request.getfixturevalue("pool"))
    runs = start(4, _trained, name, data, in_one, tracer)
    wanted = plainly(STUDIES[name], data, in_one)
    for run in runs:
        assert furthest(run, wanted) < ROUNDING
    assert len({float(loss) for loss in wanted["losses"]}) == len(wanted["losses"])


def _trained(name: str, data: int, in_one: bool, tracer: str) -> dict[str, Any]:
    return train(STUDIES[name], 4 // data, data, data - 1, in_one, tracer=tracer)


OPAQUE = {"Qwen2.5-VL": "model.get_image_features", "Mistral 3": "model.get_image_features", "HuBERT": "loss_function"}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("HuBERT", "distributed"),
        ("Qwen2.5-VL", "distributed"),
        *[(name, "distributed") for name in ("Mistral 3", "Longformer", "DETR") if ALL],
    ],
)
def test_models_that_look_at_values_train_without_a_rule(
    name: str, engine: str, request: pytest.FixtureRequest
) -> None:
    """Micro-batches of other outcomes, and other numbers of images or boxes."""
    start = engine_of(engine, lambda: request.getfixturevalue("pool"))
    wanted = plainly(AS_THEY_COME[name], 1, False)
    for run in start(3 if name in ("HuBERT", "Longformer") else 4, _as_it_comes, name):
        assert furthest(run, wanted) < ROUNDING
        opaque = [line.split()[0] for line in run["stages"].splitlines() if "is opaque" in line]
        assert set(opaque) <= {OPAQUE.get(name), *(_MERGES if name == "Qwen2.5-VL" else ()), "loss_function"}


_MERGES = "model.compute_3d_position_ids", "model.get_rope_index"


def _as_it_comes(name: str) -> dict[str, Any]:
    ranks = 3 if name in ("HuBERT", "Longformer") else 4
    return train(AS_THEY_COME[name], ranks, 1, 0, False)


@pytest.mark.parametrize("engine", every(2, ["distributed", "local"]))
def test_a_vlm_with_lora_and_unequal_images_trains_as_plain_pytorch(
    engine: str, request: pytest.FixtureRequest
) -> None:
    wanted, before = plainly(LORA, 1, False), LORA.model().state_dict()
    trained = {name for name, tensor in wanted["state"].items() if not torch.equal(tensor, before[name])}
    assert trained == {name for name in before if ".up." in name or ".down." in name}
    for run in engine_of(engine, lambda: request.getfixturevalue("pool"))(2, _lora_trained):
        assert furthest(run, wanted) < ROUNDING
        assert all(torch.equal(run["state"][name], before[name]) for name in before.keys() - trained)


def _lora_trained() -> dict[str, Any]:
    return train(LORA, 2, 1, 0, False, tracer="export")
