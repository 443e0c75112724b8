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
from tests.harness import Run, assert_run, assert_same, gradients_of, local, trained
from tests.replicas import refusals
from tests.strict_transport import run_strict
from tests.thinned import every
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


@pytest.mark.parametrize("is_given", [True, False])
def test_evaluate_takes_or_counts_a_number_of_items_as_a_step_does(is_given: bool) -> None:
    batch = padded(8, 2)
    forward_backward = fxpipe.compile(labelled(), TWO, microbatches=4)
    items = int((batch["labels"] != -100).sum())
    with torch.no_grad():
        whole = labelled()(**batch, num_items_in_batch=items)["loss"]
    given = {"num_items_in_batch": items} if is_given else {}
    assert_same(forward_backward.evaluate(**batch, **given)["loss"], whole, "loss", 1e-6)


class NotAccepting(Labelled):
    """As Qwen2.5-VL and Gemma 3: the number reaches the loss by ``**kwargs``, and the Trainer is not to give it."""

    accepts_loss_kwargs, loss_function = False, F.cross_entropy

    def forward(self, ids: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(ids, labels, **kwargs)


class Around(nn.Module):
    """A module of the user's own around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.model(**kwargs)
        return found


def not_accepting() -> NotAccepting:
    torch.manual_seed(0)
    return NotAccepting()


@pytest.mark.parametrize(("data", "tracer"), [(1, "symbolic"), (2, "record")])
@pytest.mark.parametrize("build", [not_accepting, lambda: Around(not_accepting())], ids=["model", "in another"])
def test_a_given_number_of_items_is_dealt_out_where_the_model_says_it_accepts_none(
    build: Callable[[], nn.Module], tracer: str, data: int
) -> None:
    topology, parts = Topology([("pipe", 2), ("data", data)]), [padded(4, seed) for seed in range(data)]
    items = sum(int((part["labels"] != -100).sum()) for part in parts)
    given: dict[str, Any] = {"num_items_in_batch": items}

    def run(rank: int) -> tuple[Any, Any, Any, str, str]:
        mine = parts[topology.coordinate(rank)["data"]]
        options: dict[str, Any] = {"microbatches": 4, "tracer": tracer, "example_kwargs": mine}
        step = fxpipe.compile(build(), topology, **options)
        loss = step(**mine, **given)
        gradients = gradients_of(step.named_parameters())
        with_number = fxpipe.compile(build(), topology, **options | {"example_kwargs": mine | given})
        evaluated = step.evaluate(**mine, **given, outputs="all")["loss"]
        return loss, gradients, evaluated, str(step.stages), str(with_number.stages)

    rows = [{name: value[row : row + 1] for name, value in part.items()} for part in parts for row in range(4)]
    for loss, gradients, evaluated, stages, numbered in run_strict(run, topology.world_size, 1):
        bare = {name.removeprefix("model."): value for name, value in gradients.items()}
        assert_whole(loss, bare, rows)
        assert_same(evaluated, whole_batchs(rows)[0], "evaluated", 1e-6)
        assert "labels are not counted: " in stages
        assert "labels are not counted: num_items_in_batch is what the call gives" in numbered


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


@pytest.mark.parametrize("name", every(2, ["BERT", "SegFormer"]))
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


@pytest.mark.parametrize("ignored", [0, 1], ids=["as many on both", "fewer on one"])
def test_a_replicas_own_number_of_items_is_refused(ignored: int) -> None:
    def body(rank: int) -> None:
        step = fxpipe.compile(labelled(), Topology([("data", 2)]), microbatches=2)
        ids = torch.arange(10).view(2, 5) + rank
        labels = ids.clone()
        labels[0, : ignored * rank] = -100
        step(ids=ids, labels=labels, num_items_in_batch=(labels != -100).sum())

    for text in refusals(body, 2):
        assert f"the replicas were given {[10, 10 - ignored]}, for {20 - ignored} labels in all" in text


def test_the_whole_batchs_number_of_items_may_be_that_of_several_calls() -> None:
    whole, items = padded(4, 0), 100

    def body(rank: int) -> Tensor:
        step = fxpipe.compile(labelled(), Topology([("data", 2)]), microbatches=2)
        mine = {name: tensor.split(2)[rank] for name, tensor in whole.items()}
        return step(**mine, num_items_in_batch=items)

    with torch.no_grad():
        wanted = labelled()(**whole, num_items_in_batch=torch.tensor(items))["loss"]
    for loss in run_strict(body, 2):
        torch.testing.assert_close(loss, wanted)
