"""``{"*": "auto", name: "whole"}``: cuts are searched for around regions, none inside, and the table found runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import FxpipeError, PartitionError, Topology
from fxpipe.graph.opaque_call import opaque_calls
from tests.harness import Run, assert_run, compiled, engine_of, reference, stepped
from tests.models import WIDTH, Case, linear, vectors
from tests.thinned import every

TRACERS = ["symbolic", "export", "record"]


class Picks(nn.Module):
    """Rows that are large by the word of Python, in their order, through two layers; a cut between would be inside."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.first, self.second, self.least = linear(), linear(), least

    def forward(self, x: Tensor) -> Tensor:
        kept = [place for place, row in enumerate(x) if row.sum().item() > self.least] or [0]
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

    def __init__(self, least: float) -> None:
        super().__init__()
        self.before = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())
        self.counter, self.region, self.behind, self.head = Counter(), Picks(least), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.counter.counts(self.before(x))
        rows = torch.tanh(self.behind(self.region(h)))
        return self.head(rows).square().mean() + (self.counter.reads(self.before(x)) - y).square().mean()


RULES: Any = {"*": "auto", "region": "whole", "counter.counts": "whole", "counter.reads": "whole"}


def case(tracer: str = "export") -> Case:
    """With "record" as many rows each time, for which alone it holds."""
    return Case(lambda: Around(-1e9 if tracer == "record" else 0.0), vectors, ranks=2, microbatches=4)


def _trained(tracer: str, options: dict[str, Any]) -> tuple[Run, list[str]]:
    batches = [case().batch(number) for number in range(2)]
    fb = compiled(case(tracer), boundaries=RULES, tracer=tracer, example_kwargs=batches[0], **options)
    return stepped(fb, case(), batches), [
        str([kept.name for kept in opaque_calls(stage.module)]) for stage in fb.stages
    ]


@pytest.mark.parametrize(
    ("engine", "tracer", "options"),
    every(
        2,
        [
            ("distributed", "export", {}),
            *(("local", tracer, {}) for tracer in TRACERS),
            ("strict 1", "symbolic", {"memory_per_rank": 1e6, "schedule": "zb_h1"}),
        ],
    ),
)
def test_cuts_found_around_regions_train_as_plain_pytorch(
    engine: str, tracer: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    wanted, _ = reference(case(tracer), [case().batch(number) for number in range(2)])
    runs = engine_of(engine, lambda: request.getfixturevalue("pool"))(2, _trained, tracer, options)
    assert_run([run for run, _ in runs], wanted, 1e-6)
    for _, held in runs:  # those that share a counter are in one stage
        assert sum("region" in stage for stage in held) == 1
        assert any("counts" in stage and "reads" in stage for stage in held)


class Uneven(nn.Module):
    """Two layers, a method with the parameters of three, which looks at numbers, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region = nn.Sequential(linear(), linear()), nn.ModuleList([linear() for _ in range(3)])
        self.behind = nn.Sequential(linear(), linear())

    def look(self, x: Tensor) -> Tensor:
        x = x * (x.sum() > -1e9).item()
        for layer in self.region:
            x = layer(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.behind(self.look(self.before(x))) - y).square().mean()


@pytest.mark.parametrize("returns", [None, torch.empty(4, WIDTH, device="meta")])
def test_a_region_that_looks_at_numbers_counts_by_its_parameters_and_that_is_told(returns: Tensor | None) -> None:
    """Its layers on 4 rows of shapes are one product of each of the parameters with each row: 2 × 4 × 3 × (w² + w)."""
    with torch.device("meta" if returns is not None else "cpu"):
        model = Uneven()
    rule: Any = "whole" if returns is None else {"whole": returns}
    options: Any = {
        "microbatches": 4,
        "hardware": "h100",
        "example_kwargs": case().batch(rows=16),
        "boundaries": {"*": "auto", "look": rule},
    }
    told = fxpipe.preview(model, Topology([("pipe", 2)]), **options)
    assert "look: opaque, and cannot run without numbers; reckoned as one product" in str(told)
    products = 2 * 4 * (4 * WIDTH**2 + 3 * (WIDTH**2 + WIDTH))  # the first layer's input needs no gradient
    assert told.flops == 4 * (3 * products - 2 * 4 * WIDTH**2)
    assert sum(any(name.startswith("region.") for name in stage.parameters) for stage in told.graph) == 1
    held = sum(p.numel() for stage in told.graph for p in stage.parameters.values())
    assert held == 7 * (WIDTH**2 + WIDTH)


def test_what_is_found_fits_the_memory_with_the_regions_parameters() -> None:
    options: Any = {
        "microbatches": 4,
        "example_kwargs": case().batch(rows=16),
        "boundaries": {"*": "auto", "look": "whole"},
    }
    layer = 16 * (WIDTH**2 + WIDTH)
    most = max(rank.total for rank in fxpipe.preview(Uneven(), Topology([("pipe", 2)]), **options).ranks)
    fxpipe.preview(Uneven(), Topology([("pipe", 2)]), memory_per_rank=most, **options)
    with pytest.raises(PartitionError, match="no balance fits"):
        fxpipe.preview(Uneven(), Topology([("pipe", 2)]), memory_per_rank=3 * layer, **options)


@pytest.mark.parametrize("boundaries", [lambda modules: "auto", lambda modules: RULES])
def test_a_function_may_leave_the_cuts_to_the_search(boundaries: Any) -> None:
    model = nn.Sequential(*(linear() for _ in range(4))) if boundaries({}) == "auto" else case().model()
    batch: Any = (
        {"example_args": (torch.randn(8, WIDTH),)} if boundaries({}) == "auto" else {"example_kwargs": case().batch()}
    )
    loss_fn = (lambda y, target: y.mean() + 0 * target) if boundaries({}) == "auto" else None
    if loss_fn is not None:
        batch["example_kwargs"] = {"target": torch.zeros(8, 1)}
    assert (
        len(fxpipe.preview(model, Topology([("pipe", 2)]), boundaries=boundaries, loss_fn=loss_fn, **batch).graph) > 1
    )


@pytest.mark.parametrize(
    ("boundaries", "told"),
    [
        (
            ["auto", "region"],
            r'"auto" where a submodule is named; write "auto", or.*\{"\*": "auto", "model.visual": "whole"',
        ),
        ({"auto": "whole"}, '"auto" where a submodule is named'),
        ({"region": "auto"}, "\"auto\" for 'region'; it is for all of the model"),
        ({"*": "auto", "head": "before"}, '.before. for .head. beside "auto"'),
        ({"*": ["auto", "before"]}, ".before. for"),
        ({"*": "auto", "region": ["whole", "after"]}, '.after. for .region. beside "auto"'),
        ({"*": "auto", "region": "whole", "region.first": "whole"}, "inside of 'region'"),
        ({"*": "auto", "regiom": "whole"}, 'did you mean "region"'),
        ([{"region": "whole"}, "auto"], 'which is no name; give .*"auto"'),
    ],
)
def test_wrong_mixes_with_auto_are_refused(boundaries: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        fxpipe.preview(case().model(), Topology([("pipe", 2)]), boundaries=boundaries, example_kwargs=case().batch())


def test_auto_beside_a_region_needs_a_batch() -> None:
    with pytest.raises(FxpipeError, match="example_args="):
        fxpipe.preview(case().model(), Topology([("pipe", 2)]), boundaries=RULES)
