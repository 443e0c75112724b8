"""Boundaries from outside: a named submodule is cut as if its calls were marked."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError, passes, stage_boundary
from fxpipe.graph.program import Program, is_boundary, where
from fxpipe.passes.chain import chain
from fxpipe.trace import Cut, Request
from fxpipe.trace.cuts.cutting import crossing, cutting
from fxpipe.trace.opaque.region_calls import watching
from fxpipe.trace.opaque.regions import Region
from tests.capturing import assert_trains_alike, capture_by
from tests.strict_transport import run_strict
from tests.thinned import in_turn, pairwise

TRACERS = ["symbolic", "export", "record"]


# ---- what is cut: a named submodule is as good as a marked one ----


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return x + (y if scale is None else y * scale)


class Wrapped(Layer):
    """As Hugging Face's layers: a ``__call__`` of its own class, which does something first."""

    def __call__(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(x * 2, **kwargs)  # type: ignore[no-any-return]


class Further(Wrapped):
    def __call__(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(x + 1, **kwargs)


class Marked(nn.Module):
    """A chain of layers; ``marked``: with the boundaries in its forward, where the names would put them."""

    def __init__(self, marked: Mapping[int, Cut], layers: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.marked = dict(marked)
        self.layers = nn.ModuleList(layers() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if self.marked.get(place) in ("before", "both"):
                x, scale_here = stage_boundary([x, scale], name=f"layers.{place}")
            else:
                scale_here = scale
            x = layer(x, scale=scale_here)
            if self.marked.get(place) in ("after", "both"):
                (x,) = stage_boundary([x])
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def batch(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)]


def cut(tracer: str, model: nn.Module, cuts: Mapping[str, Cut], *inputs: Any) -> Program:
    batch = dict(zip(Request.signature(model, None).parameters, inputs, strict=True))
    return chain(passes.default(), capture_by(tracer, model, batch, cuts=cuts))


def boundaries_of(program: Program) -> list[tuple[int, Any]]:
    """For each boundary how many values cross it, and its name."""
    return [(len(n.all_input_nodes), n.args[1]) for n in program.graph.nodes if is_boundary(n)]


def assert_computes(program: Program, model: nn.Module, *inputs: Any) -> None:
    """The stages' result and gradients are the model's, to the last bit."""
    batch = dict(zip(program.inputs, inputs, strict=True))
    assert_trains_alike(passes.split(program), model, copy.deepcopy(model), batch)


MARKS: dict[str, dict[int, Cut]] = {
    "before": {1: "before", 3: "before"},
    "after": {0: "after", 2: "after"},
    "mixed": {0: "after", 2: "both", 3: "before"},
}


@pytest.mark.parametrize(
    ("tracer", "layer", "marks"),
    pairwise(TRACERS, [Layer, Wrapped, Further], list(MARKS)),
)
def test_a_named_submodule_is_cut_as_if_its_call_were_marked(tracer: str, layer: type[Layer], marks: str) -> None:
    inputs = batch((6, 4), (6, 1))
    marked, named = Marked(MARKS[marks], layer), Marked({}, layer)
    cuts = {f"layers.{place}": side for place, side in MARKS[marks].items()}
    program = cut(tracer, named, cuts, *inputs)
    assert str(program) == str(cut(tracer, marked, {}, *inputs))
    lines = [where(node) for node in program.graph.nodes if is_boundary(node)]
    assert all("x = layer(x, scale=scale_here)" in line for line in lines)
    assert_computes(program, named, *inputs)
    with cutting(named, cuts):  # outside of a capture a cut changes nothing
        assert torch.equal(named(*inputs), marked(*inputs))


@pytest.mark.parametrize("tracer", TRACERS)
def test_the_stage_that_a_name_opens_is_called_after_it(tracer: str) -> None:
    cuts: dict[str, Cut] = {"layers.1": "before", "layers.2": "after", "head": "before"}
    program = cut(tracer, Marked({}), cuts, *batch((6, 4), (6, 1)))
    assert program.stage_names == ("layers.0", "layers.1", "layers.3", "head")


# ---- bodies: what is called how, and what crosses ----


class Model(nn.Module):
    """One line of forward, and what it may need."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.part: nn.Module = Layer()
        self.table = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.body(self, self.first(x)))


class Part(nn.Module):
    """A submodule that does what it is made for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


def filled(linear: nn.Module, x: Tensor, found: list[Tensor]) -> Tensor:
    found.append(linear(x))
    return found[0] + x


def collects_more(m: Any, x: Tensor) -> Tensor:
    found = [x * 2]
    return m.part(x, found) + found[1] + found[0]  # type: ignore[no-any-return]


def changes(linear: nn.Module, found: dict[str, Tensor]) -> Tensor:
    found["x"], x = linear(found["x"]), found["x"]
    return x


def reads_changed(m: Any, x: Tensor) -> Tensor:
    found = {"x": x * 2}
    return m.part(found) + found["x"] * 3  # type: ignore[no-any-return]


@dataclass
class Body:
    """A call of ``part``, and for each boundary that the name puts there how many values cross it."""

    side: Cut
    crossing: list[int]
    function: Callable[..., Any]
    """``part``'s: its linear layer, and what it is given, to what it returns."""
    call: Callable[[Any, Tensor], Any] = lambda m, x: m.part(x)


BODIES = {
    "a list and a dict of tensors": Body(
        "before",
        [3],
        lambda linear, xs, *, more: linear(xs[0]) + xs[1] + more["a"][0],
        lambda m, x: m.part([x, x * 2, None, 3], more={"a": (x * 3, "text")}),
    ),
    "numbers and None pass": Body(
        "before",
        [1],
        lambda linear, n, x, none, flag: linear(x) * n if none is None and flag else x,
        lambda m, x: m.part(2.0, x, None, flag=True),
    ),
    "a tuple returned": Body(
        "after",
        [2],
        lambda linear, x: (linear(x), [x, None, "text"]),
        lambda m, x: m.part(x)[0] + m.part.linear(x),
    ),
    "called twice, both": Body("both", [1] * 4, lambda linear, x: linear(x), lambda m, x: m.part(m.part(x))),
    "parameters and buffers do not cross": Body(
        "before",
        [1],
        lambda linear, x, weight, buffers: linear(x) * weight + buffers[0],
        lambda m, x: m.part(x, m.table, [m.mean]),
    ),
    "a list that is filled is its caller's": Body("before", [2], filled, collects_more),
    "a dict that is changed is its caller's": Body("both", [1, 1], changes, reads_changed),
}


@pytest.mark.usefixtures("classes_unchanged")
@pytest.mark.parametrize(("tracer", "name"), in_turn(TRACERS, list(BODIES)))
def test_what_crosses_a_boundary_from_outside(tracer: str, name: str) -> None:
    body, (x,) = BODIES[name], batch((6, 4))
    model = Model(body.call)
    model.part = Part(body.function)
    program = cut(tracer, model, {"part": body.side}, x)
    assert [count for count, _ in boundaries_of(program)] == body.crossing
    assert_computes(program, model, x)


@pytest.mark.parametrize("tracer", TRACERS)
def test_hooks_run_inside_of_the_boundaries(tracer: str) -> None:
    (x,) = batch((6, 4))

    def hooked(marked: bool) -> nn.Module:
        mark = stage_boundary if marked else lambda values, name=None: values
        model = Model(lambda m, x: mark([m.part(mark([x], name="part")[0])])[0])
        model.part.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
        model.part.register_forward_hook(lambda module, inputs, output: output * 5)
        return model

    model = hooked(marked=False)
    program = cut(tracer, model, {"part": "both"}, x)
    assert str(program) == str(cut(tracer, hooked(marked=True), {}, x))
    assert_computes(program, model, x)


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_shared_submodule_is_one_by_any_of_its_names(tracer: str) -> None:
    model = Model(lambda m, x: m.again(m.first(x)))
    model.again = model.part
    (x,) = batch((6, 4))
    program = cut(tracer, model, {"part": "before", "again": "after"}, x)
    assert boundaries_of(program) == [(1, "part"), (1, None)]


class Encoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_module_is_cut_inside_unless_a_symbolic_trace_keeps_it_whole(tracer: str) -> None:
    model, (x,) = Encoded(), batch((2, 3, 4))
    cuts: dict[str, Cut] = {"encoder.layers.1": "before", "encoder.layers.2": "before"}
    if tracer == "symbolic":
        told = "names encoder.layers.1, which is a part of a TransformerEncoder that a symbolic trace takes as a leaf"
        with pytest.raises(TraceError, match=rf"(?s){told}.*return self\.encoder\(x\)"):
            cut(tracer, model, cuts, x)
    else:
        program = cut(tracer, model, cuts, x)
        assert program.stage_names[1:] == ("encoder.layers.1", "encoder.layers.2")
        assert_computes(program, model, x)


# ---- refused, and undone ----


def changes_the_first(linear: nn.Module, first: list[Tensor], second: list[Tensor]) -> Tensor:
    first[0] = linear(first[0])
    return second[0]


Call = Callable[[Any, Tensor], Any]
REFUSED: dict[str, tuple[Cut, Callable[..., Any], Call]] = {
    "boundaries= names part, which Model.forward never calls": ("before", lambda linear, x: x, lambda m, x: x),
    "part is given no tensor that could cross a boundary": ("before", lambda linear, n: n, lambda m, x: x + m.part(3)),
    "part changes a list that it is given": ("before", changes_the_first, lambda m, x: m.part(*[[x]] * 2)),
    "part returns no tensor that could cross a boundary": (
        "after",
        lambda linear, x: None,
        lambda m, x: x + len(m.part(x) or ""),
    ),
}


@pytest.fixture
def classes_unchanged() -> Iterator[None]:
    classes = [nn.Module, nn.Linear, nn.Sequential, Layer, Wrapped, Further, Part, Model]
    before = [dict(vars(cls)) for cls in classes]
    yield
    assert [dict(vars(cls)) for cls in classes] == before


@pytest.mark.usefixtures("classes_unchanged")
@pytest.mark.parametrize(("tracer", "told"), in_turn(TRACERS, list(REFUSED)))
def test_what_cannot_be_cut_is_refused_with_its_line(tracer: str, told: str) -> None:
    side, function, call = REFUSED[told]
    model = Model(call)
    model.part = Part(function)
    with pytest.raises(TraceError, match=re.escape(told)) as caught:
        cut(tracer, model, {"part": side}, *batch((6, 4)))
    assert "never calls" in told or "m.part(" in str(caught.value)


class Base(nn.Module):
    """Calls its forward twice, so that a class below it may be met inside of one above it."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(super().__call__(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x * 3


class Derived(Base):
    pass


def test_each_call_is_cut_once_where_both_a_class_and_one_below_it_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Base(), Derived(), Base())
    program = cut("symbolic", model, {"1": "before", "2": "both"}, *batch((6, 4)))
    assert boundaries_of(program) == [(1, "1"), (1, "2"), (1, None)]


def test_each_call_of_a_region_counts_once_where_both_a_class_and_one_below_it_hold_regions() -> None:
    model, calls = nn.ModuleDict({"base": Base(), "derived": Derived()}), []

    def handle(region: Region, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls.append((region.name, number))
        return inner(*args, **kwargs)

    with watching(model, [Region("base", "base"), Region("derived", "derived")], handle):
        for _ in range(2):
            model["derived"](torch.ones(4))
    assert calls == [("derived", 0), ("derived", 1)]


# ---- through compile ----


THREE_STAGES: list[Any] = [
    ["layers.1", "head"],
    {"layers.*": {"every": 2}, "head": "before"},
    lambda modules: {name: "both" for name, module in modules.items() if name == "layers.1"},
]


@pytest.mark.parametrize("given", THREE_STAGES)
def test_compile_takes_boundaries_from_outside(given: Any) -> None:
    x, scale = batch((6, 4), (6, 1))
    model, plain = Marked({}), Marked({})
    forward_backward = fxpipe.compile(model, fxpipe.Topology([("pipe", 3)]), boundaries=given, microbatches=1)
    loss = forward_backward(x, scale)
    wanted = plain(x, scale)
    wanted.backward()
    assert torch.equal(loss, wanted.detach())
    for found, reference in zip(forward_backward.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, reference.grad)


# ---- dataclasses: their fields cross, as entries of a dict do ----


@dataclass
class Mutable:
    h: Tensor
    scale: float = 2.0
    more: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    h: Tensor
    scale: float = 2.0
    more: Any = None


class Passing(nn.Module):
    """Two submodules, one of which gives the other its values in an object; ``writes``: which sets a field of it."""

    def __init__(self, kind: Callable[..., Any], writes: bool, marked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.below, self.above = Below(kind), Above(writes)
        self.marked = marked

    def forward(self, x: Tensor) -> Tensor:
        state = self.below(x)
        given = stage_boundary(state) if self.marked else state
        return (self.above(given) + given.h + (0 if self.marked else state.h)).square().mean()


class Below(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return self.kind(h=h, scale=2.0, more=[self.kind(h=h.tanh(), scale=3.0, more=None), None])


class Above(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4), writes

    def forward(self, state: Any) -> Tensor:
        inner = state.more[0]
        h = self.linear(state.h) * state.scale + inner.h * inner.scale
        if self.writes:
            state.h = h
        return h


KINDS: dict[str, tuple[Callable[..., Any], bool]] = {
    "a dataclass": (Mutable, False),
    "one that is written into": (Mutable, True),
    "a frozen one with slots": (Frozen, False),
    "a namespace": (SimpleNamespace, True),
}
WHERE: dict[str, Any] = {"before": {"above": "before"}, "after": {"below": "after"}, "marked": (), "auto": "auto"}


@pytest.mark.parametrize(("tracer", "kind", "place"), pairwise(TRACERS, list(KINDS), list(WHERE)))
def test_a_dataclass_crosses_a_boundary_as_its_fields_do(tracer: Any, kind: str, place: str) -> None:
    make, x = lambda: Passing(*KINDS[kind], marked=place == "marked"), torch.randn(4, 4)
    plain = make()
    wanted = sum(plain(part) / 2 for part in x.chunk(2))
    wanted.backward()  # type: ignore[union-attr]

    def body(rank: int) -> None:
        options: dict[str, Any] = {"boundaries": WHERE[place], "microbatches": 2, "example_args": (x,)}
        run = fxpipe.compile(make(), fxpipe.Topology([("pipe", 2)]), tracer=tracer, **options)
        assert len(run.stages) == 2
        torch.testing.assert_close(run(x), wanted.detach())  # type: ignore[union-attr]
        for name, parameter in run.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)

    run_strict(body, 2)


def test_one_that_holds_itself_crosses_once() -> None:
    state = SimpleNamespace(h=torch.ones(2), me=None)
    state.me = state
    behind = crossing(state, lambda leaf: isinstance(leaf, Tensor), lambda tensors: [one + 1 for one in tensors])
    assert behind is not state
    assert behind.h.tolist() == [2.0, 2.0]
    assert state.h.tolist() == [1.0, 1.0]
