"""Bugs of numbers that go into a stage, and of what depends on them, that once bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from fxpipe.strict import run_strict
from tests.harness import Run, assert_run, assert_same, gradients_of, local, trained

ONE, TWO = Topology([("pipe", 1)]), Topology([("pipe", 2)])
WORDS, WIDTH = 11, 8

# --- the number of items ---


class Labelled(nn.Module):
    """Uses the number of items for one part of its loss, and not for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.part = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 1)

    def forward(
        self, ids: Tensor, labels: Tensor, scale: Tensor | None = None, num_items_in_batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        h = stage_boundary(torch.tanh(self.embed(ids)))
        loss = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="sum")
        if num_items_in_batch is None:
            num_items_in_batch = (labels != -100).sum()
        auxiliary = self.part(h).square().mean()
        return {"loss": loss / num_items_in_batch + 0.1 * auxiliary, "auxiliary": auxiliary}


def labelled() -> Labelled:
    torch.manual_seed(0)
    return Labelled()


def padded(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (rows, 5), generator=generator) for _ in range(2))
    labels[torch.rand(rows, 5, generator=generator) < 0.4] = -100
    return {"ids": ids, "labels": labels}


def whole_batchs(parts: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Σ totals / Σ labels, and the mean of the auxiliary losses over rows, with their gradients."""
    model = labelled()
    rows = sum(len(part["ids"]) for part in parts)
    items = sum(int((part["labels"] != -100).sum()) for part in parts)
    loss = torch.zeros(())
    for part in parts:
        out = model(**part, num_items_in_batch=torch.tensor(items))
        share = len(part["ids"]) / rows
        loss = loss + out["loss"] - 0.1 * (1 - share) * out["auxiliary"]
    loss.backward()
    return loss.detach(), gradients_of(model.named_parameters())


def assert_whole(loss: Tensor, named: Any, parts: list[dict[str, Tensor]]) -> None:
    wanted, gradients = whole_batchs(parts)
    assert_same(loss, wanted, "loss", 1e-6)
    for name, gradient in named.items():
        assert_same(gradient, gradients[name], name, 1e-6)


@pytest.mark.parametrize("given", [None, int, torch.tensor])
def test_an_auxiliary_loss_is_a_mean_and_what_is_divided_by_the_number_of_items_a_sum(given: Any) -> None:
    batch = padded(7, 1)
    forward_backward = fxpipe.compile(labelled(), TWO, microbatches=3, example_kwargs=batch)
    items = int((batch["labels"] != -100).sum())
    loss = forward_backward(**batch, **({} if given is None else {"num_items_in_batch": given(items)}))
    parts = [{name: value.tensor_split(3)[place] for name, value in batch.items()} for place in range(3)]
    assert_whole(loss, gradients_of(forward_backward.named_parameters()), parts)


@pytest.mark.parametrize("axes", [[("pipe", 2), ("data", 2)], [("pipe", 1), ("data", 3)]])
def test_uneven_replicas_have_their_share_of_the_number_of_items(axes: list[tuple[str, int]]) -> None:
    topology = Topology(axes)
    replicas = [[padded(rows, 10 * replica + rows) for rows in (1 + replica, 4)] for replica in range(axes[1][1])]

    def run(rank: int) -> tuple[Tensor, Any]:
        forward_backward = fxpipe.compile(labelled(), topology, microbatches=2, tracer="symbolic")
        mine = replicas[topology.coordinate(rank)["data"]]
        loss = forward_backward.step_microbatches([((), part) for part in mine])
        return loss, gradients_of(forward_backward.named_parameters())

    for loss, gradients in run_strict(run, topology.world_size, 1):
        assert_whole(loss, gradients, [part for parts in replicas for part in parts])


def test_a_number_of_items_given_beside_loss_weight_is_weighted_by_it_and_one_without_weight_is_left_out() -> None:
    parts = [padded(2, seed) for seed in range(3)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    batch["labels"][2:4] = -100

    def weight(ids: Tensor, labels: Tensor, *_: Any) -> Tensor:
        return (labels != -100).sum()

    forward_backward = fxpipe.compile(labelled(), TWO, microbatches=3, loss_weight=weight)
    counts = [float((part != -100).sum()) for part in batch["labels"].chunk(3)]
    loss = forward_backward(**batch, num_items_in_batch=sum(counts))
    model, wanted = labelled(), torch.zeros(())
    for ids, labels, count in zip(batch["ids"].chunk(3), batch["labels"].chunk(3), counts, strict=True):
        if count:
            out = model(ids, labels, num_items_in_batch=torch.tensor(sum(counts)))
            wanted = wanted + out["loss"] - 0.1 * (1 - count / sum(counts)) * out["auxiliary"]
    wanted.backward()
    assert_same(loss, wanted.detach(), "loss", 1e-6)
    gradients = gradients_of(model.named_parameters())
    for name, gradient in gradients_of(forward_backward.named_parameters()).items():
        assert_same(gradient, gradients[name], name, 1e-6)


def test_evaluate_takes_a_number_of_items_as_a_step_does() -> None:
    batch = padded(8, 2)
    forward_backward = fxpipe.compile(labelled(), TWO, microbatches=4)
    items = int((batch["labels"] != -100).sum())
    with torch.no_grad():
        whole = labelled()(**batch, num_items_in_batch=items)["loss"]
    assert_same(forward_backward.evaluate(**batch, num_items_in_batch=items)["loss"], whole, "loss", 1e-6)


class Told(nn.Module):
    """Its loss is 1 / the number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.a(x).float().sum() * 0 + 1 / num_items_in_batch


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_number_of_items_keeps_its_digits_whatever_the_model_computes_in(tracer: str) -> None:
    batch = {"x": torch.ones(1028, 4), "labels": torch.zeros(1028)}  # 257 has 9 digits, bfloat16 has 8
    forward_backward = fxpipe.compile(
        Told(), ONE, microbatches=4, tracer=tracer, example_kwargs=batch, precision=fxpipe.Precision()
    )
    assert_same(forward_backward(**batch).float(), torch.tensor(4 / 1028), "loss", 1e-7)


def checkpointed_and_hooked(build: Callable[[], Any]) -> nn.Module:
    """As ``output_hidden_states`` does, the hook makes tracers keep whole blocks, given all that the model is given."""
    model = build()
    model.gradient_checkpointing_enable()
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_hook(lambda module, args, output: None)
    return model


def segformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_labels=3,
        depths=[1, 1, 1, 1],
        hidden_sizes=[4, 4, 8, 8],
        decoder_hidden_size=8,
        num_attention_heads=[1, 1, 1, 1],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def scenes(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 3, (rows, 32, 32), generator=generator),
    }


@pytest.mark.parametrize("name", ["BERT", "SegFormer"])
def test_a_model_that_is_given_the_number_of_items_and_does_not_use_it(name: str) -> None:
    pytest.importorskip("transformers")
    from tests import hf

    case = hf.MODELS["BERT"]
    if name == "SegFormer":
        cut = {"segformer.stages.2": "before"}
        case = hf.HFCase(segformer, scenes, boundaries=cut, ranks=2, stages=2, tolerance=1e-6, **hf.SGD)
    case = replace(case, build=lambda build=case.build: checkpointed_and_hooked(build))
    batches = [case.batch(0)]

    def train() -> Run:
        return trained(case, batches, boundaries=case.boundaries, example_kwargs=batches[0])

    assert_run(local(4, train), hf.trained_plainly(case, batches), case.tolerance)
