"""The models of ``examples/benchmarks/vlm.py`` have the published sizes, and its layouts compare as they must."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.fixture
def vlm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("vlm")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLaVA-1.5-7B", 7.05),  # 7.06 with the 24th layer of its encoder, which does not run
        ("Qwen2.5-VL-7B", 8.29),
        ("PaliGemma-3B", 2.92),
        ("SmolVLM-2B", 2.25),
        ("Whisper-large-v3", 1.54),
        ("CLIP ViT-L/14", 0.43),
    ],
)
def test_models_have_as_many_parameters_as_their_papers_say(vlm: Any, name: str, billions: float) -> None:
    with torch.device("meta"):
        model = vlm.MODELS[name].build().model
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.011)


def test_layers_beside_the_embedding_and_the_head_are_fewer(vlm: Any) -> None:
    """32 layers and two more on 8 ranks: 4 each, and one more on the first two."""
    ranks = vlm.beside_ends(32, 8)
    assert [ranks.count(rank) for rank in range(8)] == [5 - 1, 5, 4, 4, 4, 4, 4, 4 - 1]


@pytest.mark.parametrize("trained", [True, False])
def test_no_layout_by_hand_is_better_and_costs_are_those_of_the_shapes(
    vlm: Any, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = vlm.VLMS["PaliGemma-3B"].vision.__class__
    vision, language = tower(3, 512, 2048, 8), tower(6, 512, 2048, 8, gated=True, causal=True)
    small = vlm.VLMS["PaliGemma-3B"].__class__(vision, 448, language, 1000)
    monkeypatch.setitem(vlm.MODELS, "small", small)
    monkeypatch.setitem(vlm.VLMS, "small", small)
    model = vlm.costed("small", trained, 4)
    patches, tokens, width = 32**2, 32**2 + 512, 512
    products = patches * (3 * 14**2 * width + 3 * (4 * width**2 + 2 * width * 2048) + width * width)
    products += tokens * (6 * (4 * width**2 + 3 * width * 2048) + width * 1000)
    products += 2 * width * (3 * patches**2 + 6 * tokens**2)  # attention's two, without a mask
    assert sum(cost.flops for cost in model.costs.nodes.values()) == 2 * products

    found = vlm.outcomes(model, 4)
    row = vlm.Row("small", trained, 4, found, {})
    assert row.over_d("a") > 1
    assert min(map(row.over_d, "bc")) > 0.999  # times that agree to four digits count as equal
    work = sum(model.unit_seconds)
    for outcome in found.values():
        assert outcome.makespan >= vlm.MICROBATCHES * work / 4
    assert f"{row.over_d('a'):.2f}" in vlm.means([row])
