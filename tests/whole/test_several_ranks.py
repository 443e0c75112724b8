"""Stages on several ranks: what these hold, what they must not do, and what comes out of a last stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import PartitionError, RunError, Topology, stage_boundary
from tests.harness import local, strict
from tests.whole.test_random_models import drawn_on_several, trained


def test_two_runs_have_the_same_bits_whoever_goes_first() -> None:
    draw = dataclasses.replace(drawn_on_several(0), data=2, zero=1)
    one, other = (strict(seed)(2 * draw.ranks, trained, draw) for seed in (0, 7))
    for found, again in zip(one, other, strict=True):
        assert all(map(torch.equal, found.losses, again.losses))
        assert all(torch.equal(parameter, again.parameters[name]) for name, parameter in found.parameters.items())


# --- what its ranks hold, and what they must not do ---


class TwoTowers(nn.Module):
    """``image`` → ``joined`` → ``head``; a norm of the user's in the first."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 4))
        self.joined, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = stage_boundary(self.image(x))
        return (self.head(stage_boundary(torch.tanh(self.joined(features)))) - y).square().mean()


ROWS = torch.ones(8, 4), torch.ones(8, 1)


def two_towers(norm: nn.Module | None = None, **options: Any) -> fxpipe.ForwardBackward:
    torch.manual_seed(0)
    placement: dict[str, Any] = {"image": "all", "joined": 0, "head": 1}
    topology = Topology([("pipe", options.pop("ranks", 2))])
    model = TwoTowers(nn.Identity() if norm is None else norm)
    return fxpipe.compile(model, topology, **{"microbatches": 4, "placement": placement, **options})


def elements_of_state(zero: int) -> int:
    forward_backward = two_towers(zero=zero)
    optimizer = forward_backward.optimizer(torch.optim.AdamW, lr=0.1)
    forward_backward(*ROWS)
    optimizer.step()
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def test_zero_shards_the_optimizer_state_over_all_holders() -> None:
    image, others = (4 * 6 + 6) + (6 * 4 + 4), (4 * 4 + 4) + (4 + 1)
    whole = strict(0)(2, elements_of_state, 0)
    assert sum(whole) == 2 * image + others
    assert strict(0)(2, elements_of_state, 3) == whole  # which shards over the data axis, and there is none
    parts = strict(0)(2, elements_of_state, 1)
    assert sum(parts) == image + others
    assert all(part < total for part, total in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    ("norm", "options", "said"),
    [
        (nn.BatchNorm1d(6), {}, "'image' is on ranks 0, 1, and its forward writes image.1.num_batches"),
        (None, {"placement": {"image": (0, 2), "joined": 0, "head": 1}}, r"uses ranks \[0, 1, 2\]; with 2 pipe ranks"),
        (None, {"placement": {"image": "all", "joined": 0, "head": 0}, "ranks": 3, "schedule": "zb_v"}, "zb_v"),
    ],
)
def test_what_its_ranks_could_not_keep_equal_is_refused(norm: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(fxpipe.FxpipeError, match=said):
        strict(0)(options.get("ranks", 2), lambda: two_towers(norm, **options))


class Renormed(nn.Module):
    """Keeps a weight at length 1 in forward, as SwAV's prototypes, or in the rows that are looked up."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.rows = by_hand, nn.Embedding(6, 6, max_norm=None if by_hand else 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            with torch.no_grad():
                self.rows.weight.copy_(nn.functional.normalize(self.rows.weight, dim=-1))
            return x @ self.rows.weight
        return x + self.rows(x.argmax(-1))


@pytest.mark.parametrize(("by_hand", "tracer"), [(True, "export"), (False, "record")], ids=["by hand", "max_norm"])
def test_a_parameter_that_its_forward_writes_is_refused(by_hand: bool, tracer: str) -> None:
    with pytest.raises(PartitionError, match=r"is on ranks 0, 1, and its forward writes image\.1\.rows\.weight"):
        two_towers(Renormed(by_hand), example_args=ROWS, tracer=tracer)


class Annealed(nn.Module):
    """Counts its calls in Python and goes by the count, as the capacity of PyTorch-VAE's BetaVAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_iter = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_iter += 1
        return x * min(1.0, self.num_iter / 10)


def test_an_opaque_region_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"is on ranks 0, 1, and its forward writes image\.1\.num_iter"):
        two_towers(Annealed(), example_args=ROWS, boundaries={"image.1": "whole"})


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


@pytest.mark.parametrize("options", [{}, {"parallelize": lambda stage, mesh: None}], ids=["whole", "function"])
def test_a_buffer_that_such_a_stage_writes_is_found_in_the_step(options: dict[str, Any]) -> None:
    stages = {"image": nn.Sequential(nn.Linear(4, 4), Counting()), "loss": lambda x: x.square().mean()}
    graph = fxpipe.StageGraph.from_callables(stages, [("image", "loss")], {"image": ["x"]})
    placement: dict[str, Any] = {"image": "all", "loss": 1}
    options = {"microbatches": 2, "placement": placement, **options}
    forward_backward = fxpipe.compile(graph, Topology([("pipe", 2)]), **options)
    with pytest.raises(RunError, match=r"'image' is on ranks 0, 1, and its forward writes image\.1\.calls"):
        forward_backward(ROWS[0])


def test_a_frozen_batch_norm_only_reads() -> None:
    assert two_towers(nn.BatchNorm1d(6).eval())(*ROWS) > 0


# --- a last stage on several ranks ---


class Head(nn.Module):
    """Returns outputs, and a loss with metrics; ``counted``: as a ``Sum``."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted, self.body, self.head = counted, nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        out = self.head(stage_boundary(torch.tanh(self.body(x))))
        wrong = (out - y).square().sum()
        loss: Any = fxpipe.Sum(wrong, y.numel()) if self.counted else wrong / y.numel()
        return {"loss": loss, "wrong": wrong.detach(), "out": out}


def steps_and_outputs(counted: bool, head: Any, microbatches: int) -> list[Any]:
    torch.manual_seed(0)
    topology, placement = Topology([("pipe", 3)]), {"body": (0, 1, 2), "head": head}
    forward_backward = fxpipe.compile(Head(counted), topology, microbatches=microbatches, placement=placement)
    found: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for rows in (12, 5):
        given = {"x": torch.randn(rows, 4, generator=generator), "y": torch.randn(rows, 2, generator=generator)}
        found += [forward_backward(**given), dict(forward_backward.metrics)]
        found += [forward_backward.evaluate(**given, outputs=outputs) for outputs in ("all", "loss", "last")]
    return found


@pytest.mark.parametrize(("counted", "microbatches"), [(False, 2), (True, 4)], ids=["mean", "sum"])
def test_losses_metrics_and_outputs_of_several_ranks_are_those_of_one(counted: bool, microbatches: int) -> None:
    one_each = strict(0)(3, steps_and_outputs, counted, 2, microbatches)
    for number, engine in enumerate((local, strict(1))):
        several = engine(3, steps_and_outputs, counted, (2, 0), microbatches)
        for rank, found in enumerate(several):
            for place, (got, wanted) in enumerate(zip(found, one_each[2], strict=True)):
                if number and place % 5 == 4 and rank == 1:
                    assert got is None  # "last": only the ranks of the last stage
                    continue
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
