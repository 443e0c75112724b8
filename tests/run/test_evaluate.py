"""Evaluation over replicas: numbers are the whole batch's, as plain PyTorch finds them; rows are the replica's own."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import Engine, engine_of, replica_of
from tests.replicas import refusals
from tests.thinned import every, in_turn
from tests.two_ranks import TWO, Pooled

IGNORED = -100
CLASSES, LENGTH, WIDTH = 5, 3, 4
MICROBATCHES = 2
SQUARE = Topology([("pipe", 2), ("data", 2)])
OUTSIDE = Topology([("data", 2), ("pipe", 2)])
ROW = Topology([("data", 2)])
TOLERANCE = {"rtol": 1e-12, "atol": 0.0}

ROWS = {"even": (4, 4), "uneven": (5, 2), "one row": (6, 1)}


@pytest.fixture(params=["strict 2", "distributed"])
def two_replicas(request: pytest.FixtureRequest) -> Engine:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


one_engine = pytest.mark.parametrize("two_replicas", every(2, ["strict 2", "distributed"]), indirect=True)
"""For kinds of results, which processes exchange as others' are."""


class Tagger(nn.Module):
    """Logits for each token, and numbers of every kind beside them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.kind = kind
        self.double()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(stage_boundary(self.embed(ids).tanh()))
        return logits if labels is None else OUTPUTS[self.kind](logits, labels)


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over what is not ignored: NaN where nothing is left."""
    return total(logits, labels) / count(labels)


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().sum(2).mean()


def everything(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    return {
        "loss": of_rows(logits, labels),
        "logits": logits,
        "right": (logits.argmax(2) == labels).sum(),
        "peak": torch.complex(of_rows(logits, labels), logits.mean()),
        "words": "as they are",
        "size": (3, 4),
    }


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rows": of_rows,
    "loss_weight": of_tokens,
    "Sum": lambda logits, labels: fxpipe.Sum(total(logits, labels), count(labels)),
    "Sum of numbers": lambda logits, labels: {"loss": fxpipe.Sum(total(logits, labels), labels.shape[0])},
    "dict": everything,
}


def counted(ids: Tensor, labels: Tensor) -> Tensor:
    return count(labels)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (rows, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (rows, LENGTH), generator=generator)
    labels[torch.rand(rows, LENGTH, generator=generator) < 0.3] = IGNORED
    return ids, labels


def evaluated(
    kind: str, topology: Topology, rows: tuple[int, ...], outputs: str, masked: int | None = None, **options: Any
) -> Any:
    """What a rank gets for its replica's rows; in the ``masked`` replica all labels are ignored."""
    weigh = counted if kind == "loss_weight" else None
    step = fxpipe.compile(Tagger(kind), topology, microbatches=MICROBATCHES, loss_weight=weigh, **options)
    replica = replica_of(topology)
    ids, labels = (tensor.split(list(rows))[replica] for tensor in batch(sum(rows)))
    labels = torch.full_like(labels, IGNORED) if replica == masked else labels
    return step.evaluate(ids, labels, outputs=outputs)


@torch.no_grad()
def plain(kind: str, rows: tuple[int, ...], masked: int | None = None) -> Any:
    """The whole batch in one piece."""
    ids, labels = batch(sum(rows))
    if masked is not None:
        labels.split(list(rows))[masked].fill_(IGNORED)
    return Tagger(kind)(ids, labels)


def assert_number(got: Any, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, **TOLERANCE)


def having(results: list[Any], topology: Topology, outputs: str) -> list[tuple[int, Any]]:
    """(replica, output) of the ranks that must have one; the others have None."""
    places = [topology.coordinate(rank) for rank in range(topology.world_size)]
    mine = [outputs == "all" or place["pipe"] == 1 for place in places]
    assert [result is None for result in results] == [not has for has in mine]
    return [(place["data"], result) for place, result, has in zip(places, results, mine, strict=True) if has]


@pytest.mark.parametrize(
    ("rows", "outputs", "kind"), in_turn(list(ROWS.values()), ["last", "all"], ["rows", "loss_weight"])
)
def test_a_number_is_the_mean_over_all_replicas(
    kind: str, rows: tuple[int, int], outputs: str, two_replicas: Engine
) -> None:
    for _, got in having(two_replicas(4, evaluated, kind, SQUARE, rows, outputs), SQUARE, outputs):
        assert_number(got, plain(kind, rows))


@pytest.mark.parametrize(("kind", "topology"), in_turn(["Sum", "Sum of numbers"], [SQUARE, OUTSIDE]), ids=str)
@one_engine
def test_a_sum_has_the_totals_and_counts_of_all_replicas(kind: str, topology: Topology, two_replicas: Engine) -> None:
    rows = ROWS["uneven"]
    for _, got in having(two_replicas(4, evaluated, kind, topology, rows, "last"), topology, "last"):
        wanted = plain(kind, rows)
        got, wanted = (got, wanted) if kind == "Sum" else (got["loss"], wanted["loss"])
        assert type(got) is fxpipe.Sum
        assert_number(got.total, wanted.total)
        assert type(got.count) is type(wanted.count)
        assert got.count == wanted.count


@pytest.mark.parametrize(("rows", "outputs"), in_turn(every(2, list(ROWS.values())), ["last", "all"]))
def test_of_a_dict_the_numbers_are_the_whole_batchs_and_the_rows_the_replicas(
    rows: tuple[int, int], outputs: str, two_replicas: Engine
) -> None:
    wanted = plain("dict", rows)
    for replica, got in having(two_replicas(4, evaluated, "dict", SQUARE, rows, outputs), SQUARE, outputs):
        for name in ("loss", "right", "peak"):
            assert_number(got[name], wanted[name])
        torch.testing.assert_close(got["logits"], wanted["logits"].split(list(rows))[replica])
        assert (got["words"], got["size"]) == ("as they are", (3, 4))


@one_engine
@pytest.mark.parametrize("kind", ["loss_weight", "Sum"])
def test_a_replica_without_weight_adds_nothing_and_no_nan(kind: str, two_replicas: Engine) -> None:
    rows = ROWS["uneven"]
    for _, got in having(two_replicas(4, evaluated, kind, SQUARE, rows, "last", 1), SQUARE, "last"):
        wanted = plain(kind, rows, 1)
        assert_number(got.total / got.count, wanted.total / wanted.count) if kind == "Sum" else assert_number(
            got, wanted
        )


def of_a_function(with_target: bool) -> Any:
    step = fxpipe.compile(Tagger("rows"), SQUARE, microbatches=MICROBATCHES, loss_fn=total_of_means)
    ids, labels = (tensor.split([5, 2])[replica_of(SQUARE)] for tensor in batch(7))
    return step.evaluate(ids, target=labels) if with_target else step.evaluate(ids)


def total_of_means(logits: Tensor, target: Tensor) -> Tensor:
    return of_rows(logits, target)


@one_engine
@pytest.mark.parametrize("with_target", [True, False], ids=["target", "none"])
def test_a_loss_function_counts_over_all_replicas_where_there_is_a_target(
    with_target: bool, two_replicas: Engine
) -> None:
    ids, labels = batch(7)
    with torch.no_grad():
        logits = Tagger("rows")(ids)
    for replica, got in having(two_replicas(4, of_a_function, with_target), SQUARE, "last"):
        if with_target:
            assert_number(got, of_rows(logits, labels))
        else:
            torch.testing.assert_close(got, logits.split([5, 2])[replica])


def test_replicas_whose_outputs_have_different_numbers_are_refused() -> None:
    def body(rank: int) -> None:
        step = fxpipe.compile(Tagger("rows"), SQUARE, microbatches=MICROBATCHES)
        ids, labels = batch(4)
        step.evaluate(ids, labels if replica_of(SQUARE) else None, outputs="all")

    for text in refusals(body, 4):
        assert text.startswith("RunError: ")
        assert "the replicas' outputs have different numbers, which cannot be averaged: none; " in text


@one_engine
def test_steps_go_on_as_if_nothing_had_been_evaluated(two_replicas: Engine) -> None:
    assert len(set(two_replicas(4, losses, True) + two_replicas(4, losses, False))) == 1


def losses(evaluates: bool) -> tuple[float, ...]:
    step = fxpipe.compile(Tagger("rows"), SQUARE, microbatches=MICROBATCHES)
    optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
    found = []
    for _ in range(3):
        mine = [tensor.split([5, 2])[replica_of(SQUARE)] for tensor in batch(7)]
        found.append(step(*mine).item())
        optimizer.step()
        if evaluates:
            step.evaluate(*mine)
    return tuple(found)


def on_one_replica(topology: Topology, zero: int, calls: int) -> str:
    """What this rank ends with where replica 0 evaluates once more, and the other goes on with a step."""
    step = fxpipe.compile(Tagger("rows"), topology, microbatches=MICROBATCHES, zero=zero)
    replica = replica_of(topology)
    mine = [tensor.split([4, 4])[replica] for tensor in batch(8)]
    try:
        for _ in range(2):
            step(*mine)
            for _ in range(calls + (replica == 0)):
                step.evaluate(*mine)
    except fxpipe.RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("topology", "zero", "calls"), in_turn([SQUARE, ROW], [0, 2], [1, 0]), ids=str)
def test_a_replica_that_evaluates_alone_is_refused_and_does_not_hang(
    topology: Topology, zero: int, calls: int, two_replicas: Engine
) -> None:
    try:
        texts = two_replicas(topology.world_size, on_one_replica, topology, zero, calls)
    except fxpipe.RunError as error:  # of the strict world
        texts = [str(error)]
    for text in texts:
        assert "the replicas [1] make a step and [0] call evaluate" in text or re.search(
            r"data 0\) (is )?in evaluate", text
        )
        assert "`if rank == 0`" in text
        assert "topo.sampler(dataset)" in text


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(stage_boundary(self.body(x))).squeeze()


def test_a_squeeze_that_drops_the_dimension_of_a_single_row_is_told_of() -> None:
    step = fxpipe.compile(Squeezing(), Topology([("pipe", 2)]), microbatches=2)
    assert step.evaluate(torch.ones(4, WIDTH)).shape == (4,)
    with pytest.raises(fxpipe.RunError, match=r"squeeze\(\) drops the dimension of a single row, too"):
        step.evaluate(torch.ones(3, WIDTH))


# --- the output on every rank ---


class Described(nn.Module):
    """An output of containers, rows of odd strides, numbers and words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        rows = self.two(stage_boundary(self.one(x)))
        return {"loss": rows.mean(), "rows": rows, "seen": (rows[:, ::2], [x.shape[1], "four"], {"empty": rows[:0]})}


@one_engine
def test_every_rank_is_given_the_output_with_all_that_is_in_it(two_replicas: Engine) -> None:
    wanted = Described()(torch.arange(16.0).view(4, 4))
    for output in two_replicas(2, described_output):
        assert list(output) == ["loss", "rows", "seen"]
        for name in ("loss", "rows"):
            torch.testing.assert_close(output[name], wanted[name])
        part, told, rest = output["seen"]
        torch.testing.assert_close(part, wanted["seen"][0])
        assert told == [4, "four"]
        assert rest["empty"].shape == (0, 3)


def described_output() -> Any:
    forward_backward = fxpipe.compile(Described(), Topology([("pipe", 2)]), microbatches=1)
    return forward_backward.evaluate(torch.arange(16.0).view(4, 4), outputs="all")


# --- micro-batches that the caller has split ---


@pytest.mark.parametrize("engine", ["local", "strict 2"])
@pytest.mark.parametrize("total", [False, True])
def test_micro_batches_of_several_lengths_give_their_own_outputs_and_losses(engine: str, total: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    parts = [torch.randint(11, (2, length)) for length in (3, 5, 4)]
    wanted = [model(part).detach() for part in parts]
    losses = [output.square().mean() for output in wanted]
    items = [output.numel() for output in wanted] if total else [1] * len(parts)
    mean = sum(loss * count for loss, count in zip(losses, items, strict=True)) / sum(items)

    def loss_fn(y: Tensor) -> Any:
        return fxpipe.Sum(y.square().sum(), y.numel()) if total else y.square().mean()

    def body() -> None:
        step = fxpipe.compile(copy.deepcopy(model), TWO, microbatches=2, boundaries=["1"], loss_fn=loss_fn)
        calls: list[Any] = [((part,), {}) for part in parts]
        torch.testing.assert_close(step.evaluate_microbatches(calls, outputs="all"), wanted)
        torch.testing.assert_close(step.evaluate_microbatches(calls, outputs="loss"), mean)
        last = step.evaluate_microbatches(calls) is not None
        torch.testing.assert_close(step.step_microbatches(calls), mean)
        torch.testing.assert_close(step.microbatch_losses, dict(enumerate(losses)) if last else {})

    engine_of(engine, lambda: None)(2, body)  # type: ignore[arg-type, return-value]


def test_saved_tensors_may_wait_on_the_cpu() -> None:
    step = fxpipe.compile(Tagger("rows"), Topology([("pipe", 2)]), microbatches=MICROBATCHES)
    found = []
    for around in (contextlib.nullcontext(), torch.autograd.graph.save_on_cpu()):
        step.zero_grad()
        with around:
            found.append((step(*batch(4)), [parameter.grad for parameter in step.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# --- what evaluation alone does ---


class Towers(nn.Module):
    """A layer, a boundary, and what ``inner`` makes of it; wrapped, where the cause is a module deeper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.inner = nn.Linear(WIDTH, WIDTH), inner
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.inner(stage_boundary(self.a(x).tanh()))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.b, self.c, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(3)


class AsksForGrad(Inner):
    def forward(self, h: Tensor) -> Tensor:
        h = h * 3 if torch.is_grad_enabled() else h
        return self.c(self.b(h)).square().mean()


class AsksWhatNeedsGrad(Inner):
    def forward(self, h: Tensor) -> Tensor:
        h = self.b(h)
        return self.c(h * 3 if h.requires_grad else h).square().mean()


class Forces(Inner):
    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            places = h.detach().requires_grad_()
            energy = self.c(self.b(places).tanh()).sum()
            forces = -torch.autograd.grad(energy, places, create_graph=self.training)[0]
        return (forces - h).square().mean()


class HeadOfEvaluation(Inner):
    def forward(self, h: Tensor) -> Any:
        loss = self.c(self.b(h)).square().mean()
        return loss if self.training else {"loss": loss, "probabilities": self.head(h).softmax(-1)}


class DeepSupervision(Inner):
    def forward(self, h: Tensor) -> Tensor:
        side = self.norm(self.head(h)).relu_().mean()
        loss = self.c(stage_boundary(self.b(h).tanh())).square().mean()
        return loss + side if self.training else loss


class ReturnsBoth(Inner):
    def forward(self, h: Tensor) -> Any:
        side = self.head(h)
        main = self.c(stage_boundary(self.b(h).tanh()))
        return main.square().mean() + side.square().mean() if self.training else (main, side)


class LossInABuffer(Inner):
    """As vector_quantize_pytorch's quantisers: the loss of evaluation is a buffer, which nobody writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.25, dtype=torch.float64), persistent=False)

    def forward(self, h: Tensor) -> Any:
        commitment = h.square().mean() + self.zero if self.training else self.zero
        loss = self.c(stage_boundary(self.b(h).tanh())).square().mean() + 2 * commitment
        return loss if self.training else (loss, commitment)


class BufferBehindACut(LossInABuffer):
    """As rotary embeddings of another kind of batch, that are made of a buffer of one stage and read in two."""

    def forward(self, h: Tensor) -> Any:
        angle = self.zero.cos()
        h = self.b(h * angle).tanh()
        if self.training:
            return self.c(stage_boundary(h)).square().mean()
        h, angle = stage_boundary((h, angle))
        return (self.c(h) * angle.unsqueeze(0)).square().mean()


class ParameterBehindACut(LossInABuffer):
    """As T5's bias by position, which training sends where its layer is checkpointed, and evaluation would copy."""

    def forward(self, h: Tensor) -> Any:
        h, bias = self.b(h).tanh(), self.b.weight.exp().mean(0)
        h, bias = stage_boundary((h, bias + 0 * h.mean() if self.training else bias))
        return (self.c(h) * bias.mean()).square().mean()


def of_evaluation(kind: type[Inner], depth: int, tracer: str, ranks: int) -> tuple[Any, Any]:
    """What two evaluations give, before a step and after it."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inner = nn.Sequential(kind()) if depth else kind()
    step = fxpipe.compile(Towers(inner), Topology([("pipe", ranks)]), microbatches=2, tracer=tracer, example_args=(x,))
    first = step.evaluate(x, outputs="all")
    optimizer = step.optimizer(torch.optim.SGD, lr=0.1)
    step(x)
    optimizer.step()
    return first, step.evaluate(x, outputs="all")


@pytest.mark.parametrize(
    ("kind", "depth", "tracer", "engine"),
    [
        (AsksForGrad, 1, "export", "strict 2"),
        (AsksWhatNeedsGrad, 0, "record", "strict 2"),
        (Forces, 0, "symbolic", "distributed"),
        (HeadOfEvaluation, 1, "record", "strict 2"),
        (DeepSupervision, 1, "record", "strict 2"),
        (ReturnsBoth, 0, "record", "distributed"),
        (LossInABuffer, 1, "export", "local"),
        (LossInABuffer, 1, "record", "strict 2"),
        (BufferBehindACut, 0, "export", "distributed"),
        (ParameterBehindACut, 0, "export", "strict 2"),
    ],
)
def test_what_evaluation_alone_does_is_plain_pytorchs(
    kind: type[Inner], depth: int, tracer: str, engine: str, request: pytest.FixtureRequest
) -> None:
    ranks = 3 if kind in (DeepSupervision, ReturnsBoth, LossInABuffer, BufferBehindACut, ParameterBehindACut) else 2
    results = engine_of(engine, lambda: request.getfixturevalue("pool"))(
        ranks, of_evaluation, kind, depth, tracer, ranks
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = Towers(nn.Sequential(kind()) if depth else kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for _ in range(2):
        with torch.no_grad():
            wanted.append(model.eval()(x))
        model.train()
        for part in x.tensor_split(2):
            (model(part) / 2).backward()
        optimizer.step()
    for result in results:
        torch.testing.assert_close(result, tuple(wanted))


@pytest.mark.parametrize("kind", ["Sum", "dict"])
@one_engine
def test_the_loss_alone_is_on_every_rank(kind: str, two_replicas: Engine) -> None:
    rows = ROWS["uneven"]
    wanted = plain(kind, rows)
    for got in two_replicas(4, evaluated, kind, SQUARE, rows, "loss"):
        assert_number(got, wanted.total / wanted.count if kind == "Sum" else wanted["loss"])


# --- How ``evaluate`` puts the outputs of micro-batches together ---


def test_evaluate_joins_rows_where_they_are() -> None:
    model = Pooled()
    forward_backward = fxpipe.compile(
        model,
        TWO,
        loss_fn=lambda y, t: (y - t).mean(),
        loss_weight=lambda x, target: target.sum(),  # of no use where there is no target
        microbatches=2,
        batch_dim={"x": 1},
    )
    x = torch.randn(5, 4, 4)
    assert torch.allclose(forward_backward.evaluate(x), model(x), atol=1e-6)
