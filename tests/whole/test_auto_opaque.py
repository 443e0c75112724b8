"""What no tracer captures is opaque by itself; cuts are searched for around opaque regions, and none inside."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError, PartitionError, Topology, TraceError
from fxpipe.stage.opaque_call import opaque_calls
from tests import models
from tests.harness import (
    Engines,
    Run,
    Steps,
    accumulate,
    assert_run,
    assert_same,
    assert_steps,
    cut,
    gradients_of,
    reference,
    stepped,
    steps_of,
)
from tests.layered import WIDTH, Layer, Layers, assert_trains, compiled, vectors
from tests.models import Case, Inputs, linear
from tests.pool import Pool

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


def step() -> Steps:
    torch.manual_seed(0)
    return steps_of(compiled(Picks(), vectors(0), CUTS), [vectors(n) for n in (1, 2)])


def test_parts_that_pick_rows_are_opaque_by_themselves(pool: Pool) -> None:
    assert_steps(pool.run(step, ranks=2), Picks(), [vectors(n) for n in (1, 2)], 2)


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
    by_hand = {**dict.fromkeys(CUTS, "before"), "loss_function": "whole"}
    assert_trains(Judged, [vectors(0), vectors(1)], by_hand, 3, tracer="export")


@pytest.mark.parametrize("options", [{"tracer": fxpipe.Tracing(opaque=False)}, {"tracer": "export"}])
def test_it_is_refused_with_the_rule_where_that_is_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r'boundaries=\{"other": "whole"\}'):
        compiled(Picks(), vectors(0), CUTS, **options)


def test_a_part_that_holds_a_cut_is_not_opaque() -> None:
    with pytest.raises(TraceError, match="value"):
        compiled(Picks(), vectors(0), [*CUTS, "other.inner"])


class Augments(Layers):
    """Masks by NumPy's draws, in place, in a method, as SpecAugment does; behind it forward asks about an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.ones(WIDTH))

    def masked(self, x: Tensor) -> Tensor:
        if self.training:
            places = np.random.rand(*x.shape) < 0.3
            x[torch.tensor(places)] = self.embed.expand_as(x)[torch.tensor(places)]
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.masked(self.first(x))
        if y.max() > 99:
            raise ValueError("y is too large")
        return F.mse_loss(self.run(x), y)


@pytest.mark.parametrize("options", [{}, {"recompute": True, "schedule": "zb_h1"}])
def test_a_method_that_draws_masks_is_opaque_by_itself_and_is_seeded(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Augments()
    plain, batch = copy.deepcopy(model), vectors(1)
    forward_backward = compiled(model, vectors(0), CUTS, **options)
    assert "masked is opaque" in str(forward_backward.stages)
    for step in range(2):
        plain.zero_grad()
        forward_backward.zero_grad()

        def call(place: int, part: Any, step: int = step) -> Tensor:
            np.random.seed(forward_backward.seed(0, place, step) % 2**32)
            return plain(**part)  # type: ignore[no-any-return]

        assert_same(forward_backward(**batch), accumulate(call, cut(batch, 2))[0], "loss")
        wanted = gradients_of(plain.named_parameters())
        for name, gradient in gradients_of(forward_backward.named_parameters()).items():
            assert_same(gradient, wanted[name], name, 1e-6)


class Mostly(Picks):
    """Of which most of the work cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.other.inner = nn.Sequential(*(Layer() for _ in range(20)))  # type: ignore[assignment]


def test_parts_that_take_most_of_a_step_are_refused_with_what_was_tried() -> None:
    with pytest.raises(TraceError, match=r"with other, picking kept opaque by itself: they take \d\d% of a step"):
        compiled(Mostly(), vectors(0), CUTS)


# --- ``{"*": "auto", name: "whole"}`` ---


class Sorted(nn.Module):
    """Rows that are large by the word of Python, in their order, through two layers; a cut between would be inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        kept = [place for place, row in enumerate(x) if row.sum().item() > 0] or [0]
        kept.sort(key=lambda place: x[place].sum().item())
        return self.second(torch.relu(self.first(torch.stack([x[place] for place in kept]))))


class Counter(nn.Module):
    """Counts its calls, in an attribute that another of its methods reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def counts(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * float(self.calls)

    def reads(self, x: Tensor) -> Tensor:
        return x * float(self.calls)


class Around(nn.Module):
    """A region between layers, and two that share a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())
        self.counter, self.region, self.behind, self.head = Counter(), Sorted(), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.counter.counts(self.before(x))
        rows = torch.tanh(self.behind(self.region(h)))
        return self.head(rows).square().mean() + (self.counter.reads(self.before(x)) - y).square().mean()


RULES: Any = {"*": "auto", "region": "whole", "counter.counts": "whole", "counter.reads": "whole"}


def around() -> Case:
    return Case(Around, models.vectors, ranks=2, microbatches=4)


def _trained(tracer: str, options: dict[str, Any]) -> tuple[Run, list[str]]:
    batches = [around().batch(number) for number in range(2)]
    fb = fxpipe.compile(
        around().model(),
        Topology([("pipe", 2)]),
        microbatches=4,
        boundaries=RULES,
        tracer=tracer,
        example_kwargs=batches[0],
        **options,
    )
    return stepped(fb, around(), batches), [
        str([kept.name for kept in opaque_calls(stage.module)]) for stage in fb.stages
    ]


@pytest.mark.parametrize(
    ("engine", "tracer", "options"),
    [
        ("distributed", "export", {}),
        ("local", "symbolic", {"hardware": fxpipe.Hardware(memory=1e6), "schedule": "zb_h1"}),
    ],
)
def test_cuts_found_around_regions_train_as_plain_pytorch(
    engine: str, tracer: str, options: dict[str, Any], engines: Engines
) -> None:
    wanted, _ = reference(around(), [around().batch(number) for number in range(2)])
    runs = engines(engine)(2, _trained, tracer, options)
    assert_run([run for run, _ in runs], wanted, 1e-6)
    for _, held in runs:  # those that share a counter are in one stage
        assert sum("region" in stage for stage in held) == 1
        assert any("counts" in stage and "reads" in stage for stage in held)


@pytest.mark.parametrize(
    ("boundaries", "told"),
    [
        (
            ["auto", "region"],
            r'"auto" where a submodule is named; write "auto", or.*\{"\*": "auto"',
        ),
        ({"region": "auto"}, "'auto' for 'region'; give"),
        ({"*": "auto", "head": "before"}, '.before. for .head. beside "auto"'),
        ({"*": "auto", "region": ["whole", "after"]}, '.after. for .region. beside "auto"'),
        ({"*": "auto", "region": "whole", "region.first": "whole"}, "inside of 'region'"),
        ([{"region": "whole"}, "auto"], 'which is no name; give .*"auto"'),
    ],
)
def test_wrong_mixes_with_auto_are_refused(boundaries: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        fxpipe.preview(
            around().model(), Topology([("pipe", 2)]), boundaries=boundaries, example_kwargs=around().batch()
        )


def test_auto_beside_a_region_needs_a_batch() -> None:
    with pytest.raises(FxpipeError, match="example_args="):
        fxpipe.preview(around().model(), Topology([("pipe", 2)]), boundaries=RULES)


class Crop(nn.Module):
    """Gives an opaque layer as many rows as the batch says, and asks behind it how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows = torch.cat([x[: count // 2] for count in counts])
        rows = rows + self.inner(rows)
        return rows.mean() if rows.shape[0] > 1 else rows.sum()


class Cropped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.crop = Crop()

    def forward(self, x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        return F.mse_loss(self.run(x * self.crop(x, counts)), y)


def cropped(number: int) -> Inputs:
    return vectors(number) | {"counts": torch.randint(4, 9, (8,), generator=torch.Generator().manual_seed(number))}


def test_a_number_of_rows_in_front_of_an_opaque_part_that_is_compared_behind_it() -> None:
    cuts: Any = {"crop.inner": "whole", "layers.1": "before"}
    assert_trains(Cropped, [cropped(0), cropped(1)], cuts, tracer="auto")
