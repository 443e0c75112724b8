"""A loss over the whole batch beside all else: sharding, types, random numbers, weights, evaluation, errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import RunError, Topology, stage_boundary
from tests.harness import engine_of, gradients_of, local, replica_of, strict
from tests.pool import Pool
from tests.strict_transport import StrictTransport
from tests.thinned import every
from tests.whole.gathered import Contrastive, LocalLoss, OverReplicas, batch, by_hand, cut, model, store_all
from tests.whole.test_gathered import assert_alike, on_the_whole_batch

PIPE_4, TWO_BY_TWO = Topology([("pipe", 4)]), Topology([("pipe", 2), ("data", 2)])
STEPS = 3


# --- sharding ---


def trained(kind: type[nn.Module], zero: int, rows: tuple[int, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Some steps of AdamW on this replica's rows."""
    forward_backward = fxpipe.compile(model(kind), TWO_BY_TWO, microbatches=3, zero=zero, schedule="cached")
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.1)
    replica, losses = replica_of(TWO_BY_TWO), []
    for number in range(STEPS):
        optimizer.zero_grad()
        mine = [tensor.split(list(rows))[replica] for tensor in batch(sum(rows), number)]
        mine += [torch.full((rows[replica],), replica)] if kind is LocalLoss else []
        losses.append(forward_backward(*mine))
        optimizer.step()
    return losses, forward_backward.state_dict(full=True)


def trained_plainly(rows: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    plain = model(Contrastive)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = plain(*batch(rows, number))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, plain.state_dict()


@pytest.mark.parametrize(("kind", "zero"), [(OverReplicas, 1), (LocalLoss, 2), (OverReplicas, 3)])
def test_sharded_replicas_train_as_one_on_the_global_batch(kind: type[nn.Module], zero: int, pool: Pool) -> None:
    rows = (8, 11)
    losses, state = trained_plainly(sum(rows))
    for got, got_state in pool.run(trained, kind, zero, rows, ranks=4):
        assert torch.allclose(torch.stack(got), torch.stack(losses), rtol=1e-9)
        assert all(torch.allclose(got_state[name], state[name], rtol=1e-6, atol=1e-9) for name in state)


# --- types and random numbers ---


def test_autocast_and_precision_hold_in_a_gathered_stage() -> None:
    seen: list[torch.dtype] = []

    class Watched(Contrastive):
        def loss(self, v: Tensor, t: Tensor) -> Any:
            logits = v @ t.T
            seen.append(logits.dtype)
            return super().loss(v, t)

    options: dict[str, Any] = {"microbatches": 3, "tracer": "record", "example_args": [x.float() for x in batch(9)]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
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


@pytest.mark.parametrize("on", ["local", "strict 1"])
def test_random_numbers_depend_on_no_schedule(on: str, request: pytest.FixtureRequest) -> None:
    def losses(schedule: str) -> list[Any]:
        return [float(one) for one in engine(4, noisy_steps, schedule)]

    engine = engine_of(on, lambda: request.getfixturevalue("pool"))
    first = losses("store_all")
    assert losses("cached") == losses("group_interleaved") == first
    assert len(set(first)) == 1
    assert abs(first[0] - on_the_whole_batch(9)[0][0].item()) > 1e-3  # it does draw


def noisy_steps(schedule: str) -> Tensor:
    torch.manual_seed(3)
    built = model(Noisy)
    torch.manual_seed(3)
    return fxpipe.compile(built, PIPE_4, microbatches=3, schedule=schedule)(*batch(9))


# --- placement ---


@pytest.mark.parametrize("schedule", ["store_all", "cached"])
def test_stages_are_placed_by_what_tables_of_groups_take(schedule: str) -> None:
    options: dict[str, Any] = {"microbatches": 4, "schedule": schedule, "example_args": batch(32)}
    forward_backward = fxpipe.compile(model(Contrastive), Topology([("pipe", 2)]), **options)
    assert forward_backward.schedule.placement.count(0) in (1, 2, 3)
    assert abs(forward_backward(*batch(32)) - on_the_whole_batch(32)[0][0]) < 1e-12


def test_a_limit_of_memory_counts_all_micro_batches_of_a_group() -> None:
    """Of 12 micro-batches all are held in front of the join, of which 1F1B on two stages would hold two."""
    options: dict[str, Any] = {"microbatches": 12, "example_args": batch(480), "schedule": "store_all"}
    with pytest.raises(fxpipe.FxpipeError, match="no balance fits into 200,000 bytes"):
        fxpipe.compile(model(Contrastive), Topology([("pipe", 2)]), memory_per_rank=200_000, **options)
    fxpipe.compile(model(Contrastive), Topology([("pipe", 2)]), memory_per_rank=400_000, **options)


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
    options = {"example_args": batch(min(rows)), "tracer": "export"}
    forward_backward = fxpipe.compile(model(kind), topology, microbatches=4, **options)
    replica = replica_of(topology) if len(rows) > 1 else 0
    return forward_backward.evaluate(*(x.split(list(rows))[replica] for x in batch(sum(rows))), outputs="all")


@pytest.mark.parametrize(
    ("kind", "topology", "rows"), every(2, [(LogitsOverReplicas, TWO_BY_TWO, (8, 11)), (Logits, PIPE_4, (11,))])
)
def test_evaluate_returns_what_the_model_does_on_all_rows(
    kind: type[nn.Module], topology: Topology, rows: tuple[int, ...]
) -> None:
    wanted = model(Logits)(*batch(sum(rows)))
    for output in (local if len(rows) == 1 else strict(0))(4, evaluated, kind, topology, rows):
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

    with pytest.raises(RunError, match=r"shapes \[6, 6\], \[5, 5\], .* in dimension 0: .*; or return what it is comp"):
        evaluated(LogitsInGroups, PIPE_4, (11,))
    output, (v, t) = evaluated(Features, PIPE_4, (11,)), model(Contrastive).towers(*batch(11))
    assert torch.allclose(output["v"] @ output["t"].T, v @ t.T)


# --- what is told, and what is refused ---


class InGroupsOverReplicas(OverReplicas):
    group = 2


def table_of_its_own() -> None:
    """The second replica runs the second group forward before the first one back."""
    table = store_all((0, 0, 1, 1), 4, 2)
    if replica_of(TWO_BY_TWO):
        loss = [action for action in table.rows[1] if action.stage == 3]
        ordered = iter([loss[0], loss[2], loss[1], loss[3]])
        row = tuple(next(ordered) if action.stage == 3 else action for action in table.rows[1])
        table = dataclasses.replace(table, rows=(table.rows[0], row))
    fxpipe.compile(model(InGroupsOverReplicas), TWO_BY_TWO, microbatches=4, schedule=table)


def test_replicas_with_tables_of_their_own_are_refused_by_compile() -> None:
    told = r"compiled different programs(?s:.*)3F0-1 3B0-1 3F2-3 3B2-3(?s:.*)3F0-1 3F2-3 3B0-1 3B2-3"
    with pytest.raises(fxpipe.FxpipeError, match=told):
        strict(0)(4, table_of_its_own)


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


class Overflowing(Contrastive):
    """Its text tower makes inf of one row."""

    def towers(self, image: Tensor, text: Tensor) -> Any:
        v, t = super().towers(image, text)
        return v, t / (1 - (text[:, :1] > 1e6).double())


def test_a_loss_that_is_not_finite_names_the_micro_batch_and_the_stage_that_made_it_so() -> None:
    forward_backward = fxpipe.compile(model(Overflowing), PIPE_4, microbatches=4, error_if_nonfinite=True)
    image, text = batch(8)
    text[5, 0] = 1e7
    with pytest.raises(
        RunError, match=r"micro-batches 0-3 is the first .* stage 2 `text` is the first in micro-batch 2"
    ):
        forward_backward(image, text)


def test_a_gather_inside_a_callable_of_the_users_own_is_refused() -> None:
    def loss(v: Tensor) -> Tensor:
        return fxpipe.stage_boundary(v, gather="batch").square().mean()

    graph = fxpipe.StageGraph.from_callables(
        {"a": nn.Linear(4, 4), "loss": loss}, edges=[("a", "loss")], inputs={"a": ["x"]}
    )
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), microbatches=2)
    with pytest.raises(fxpipe.TraceError, match="gathers 'batch' inside stage 'loss', which runs as it is"):
        forward_backward(torch.randn(4, 4))


class Mean(Contrastive):
    def towers(self, image: Tensor, text: Tensor) -> Any:
        v, t = super().towers(image, text)
        return v.mean(), t


class Centre(Contrastive):
    def towers(self, image: Tensor, text: Tensor) -> Any:
        v, t = super().towers(image, text)
        return v.mean(dim=0), t


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        (Mean, "is one number for each micro-batch, which has no rows to be put in a row; gather what it is computed"),
        (Centre, "has shapes [4], [4] for micro-batches of [3, 3] rows"),
    ],
)
def test_a_value_without_rows_is_refused_in_the_step(kind: type[nn.Module], fact: str) -> None:
    forward_backward = fxpipe.compile(model(kind), PIPE_4, microbatches=2)
    with pytest.raises(RunError, match=re.escape(fact)):
        forward_backward(*batch(6))


def test_a_batch_that_is_not_cut_is_refused() -> None:
    forward_backward = fxpipe.compile(
        model(Contrastive), PIPE_4, microbatches=2, batch_dim={"image": None, "text": None}
    )
    with pytest.raises(RunError, match="no input of this batch is cut into them"):
        forward_backward(*batch(6))


def test_a_boundary_in_front_of_everything_is_told_of() -> None:
    class Bare(Contrastive):
        def forward(self, image: Tensor, text: Tensor) -> Any:
            image, text = stage_boundary((image, text), gather="batch")
            return self.loss(torch.tanh(self.lower(image))[:, :4], self.text(text))

    with pytest.raises(fxpipe.FxpipeError, match="but the model has 1 stage"):
        fxpipe.compile(model(Bare), PIPE_4, microbatches=4)


def test_replicas_tell_each_other_their_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list travels for each of the two kinds of batch, not for each step."""
    lists: list[Any] = []
    gather = StrictTransport.gather

    def watched(self: StrictTransport, scope: str, item: Any) -> Any:
        lists.extend([item] if scope == "data" and isinstance(item, list) else [])
        return gather(self, scope, item)

    monkeypatch.setattr(StrictTransport, "gather", watched)
    strict(0)(4, some_steps)
    assert sorted(lists) == 4 * [[3, 3]] + 4 * [[5, 4]]


def some_steps() -> None:
    options = {"tracer": "export", "example_args": batch(8)}
    forward_backward = fxpipe.compile(model(OverReplicas), TWO_BY_TWO, microbatches=2, **options)
    for rows in (6, 6, 9, 6, 9):
        forward_backward(*batch(rows))


def test_cuts_that_fxpipe_finds_gather_nothing() -> None:
    with pytest.raises(fxpipe.FxpipeError, match='a boundary gathers "batch", and boundaries="auto" looks for cuts'):
        fxpipe.compile(model(Contrastive), PIPE_4, microbatches=2, boundaries="auto", example_args=batch(4))


def test_a_table_for_other_groups_is_refused() -> None:
    with pytest.raises(
        fxpipe.ScheduleError, match=r"actions of \[1, 1, 1, 2\] micro-batches .* \[1, 1, 1, 4\] at once"
    ):
        fxpipe.compile(model(Contrastive), PIPE_4, microbatches=4, schedule=store_all((0, 1, 2, 3), 4, 2))


def test_micro_batches_that_come_split_are_gathered_too() -> None:
    forward_backward = fxpipe.compile(model(Contrastive), PIPE_4, microbatches=4)
    parts = [(part, {}) for part in cut(batch(11), 3)]
    loss = forward_backward.step_microbatches(parts)
    assert_alike([([loss], gradients_of(forward_backward.named_parameters()))], on_the_whole_batch(11))
