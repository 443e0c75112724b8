"""What placing stages leaves as it is; inputs that no rank can cut, or be sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology, stage_boundary
from tests.harness import assert_same
from tests.replicas import refusals
from tests.strict_transport import run_strict
from tests.two_ranks import TWO, WIDTH


class Remembers(nn.Module):
    """Kept whole under ``record``: a counter, a cache, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.cache, self.seen = nn.Linear(WIDTH, WIDTH), 0, {}, []  # type: ignore[var-annotated]

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        if len(h) not in self.cache:
            self.cache[len(h)] = torch.arange(float(len(h))).unsqueeze(1)
        return (self.layer(h) + self.cache[len(h)]) * self.calls * sum(self.seen)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        found: Tensor = self.layer(h)[0]
        return found


class Three(nn.Module):
    """Three stages, of which a rank of two has more than one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.part(stage_boundary(torch.tanh(self.a(x))))
        return F.mse_loss(self.b(stage_boundary(h)), y)


def test_placing_stages_leaves_counters_and_caches_as_they_are() -> None:
    torch.manual_seed(0)
    model = Three(Remembers())
    plain = copy.deepcopy(model)
    batch = {name: torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5)) for name in ("x", "y")}
    forward_backward = fxpipe.compile(model, TWO, microbatches=2, tracer="record", example_kwargs=batch)
    loss = forward_backward(**batch)
    wanted = torch.stack([plain(batch["x"][part], batch["y"][part]) for part in (slice(4), slice(4, 8))]).mean()
    assert_same(loss, wanted.detach(), "loss", 1e-6)


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_placing_stages_leaves_no_tensor_without_numbers_in_the_model(tracer: str) -> None:
    model = Three(Recurrent())
    batch = {name: torch.randn(8, WIDTH) for name in ("x", "y")}
    forward_backward = fxpipe.compile(model, TWO, microbatches=2, tracer=tracer, example_kwargs=batch)
    assert "checked against the model" in str(forward_backward.stages)
    copy.deepcopy(model)(**batch)


def test_stages_whose_cost_is_not_known_are_placed_by_their_parameters() -> None:
    model = Three(nn.BatchNorm1d(WIDTH, momentum=None))  # it asks its buffer for the number of batches
    batch = {name: torch.randn(8, WIDTH) for name in ("x", "y")}
    forward_backward = fxpipe.compile(model, TWO, microbatches=2, example_kwargs=batch)
    assert len(forward_backward.stages) == 3
    assert forward_backward(**batch).isfinite()


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_sparse_input_is_refused_on_all_ranks_alike(make: Callable[[Tensor], Tensor]) -> None:
    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, graph: Tensor) -> Tensor:
            return self.last(stage_boundary(self.first(x))).square().mean()

    def body(rank: int) -> None:
        x = torch.ones(4, WIDTH)
        step = fxpipe.compile(Taking(), TWO, microbatches=2)
        with pytest.raises(fxpipe.RunError, match=r"an input of shape \[4, 4\] is of layout torch.sparse"):
            step(x, make(torch.eye(4)) if rank else None)
        step(x, torch.eye(4))

    run_strict(body, 2)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_nested_input_that_would_be_cut_into_rows_is_refused(microbatches: int) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        fxpipe.RunError, match="is a nested tensor, which torch cannot cut into rows; pass its values padded"
    ):
        fxpipe.preview(model, Topology([("pipe", 1)]), microbatches=microbatches, example_args=(nested,))


class Vocabulary:
    """An object of a user's own, which no other rank can be told of."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class WithVocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, vocabulary: Any) -> Tensor:
        return (self.two(stage_boundary(self.one(x))) * vocabulary.scale).square().mean()


def with_vocabulary(given: bool, tracer: str = "symbolic") -> Tensor:
    torch.manual_seed(0)
    example: Any = {} if tracer == "symbolic" else {"example_args": (torch.ones(4, 4), Vocabulary(3.0))}
    forward_backward = fxpipe.compile(WithVocabulary(), TWO, tracer=tracer, **example)
    return forward_backward(torch.ones(8, 4), Vocabulary(3.0) if given else None)


@pytest.mark.parametrize("given", [(True, True), (False, True)], ids=["to both ranks", "where it is used"])
def test_an_object_that_no_rank_can_be_told_of_is_what_its_own_rank_has(given: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    wanted = WithVocabulary()(torch.ones(8, 4), Vocabulary(3.0)).detach()
    for loss in run_strict(lambda rank: with_vocabulary(given[rank]), 2):
        torch.testing.assert_close(loss, wanted)


def test_an_object_that_a_capture_would_hold_is_refused_on_all_ranks() -> None:
    for told in refusals(lambda rank: with_vocabulary(True, "record"), 2):
        assert "input 'vocabulary' holds <tests.whole.test_placing_runs_nothing.Vocabulary object" in told
