"""A loss over the whole batch beside all else: sharding, types, random numbers, weights, evaluation, errors."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import RunError, Topology
from tests.device import DEVICE
from tests.harness import Batches, Run, assert_run, gradients_of, reference, replica_of, strict
from tests.harness import trained as run_case
from tests.models import Case
from tests.pool import Pool
from tests.thinned import ALL
from tests.whole.gathered import Contrastive, LocalLoss, OverReplicas, batch, by_hand, cut, model
from tests.whole.test_gathered import assert_alike, on_the_whole_batch

PIPE_4, TWO_BY_TWO = Topology([("pipe", 4)]), Topology([("pipe", 2), ("data", 2)])


# --- sharding ---


CASE = Case(Contrastive, microbatches=3, optimizer_options={"lr": 0.1})


def trained(kind: type[nn.Module], batches: Batches, zero: int) -> Run:
    case = replace(CASE, build=partial(model, kind))
    return run_case(case, batches, topology=TWO_BY_TWO, schedule="cached", zero=zero)


@pytest.mark.parametrize(("kind", "zero"), [(LocalLoss, 2), (OverReplicas, 3)])
def test_sharded_replicas_train_as_one_on_the_global_batch(kind: type[nn.Module], zero: int, pool: Pool) -> None:
    rows = [8, 11]
    whole = [dict(zip(("image", "text"), batch(sum(rows), number), strict=True)) for number in range(3)]
    batches = []
    for images, texts in (each.values() for each in whole):
        parts = zip(images.split(rows), texts.split(rows), strict=True)
        given = [{"image": image, "text": text} for image, text in parts]
        if kind is LocalLoss:
            given = [{**part, "replica": torch.full((rows[number],), number)} for number, part in enumerate(given)]
        batches.append(tuple(given))
    wanted, _ = reference(replace(CASE, build=partial(model, Contrastive), microbatches=1), whole)
    assert_run(pool.run(trained, kind, batches, zero), wanted, 1e-6)


# --- types and random numbers ---


def test_autocast_and_precision_hold_in_a_gathered_stage() -> None:
    seen: list[torch.dtype] = []

    class Watched(Contrastive):
        def loss(self, v: Tensor, t: Tensor) -> Any:
            logits = v @ t.T
            seen.append(logits.dtype)
            return super().loss(v, t)

    options: dict[str, Any] = {"microbatches": 3, "tracer": "record", "example_args": [x.float() for x in batch(9)]}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        plain = model(Contrastive).float()
        wanted = by_hand(plain, cut([x.float() for x in batch(9)], 3))
        forward_backward = fxpipe.compile(model(Watched).float(), PIPE_4, **options)
        assert torch.equal(forward_backward(*(x.float() for x in batch(9))), wanted)
    half = fxpipe.Precision(compute=torch.bfloat16)
    forward_backward = fxpipe.compile(model(Contrastive).float(), PIPE_4, microbatches=3, precision=half)
    loss = forward_backward(*(x.float() for x in batch(9)))
    assert abs(loss - wanted) < 0.05
    assert torch.bfloat16 in seen


class Noisy(Contrastive):
    def loss(self, v: Tensor, t: Tensor) -> Any:
        return super().loss(F.dropout(v, 0.5, self.training), t)


def test_random_numbers_depend_on_no_schedule() -> None:
    def losses(schedule: str) -> list[Any]:
        return [float(one) for one in strict(1)(4, noisy_steps, schedule)]

    first = losses("store_all")
    assert losses("cached") == losses("group_interleaved") == first
    assert len(set(first)) == 1
    assert abs(first[0] - on_the_whole_batch(9)[0][0].item()) > 1e-3  # it does draw


def noisy_steps(schedule: str) -> Tensor:
    torch.manual_seed(3)
    built = model(Noisy)
    torch.manual_seed(3)
    return fxpipe.compile(built, PIPE_4, microbatches=3, schedule=schedule)(*batch(9))


def test_a_limit_of_memory_counts_all_micro_batches_of_a_group() -> None:
    """Of 12 micro-batches all are held in front of the join, of which 1F1B on two stages would hold two. The join keeps
    four matrices of all pairs of the 480 rows, 3,686,400 bytes."""
    options: dict[str, Any] = {"microbatches": 12, "example_args": batch(480), "schedule": "store_all"}
    with pytest.raises(fxpipe.FxpipeError, match="no balance fits into 3,600,000 bytes"):
        fxpipe.compile(
            model(Contrastive), Topology([("pipe", 2)]), hardware=fxpipe.Hardware(memory=3_600_000), **options
        )
    fxpipe.compile(model(Contrastive), Topology([("pipe", 2)]), hardware=fxpipe.Hardware(memory=4_000_000), **options)


# --- weights ---


def weighted(weights: tuple[tuple[float, ...], ...], rows: tuple[int, ...], kind: type[nn.Module]) -> Any:
    replica, numbers = replica_of(TWO_BY_TWO), iter(())

    def weight(*inputs: Any) -> float:
        nonlocal numbers
        return next(numbers)

    forward_backward = fxpipe.compile(model(kind), TWO_BY_TWO, microbatches=2, loss_weight=weight)
    numbers = iter(weights[replica])
    mine = [tensor.split(list(rows))[replica] for tensor in batch(sum(rows))]
    mine += [torch.full((rows[replica],), replica)] if kind is LocalLoss else []
    return [forward_backward(*mine)], gradients_of(forward_backward.named_parameters())


def test_replicas_without_weight_still_gather_and_add_nothing() -> None:
    """With all weight on the first replica the local loss is that of its rows against all rows."""
    rows = (4, 6)
    plain = model(Contrastive)
    v, t = plain.towers(*batch(sum(rows)))
    logits, own = plain.scale.exp() * v @ t.T, torch.arange(rows[0])
    loss = (F.cross_entropy(logits[: rows[0]], own) + F.cross_entropy(logits.T[: rows[0]], own)) / 2
    loss.backward()
    wanted = [loss.detach()], gradients_of(plain.named_parameters())
    assert_alike(strict(0)(4, weighted, ((1.0, 1.0), (0.0, 0.0)), rows, LocalLoss), wanted)


def test_a_micro_batch_without_weight_is_a_negative_even_so() -> None:
    rows = (4, 6)
    results = strict(0)(4, weighted, ((0.0, 1.0), (1.0, 0.0)), rows, OverReplicas)
    assert_alike(results, on_the_whole_batch(sum(rows)))


# --- evaluation ---


class Logits(Contrastive):
    def loss(self, v: Tensor, t: Tensor) -> Any:
        logits = self.scale.exp() * v @ t.T
        loss = F.cross_entropy(logits, torch.arange(v.shape[0]))
        return {"loss": loss, "logits": logits, "rows": (0 * logits[:, 0] + 1).long().sum()}


class LogitsOverReplicas(Logits):
    gather = "global"


class LogitsInGroups(Logits):
    group = 2


def evaluated(kind: type[nn.Module], topology: Topology, rows: tuple[int, ...]) -> Any:
    options = {"example_args": batch(min(rows)), "tracer": "record"}
    forward_backward = fxpipe.compile(model(kind), topology, microbatches=4, **options)
    replica = replica_of(topology) if len(rows) > 1 else 0
    return forward_backward.evaluate(*(x.split(list(rows))[replica] for x in batch(sum(rows))), outputs="all")


def test_evaluate_returns_what_the_model_does_on_all_rows() -> None:
    rows = (8, 11)
    wanted = model(Logits)(*batch(sum(rows)))
    for output in strict(0)(4, evaluated, LogitsOverReplicas, TWO_BY_TWO, rows):
        assert torch.allclose(output["logits"], wanted["logits"], rtol=1e-12)
        assert torch.allclose(output["loss"], wanted["loss"], rtol=1e-12)
        assert output["rows"] == sum(rows)


def test_evaluate_puts_the_rows_of_groups_in_a_row() -> None:
    output = evaluated(LogitsInGroups, PIPE_4, (12,))
    halves = [model(Logits)(*(x.split(6)[i] for x in batch(12)))["logits"] for i in (0, 1)]
    assert torch.allclose(output["logits"], torch.cat(halves))


def test_evaluate_refuses_blocks_of_different_sizes_and_returns_what_they_are_made_of() -> None:
    class Features(LogitsInGroups):
        def loss(self, v: Tensor, t: Tensor) -> Any:
            return {"loss": super().loss(v, t)["loss"], "v": v, "t": t}

    with pytest.raises(RunError, match=r"shapes \[6, 6\], \[5, 5\], .* in dimension 0, .*, or return what it is comp"):
        evaluated(LogitsInGroups, PIPE_4, (11,))
    output, (v, t) = evaluated(Features, PIPE_4, (11,)), model(Contrastive).towers(*batch(11))
    assert torch.allclose(output["v"] @ output["t"].T, v @ t.T)


# --- what is told, and what is refused ---


class InGroupsOverReplicas(OverReplicas):
    group = 2


def two_groups_and_one() -> str:
    """The second replica has half as many micro-batches."""
    replica = replica_of(TWO_BY_TWO)
    forward_backward = fxpipe.compile(model(InGroupsOverReplicas), TWO_BY_TWO, microbatches=4, schedule="store_all")
    with pytest.raises(RunError) as caught:
        forward_backward.step_microbatches([(part, {}) for part in cut(batch(8), 2 if replica else 4)])
    return str(caught.value)


def test_replicas_that_would_wait_for_each_other_are_refused_before_a_step() -> None:
    for told in strict(0)(4, two_groups_and_one):
        assert "the replicas run tables of their own" in told
        assert "drop_last=True" in told


def test_the_table_the_stages_and_the_timeline_tell_of_groups() -> None:
    forward_backward = fxpipe.compile(model(Contrastive), PIPE_4, microbatches=4, schedule="store_all")
    assert "3F0-3" in str(forward_backward.schedule)
    assert "loss runs once for all micro-batches" in str(forward_backward.stages)
    forward_backward.record_timeline()
    forward_backward(*batch(8))
    assert "3B0-3" in str(forward_backward.timeline())


class Failing(Contrastive):
    def loss(self, v: Tensor, t: Tensor) -> Any:
        return F.cross_entropy(v, torch.full_like(v[:, 0], 99).long()) + super().loss(v, t)


def test_an_error_names_the_groups_micro_batches() -> None:
    forward_backward = fxpipe.compile(model(Failing), PIPE_4, microbatches=4)
    with pytest.raises(IndexError) as caught:
        forward_backward(*batch(8))
    assert "in the forward of stage 3 `loss`, micro-batches 0-3, step 0" in "\n".join(caught.value.__notes__)


def test_a_gather_inside_a_callable_of_the_users_own_is_refused() -> None:
    def loss(v: Tensor) -> Tensor:
        return fxpipe.stage_boundary(v, gather="batch").square().mean()

    graph = fxpipe.StageGraph.from_callables(
        {"a": nn.Linear(4, 4), "loss": loss}, edges=[("a", "loss")], inputs={"a": ["x"]}
    )
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=2)
    with pytest.raises(fxpipe.TraceError, match="gathers 'batch' inside stage 'loss', which is not captured"):
        forward_backward(torch.randn(4, 4))


class Centre(Contrastive):
    def towers(self, image: Tensor, text: Tensor) -> Any:
        v, t = super().towers(image, text)
        return v.mean(dim=0), t


def test_a_value_without_rows_is_refused_in_the_step() -> None:
    forward_backward = fxpipe.compile(model(Centre), PIPE_4, microbatches=2)
    with pytest.raises(RunError, match=re.escape("has shapes [4], [4] for micro-batches of [3, 3] rows")):
        forward_backward(*batch(6))


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"] if ALL else ["symbolic"])
def test_cuts_are_searched_in_front_of_what_gathers(tracer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpipe.search.moves.MORE_ACTIONS", 2000)
    forward_backward = fxpipe.compile(
        model(Contrastive),
        Topology([("pipe", 3)]),
        microbatches=4,
        boundaries="auto",
        example_args=batch(8),
        tracer=tracer,
    )
    gathered = [stage.name for stage in forward_backward.stages if stage.gathered is not None]
    assert gathered == ["loss"]
    assert len(forward_backward.stages) >= 3
    for rows in (8, 11):  # and a kind of batch that comes later is cut alike
        forward_backward.zero_grad()
        loss = forward_backward(*batch(rows))
        assert_alike([([loss], gradients_of(forward_backward.named_parameters()))], on_the_whole_batch(rows))


def test_the_search_in_front_of_a_gather_takes_the_tower_apart_that_is_longest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image tower is most of the work, and no stage of a group: two of three ranks have parts of it."""

    class Long(Contrastive):
        group = 2

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
            self.lower = nn.Linear(6, 512)
            self.upper = nn.Linear(512, 4)

        def towers(self, image: Tensor, text: Tensor) -> Any:
            x = self.lower(image)
            for layer in self.layers:
                x = layer(x)
            return self.upper(x), self.text(text)

    monkeypatch.setattr("fxpipe.search.moves.MORE_ACTIONS", 2000)
    plan = fxpipe.preview(
        Long(), Topology([("pipe", 3)]), microbatches=4, boundaries="auto", example_args=batch(4096), hardware="h100"
    )
    ranks = {rank for stage in plan.graph if "layers" in stage.name for rank in plan.graph.ranks(stage.index)}
    assert len(ranks) >= 2
    assert plan.schedule.groups == tuple(2 if stage.gathered else 1 for stage in plan.graph)
    assert f"{plan.bubble:.1%}" in capsys.readouterr().err


def test_micro_batches_that_come_split_are_gathered_too() -> None:
    forward_backward = fxpipe.compile(model(Contrastive), PIPE_4, microbatches=4)
    parts = [(part, {}) for part in cut(batch(11), 3)]
    loss = forward_backward.step_microbatches(parts)
    assert_alike([([loss], gradients_of(forward_backward.named_parameters()))], on_the_whole_batch(11))
