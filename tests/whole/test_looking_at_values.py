"""Code that looks at values: branches that are certain, methods that are opaque, assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import TraceError, stage_boundary
from tests.harness import accumulate, assert_same, cut, engine_of, gradients_of
from tests.layered import WIDTH, Layer, Layers, assert_trains, compiled, vectors
from tests.models import Inputs
from tests.pool import Pool


class LayerDrop(Layers):
    """As speech models skip layers; ``skips``: whether one is skipped."""

    skips: Callable[[], Any]

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not type(self).skips():
                x = layer(x)
        return x


def dropping(function: Callable[[], Any]) -> type[LayerDrop]:
    return type("LayerDrop", (LayerDrop,), {"skips": staticmethod(function)})


CERTAIN = {
    "rand < 0": lambda: torch.rand([]) < 0.0,
    "rand(1) < 0": lambda: torch.rand(1) < 0,
    "0 > rand": lambda: torch.rand(()) > 1.0,
    "rand >= 1": lambda: torch.rand([]).ge(1),
    "not rand >= 0": lambda: not torch.rand([]) >= 0,
    "rand.lt": lambda: torch.lt(torch.rand([]), -1),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_a_branch_on_a_drawn_number_that_is_certain_is_decided(name: str) -> None:
    assert_trains(dropping(CERTAIN[name]), [vectors(0), vectors(1)], ["layers.1", "layers.3"], 3)


@pytest.mark.parametrize("name", ["rand < 1", "rand <= 1"])
def test_layers_that_are_always_skipped_are_left_out(name: str) -> None:
    def skips() -> Any:
        return torch.rand([]) < 1 if name == "rand < 1" else torch.rand([]) <= 1.0

    class Half(dropping(skips)):  # type: ignore[misc]
        def run(self, x: Tensor) -> Tensor:
            return self.layers[3](super().run(self.layers[0](x)))  # type: ignore[no-any-return]

    assert_trains(Half, [vectors(0), vectors(1)], ["layers.3"], 2)


def written() -> Any:
    drawn = torch.rand([])
    drawn.view(1).sub_(1)
    return drawn < 0


UNCERTAIN = {
    "rand < 0.1": lambda: torch.rand([]) < 0.1,
    "rand <= 0": lambda: torch.rand([]) <= 0,
    "rand > 0": lambda: torch.rand([]) > 0,
    "randn < 0": lambda: torch.randn([]) < 0,
    "written": written,
    "shifted": lambda: torch.rand([]) - 1 < 0,
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_one_that_is_not_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match="looks at the values of a tensor"):
        compiled(dropping(UNCERTAIN[name])(), vectors(0), ["layers.1"])


class Asserting(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._assert((x < 1e6).all(), "too large")
            x = layer(x)
        return x


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_assertions_on_values_between_submodules_are_in_nobodys_way(tracer: str) -> None:
    assert_trains(Asserting, [vectors(0), vectors(1)], ["layers.1", "layers.3"], 3, tracer=tracer)


class Sees(nn.Module):
    """As Idefics 3: pictures that are nothing but padding are dropped, and the others take the places of some rows."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.vision, self.text = Layer(), nn.Sequential(Layer(), Layer(), Layer())
        self.counts, self.seen = counts, 0

    def features(self, pictures: Tensor, scale: float) -> dict[str, Any]:
        if self.counts:
            self.seen = self.seen + 1
        kept = pictures[(pictures != 0).any(-1)]
        return {"all": [self.vision(kept) * scale]}

    def forward(self, x: Tensor, y: Tensor, pictures: Tensor) -> Tensor:
        found = torch.cat(self.features(pictures, scale=0.5)["all"])
        x = x.masked_scatter((pictures != 0).any(-1, keepdim=True), found)
        return F.mse_loss(self.text(x), y)


class Wrapped(nn.Module):
    """A method behind another one of the same name."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Sees(**options)

    def features(self, pictures: Tensor) -> Any:
        return self.model.features(pictures, 1.0)

    def forward(self, x: Tensor, y: Tensor, pictures: Tensor) -> Tensor:
        return self.model(x, y, pictures)  # type: ignore[no-any-return]


def with_pictures(number: int) -> Inputs:
    """Every second picture of batches with odd numbers is padding."""
    pictures = vectors(number + 50)["x"]
    pictures[1 :: 2 if number % 2 else 8] = 0.0
    if number % 2 == 0:
        pictures[1] = 1.0
    return vectors(number) | {"pictures": pictures}


@pytest.mark.parametrize(("make", "prefix"), [(Sees, ""), (Wrapped, "model.")])
def test_a_method_that_looks_at_values_stays_whole_where_cuts_are_elsewhere(make: Any, prefix: str) -> None:
    cuts = [f"{prefix}text.1", f"{prefix}text.2"]
    forward_backward = assert_trains(make, [with_pictures(0), with_pictures(2)], cuts, 3, tracer="record")
    homes = [any("vision" in name for name in stage.tensors) for stage in forward_backward.stages]
    assert homes == [True, False, False]


def picture_losses(engine: str) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
    torch.manual_seed(0)
    forward_backward = compiled(Sees(), with_pictures(0), ["text.1"], tracer="record")
    return [(forward_backward(**with_pictures(2)), gradients_of(forward_backward.named_parameters()))]


def test_it_stays_whole_on_two_processes(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = Sees()
    wanted_loss, _ = accumulate(lambda _, part: plain(**part), cut(with_pictures(2), 2))
    wanted = gradients_of(plain.named_parameters())
    for ((loss, gradients),) in engine_of("distributed", lambda: pool)(2, picture_losses, ""):
        assert_same(loss, wanted_loss, "loss")
        for name, gradient in gradients.items():
            assert_same(gradient, wanted[name], name)


@pytest.mark.parametrize(
    ("make", "cuts", "told"),
    [
        (lambda: Sees(counts=True), ["text.1"], r"Sees\.features sets seen, which would be lost"),
        (Sees, ["text.1", "vision"], "looks at the values of a tensor"),
    ],
)
def test_a_method_that_cannot_stay_whole_is_refused(make: Any, cuts: Any, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        compiled(make(), with_pictures(0), cuts, tracer="record")


class Patched(nn.Module):
    """As torchvision's ViT: each block asserts the dimensions of what it is given."""

    def __init__(self, by_value: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(4))
        self.by_value = by_value

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _, width = x.shape
        torch._assert(width == WIDTH, f"Wrong width! Expected {WIDTH} but got {width}!")
        x = self.first(x)
        for layer in self.layers:
            x = stage_boundary(x)
            torch._assert(x.dim() == 2, f"Expected (rows, width), got {x.shape}")
            if self.by_value:
                torch._assert((x.abs() * 2 < 1e6).all(), "too large")
            x = layer(x)
        return F.mse_loss(x, y)


@pytest.mark.parametrize("by_value", [False, True])
def test_an_assertion_runs_in_its_operands_stage_and_makes_none_of_its_own(by_value: bool) -> None:
    forward_backward = assert_trains(
        lambda: Patched(by_value), [vectors(0), vectors(1)], (), 5, tracer="symbolic", ranks=1
    )
    found = [str(stage.forward).count("torch._assert(") for stage in forward_backward.stages]
    assert found == [1 + by_value] * 4 + [0]


def test_an_assertion_that_does_not_hold_is_raised() -> None:
    forward_backward = compiled(Patched(True), vectors(0), (), tracer="symbolic", ranks=1)
    with pytest.raises(AssertionError, match="too large"):
        forward_backward(**{name: value * 1e7 for name, value in vectors(1).items()})


def test_one_that_looks_at_two_stages_runs_in_the_later() -> None:
    class Two(Layers):
        def run(self, x: Tensor) -> Tensor:
            a = self.layers[0](x)
            b = self.layers[1](stage_boundary(a))
            torch._assert((a + stage_boundary(b)).sum() < 1e6, "too large")
            return self.layers[2](stage_boundary(b))  # type: ignore[no-any-return]

    forward_backward = assert_trains(Two, [vectors(0), vectors(1)], (), 3, tracer="symbolic", ranks=1)
    assert ["torch._assert(" in str(stage.forward) for stage in forward_backward.stages] == [False, True, False]
