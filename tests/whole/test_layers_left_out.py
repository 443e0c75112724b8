"""Kinds of batch that run other parts of the model than the first: layers left out, other depths, other lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import PartitionError
from fxpipe.trace import NEED_SHAPES
from tests.layered import WIDTH, Layer, assert_trains, compiled, vectors
from tests.models import Inputs
from tests.thinned import in_turn

DEPTH = 6


class Deep(nn.Module):
    """Layers that a batch may leave out, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), Layer()) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, keep: tuple[bool, ...] = (True,) * DEPTH) -> Tensor:
        x = self.first(x)
        for layer, kept in zip(self.layers, keep, strict=True):
            if kept:
                x = x + layer(x)
        return F.mse_loss(self.head(x), y)


class Looped(nn.Module):
    """One layer that is run several times, and a head; ``depth`` times in all, or until another layer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.late = Layer(), Layer()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, keep: tuple[bool, ...] = (True,) * DEPTH) -> Tensor:
        for kept in keep:
            x = self.layer(x) * 0.5 if kept else x
        return F.mse_loss(self.head(self.late(x) if keep[0] else x), y)


def keeping(number: int, *left_out: int) -> Inputs:
    return vectors(number) | {"keep": tuple(place not in left_out for place in range(DEPTH))}


LEFT_OUT = [keeping(0), keeping(1, 3), keeping(2, 0, 2, 5), keeping(3, *range(DEPTH)), keeping(4, 3, 4, 5), keeping(5)]


CUT: list[tuple[Callable[[], nn.Module], Any, int | None]] = [
    (Deep, ["layers.3"], 2),
    (Deep, {"layers.*": "before"}, 7),
    (Deep, {"layers.1": "after", "layers.4": "both"}, 4),
    (Looped, ["late"], 2),
    (Deep, "auto", None),
]
"""A model, its cuts, and how many stages they make of it."""


@pytest.mark.parametrize(("model", "tracer"), in_turn(CUT, sorted(NEED_SHAPES)))
def test_layers_that_a_batch_leaves_out(model: Any, tracer: str) -> None:
    make, cuts, stages = model
    assert_trains(make, LEFT_OUT, cuts, stages, tracer=tracer)


def test_a_first_batch_without_them_by_the_default_tracer() -> None:
    assert_trains(Deep, [vectors(0), *LEFT_OUT[1:]], ["layers.3"], 2)


class Borrowed(Deep):
    """Uses the first layer's weight at the end, too, where a batch says so."""

    def forward(self, x: Tensor, y: Tensor, keep: tuple[bool, ...] = (True,)) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(self.head(h if keep[0] else h @ self.first.weight.tanh()), y)


def test_a_parameter_that_a_later_batch_uses_in_another_stage_is_sent_there() -> None:
    batches = [vectors(0), vectors(1) | {"keep": (False,)}, vectors(2)]
    assert_trains(Borrowed, batches, ["layers.3"], 2, 1e-6)


class Decays(Deep):
    """Multiplies by what a parameter alone decides, as often as a batch says, behind a layer that a batch may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, y: Tensor, keep: tuple[bool, ...] = (True,) * DEPTH) -> Tensor:
        x = self.first(x)
        x = self.layers[0](x) if keep[0] else x
        for _ in filter(None, keep):
            x = x * self.decay.neg().exp()
        return F.mse_loss(self.head(x), y)


def test_what_is_computed_of_a_parameter_alone_is_used_where_the_parameter_is() -> None:
    assert_trains(Decays, [vectors(0), keeping(1, 0, 2), vectors(2)], ["layers.0"], 2, 1e-6)


class Repeats(Deep):
    """Each layer adds what a parameter alone decides, repeated for as many rows as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        places = self.places.sin().repeat(x.shape[0], 1)
        for layer in self.layers:
            x = layer(x + places)
        return F.mse_loss(self.head(x), y)


def test_stages_hold_what_a_capture_reads_that_one_with_symbolic_sizes_has_replaced() -> None:
    batches = [vectors(0, rows=9), vectors(1, rows=2), vectors(2, rows=9)]
    assert_trains(Repeats, batches, ["layers.3"], 2, 1e-6, tracer="export")


def test_what_the_first_batch_leaves_out_is_refused_with_what_to_give() -> None:
    forward_backward = compiled(Deep(), keeping(0, 3), ["layers.2"], tracer="export")
    with pytest.raises(PartitionError, match=r"uses layers\.3.* example_args= of the kind that uses most"):
        forward_backward(**keeping(1))
