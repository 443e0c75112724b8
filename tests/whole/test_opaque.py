"""Opaque regions: their Python runs in every step, and the model trains as plain PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import FxpipeError, PartitionError, RunError, Topology, TraceError
from tests import harness
from tests.harness import Engines, accumulate, assert_gradients, assert_same, compiled, cut, gradients_of, reference
from tests.models import WIDTH, Case, Inputs, Layers, linear, vectors
from tests.pool import Pool
from tests.thinned import in_turn

TRACERS = ["symbolic", "export", "record"]
REGION: Any = {"region": "whole", "head": "before"}
POSITIVE, NEGATIVE = ({"x": torch.full((4, WIDTH), sign), "y": torch.zeros(4, WIDTH)} for sign in (1.0, -1.0))


def two(build: Callable[[], nn.Module], **changes: Any) -> Case:
    """A model of two stages, a region in the first."""
    return Case(build, vectors, **{"stages": 2, "ranks": 2, "microbatches": 2, "tolerance": 1e-6} | changes)


def assert_trains(
    case: Case, batches: Sequence[Inputs], boundaries: Any = REGION, tracer: str = "export", **options: Any
) -> None:
    """As in plain PyTorch, captured with the first batch."""
    options = {"boundaries": boundaries, "tracer": tracer, "example_kwargs": batches[0], **options}
    harness.assert_trains(case, options.pop("engine", harness.local), batches, **options)


class Looks(nn.Module):
    """A layer whose input is looked at: ``made`` of the output, and of whether the input is positive."""

    def __init__(self, made: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        self.inner, self.made = linear(), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.inner(x), x.sum().item() > 0)


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
        kept = [place for place, row in enumerate(x.numpy(force=True)) if float(numpy.sum(row)) > 0] or [0]
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
BATCHES = [SELECTING.batch(number) for number in range(3)]


@pytest.mark.parametrize(("engine", "tracer"), [("strict 1", "export"), ("distributed", "symbolic")])
def test_what_a_region_returns_has_another_size_each_time(engine: str, tracer: str, engines: Engines) -> None:
    assert len({int(Selects()(batch["x"])["rows"].shape[0]) for batch in BATCHES}) > 1
    assert_trains(SELECTING, BATCHES, CUTS, tracer, engine=engines(engine))


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


def test_a_region_called_twice_and_a_method() -> None:
    assert_trains(two(Twice, microbatches=4), BATCHES[:2], REGION | {"positions": "whole"})


@pytest.mark.parametrize("options", [{"schedule": "zb_h1"}, {"recompute": True}, {"zero": 1}])
def test_options_go_with_a_region(options: dict[str, Any]) -> None:
    assert_trains(SELECTING, BATCHES[:2], CUTS, **options)


def test_a_stage_with_a_region_is_not_compiled_and_that_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    compiled_stages = []

    def compiler(stage: Any) -> Any:
        compiled_stages.append(stage)
        return stage

    assert_trains(SELECTING, BATCHES[:1], CUTS, "symbolic", stage_compiler=compiler)
    assert len(compiled_stages) == 3
    assert "'region' holds an opaque region" in capfd.readouterr().err


class Divides(Layers):
    """Behind a region it divides words into heads, whose number torch finds: a condition of its own is an "or"."""

    names = "region head"

    def forward(self, x: Tensor) -> Tensor:
        words = self.head(x + self.region(x))
        rows, length, _ = words.shape
        heads = words.view(rows, length, -1, 2).transpose(1, 2)
        return heads.reshape(rows, -1, length, 2).softmax(1).square().sum((1, 2, 3)).mean()


def test_a_capture_of_any_number_of_rows_is_not_taken_for_another_length() -> None:
    batches = [{"x": torch.randn(rows, length, WIDTH)} for rows, length in [(8, 3), (6, 3), (8, 4), (6, 3), (6, 4)]]
    assert_trains(two(Divides), batches)


class Branches(nn.Module):
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
    case = two(Branches, rows=4, microbatches=1)
    forward_backward = compiled(case, boundaries=REGION, tracer=tracer, example_kwargs=POSITIVE)
    assert torch.equal(forward_backward(**POSITIVE), case.model()(**POSITIVE))
    with pytest.raises(RunError, match=told):
        forward_backward(**NEGATIVE)


# --- what is refused


class Odd(nn.Module):
    """Does what a region may not, as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.head = how, linear(), linear()
        self.note = None

    def region(self, x: Tensor) -> Any:
        h = self.inner(x)
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
        if self.how == "makes":
            self.made = linear()
        return h, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.how == "uncalled":
            return self.head(self.inner(x)).mean()
        h, scale = self.region(x * 1)
        loss = self.head(h * scale).square().mean()
        return loss + self.note if self.how == "read" else loss


@pytest.mark.parametrize(
    ("how", "tracer"),
    in_turn(["object", "sets", "marks", "read", "number", "makes"], ["record", "symbolic", "export"]),
)
def test_what_a_region_may_not_do_is_refused(how: str, tracer: str) -> None:
    told = {
        "object": "returns a object",
        "sets": "sets head.note outside of it",
        "marks": "a boundary lies inside of region",
        "read": "forward reads .note",
        "number": "a tensor in place of a number",
        "makes": "region, an opaque region, makes or replaces one of the model's modules when it runs",
    }
    with pytest.raises(FxpipeError, match=told[how]):
        compiled(two(lambda: Odd(how)), boundaries=REGION, tracer=tracer, example_kwargs=BATCHES[0])


class Overwrites(nn.Module):
    """Its method writes into a value that forward uses behind it, and into an input. With ``later`` it also writes into
    its last argument where that is negative."""

    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.later, self.fill = linear(), linear(), later, nn.Parameter(torch.ones(WIDTH))

    def region(self, h: Tensor, scale: float, y: Tensor, x: Tensor) -> Tensor:
        h[:, 1:3] = self.fill[1:3] * scale if h.sum().item() else 0.0
        y[0] = 0.5
        if self.later and x.amin().item() < 0:
            x += 1
        return y

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        y = self.region(h, 2.0, y=y, x=x)
        return (self.head(h.tanh()) - y).square().mean()


@pytest.mark.parametrize(("tracer", "at"), in_turn(TRACERS, [{"head": "before"}, {"first": "after"}]))
def test_a_region_may_write_into_what_it_is_given(tracer: str, at: Any) -> None:
    case = two(Overwrites)
    assert_trains(case, [case.batch(number) for number in range(2)], {"region": "whole", **at}, tracer)


def test_a_region_that_writes_more_than_it_was_seen_to_is_refused() -> None:
    forward_backward = compiled(two(lambda: Overwrites(later=True)), boundaries=REGION, example_kwargs=POSITIVE)
    with pytest.raises(RunError, match=r"region writes into a tensor of shape \[2, 6\] that it is given"):
        forward_backward(**NEGATIVE)


def replaced() -> nn.Module:
    """Its attribute would run in place of the method, and no region would be opaque."""
    model = Odd("")
    model.region = lambda x: (model.inner(x), 1.0)  # type: ignore[method-assign]
    return model


WRONG: list[tuple[Any, Any, str]] = [
    (Selecting, {"region": "whole", "region.*": "before"}, "cuts 'region.first', which is inside of 'region'"),
    (Selecting, {"region": "whole", "region.first": "whole"}, "'region.first' whole inside of 'region'"),
    (Selecting, {"region": {"whole": None, "cut": "after"}}, '["whole", "after"]'),
    (Selecting, {"region.forward": "before"}, "'region.forward', which is a method: it may be \"whole\""),
    (Selecting, {"forward": "whole"}, "pipe ranks"),
    (Selecting, {"regiom": "whole"}, 'did you mean "region"'),
    (Selecting, {"reg*m": "whole"}, "matches no submodule"),
    (replaced, REGION, "'region' whole, which was set as an attribute of this Odd"),
    (lambda: Odd("uncalled"), REGION, "keeps region whole, which Odd.forward never calls"),
]


def _told_wrong() -> list[str]:
    """What compile says of each."""
    told = []
    for build, boundaries, _ in WRONG:
        with pytest.raises(FxpipeError) as refused:
            compiled(two(build), boundaries=boundaries, example_kwargs=BATCHES[0])
        told.append(str(refused.value))
    return told


def test_regions_that_cannot_be_are_told_before_anything_runs(pool: Pool) -> None:
    """On two processes, where nobody waits for another."""
    for told in pool.run(_told_wrong, ranks=2):
        for text, (_, _, fact) in zip(told, WRONG, strict=True):
            assert fact in text


def test_without_a_batch_the_error_asks_for_one() -> None:
    with pytest.raises(TraceError, match=r"region is opaque, and what it returns is not known.*\n?.*example_args="):
        fxpipe.compile(Selecting(), Topology([("pipe", 4)]), boundaries=CUTS)


@pytest.mark.parametrize(
    ("rules", "told"),
    [({"behind": "before", "head": "before"}, '"region": "whole"'), (["region"], '"region": ["whole", "before"]')],
    ids=["elsewhere", "there"],
)
def test_a_refusal_names_what_could_be_opaque_and_keeps_its_cut(rules: Any, told: str) -> None:
    with pytest.raises(TraceError, match=re.escape(f"boundaries={{{told}}}")):
        compiled(replace(SELECTING, ranks=2), boundaries=rules, tracer="export", example_kwargs=BATCHES[0])


class Looking(nn.Module):
    """Two parts that look at numbers, and a method that does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Looks(lambda h, large: h * (1.0 + large)) for _ in range(2)), linear()

    def factor(self, y: Tensor) -> Tensor:
        return y * (2.0 if y.tolist()[0][0] > 0 else 3.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - self.factor(y)).square().mean()


def test_what_refusals_say_to_keep_whole_leads_to_a_model_that_trains() -> None:
    case, rules = two(Looking), {"head": "before"}
    for _ in range(2):
        with pytest.raises(TraceError) as refused:
            compiled(case, boundaries=rules, tracer="export", example_kwargs=case.batch())
        (told,) = re.findall(r'boundaries=\{"([\w.*]+)": "whole"\}', str(refused.value))
        rules[told] = "whole"
    assert rules.keys() == {"head", "blocks.*", "factor"}
    assert_trains(case, [case.batch()], rules)


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


@pytest.mark.parametrize(
    ("how", "tracer", "told"),
    [
        ("writes", "symbolic", "region, an opaque region, changes region.ema"),
        ("flags", "record", "changes region.flag"),
        ("widens", "export", "of torch.float64 on .*, but of 2 dimensions and of torch.float32"),
    ],
)
def test_what_it_did_not_do_in_the_example_is_refused_where_others_would_not_see_it(
    how: str, tracer: str, told: str
) -> None:
    case = two(lambda: AroundIt(how))
    forward_backward = compiled(case, boundaries=REGION, tracer=tracer, example_kwargs=POSITIVE)
    assert_same(forward_backward(**POSITIVE), case.model()(**POSITIVE).detach(), "loss", 1e-6)
    with pytest.raises(RunError, match=told):
        forward_backward(**NEGATIVE)


@pytest.mark.parametrize("tracer", ["symbolic", "record"])
def test_a_gradient_is_not_lost_where_the_example_needed_none(tracer: str) -> None:
    """Behind a branch on a value."""
    case = two(lambda: AroundIt("detaches"), tolerance=0.0)
    wanted, _ = reference(case, [POSITIVE, NEGATIVE])
    assert [gradients["region.inner.weight"] is None for gradients in wanted.gradients] == [True, False]
    assert_trains(case, [POSITIVE, NEGATIVE], tracer=tracer)


def test_what_was_frozen_may_be_trained_later() -> None:
    case = two(lambda: AroundIt(""))
    model, plain = case.model().requires_grad_(False), case.model()
    model.get_submodule("head").requires_grad_(True)
    options: Any = {"boundaries": REGION, "tracer": "export", "example_kwargs": NEGATIVE, "microbatches": 1}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
    forward_backward(**NEGATIVE)
    forward_backward.zero_grad()
    model.requires_grad_(True)
    forward_backward(**NEGATIVE)
    plain(**NEGATIVE).backward()
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain, 1e-6)


def test_an_attribute_of_a_region_that_others_read_may_be_set_between_steps() -> None:
    model: Any = two(lambda: AroundIt("flags")).model()
    options: Any = {"boundaries": REGION, "tracer": "export", "example_kwargs": POSITIVE, "microbatches": 1}
    forward_backward = fxpipe.compile(model, Topology([("pipe", 2)]), **options)
    once = forward_backward(**POSITIVE)
    model.region.flag = True
    assert torch.equal(forward_backward(**POSITIVE), 2 * once)


# --- what a region keeps between its calls


class Counted(nn.Module):
    """Counts in one region, and reads its counter in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.head, self.calls = linear(), linear(), linear(), 0

    def region(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * min(self.calls, 2)

    def reader(self, x: Tensor) -> Tensor:
        return x * float(self.calls)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.reader(self.other(self.region(x)))).square().mean()


def test_an_attribute_of_regions_is_refused_in_two_stages_and_right_in_one() -> None:
    """Each rank would count by itself: a silent difference from one process."""
    case, rules = two(Counted), {"region": "whole", "reader": "whole"}
    with pytest.raises(PartitionError, match=r"calls, an attribute .* by region in stage .* and by reader in stage"):
        compiled(case, boundaries=rules | {"other": "before"}, tracer="export", example_kwargs=BATCHES[0])
    assert_trains(case, BATCHES[:2], rules | {"head": "before"})


class Keeps(nn.Module):
    """Keeps something between its calls, of the kind ``how``; only for negative rows, if it keeps ``late``."""

    last: Tensor

    def __init__(self, how: str, late: bool) -> None:
        super().__init__()
        self.how, self.late, self.inner = how, late, linear()
        self.kept: Any = {"number": 0, "list": {"seen": []}, "tensor": torch.zeros(WIDTH)}.get(how)
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        factor = {"number": lambda: self.kept, "list": lambda: len(self.kept["seen"])}
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


KEPT = ["number", "list", "tensor", "buffer", ".data"]
ONES = {"x": torch.ones(4, WIDTH), "y": torch.ones(4, WIDTH)}


@pytest.mark.parametrize(("how", "tracer"), in_turn(["buffer", ".data"], TRACERS))
def test_what_a_region_keeps_later_between_calls_in_two_stages_is_refused(how: str, tracer: str) -> None:
    """Each rank would keep its own: a silent difference from one process."""
    rules = {"region": "whole", "other": "before"}
    forward_backward = compiled(two(lambda: KeptBetween(how)), boundaries=rules, tracer=tracer, example_kwargs=ONES)
    assert len({stage.name for stage in forward_backward.stages if "region.inner.weight" in stage.tensors}) == 2
    forward_backward(**ONES)
    place = {"buffer": "region.last", ".data": "region.inner.weight"}[how]
    with pytest.raises(RunError, match=f"region, an opaque region, changes {place}"):
        forward_backward(**NEGATIVE)


@pytest.mark.parametrize(("how", "late"), in_turn(KEPT, [True, False]))
def test_what_a_region_keeps_between_calls_in_one_stage_is_as_in_plain_pytorch(how: str, late: bool) -> None:
    assert_trains(two(lambda: KeptBetween(how, late)), [ONES, NEGATIVE])


# --- what a region returns


def test_what_a_region_returns_is_seen_without_the_check_too() -> None:
    case = two(lambda: AroundIt(""), microbatches=1)
    options: Any = {"boundaries": REGION, "example_kwargs": POSITIVE, "tracer": fxpipe.Tracing("export", check=False)}
    forward_backward = compiled(case, **options)
    assert "not checked: fxpipe.Tracing(check=False)" in str(forward_backward.stages)
    assert_same(forward_backward(**NEGATIVE), case.model()(**NEGATIVE).detach(), "loss", 1e-6)


OTHERWISE: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "layout": lambda h, large: h if large else h.t().contiguous().t(),
    "gradient": lambda h, large: h if large else h.detach(),
}
"""What a region returns that is unlike in that for other values."""


class Unlike(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.region, self.before, self.head = Looks(OTHERWISE[what]), linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.before(x) + self.region(x)) - y).square().mean()


@pytest.mark.parametrize(("what", "tracer"), in_turn(["gradient", "layout"], TRACERS))
def test_what_nobody_asks_may_be_otherwise_each_time(what: str, tracer: str) -> None:
    both = {name: torch.cat([NEGATIVE[name][:2], POSITIVE[name][:2]]) for name in POSITIVE}
    assert_trains(two(lambda: Unlike(what)), [POSITIVE, both], tracer=tracer)


class Picks(Layers):
    """A method that calls another submodule for other values."""

    names = "before image video head"

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.image(x) if x.sum().item() > 0 else self.video(x)
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.before(x))
        return (self.head(h + self.features(x)) - y).square().mean()


@pytest.mark.parametrize(("tracer", "returns"), in_turn(TRACERS, [None, torch.empty(2, WIDTH, device="meta")]), ids=str)
def test_a_method_has_what_no_other_stage_uses(returns: Tensor | None, tracer: str) -> None:
    """On its rank alone: what the example did not call would be on the meta device there."""
    case, rules = two(Picks), {"features": "whole" if returns is None else {"whole": returns}}
    stages = list(compiled(case, boundaries=rules, tracer=tracer, example_kwargs=POSITIVE).stages)
    assert {"image.weight", "video.weight", "head.weight"} <= set(stages[1].tensors)
    assert set(stages[0].tensors) == {"before.weight", "before.bias"}
    assert_trains(case, [POSITIVE, NEGATIVE], rules, tracer)


# --- on the meta device


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Picks()


def initialised(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


RETURNS: Any = {"features": {"whole": torch.empty(2, WIDTH, device="meta")}}
TWO: Any = {"microbatches": 2, "example_kwargs": POSITIVE}


def test_a_preview_counts_what_a_region_is_said_to_return_and_what_no_other_stage_uses() -> None:
    previewed = fxpipe.preview(on_meta(), Topology([("pipe", 2)]), boundaries=RETURNS, **TWO)
    assert {name.partition(".")[0] for name in previewed.graph[1].parameters} == {"image", "video", "head"}
    assert previewed.ranks[1].parameters == 3 * 4 * (WIDTH * WIDTH + WIDTH)
    assert all(rank.activations is not None for rank in previewed.ranks)


def test_a_model_on_meta_with_a_declared_method_trains_all_that_it_uses() -> None:
    options: Any = {"tracer": "export", "boundaries": RETURNS, "init_fn": initialised, **TWO}
    forward_backward = fxpipe.compile(on_meta(), Topology([("pipe", 2)]), **options)
    plain, both = Picks(), {name: torch.cat([POSITIVE[name][:2], NEGATIVE[name][:2]]) for name in POSITIVE}
    forward_backward.load_state_dict(plain.state_dict())
    forward_backward(**both)
    accumulate(lambda _, part: plain(**part), cut(both, 2))
    assert_gradients(gradients_of(forward_backward.named_parameters()), plain)


def test_what_a_region_returns_is_to_be_said_on_meta() -> None:
    with pytest.raises(TraceError, match=r'say what: boundaries=\{"features": \{"whole": torch.empty'):
        fxpipe.preview(on_meta(), Topology([("pipe", 2)]), boundaries={"features": "whole"}, **TWO)
