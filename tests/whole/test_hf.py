"""Hugging Face models, unmodified and cut by names, train as plain PyTorch trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError
from fxpipe.trace import TRACERS
from tests.harness import (
    Run,
    accumulate,
    assert_gradients,
    assert_run,
    assert_same,
    cut,
    gradients_of,
    local,
    replica_of,
    trained,
)
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import ALL, every

pytest.importorskip("transformers")

from tests.hf import (
    IMAGES_BY_GRID,
    MODELS,
    ROUNDING,
    SGD,
    HFCase,
    drop_what_is_only_rounding,
    layers,
    mixtral,
    request_of,
    trained_plainly,
)

STEPS = 2
SECONDS = 150.0  # for a call: the first one imports transformers and torch.export in each worker
QUICK: dict[str, Any] = {} if ALL else {"tracer": "record"}
"""Where it does not matter what captures: auto would come to torch.export, which takes several times as long."""


def batches_of(case: HFCase) -> list[Inputs]:
    return [case.batch(number) for number in range(STEPS)]


# --- one program: what a tracer captures ---


@pytest.mark.parametrize("name", every(12, list(MODELS)))
def test_evaluation_gives_the_logits(name: str) -> None:
    case = MODELS[name]
    model = case.model()
    forward_backward = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 1)]),
        boundaries=case.boundaries,
        microbatches=2,
        example_kwargs=case.batch(),
        **QUICK,
    )
    batch = {name: value for name, value in case.batch().items() if name not in ("labels", "return_loss")}
    if "input_features" in batch or name == "T5":  # a decoder needs something to begin with
        batch["decoder_input_ids"] = case.batch()["labels"].clamp(min=0)
    got = forward_backward.evaluate(**batch)
    with torch.no_grad():
        parts = [model.eval()(**part) for part in cut(batch, 2)]
    key = "logits" if "logits" in parts[0] else "image_embeds"
    assert_same(got[key], torch.cat([part[key] for part in parts]), key)


def test_images_by_a_grid_are_refused_with_the_line_that_reads_it() -> None:
    """How many patches an image has stands in a tensor, and Python loops go by it."""
    case = IMAGES_BY_GRID
    for tracer in every(2, ("record", "export")):  # the other takes seconds until it gets there
        with pytest.raises(TraceError, match=r"(vision_utils|modeling_qwen2_vl)\.py.*\n.*tolist\(\)"):
            TRACERS[tracer](request_of(case.model(), case.batch(), case.boundaries))


def test_a_loop_over_the_experts_that_were_chosen_runs_inside_a_block() -> None:
    """Which experts run depends on the numbers: no graph holds that, but an opaque module does."""
    cuts: Any = {"boundaries": layers("model.layers", 1), "stages": 2, "ranks": 2}
    looping = replace(MODELS["Mixtral"], build=lambda: mixtral("eager", layers=2), **cuts)
    assert_trained(local(2, train, looping, {"tracer": "record"}), looping)


# --- four processes ---


def train(case: HFCase, options: Mapping[str, Any]) -> Run:
    batches = batches_of(case)
    return trained(case, batches, boundaries=case.boundaries, example_kwargs=batches[0], **options)


def train_model(name: str, ranks: int, options: Mapping[str, Any]) -> Run:
    return train(replace(MODELS[name], ranks=ranks), options)


def assert_trained(runs: Sequence[Run], case: HFCase) -> None:
    """The runs equal plain PyTorch's."""
    wanted = trained_plainly(case, batches_of(case))
    if case.tolerance:
        for run in [*runs, wanted]:
            drop_what_is_only_rounding(run)
    assert_run(runs, wanted, case.tolerance)


@pytest.mark.parametrize("name", every(12, list(MODELS)))
def test_two_steps_on_processes_equal_plain_pytorch(name: str, pool: Pool) -> None:
    """On two ranks, two stages each, unless all cases run: each process captures the whole model."""
    case, ranks = MODELS[name], 4 if ALL else 2
    assert_trained(pool.run(train_model, name, ranks, {}, ranks=ranks, seconds=SECONDS), case)


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"), every(3, [("T5", 4, "zb_h1"), ("CLIP", 4, "zb_h1"), ("Llama", 2, "gpipe")])
)
def test_no_schedule_changes_a_bit_be_backwards_in_halves_or_not(name: str, ranks: int, schedule: str) -> None:
    case = replace(MODELS[name], ranks=ranks)
    assert_trained(local(ranks, train, case, QUICK | {"schedule": schedule}), case)


# --- what is commonly done to such models ---


def checkpointed(build: Callable[[], nn.Module]) -> nn.Module:
    model: Any = build()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("name", every(3, ["CLIP", "T5", "Llama"]))
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    case = MODELS[name]
    assert_trained(local(4, train, replace(case, build=partial(checkpointed, case.build)), QUICK), case)


def train_replica(case: HFCase) -> Run:
    """On half of each batch."""
    topology = fxpipe.Topology([("data", 2), ("pipe", case.ranks)])
    half = replica_of(topology)
    batches = [cut(batch, 2)[half] for batch in batches_of(case)]
    options = {"topology": topology, "microbatches": 2, "example_kwargs": batches[0], "boundaries": case.boundaries}
    return trained(case, batches, **options, **QUICK)


def test_labels_are_counted_over_replicas(pool: Pool) -> None:
    """Their numbers differ between micro-batches and between replicas."""
    case = replace(MODELS["Llama"], ranks=2 if ALL else 1, tolerance=1e-6, **SGD)
    assert_trained(pool.run(train_replica, case, ranks=2 * case.ranks, seconds=SECONDS), case)


# --- dropout ---


def smoothed(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)


def test_a_loss_of_one_s_own_on_what_the_model_returns() -> None:
    """To rounding: told that it is exported, transformers makes a mask where it otherwise asks for is_causal."""
    case = MODELS["Llama"]
    ids = case.batch()["input_ids"]
    model = case.model()
    eager = copy.deepcopy(model)
    forward_backward = fxpipe.compile(
        model,
        fxpipe.Topology([("pipe", 4)]),
        loss_fn=smoothed,
        boundaries=case.boundaries,
        microbatches=4,
        example_kwargs={"input_ids": ids, "target": ids},
    )
    got = forward_backward(input_ids=ids, target=ids)
    parts = cut({"input_ids": ids}, 4)
    wanted, _ = accumulate(lambda _, part: smoothed(eager(**part), part["input_ids"]), parts)
    assert_same(got, wanted, "loss", ROUNDING)
    assert_gradients(gradients_of(forward_backward.named_parameters()), eager, ROUNDING)
