"""Regions kept whole: their Python runs in every step, and the model trains as plain PyTorch does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import FxpipeError, PartitionError, RunError, Topology, TraceError
from tests.harness import Run, assert_run, assert_same, compiled, engine_of, reference, trained
from tests.models import WIDTH, Case, linear, vectors


class Selects(nn.Module):
    """Rows that are large by NumPy's word; how many depends on the values. Counts what it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        kept = [place for place, row in enumerate(x.detach().numpy()) if float(numpy.sum(row)) > 0] or [0]
        self.seen += len(kept)
        rows = torch.stack([x[place] for place in kept])
        hidden = checkpoint(self.first, rows, use_reentrant=False)
        if hidden.sum().item() > 0:
            hidden = self.second(hidden)
        return {"rows": hidden * scale, "mask": None, "kept": torch.tensor(kept)}


class Selecting(nn.Module):
    """A region amid the model: what comes out of it has a size of its own each time, here and two stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.region, self.behind, self.head = linear(), Selects(), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.region(self.before(x), scale=2.0)
        rows = found["rows"]
        assert found["mask"] is None
        h = torch.relu(self.behind(rows)) / rows.shape[0]
        return (self.head(h) - y[found["kept"]]).square().mean()


CUTS: Any = {"region": "whole", "reg[i]on": "before", "behind": "before", "head": "before"}
SELECTING = Case(Selecting, vectors)
TRACERS = ["symbolic", "export"]


class Twice(nn.Module):
    """One region that is called twice, and a method of the model that is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.head = Selects(), linear()

    def positions(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.tensor([int(row.sum().item() > 0) for row in x]), None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places, nothing = self.positions(x)
        assert nothing is None
        one, other = self.region(x)["rows"], self.region(y, scale=0.5)["rows"]
        return self.head(one).square().mean() + self.head(other).square().mean() + (places[:, None] * x).mean()


ENGINES = ["local", "strict 1", "distributed"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return engine_of(request.param, lambda: request.getfixturevalue("pool"))


@pytest.mark.parametrize("tracer", TRACERS)
def test_what_a_region_returns_has_another_size_each_time(engine: Any, tracer: str) -> None:
    batches = [SELECTING.batch(number) for number in range(3)]
    wanted, _ = reference(SELECTING, batches)
    sizes = {int(Selects()(batch["x"])["rows"].shape[0]) for batch in batches}
    runs = engine(4, _selecting, tracer)
    assert len(sizes) > 1
    assert_run(runs, wanted)


def _selecting(tracer: str) -> Run:
    batches = [SELECTING.batch(number) for number in range(3)]
    return trained(SELECTING, batches, boundaries=CUTS, tracer=tracer, example_kwargs=batches[0])


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_region_called_twice_and_a_method(tracer: str) -> None:
    case = Case(Twice, vectors, stages=2, ranks=2)
    batches = [case.batch(number) for number in range(2)]
    wanted, _ = reference(case, batches)
    rules = {"region": "whole", "positions": "whole", "head": "before"}
    run = trained(case, batches, boundaries=rules, tracer=tracer, example_kwargs=batches[0])
    assert_run([run], wanted, 1e-6)


@pytest.mark.parametrize("options", [{"schedule": "zb_h1"}, {"recompute": True}, {"zero": 1}])
def test_options_go_with_a_region(options: dict[str, Any]) -> None:
    batches = [SELECTING.batch(number) for number in range(2)]
    wanted, _ = reference(SELECTING, batches)
    run = trained(SELECTING, batches, boundaries=CUTS, tracer="export", example_kwargs=batches[0], **options)
    assert_run([run], wanted)


def test_a_stage_with_a_region_is_not_compiled_and_that_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    batches, compiled_stages = [SELECTING.batch()], []

    def compiler(stage: Any) -> Any:
        compiled_stages.append(stage)
        return stage

    wanted, _ = reference(SELECTING, batches)
    options = {"boundaries": CUTS, "tracer": "symbolic", "example_kwargs": batches[0]}
    assert_run([trained(SELECTING, batches, stage_compiler=compiler, **options)], wanted)
    assert len(compiled_stages) == 3
    assert "'region' holds what is kept whole" in capfd.readouterr().err


class Frozen(nn.Module):
    """What is behind the region asks how many rows there are, and goes another way for many."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.head = Selects(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.region(x)["rows"]
        if rows.shape[0] > 2:
            rows = rows * 2
        return self.head(rows[: rows.shape[0]]).square().mean()


@pytest.mark.parametrize(("tracer", "told"), [("export", "size 0 of tensor 0"), ("record", "was captured with")])
def test_a_size_that_decides_about_code_is_checked_in_each_step(tracer: str, told: str) -> None:
    """Never a result of the other branch."""
    case = Case(Frozen, vectors, stages=2, ranks=2, rows=4, microbatches=1)
    many = {"x": torch.ones(4, WIDTH), "y": torch.zeros(4, WIDTH)}
    few = {"x": -torch.ones(4, WIDTH), "y": torch.zeros(4, WIDTH)}
    rules = {"region": "whole", "head": "before"}
    forward_backward = compiled(case, boundaries=rules, tracer=tracer, example_kwargs=many, check_capture=True)
    model = case.model()
    assert torch.equal(forward_backward(**many), model(**many))
    with pytest.raises(RunError, match=told):
        forward_backward(**few)


class Odd(nn.Module):
    """Does what a region may not, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, linear(), linear()
        self.note = None

    def region(self, x: Tensor) -> Any:
        h = self.inner(x)
        if self.how == "writes":
            x += 1
        if self.how == "object":
            return object()
        if self.how == "sets":
            self.head.note = h.sum().item()
        if self.how == "number":
            return h, float(x.sum())
        if self.how == "marks":
            h = fxpipe.stage_boundary(h)
        if self.how == "read":
            self.note = h.mean()
        return h, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "uncalled":
            return self.head(self.inner(x)).mean()
        h, scale = self.region(x * 1)
        loss = self.head(h * scale).square().mean()
        return loss + self.note if self.how == "read" else loss


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("writes", "writes into a tensor"),
        ("object", "returns a object"),
        ("sets", "sets head.note outside of it"),
        ("marks", "a boundary lies inside of region"),
        ("read", "forward reads .note"),
        ("number", "a tensor in place of a number"),
    ],
)
@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_what_a_region_may_not_do_is_refused(how: str, told: str, tracer: str) -> None:
    case = Case(lambda: Odd(how), vectors, ranks=2, microbatches=2)
    with pytest.raises(FxpipeError, match=told):
        compiled(case, boundaries={"region": "whole", "head": "before"}, tracer=tracer, example_kwargs=case.batch())


@pytest.mark.parametrize(
    ("boundaries", "told"),
    [
        ({"region": "whole", "region.first": "before"}, "inside of 'region'"),
        ({"region": "whole", "region.first": "whole"}, "'region.first' whole inside of 'region'"),
        ({"regiom": "whole"}, 'did you mean "region"'),
        ({"region": {"whole": None, "cut": "after"}}, r'\["whole", "after"\]'),
    ],
)
def test_names_that_cannot_be_whole_are_refused(boundaries: dict[str, Any], told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        compiled(SELECTING, boundaries=boundaries, example_kwargs=SELECTING.batch())


def test_without_a_batch_the_error_asks_for_one() -> None:
    with pytest.raises(TraceError, match=r"region is kept whole, and what it returns is not known.*\n?.*example_args="):
        fxpipe.compile(Selecting(), Topology([("pipe", 4)]), boundaries=CUTS)


def test_a_refusal_names_what_could_be_kept_whole() -> None:
    rules = {"behind": "before", "head": "before"}
    with pytest.raises(TraceError, match=r'boundaries=\{"region": "whole"\}'):
        compiled(replace(SELECTING, ranks=3), boundaries=rules, tracer="export", example_kwargs=SELECTING.batch())


class Odder(nn.Module):
    """Does in some steps, by the values of its input, what it has not done in the example."""

    ema: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.flag = how, linear(), False
        self.register_buffer("ema", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        if x.sum().item() > 0:
            return h.detach() if self.how == "detaches" else h
        if self.how == "writes":
            self.ema.mul_(2)
        if self.how == "assigns":
            self.ema = self.ema * 2
        if self.how == "flags":
            self.flag = True
        return h.double() if self.how == "widens" else h


class AroundIt(nn.Module):
    """Code in another stage reads what the region holds."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.before, self.region, self.head = how, linear(), Odder(how), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.region(x + 0 * self.before(x))
        h = self.head(h.float()) * (self.region.ema if self.how == "writes" else 1)
        return h.square().mean() * (2 if self.how == "flags" and self.region.flag else 1) + y.mean()


POSITIVE = {"x": torch.ones(4, WIDTH), "y": torch.zeros(4, WIDTH)}
NEGATIVE = {"x": -torch.ones(4, WIDTH), "y": torch.zeros(4, WIDTH)}
AROUND = {"region": "whole", "head": "before"}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("writes", "region, which is kept whole, changes region.ema"),
        ("assigns", r"assigns region.ema.*self.ema.copy_"),
        ("flags", "changes region.flag"),
        ("widens", "of torch.float64, but of torch.float32"),
    ],
)
@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_what_it_did_not_do_in_the_example_is_refused_where_others_would_not_see_it(
    how: str, told: str, tracer: str
) -> None:
    case = Case(lambda: AroundIt(how), vectors, ranks=2, microbatches=2)
    forward_backward = compiled(case, boundaries=AROUND, tracer=tracer, example_kwargs=POSITIVE)
    model = case.model()
    assert_same(forward_backward(**POSITIVE), model(**POSITIVE).detach(), "loss", 1e-6)
    if (how, tracer) == ("widens", "symbolic"):  # which follows types
        assert_same(forward_backward(**NEGATIVE), model(**NEGATIVE).detach(), "loss", 1e-6)
        return
    with pytest.raises(RunError, match=told):
        forward_backward(**NEGATIVE)


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_gradient_is_not_lost_where_the_example_needed_none(tracer: str) -> None:
    """Behind a branch on a value; and where what was frozen is trained."""
    case = Case(lambda: AroundIt("detaches"), vectors, stages=2, ranks=2, microbatches=2)
    wanted, _ = reference(case, [POSITIVE, NEGATIVE])
    assert wanted.gradients[0]["region.inner.weight"] is None
    assert wanted.gradients[1]["region.inner.weight"] is not None
    assert_run([trained(case, [POSITIVE, NEGATIVE], boundaries=AROUND, tracer=tracer, example_kwargs=POSITIVE)], wanted)


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_what_was_frozen_may_be_trained_later(tracer: str) -> None:
    model = Case(lambda: AroundIt(""), vectors).model().requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    plain = Case(lambda: AroundIt(""), vectors).model()
    options: Any = {"boundaries": AROUND, "tracer": tracer, "example_kwargs": NEGATIVE, "microbatches": 1}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
    forward_backward(**NEGATIVE)
    forward_backward.zero_grad()
    model.requires_grad_(True)
    forward_backward(**NEGATIVE)
    plain(**NEGATIVE).backward()
    assert_same(
        model.get_parameter("region.inner.weight").grad, plain.get_parameter("region.inner.weight").grad, "", 1e-6
    )


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_an_attribute_of_a_region_that_others_read_may_be_set_between_steps(tracer: str) -> None:
    case = Case(lambda: AroundIt("flags"), vectors, ranks=2, microbatches=1)
    model: Any = case.model()
    options: Any = {"boundaries": AROUND, "tracer": tracer, "example_kwargs": POSITIVE, "microbatches": 1}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
    once = forward_backward(**POSITIVE)
    model.region.flag = True
    assert torch.equal(forward_backward(**POSITIVE), 2 * once)
