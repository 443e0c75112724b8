"""Hugging Face models, unmodified and cut by names, train as plain PyTorch trains them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError, passes
from fxpipe.passes.chain import chain
from fxpipe.passes.split import split
from fxpipe.trace import TRACERS
from tests.capturing import run_stages
from tests.harness import Run, accumulate, assert_run, assert_same, cut, gradients_of, local, replica_of, trained
from tests.models import Inputs
from tests.pool import Pool
from tests.thinned import ALL, every

transformers = pytest.importorskip("transformers")

from tests.hf import (  # noqa: E402
    IMAGES_BY_GRID,
    MODELS,
    ROUNDING,
    SGD,
    HFCase,
    gpt2,
    llama,
    mixtral,
    request_of,
    t5,
    trained_plainly,
)

STEPS = 2
SECONDS = 150.0  # for a call: the first one imports transformers and torch.export in each worker
every_model = pytest.mark.parametrize("name", MODELS)
QUICK: dict[str, Any] = {} if ALL else {"tracer": "record"}
"""Where it does not matter what captures: auto would come to torch.export, which takes several times as long."""
HALVES = [(name, 4, "zb_h1") for name in ("T5", "CLIP", "GPT-2")]
OTHER_TABLES = [("Llama", 2, "interleaved_1f1b"), ("Llama", 2, "gpipe")]


def batches_of(case: HFCase) -> list[Inputs]:
    return [case.batch(number) for number in range(STEPS)]


def microbatch(case: HFCase, number: int = 0) -> Inputs:
    """One of those that a step is cut into, as the stages get it."""
    batch = case.batch(number)
    items = case.labels_of(batch)
    return cut(batch, case.microbatches)[0] | ({} if items is None else {"num_items_in_batch": items})


# --- one program: what a tracer captures ---


@pytest.mark.parametrize(("name", "tracer"), every(9, list(product(MODELS, ["export", "record"]))))
def test_stages_of_a_captured_program_compute_what_the_model_does(name: str, tracer: str) -> None:
    case = MODELS[name]
    model = case.model().train()
    eager = copy.deepcopy(model)
    program = TRACERS[tracer](request_of(model, microbatch(case), case.boundaries))
    graph = split(chain(passes.default(), program))
    assert len(graph) == case.stages, str(graph)
    for number in (0, 1):  # on what was captured, and on numbers that were not
        got = run_stages(graph, microbatch(case, number))["loss"]
        wanted = eager(**microbatch(case, number))["loss"]
        assert_same(got, wanted, "loss", case.tolerance)
        got.backward()
        wanted.backward()
    gradients = gradients_of(eager.named_parameters())
    for parameter, gradient in gradients_of(model.named_parameters()).items():
        assert_same(gradient, gradients[parameter], parameter, case.tolerance)


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
    looping = replace(MODELS["Mixtral"], build=lambda: mixtral("eager"))
    assert_trained(local(4, train, looping, {"tracer": "record"}), looping)


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


def drop_what_is_only_rounding(run: Run) -> None:
    """A bias of keys, which starts at 0, has no gradient: softmax takes it away, but for rounding."""
    for tensors in [*run.gradients, run.state]:
        for tensor in tensors.values():
            if tensor is not None and tensor.is_floating_point() and tensor.abs().max() < 1e-9:
                tensor.zero_()


@pytest.mark.parametrize("name", every(12, list(MODELS)))
def test_two_steps_on_processes_equal_plain_pytorch(name: str, pool: Pool) -> None:
    """On two ranks, two stages each, unless all cases run: each process captures the whole model."""
    case, ranks = MODELS[name], 4 if ALL else 2
    assert_trained(pool.run(train_model, name, ranks, {}, ranks=ranks, seconds=SECONDS), case)


@pytest.mark.parametrize("name", every(4, ["T5", "CLIP", "LLaVA", "Mixtral"]))
def test_opaque_modules_on_two_processes_equal_plain_pytorch(name: str, pool: Pool) -> None:
    assert_trained(pool.run(train_model, name, 2, {"tracer": "record"}, ranks=2, seconds=SECONDS), MODELS[name])


@pytest.mark.parametrize("name", every(3, ["CLIP", "GPT-2", "T5"]))
def test_micro_batches_of_two_shapes_equal_plain_pytorch(name: str) -> None:
    case = replace(MODELS[name], rows=10)
    assert_trained(local(4, train, case, QUICK), case)


@pytest.mark.parametrize(("name", "ranks", "schedule"), every(5, HALVES + OTHER_TABLES))
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


def low_rank(model: nn.Module, *names: str) -> nn.Module:
    """Everything is frozen but a low-rank term beside each of these linear layers."""
    model.requires_grad_(False)
    for name in names:
        model.set_submodule(name, LowRank(model.get_submodule(name)))
    return model


class LowRank(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, (out, width) = linear, linear.weight.shape
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def test_a_frozen_model_with_low_rank_terms_in_its_later_layers() -> None:
    names = [f"model.layers.{layer}.self_attn.{which}_proj" for layer in (2, 3) for which in "qv"]
    case = replace(MODELS["Llama"], build=lambda: low_rank(llama(), *names))
    (run,) = local(4, train, case, QUICK)
    assert_trained([run], case)
    trained_names = {name for name, gradient in run.gradients[0].items() if gradient is not None}
    assert trained_names == {f"{name}.{part}.weight" for name in names for part in ("up", "down")}


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def step_under_autocast(case: HFCase) -> Run:
    batch = case.batch()
    with bfloat16():  # for one step only: it keeps weights that it has cast
        return trained(case, [batch], boundaries=case.boundaries, example_kwargs=batch, **QUICK)


@pytest.mark.parametrize("name", every(3, ["Whisper", "CLIP", "Llama"]))
def test_autocast_around_the_call_is_that_of_the_loop(name: str) -> None:
    case = MODELS[name]
    if case.tolerance:
        case = replace(case, tolerance=1e-2)  # of sums of numbers of 8 bits
    assert_run(local(4, step_under_autocast, case), trained_plainly(case, [case.batch()], bfloat16), case.tolerance)


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


def dropouts(case: HFCase) -> HFCase:
    builders = {gpt2: lambda: gpt2(dropout=0.1), t5: lambda: t5(dropout_rate=0.1)}
    return replace(case, build=builders[case.build])


@pytest.mark.parametrize("tracer", every(2, ["record", "export"]))
def test_dropout_in_one_stage_equals_a_loop_reseeded_per_micro_batch(tracer: str) -> None:
    case = dropouts(replace(MODELS["GPT-2"], stages=1, ranks=1, boundaries=()))
    batch = case.batch()
    model = case.model()
    forward_backward = fxpipe.compile(
        copy.deepcopy(model), fxpipe.Topology([("pipe", 1)]), microbatches=4, tracer=tracer, example_kwargs=batch
    )
    loss = forward_backward(**batch)
    wanted = []
    for place, part in enumerate(cut(batch, 4)):
        torch.manual_seed(forward_backward.seed(0, place, 0))
        wanted.append(model(**part, num_items_in_batch=case.labels_of(batch))["loss"])
        wanted[-1].backward()
    assert_same(loss, torch.stack(wanted).sum().detach(), "loss", 1e-6)
    gradients = gradients_of(model.named_parameters())
    for parameter, gradient in gradients_of(forward_backward.named_parameters()).items():
        assert_same(gradient, gradients[parameter], parameter)


def train_with_dropout(name: str) -> Run:
    return train(dropouts(replace(MODELS[name], ranks=2)), QUICK)


@pytest.mark.parametrize("name", every(2, ["GPT-2", "T5"]))
def test_dropout_is_the_same_on_one_process_and_on_two(name: str, pool: Pool) -> None:
    (alone,) = local(2, train_with_dropout, name)
    assert_run(pool.run(train_with_dropout, name, ranks=2, seconds=SECONDS), alone, MODELS[name].tolerance)
    without = trained_plainly(MODELS[name], batches_of(MODELS[name]))
    assert not torch.equal(alone.losses[0], without.losses[0])


# --- what a user does around it ---


@functools.cache
def trained_alone(name: str) -> Run:
    """On one process that plays all ranks; for tests that only read it."""
    (run,) = local(4, train, MODELS[name], QUICK)
    return run


def test_the_trained_weights_load_into_a_plain_model(tmp_path: Any) -> None:
    case, run = MODELS["GPT-2"], trained_alone("GPT-2")
    plain = gpt2()
    plain.load_state_dict(run.state)
    plain.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    batch = case.batch()
    with torch.no_grad():
        assert_same(again(**batch)["loss"], plain.eval()(**batch)["loss"], "loss")


def test_the_number_of_labels_makes_the_loss_the_whole_batch_s() -> None:
    """Uneven padding: a mean of the micro-batches' means would be another number."""
    case = MODELS["GPT-2"]
    run = trained_alone("GPT-2")
    model = case.model()
    whole = model(**case.batch())["loss"]
    parts = [model(**part)["loss"] for part in cut(case.batch(), case.microbatches)]
    assert_same(run.losses[0], whole.detach(), "loss", 1e-6)
    assert abs(torch.stack(parts).mean() - whole).item() > 1e-5


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
    gradients = gradients_of(eager.named_parameters())
    for name, gradient in gradients_of(forward_backward.named_parameters()).items():
        assert_same(gradient, gradients[name], name, ROUNDING)
