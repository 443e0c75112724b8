"""``num_items_in_batch``: counted, given, dealt out over micro-batches, replicas and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import assert_gradients, assert_run, assert_same, gradients_of, trained
from tests.replicas import refusals
from tests.strict_transport import run_strict
from tests.two_ranks import ONE, TWO, WIDTH, WORDS


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
    assert forward_backward.required_inputs == ("ids", "labels"), "of which the number is counted"
    items = int((batch["labels"] != -100).sum())
    number = {} if given is None else {"num_items_in_batch": given(items)}
    with torch.no_grad():
        whole = labelled()(**batch, num_items_in_batch=items)["loss"]
    assert_same(forward_backward.evaluate(**batch, **number)["loss"], whole, "evaluated", 1e-6)
    loss = forward_backward(**batch, **number)
    parts = [{name: value.tensor_split(3)[place] for name, value in batch.items()} for place in range(3)]
    assert_whole(loss, gradients_of(forward_backward.named_parameters()), parts)


def test_uneven_replicas_have_their_share_of_the_number_of_items() -> None:
    topology = Topology([("pipe", 2), ("data", 2)])
    replicas = [[padded(rows, 10 * replica + rows) for rows in (1 + replica, 4)] for replica in range(2)]

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
    assert_gradients(gradients_of(forward_backward.named_parameters()), model, 1e-6)


class NotAccepting(Labelled):
    """As Qwen2.5-VL and Gemma 3: the number reaches the loss by ``**kwargs``, and the Trainer is not to give it."""

    accepts_loss_kwargs, loss_function = False, F.cross_entropy

    def forward(self, ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(ids, labels, **kwargs)


def not_accepting() -> NotAccepting:
    torch.manual_seed(0)
    return NotAccepting()


def test_a_given_number_of_items_is_dealt_out_where_the_model_says_it_accepts_none() -> None:
    topology, parts = Topology([("pipe", 2), ("data", 2)]), [padded(4, seed) for seed in range(2)]
    items = sum(int((part["labels"] != -100).sum()) for part in parts)
    given: dict[str, Any] = {"num_items_in_batch": items}

    def run(rank: int) -> tuple[Any, Any, Any, str]:
        mine = parts[topology.coordinate(rank)["data"]]
        options: dict[str, Any] = {"microbatches": 4, "tracer": "record", "example_kwargs": mine}
        step = fxpipe.compile(not_accepting(), topology, **options)
        loss = step(**mine, **given)
        gradients = gradients_of(step.named_parameters())
        evaluated = step.evaluate(**mine, **given, outputs="all")["loss"]
        return loss, gradients, evaluated, str(step.stages)

    rows = [{name: value[row : row + 1] for name, value in part.items()} for part in parts for row in range(4)]
    for loss, gradients, evaluated, stages in run_strict(run, topology.world_size, 1):
        assert_whole(loss, gradients, rows)
        assert_same(evaluated, whole_batchs(rows)[0], "evaluated", 1e-6)
        assert "labels are not counted: " in stages


@pytest.mark.parametrize(
    ("build", "options", "note"),
    [
        (labelled, {}, "labels are counted: the loss reads num_items_in_batch of the whole batch"),
        (not_accepting, {}, "labels are not counted: the model has accepts_loss_kwargs = False"),
        (labelled, {"loss_weight": lambda *_: 1}, "labels are not counted: loss_weight= is given"),
    ],
)
def test_stages_say_whether_labels_are_counted(build: Any, options: dict[str, Any], note: str) -> None:
    assert note in str(fxpipe.compile(build(), TWO, example_kwargs=padded(8, 0), **options).stages).splitlines()


def checkpointed_and_hooked(build: Callable[[], Any]) -> nn.Module:
    """As ``output_hidden_states`` does, the hook makes tracers keep whole blocks, given all that the model is given."""
    model = build()
    model.gradient_checkpointing_enable()
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.register_forward_hook(lambda module, args, output: None)
    return model


class Told(nn.Module):
    """Its loss is 1 / the number of items."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.a(x).float().sum() * 0 + 1 / num_items_in_batch


def test_a_number_of_items_keeps_its_digits_whatever_the_model_computes_in() -> None:
    batch = {"x": torch.ones(1028, 4), "labels": torch.zeros(1028)}  # 257 has 9 digits, bfloat16 has 8
    options: Any = {"microbatches": 4, "example_kwargs": batch, "precision": fxpipe.Precision()}
    loss = fxpipe.compile(Told(), ONE, **options)(**batch)
    assert_same(loss.float(), torch.tensor(4 / 1028), "loss", 1e-7)


def test_a_model_that_is_given_the_number_of_items_and_does_not_use_it() -> None:
    hf = pytest.importorskip("tests.hf")
    case = hf.MODELS["BERT"]
    case = replace(case, build=lambda build=case.build: checkpointed_and_hooked(build))
    batches = [case.batch(0)]
    run = trained(case, batches, boundaries=case.boundaries, example_kwargs=batches[0])
    assert_run([run], hf.trained_plainly(case, batches), case.tolerance)


def test_a_replicas_own_number_of_items_is_refused() -> None:
    def body(rank: int) -> None:
        step = fxpipe.compile(labelled(), Topology([("data", 2)]), microbatches=2)
        ids = torch.arange(10).view(2, 5) + rank
        labels = ids.clone()
        labels[0, :rank] = -100
        step(ids=ids, labels=labels, num_items_in_batch=(labels != -100).sum())

    for text in refusals(body, 2):
        assert "the replicas were given [10, 9], for 19 labels in all" in text
