"""What no tracer captures is opaque by itself, without a rule: parts, and functions that a property gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError
from tests.harness import accumulate, assert_same, cut, engine_of, gradients_of
from tests.layered import WIDTH, Layer, Layers, assert_trains, compiled, vectors
from tests.models import Inputs

CUTS = ["layers.1", "layers.3"]


class Picking(nn.Module):
    """Returns the rows that its own numbers pick: how many they are shows when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x[[0, *(row for row, total in enumerate(x.sum(1).tolist()) if total > 0)]]


class Picks(Layers):
    """One such part between layers that are cut, ``picking``, and another in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.picking, self.other = Picking(), Picking()

    def run(self, x: Tensor) -> Tensor:
        x = x + self.other(x).sum(0)
        return self.layers(x + self.picking(x).sum(0))  # type: ignore[no-any-return]


class Judged(Layers):
    """As transformers' models have a function for their loss, here one that matches rows on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(classes=2)  # an object, which the function is given

    @property
    def loss_function(self) -> Any:
        return matched

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_function(self.run(x), y, self.config)  # type: ignore[no-any-return]


def matched(x: Tensor, y: Tensor, config: Any) -> Tensor:
    order = sorted(range(len(x)), key=lambda row: float(x[row].sum()))
    return (x[order] - y).square().mean()


def step(make: Any, given: list[Inputs]) -> list[tuple[Tensor, dict[str, Any]]]:
    torch.manual_seed(0)
    fb = compiled(make(), given[0], CUTS)
    found = []
    for one in given[1:]:
        fb.zero_grad()
        found.append((fb(**one), gradients_of(fb.named_parameters())))
    return found


@pytest.mark.parametrize("engine", ["local", "distributed"])
def test_parts_that_pick_rows_are_opaque_by_themselves(engine: str, request: pytest.FixtureRequest) -> None:
    run = engine_of(engine, lambda: request.getfixturevalue("pool"))
    given = [vectors(n) for n in range(4)]
    for found in run(2, step, Picks, given):
        torch.manual_seed(0)
        plain = Picks()
        for one, (loss, gradients) in zip(given[1:], found, strict=True):
            plain.zero_grad()
            wanted, _ = accumulate(lambda _, part, plain=plain: plain(**part), cut(one, 2))  # type: ignore[misc]
            assert_same(loss, wanted, "loss")
            known = gradients_of(plain.named_parameters())
            for name, gradient in gradients.items():
                assert_same(gradient, known[name], name)


def test_stages_say_which_part_why_and_what_share_of_the_cost() -> None:
    forward_backward = assert_trains(Picks, [vectors(0), vectors(1)], CUTS, 3)
    lines = str(forward_backward.stages).splitlines()
    said = [line for line in lines if "is opaque" in line]
    assert [line.split()[0] for line in said] == ["other", "picking"]
    assert all("% of a step's FLOPs: " in line and "(test_auto_opaque.py:" in line for line in said)
    assert "is opaque" in str(
        fxpipe.preview(
            Picks(), fxpipe.Topology([("pipe", 2)]), boundaries=CUTS, microbatches=2, example_kwargs=vectors(0)
        )
    )


def test_the_function_of_a_property_may_be_opaque() -> None:
    forward_backward = assert_trains(Judged, [vectors(0), vectors(1)], CUTS, 3)
    assert "loss_function is opaque" in str(forward_backward.stages)


@pytest.mark.parametrize("rule", [{"loss_function": "whole"}])
def test_it_may_be_named_by_hand(rule: dict[str, str]) -> None:
    assert_trains(Judged, [vectors(0), vectors(1)], {**dict.fromkeys(CUTS, "before"), **rule}, 3, tracer="export")


@pytest.mark.parametrize("options", [{"auto_opaque": False}, {"tracer": "export"}])
def test_it_is_refused_with_the_rule_where_that_is_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r'boundaries=\{"other": "whole"\}'):
        compiled(Picks(), vectors(0), CUTS, **options)


def test_a_part_that_holds_a_cut_is_not_opaque() -> None:
    with pytest.raises(TraceError, match="value"):
        compiled(Picks(), vectors(0), [*CUTS, "other.inner"])


class Mostly(Picks):
    """Of which most of the work cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.other.inner = nn.Sequential(*(Layer() for _ in range(20)))  # type: ignore[assignment]


def test_parts_that_take_most_of_a_step_are_refused_with_what_was_tried() -> None:
    with pytest.raises(TraceError, match=r"with other, picking kept opaque by itself: they take \d\d% of a step"):
        compiled(Mostly(), vectors(0), CUTS)
