"""Opaque regions: their Python runs in every step, and the model trains as plain PyTorch does."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import FxpipeError, PartitionError, RunError, Topology, TraceError
from tests.harness import Run, accumulate, assert_run, assert_same, compiled, engine_of, reference, strict, trained
from tests.models import WIDTH, Case, linear, vectors
from tests.thinned import in_turn


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
    assert "'region' holds an opaque region" in capfd.readouterr().err


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


@pytest.mark.parametrize(
    ("tracer", "told"), [("export", "size 0 of tensor 0"), ("record", "region, an opaque region.*was captured with")]
)
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
        ({"region.forward": ["whole", "after"]}, "'region.forward', a method, which may be whole, but is not cut"),
        ({"region.forward": "before"}, "'region.forward', a method, which may be whole, but is not cut"),
    ],
)
def test_names_that_cannot_be_whole_are_refused(boundaries: dict[str, Any], told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        compiled(SELECTING, boundaries=boundaries, example_kwargs=SELECTING.batch())


WRONG: list[tuple[Any, Any, str]] = [
    (Selecting, {"region": "whole", "region.*": "before"}, "cuts 'region.first', which is inside of 'region'"),
    (Selecting, {"region": "whole", "region.*": "whole"}, "keeps 'region.first' whole inside of 'region'"),
    (Selecting, {"": "whole"}, "names '', the model itself"),
    (Selecting, {"forward": "whole"}, "pipe ranks"),
    (Selecting, {"regiom": "whole"}, 'did you mean "region"'),
    (Selecting, {"reg*m": "whole"}, "matches no submodule"),
    (
        lambda: Odd("uncalled"),
        {"region": "whole", "head": "before"},
        "keeps region whole, which Odd.forward never calls",
    ),
    (lambda: Odd("marks"), {"region": "whole", "head": "before"}, "a boundary lies inside of region"),
]


def _told_wrong() -> list[str]:
    """What compile says of each, on the engine that this process belongs to."""
    told = []
    for build, boundaries, _ in WRONG:
        with pytest.raises(FxpipeError) as refused:
            compiled(Case(build, vectors, ranks=2), boundaries=boundaries, example_kwargs=SELECTING.batch())
        told.append(str(refused.value))
    return told


@pytest.mark.parametrize("name", ["local", "distributed"])
def test_regions_that_cannot_be_are_told_before_anything_runs(name: str, request: pytest.FixtureRequest) -> None:
    """On two processes, too, where nobody waits for another."""
    for told in engine_of(name, lambda: request.getfixturevalue("pool"))(2, _told_wrong):
        for text, (_, _, fact) in zip(told, WRONG, strict=True):
            assert fact in text


class Judges(nn.Module):
    """A loss in training; in evaluation what a region makes of the prediction, as a detector's boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(), linear()

    def boxes(self, x: Tensor) -> list[dict[str, Tensor]]:
        return [{"box": row * (2 if row.sum().item() > 0 else 3)} for row in x.unbind()]

    def forward(self, x: Tensor, y: Tensor) -> Any:
        found = self.head(torch.relu(self.inner(x)))
        return (found - y).square().mean() if self.training else self.boxes(found)


@pytest.mark.parametrize("name", ["local", "distributed"])
def test_a_region_may_be_called_in_evaluation_alone(name: str, request: pytest.FixtureRequest) -> None:
    model, batch = JUDGES.model().eval(), JUDGES.batch()
    wanted = model(**batch)
    for found in engine_of(name, lambda: request.getfixturevalue("pool"))(2, _judged):
        if found is not None:  # the ranks of the last stage
            for got, one in zip(found, wanted, strict=True):
                assert_same(got["box"], one["box"], "box", 1e-6)


JUDGES = Case(Judges, vectors, stages=2, ranks=2, microbatches=2)


def _judged() -> Any:
    forward_backward = compiled(JUDGES, boundaries={"boxes": "whole", "head": "before"}, example_kwargs=JUDGES.batch())
    forward_backward(**JUDGES.batch())
    return forward_backward.evaluate(**JUDGES.batch())


def test_without_a_batch_the_error_asks_for_one() -> None:
    with pytest.raises(TraceError, match=r"region is opaque, and what it returns is not known.*\n?.*example_args="):
        fxpipe.compile(Selecting(), Topology([("pipe", 4)]), boundaries=CUTS)


def test_a_refusal_names_what_could_be_opaque() -> None:
    rules = {"behind": "before", "head": "before"}
    with pytest.raises(TraceError, match=r'boundaries=\{"region": "whole"\}'):
        compiled(replace(SELECTING, ranks=3), boundaries=rules, tracer="export", example_kwargs=SELECTING.batch())


class Looks(nn.Module):
    """One of several: looks at numbers, in code of its own, on which a function of nobody's is called, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[[place for place, row in enumerate(x) if numpy.float32(row.sum().item()) > -1e9]])


class Looking(nn.Module):
    """Two that look at numbers, and a method that does; a cut between the one and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Looks(), Looks()]), linear()

    def factor(self, y: Tensor) -> Tensor:
        return y * (2.0 if y.tolist()[0][0] > 0 else 3.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - self.factor(y)).square().mean()


def test_what_refusals_say_to_keep_whole_leads_to_a_model_that_trains() -> None:
    case = Case(Looking, vectors, stages=2, ranks=2, microbatches=2)
    rules: dict[str, Any] = {"head": "before"}
    for _ in range(2):
        with pytest.raises(TraceError) as refused:
            compiled(case, boundaries=rules, tracer="export", example_kwargs=case.batch())
        (told,) = re.findall(r'boundaries=\{"([\w.*]+)": "whole"\}', str(refused.value))
        rules[told] = "whole"
    assert rules.keys() == {"head", "blocks.*", "factor"}
    wanted, _ = reference(case, [case.batch()])
    run = trained(case, [case.batch()], boundaries=rules, tracer="export", example_kwargs=case.batch())
    assert_run([run], wanted, 1e-6)


def test_a_refusal_of_what_is_cut_keeps_the_cut() -> None:
    with pytest.raises(TraceError, match=r'boundaries=\{"region": \["whole", "before"\]\}'):
        compiled(replace(SELECTING, ranks=2), boundaries=["region"], tracer="export", example_kwargs=SELECTING.batch())


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
        ("writes", "region, an opaque region, changes region.ema"),
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


class Counting(nn.Module):
    """Counts its calls, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = linear(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * min(self.calls, 2)


class Counted(nn.Module):
    """Its counter is set in one region, and set again or read in another one, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.region, self.other, self.head, self.how = Counting(), linear(), linear(), how

    def reader(self, x: Tensor) -> Tensor:
        return x * float(self.region.calls)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.other(self.region(x))
        h = self.region(h) if self.how == "twice" else self.reader(h)
        return self.head(h).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
@pytest.mark.parametrize(("how", "second"), [("twice", "region"), ("read", "reader")])
def test_an_attribute_of_regions_in_two_stages_is_refused(tracer: str, how: str, second: str) -> None:
    """Each rank would count by itself: a silent difference from one process."""
    case = Case(lambda: Counted(how), vectors, stages=2, ranks=2)
    batches = [case.batch(number) for number in range(2)]
    rules = {"region": "whole", "reader": "whole"} if how == "read" else {"region": "whole"}
    told = f"region.calls, an attribute .* by region in stage .* and by {second} in stage"
    with pytest.raises(PartitionError, match=told):
        compiled(case, boundaries=rules | {"other": "before"}, tracer=tracer, example_kwargs=batches[0])


@pytest.mark.parametrize("how", ["twice", "read"])
def test_an_attribute_of_regions_in_one_stage_is_as_in_plain_pytorch(how: str) -> None:
    case = Case(lambda: Counted(how), vectors, stages=2, ranks=2)
    batches = [case.batch(number) for number in range(2)]
    rules = {"region": "whole", "reader": "whole"} if how == "read" else {"region": "whole"}
    wanted, _ = reference(case, batches)
    run = trained(case, batches, boundaries=rules | {"head": "before"}, tracer="export", example_kwargs=batches[0])
    assert_run([run], wanted, 1e-6)


class Keeps(nn.Module):
    """Keeps something between its calls, of the kind ``how``; only for negative rows, if it keeps ``late``."""

    last: Tensor

    def __init__(self, how: str, late: bool) -> None:
        super().__init__()
        self.how, self.late, self.inner = how, late, linear()
        self.kept: Any = {"number": 0, "list": {"seen": []}, "tensor": torch.zeros(WIDTH), "array": numpy.zeros(1)}.get(
            how
        )
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        factor = {"number": lambda: self.kept, "list": lambda: len(self.kept["seen"]), "array": lambda: self.kept[0]}
        h: Tensor = self.inner(x) * (1 + float(factor.get(self.how, float)()))
        h = h + self.last + (self.kept if self.how == "tensor" else 0)
        if not self.late or x.sum().item() < 0:
            self._keep(h.detach().mean(0))
        return h

    def _keep(self, mean: Tensor) -> None:
        if self.how == "number":
            self.kept += 1
        elif self.how == "list":
            self.kept["seen"].append(1)
        elif self.how == "array":
            self.kept[0] += 1
        elif self.how == "tensor":
            self.kept.add_(mean)
        elif self.how == "buffer":
            self.last = mean
        else:
            self.inner.weight.data = self.inner.weight.data.clamp(-0.1, 0.1)


class KeptBetween(nn.Module):
    """A region that keeps something is called twice: with rows of the first, and of the second input."""

    def __init__(self, how: str, late: bool = True) -> None:
        super().__init__()
        self.region, self.other, self.head = Keeps(how, late), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.region(x)
        return self.head(self.region(y + self.other(h).abs() * y)).square().mean()


KEPT = ["number", "list", "tensor", "array", "buffer", ".data"]
BEFORE_AND_AFTER: Any = ({"x": torch.ones(4, WIDTH), "y": torch.ones(4, WIDTH)}, NEGATIVE)


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_what_a_region_keeps_later_between_calls_in_two_stages_is_refused(how: str, tracer: str) -> None:
    """Each rank would keep its own: a silent difference from one process."""
    case = Case(lambda: KeptBetween(how), vectors, ranks=2, microbatches=2)
    rules = {"region": "whole", "other": "before"}
    forward_backward = compiled(case, boundaries=rules, tracer=tracer, example_kwargs=BEFORE_AND_AFTER[0])
    assert len({stage.name for stage in forward_backward.stages if "region.inner.weight" in stage.tensors}) == 2
    forward_backward(**BEFORE_AND_AFTER[0])
    place = {"buffer": "region.last", ".data": "region.inner.weight"}.get(how, "region.kept")
    with pytest.raises(RunError, match=f"region, an opaque region, changes {place}"):
        forward_backward(**NEGATIVE)


@pytest.mark.parametrize("how", [how for how in KEPT if how != "array"])  # arrays are not put back behind the check
@pytest.mark.parametrize("late", [True, False])
def test_what_a_region_keeps_between_calls_in_one_stage_is_as_in_plain_pytorch(how: str, late: bool) -> None:
    case = Case(lambda: KeptBetween(how, late), vectors, stages=2, ranks=2, microbatches=2, tolerance=1e-6)
    wanted, _ = reference(case, BEFORE_AND_AFTER)
    options: Any = {"boundaries": AROUND, "tracer": "export", "example_kwargs": BEFORE_AND_AFTER[0]}
    assert_run([trained(case, BEFORE_AND_AFTER, **options)], wanted)


class Makes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.head = what, linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.region(x)).square().mean()

    def region(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = linear() if self.what == "submodule" else nn.Parameter(torch.ones(WIDTH, WIDTH))
        return self.made(x) if isinstance(self.made, nn.Module) else x @ self.made


@pytest.mark.parametrize("what", ["submodule", "parameter"])
def test_a_region_that_makes_its_parameters_when_it_runs_is_refused(what: str) -> None:
    case = Case(lambda: Makes(what), vectors, ranks=2, microbatches=1)
    with pytest.raises(TraceError, match=f"region, an opaque region, makes or replaces a {what} when it runs"):
        compiled(case, boundaries={"region": "whole", "head": "before"}, example_kwargs=POSITIVE)


class Switches(nn.Module):
    """Its normalisation goes by other numbers for negative rows: those of a micro-batch behind would be used in B."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = linear(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm.train(x.sum().item() > 0)(self.inner(x))
        return h


@pytest.mark.parametrize(("example", "error"), [(POSITIVE, RunError), (NEGATIVE, TraceError)])
def test_a_region_that_switches_between_training_and_evaluation_is_refused(example: Any, error: Any) -> None:
    case = Case(lambda: nn.Sequential(Switches(), linear()), vectors, ranks=2, microbatches=2)
    options: Any = {"boundaries": {"0": "whole", "1": "before"}, "loss_fn": lambda out, target: (out - target).mean()}

    def train() -> None:
        forward_backward = compiled(
            case, **options, example_args=(example["x"],), example_kwargs={"target": example["y"]}
        )
        forward_backward(NEGATIVE["x"], target=NEGATIVE["y"])

    with pytest.raises(error, match=r"0, an opaque region, switches 0\.norm between training and evaluation"):
        train()


def test_a_function_set_on_one_module_in_place_of_its_method_is_refused() -> None:
    """It would run in place of the method, and no region would be opaque."""

    def build() -> nn.Module:
        model = Picks()
        model.features = lambda x: model.image(x)  # type: ignore[method-assign]
        return model

    case = Case(build, vectors, ranks=2, microbatches=1)
    with pytest.raises(PartitionError, match="'features' whole, which was set as an attribute of this Picks"):
        compiled(case, boundaries={"features": "whole"}, example_kwargs=POSITIVE)


class Splits(nn.Module):
    """As Qwen2-VL: a tensor for each image, of which a grid of three columns has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.see, self.head = nn.Embedding(9, WIDTH), nn.Linear(8, WIDTH), linear()

    def features(self, pixels: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.see(pixels).split(grid.prod(1).tolist()))

    def forward(self, words: Tensor, pixels: Tensor, grid: Tensor, images: Tensor) -> Tensor:
        seen = torch.stack([image.mean(0) for image in self.features(pixels, grid)]).mean(0)
        return self.head(self.embed(words) + seen).square().mean()


def images_and_words(counts: Any, length: int) -> dict[str, Tensor]:
    """Two rows of words for each count, which is how many images the first has, of four patches each."""
    generator = torch.Generator().manual_seed(length)
    return {
        "words": torch.randint(9, (2 * len(counts), length), generator=generator),
        "pixels": torch.randn(4 * sum(counts), 8, generator=generator),
        "grid": torch.tensor([[1, 2, 2]]).repeat(sum(counts), 1),
        "images": torch.tensor([number for count in counts for number in (count, 0)]),
    }


def test_as_many_tensors_as_images_are_guessed_from_the_likest_micro_batch_seen() -> None:
    """Three images and three columns: the last one seen does not tell which of them a list of three goes with."""
    case = Case(Splits, vectors, stages=2, ranks=2, microbatches=3)
    example = images_and_words((1, 2, 3), WIDTH)  # as many words as a layer is wide
    rules = {"grid": fxpipe.Packed("images"), "pixels": fxpipe.Packed(lambda grid: grid.prod(1), of="grid")}
    forward_backward = compiled(
        case,
        boundaries={"features": "whole", "head": "before"},
        tracer="export",
        batch_dim=rules,
        example_kwargs=example,
    )
    model = case.model()
    for length in (4, 5):
        parts = [images_and_words((count,), length) for count in (4, 1, 3)]
        loss = forward_backward.step_microbatches([((), part) for part in parts])
        wanted = sum(model(**part).detach() / 3 for part in parts)
        assert torch.allclose(loss, wanted, rtol=1e-6)


class Scaled(nn.Module):
    """A region, by its ``.item()``; each has a factor of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = linear(), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.factor if x.sum().item() > -1e9 else 1.0)


class Namesakes(nn.Module):
    """Two regions whose names differ by a dot, and a third one whose name ends as that of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleDict({"proj": Scaled(2.0), "proj_0": Scaled(3.0)})
        self.enc_proj, self.head = Scaled(5.0), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.enc["proj"](x) + self.enc_proj(2 * x) + self.enc["proj_0"](x) + self.enc["proj"](3 * x)
        return (self.head(h) - y).square().mean()


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_regions_whose_names_differ_by_a_dot_are_two(tracer: str) -> None:
    case = Case(Namesakes, vectors, stages=2, ranks=2, microbatches=2, tolerance=1e-6)
    rules = {"enc.*": "whole", "enc_proj": "whole", "head": "before"}
    wanted, _ = reference(case, [case.batch()])
    assert_run(
        [
            trained(
                case, [case.batch()], boundaries=rules, tracer=tracer, example_kwargs=case.batch(), check_capture=True
            )
        ],
        wanted,
    )


class Counts(nn.Module):
    """Asks of the region's rows what is another thing where there are none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.region, self.head = how, Positive(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.region(x)
        many = max(rows.shape[0], 1) if self.how == "at least 1" else float(rows.shape[0])
        return self.head(rows).square().sum() / (many + (self.how != "at least 1")) + y.mean()


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x[[place for place, row in enumerate(x) if row.sum().item() > 0]])
        return h


@pytest.mark.parametrize("how", ["at least 1", "float"])
@pytest.mark.parametrize("examples", [(POSITIVE, NEGATIVE), (NEGATIVE, POSITIVE)])
def test_no_rows_at_all_are_not_taken_for_some(how: str, examples: tuple[Any, Any]) -> None:
    """Right, or an error: never what other sizes give."""
    case = Case(lambda: Counts(how), vectors, ranks=2, microbatches=1)
    options: Any = {"boundaries": {"region": "whole", "head": "before"}, "example_kwargs": examples[0]}
    forward_backward, model = compiled(case, tracer="export", **options), case.model()
    for batch in examples:
        try:
            loss = forward_backward(**batch)
        except RunError as error:
            assert "size 0 of tensor 0" in str(error)  # noqa: PT017
            assert batch is not examples[0]
            continue
        assert_same(loss, model(**batch).detach(), "loss", 1e-6)


def test_what_a_region_returns_is_seen_without_the_check_too() -> None:
    case = Case(lambda: AroundIt(""), vectors, ranks=2, microbatches=1)
    options: Any = {"boundaries": AROUND, "example_kwargs": POSITIVE, "check_capture": False}
    forward_backward = compiled(case, tracer="export", **options)
    assert "not checked: check_capture=False" in str(forward_backward.stages)
    assert_same(forward_backward(**NEGATIVE), case.model()(**NEGATIVE).detach(), "loss", 1e-6)


class Otherwise(nn.Module):
    """Returns, for other values, a tensor that is unlike in ``what``."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.inner = what, linear()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        if x.sum().item() > 0:
            return h
        if self.what == "layout":
            return h.t().contiguous().t()
        return torch.stack([h, 2 * h], 1) if self.what == "dims" else h.detach()


class Asks(nn.Module):
    """Code behind a region does another thing by what that one returns, if it is to ``ask``."""

    def __init__(self, what: str, ask: bool) -> None:
        super().__init__()
        self.what, self.ask, self.region, self.before, self.head = what, ask, Otherwise(what), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.region(x)
        if self.ask:
            asked = {"dims": h.dim() == 3, "gradient": not (h + 1).requires_grad, "layout": not h.is_contiguous()}
            h = 5 * h if asked[self.what] else h
        h = h.sum(tuple(range(h.dim()))[1:-1]) if self.what == "dims" else h
        return (self.head(self.before(x) + h) - y).square().mean()


@pytest.mark.parametrize(
    ("what", "told"),
    [("dims", "shape"), ("gradient", r"needs a gradient.*\n.*test_opaque"), ("layout", "how it lies in mem")],
)
@pytest.mark.parametrize("tracer", ["export", "record"])
def test_what_code_behind_a_region_asks_of_its_tensors_stays_so(what: str, told: str, tracer: str) -> None:
    case = Case(lambda: Asks(what, True), vectors, stages=2, ranks=2, microbatches=2)
    forward_backward = compiled(case, boundaries=AROUND, tracer=tracer, example_kwargs=POSITIVE)
    forward_backward(**POSITIVE)
    with pytest.raises(RunError, match=told):
        forward_backward(**NEGATIVE)


@pytest.mark.parametrize("what", ["gradient", "layout"])
@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_what_nobody_asks_may_be_otherwise_each_time(what: str, tracer: str) -> None:
    case = Case(lambda: Asks(what, False), vectors, stages=2, ranks=2, microbatches=2, tolerance=1e-6)
    batches = [POSITIVE, {name: torch.cat([NEGATIVE[name][:2], POSITIVE[name][:2]]) for name in POSITIVE}]
    wanted, _ = reference(case, batches)
    assert_run([trained(case, batches, boundaries=AROUND, tracer=tracer, example_kwargs=POSITIVE)], wanted)


class Picks(nn.Module):
    """A method that calls another submodule for other values."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.image, self.video, self.head = linear(), linear(), linear(), linear()

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.image(x) if x.sum().item() > 0 else self.video(x)
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.before(x))
        return (self.head(h + self.features(x)) - y).square().mean()


@pytest.mark.parametrize("returns", [None, torch.empty(2, WIDTH, device="meta")])
@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_method_has_what_no_other_stage_uses(returns: Tensor | None, tracer: str) -> None:
    """On its rank alone: what the example did not call would be on the meta device there."""
    case = Case(Picks, vectors, stages=2, ranks=2, microbatches=2, tolerance=1e-6)
    rules: Any = {"features": "whole" if returns is None else {"whole": returns}}
    options: Any = {"boundaries": rules, "tracer": tracer, "example_kwargs": POSITIVE}
    stages = list(compiled(case, **options).stages)
    assert {"image.weight", "video.weight", "head.weight"} <= set(stages[1].tensors)
    assert set(stages[0].tensors) == {"before.weight", "before.bias"}
    wanted, _ = reference(case, [POSITIVE, NEGATIVE])
    assert_run([trained(case, [POSITIVE, NEGATIVE], **options)], wanted)


class PicksTwice(Picks):
    """The method is called in two stages, and the first uses for some values what the second was seen to."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.features(self.before(x)))
        return (self.head(self.features(h - 9)) - y).square().mean()


def test_a_method_has_in_each_stage_what_it_was_seen_to_use_in_any() -> None:
    case = Case(PicksTwice, vectors, stages=2, ranks=2, microbatches=2, tolerance=1e-6)
    model: Any = case.model()
    order = [{"x": sign * torch.ones(4, WIDTH), "y": torch.zeros(4, WIDTH)} for sign in (1.0, -1.0)]
    order.sort(key=lambda batch: -model.before(batch["x"]).sum().item())
    assert model.before(order[1]["x"]).sum() < 0 < model.before(order[0]["x"]).sum()
    wanted, _ = reference(case, order)
    assert_run(strict(1)(2, _sometimes, case, order, {"features": "whole"}, "export"), wanted)


class Auxiliary(nn.Module):
    """Returns a loss of its own in training, and None in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.inner(x) if x.sum().item() > -1e9 else x
        return h, h.mean() if self.training else None


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region, self.head = Auxiliary(), linear()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h, loss = self.region(x)
        out = self.head(h)
        error = (out - y).square().mean()
        return {"loss": error if loss is None else error + loss, "out": out}


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_region_may_return_another_thing_in_evaluation(tracer: str) -> None:
    case = Case(WithAuxiliary, vectors, stages=2, ranks=2, rows=8, microbatches=2, tolerance=1e-6)
    model, batch = case.model(), case.batch()
    forward_backward = compiled(case, boundaries=AROUND, tracer=tracer, example_kwargs=batch)
    forward_backward(**batch)
    assert_same(forward_backward.evaluate(**batch)["out"], model.eval()(**batch)["out"].detach(), "out", 1e-6)
    forward_backward(**batch)


class Sometimes(nn.Module):
    """As a text model that sees images: zeros, which need no gradient, where there is nothing to see."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.before, self.see, self.behind, self.head = linear(), linear(), linear(), linear()
        self.see.requires_grad_(not frozen)

    def region(self, x: Tensor) -> Tensor:
        return self.see(x) if float(x.sum()) > 0 else torch.zeros(x.shape)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.region(x)
        return self.head(self.behind(seen + self.before(y))).square().mean()


SOMETIMES: Any = {"region": "whole", "before": "after", "behind": "before", "head": "before"}
NOTHING, SEEN = ({"x": torch.full((4, WIDTH), number), "y": torch.ones(4, WIDTH)} for number in (-1.0, 1.0))


@pytest.mark.parametrize(("tracer", "engine"), in_turn(["symbolic", "export", "record"], ["local", "strict 1"]))
@pytest.mark.parametrize("order", [(NOTHING, SEEN), (SEEN, NOTHING)], ids=["nothing first", "images first"])
def test_what_a_region_returns_needs_a_gradient_in_some_steps_only(order: Any, tracer: str, engine: str) -> None:
    case = Case(Sometimes, vectors, stages=4, ranks=4, rows=4, microbatches=2)
    wanted, _ = reference(case, order)
    runs = engine_of(engine, lambda: None)(4, _sometimes, case, order, SOMETIMES, tracer)  # type: ignore[arg-type, return-value]
    assert_run(runs, wanted)


def _sometimes(case: Case, order: Any, boundaries: Any, tracer: str) -> Run:
    return trained(case, order, boundaries=boundaries, tracer=tracer, example_kwargs=order[0])


class Borrows(Sometimes):
    """Uses for some values what another stage uses, too."""

    def region(self, x: Tensor) -> Tensor:
        return self.before(x) if float(x.sum()) > 0 else torch.zeros(x.shape)


def test_what_a_method_uses_for_some_values_and_another_stage_has_is_named() -> None:
    case = Case(Borrows, vectors, stages=4, ranks=4, rows=4, microbatches=2)
    with pytest.raises(RunError, match=r"before.weight is held by pipe rank 0"):
        strict(1)(4, _sometimes, case, (NOTHING, SEEN), SOMETIMES, "export")


# --- on the meta device


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


TWO_IMAGES = (torch.empty(4, WIDTH, device="meta"),) * 2
SPLITS: Any = {"features": {"whole": TWO_IMAGES}, "head": "before"}
OF_IMAGES = {"grid": fxpipe.Packed("images"), "pixels": fxpipe.Packed(lambda grid: grid.prod(1), of="grid")}


def test_a_preview_counts_what_a_region_is_said_to_return_and_what_no_other_stage_uses() -> None:
    two, batch = Topology([("pipe", 2)]), images_and_words((2, 2, 2), 5)
    options: Any = {"microbatches": 3, "batch_dim": OF_IMAGES, "example_kwargs": batch}
    previewed = fxpipe.preview(on_meta(Splits), two, boundaries=SPLITS, **options)
    assert set(previewed.graph[0].parameters) == {"see.weight", "see.bias", "embed.weight"}
    assert previewed.ranks[0].parameters == 4 * (8 * WIDTH + WIDTH + 9 * WIDTH)
    assert all(rank.activations is not None for rank in previewed.ranks)


@pytest.mark.parametrize("tracer", ["symbolic", "export", "record"])
def test_a_model_on_meta_with_a_declared_method_trains_all_that_it_uses(tracer: str) -> None:
    batch = images_and_words((2, 2, 2), 5)
    forward_backward = fxpipe.compile(
        on_meta(Splits),
        Topology([("pipe", 2)]),
        microbatches=3,
        tracer=tracer,
        batch_dim=OF_IMAGES,
        boundaries=SPLITS,
        example_kwargs=batch,
        init_fn=lambda module: module.reset_parameters() if isinstance(module, nn.Linear | nn.Embedding) else None,
    )
    plain = Splits()
    forward_backward.load_state_dict(plain.state_dict())
    forward_backward(**batch)
    parts = zip(*(value.split(len(value) // 3) for value in batch.values()), strict=True)
    accumulate(lambda _, part: plain(*part.values()), [dict(enumerate(part)) for part in parts], [1.0] * 3)  # type: ignore[arg-type]
    found = dict(forward_backward.named_parameters())
    for name, parameter in plain.named_parameters():
        assert_same(found[name].grad, parameter.grad, name)


def test_what_a_region_returns_is_to_be_said_on_meta() -> None:
    batch, two = images_and_words((2, 2, 2), 5), Topology([("pipe", 2)])
    options: Any = {"boundaries": {"features": "whole", "head": "before"}, "batch_dim": OF_IMAGES, "microbatches": 2}
    with pytest.raises(TraceError, match=r'say what: boundaries=\{"features": \{"whole": torch.empty'):
        fxpipe.preview(on_meta(Splits), two, example_kwargs=batch, **options)


# --- beside other things


class Tied(nn.Module):
    """A weight of the region is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.mid, self.head = Selects(), linear(), linear()
        self.head.weight = self.region.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(self.region(x)["rows"]))).square().mean()


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_weight_may_be_tied_in_a_region_and_outside(tracer: str) -> None:
    case = Case(Tied, vectors, stages=3, ranks=3)
    batches = [case.batch(number) for number in range(2)]
    wanted, _ = reference(case, batches)
    rules = {"region": "whole", "mid": "before", "head": "before"}
    assert_run(strict(1)(3, _sometimes, case, batches, rules, tracer), wanted, 1e-6)


@pytest.mark.parametrize("engine", ["local", "strict 1"])
def test_what_needs_a_gradient_at_times_goes_through_a_frozen_stage(engine: str) -> None:
    def build() -> nn.Module:
        model = Sometimes()
        model.behind.requires_grad_(False)
        model.before.requires_grad_(False)
        return model

    case = Case(build, vectors, stages=4, ranks=4, rows=4, microbatches=2)
    both = {name: torch.cat([NOTHING[name][:2], SEEN[name][:2]]) for name in SEEN}
    order = (SEEN, both, NOTHING)
    wanted, _ = reference(case, order)
    runs = engine_of(engine, lambda: None)(4, _sometimes, case, order, SOMETIMES, "record")  # type: ignore[arg-type, return-value]
    assert_run(runs, wanted)


# --- a loss over the whole batch behind a region


class Contrasts(nn.Module):
    """Two towers, of which one looks at numbers, unless it ``runs_on_shapes``; and a loss over all rows."""

    def __init__(self, runs_on_shapes: bool = False) -> None:
        super().__init__()
        self.tower, self.other, self.runs_on_shapes = linear(), linear(), runs_on_shapes

    def region(self, x: Tensor) -> Tensor:
        return self.tower(x * 2 if self.runs_on_shapes or x.sum().item() < 1e9 else x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        v, t = fxpipe.stage_boundary((self.region(x), self.other(y)), name="loss", gather="batch")
        return nn.functional.cross_entropy(v @ t.T, torch.arange(v.shape[0]))


@pytest.mark.parametrize(
    ("tracer", "runs_on_shapes", "found"),
    [("export", False, "export"), ("record", False, "record"), ("auto", False, "symbolic"), ("auto", True, "symbolic")],
)
def test_a_stage_gathers_what_comes_out_of_a_region(tracer: str, runs_on_shapes: bool, found: str) -> None:
    case = Case(lambda: Contrasts(runs_on_shapes), vectors, stages=3, ranks=3, rows=WIDTH + 2, microbatches=4)
    batches, model = [case.batch(number) for number in range(2)], case.model()
    forward_backward = compiled(case, boundaries={"region": "whole"}, tracer=tracer, example_kwargs=batches[0])
    assert f"captured by the {found} tracer" in str(forward_backward.stages)
    for batch in batches:
        forward_backward.zero_grad()
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        assert_same(forward_backward(**batch), loss.detach(), "loss", 1e-6)
        for name, parameter in forward_backward.named_parameters():
            wanted = model.get_parameter(name).grad
            assert torch.allclose(parameter.grad, wanted, atol=1e-6), name
