"""Hugging Face's models with an opaque region; nine of them, at length: ``examples/benchmarks/opaque_regions.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import engine_of

pytest.importorskip("transformers")

from tests.opaque_regions import LORA, STUDIES, furthest, plainly, train
from tests.thinned import every

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
