"""Objects among the inputs: what is no tensor data is a value that a capture holds for, as a string is."""

from __future__ import annotations

import enum
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fxpipe
from fxpipe.batch.description import describe
from fxpipe.batch.objects import spec_of
from fxpipe.errors import FxpipeError, TraceError
from fxpipe.specs import ObjectSpec, ObjectValue
from tests.models import Layers
from tests.scripts import Scripts
from tests.strict_transport import run_strict
from tests.thinned import pairwise

TWO = fxpipe.Topology([("pipe", 2)])


class Red(enum.Enum):
    SUM = 1
    MEAN = 2


class Number(enum.IntEnum):
    SUM = 1
    MEAN = 2


@dataclass
class Config:
    scale: float = 0.5
    names: list[str] = field(default_factory=list)


class Holder:
    """Of a class of the user's, without an ``__eq__``."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def method(self) -> Any:
        return self.x


class Net(nn.Module):
    """Two stages; ``how`` changes what goes from one to the other."""

    def __init__(self, apply: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.apply_to = nn.Linear(4, 4), nn.Linear(4, 4), apply

    def forward(self, x: Tensor, how: Any) -> Tensor:
        h = fxpipe.stage_boundary(self.apply_to(self.a(x), how))
        return self.b(h).square().mean()


CASES: dict[str, tuple[Callable[[Tensor, Any], Any], list[Any]]] = {
    "an enum, by identity": (lambda h, how: h.exp() if how is Red.SUM else h, [Red.SUM, Red.MEAN]),
    "an enum of numbers": (lambda h, how: h.exp() if how is Number.SUM else h, [Number.SUM, Number.MEAN]),
    "a function": (lambda h, how: h.exp() if how is F.gelu else how(h), [F.gelu, F.silu, torch.relu]),
    "a lambda": (lambda h, how: how(h), [lambda h: 2 * h, lambda h: 3 * h]),
    "a partial": (lambda h, how: how(h), [partial(F.gelu, approximate=kind) for kind in ("none", "tanh")]),
    "its class": (lambda h, how: h * how.scale if type(how) is Config else h, [Config(), Config(2.0), Holder(1)]),
    "an object": (lambda h, how: h * how.x, [Holder(3), Holder(4.0)]),
    "a class": (lambda h, how: h.exp() if how is Config else h, [Config, Holder]),
    "in a dict": (lambda h, how: h.exp() if how["a"] is Red.SUM else h + how["b"], [{"a": a, "b": 2} for a in Red]),
    "numbers of NumPy's": (lambda h, how: h * how, [np.float64(0.5), np.float32(2), np.int64(3)]),
    "None in a dict": (lambda h, how: h.exp() if how["a"] is None else h, [{"a": torch.ones(4)}, {"a": None}]),
    "a truth value in a dict": (lambda h, how: h.exp() if how["a"] is True else h, [{"a": False}, {"a": True}]),
    "a key of a dict": (lambda h, how: h.exp() if how.get("a") is None else h, [{"a": torch.ones(4)}, {}]),
    "other tensors in an object": (lambda h, how: h + how.x, [Holder(torch.ones(4)), Holder(torch.zeros(4))]),
}
WITH_EXAMPLE: dict[str, tuple[Callable[[Tensor, Any], Any], list[Any]]] = {
    "an enum, by value": (lambda h, how: h.exp() if how == Red.SUM else h, [Red.SUM, Red.MEAN]),
    "an instance": (lambda h, how: h * how.scale if isinstance(how, Config) else h, [Config(), Config(2.0), Holder(1)]),
    "a range": (lambda h, how: h * sum(i + 1 for i in how), [range(2), range(3)]),
    "a number looked up": (lambda h, how: h.exp() if how in {2} else h, [1, 2]),
    "a string in a list": (lambda h, how: h.exp() if how[0] == "a" else h, [["b"], ["a"]]),
    "a string in a dict, looked up": (lambda h, how: {"a": 3.0}.get(how["a"], 1.0) * h, [{"a": "b"}, {"a": "a"}]),
    "a string in a dict, in another": (lambda h, how: len(f"<{how['a']}>") * h, [{"a": "b"}, {"a": "ab"}]),
    "a set": (lambda h, how: h.exp() if "a" in how else h, [{"a", "b"}, {"b", "c"}]),
    "a truth value of NumPy's": (lambda h, how: h.exp() if how else h, [np.bool_(True), np.bool_(False)]),
}


def steps(apply: Any, values: list[Any], x: Tensor, **options: Any) -> list[Any]:
    """The loss and the gradients of a step for each value."""
    options = {"microbatches": 2, "batch_dim": {"x": 0, "how": None}} | options
    fb, found = fxpipe.compile(Net(apply), TWO, **options), []
    for how in values:
        fb.optimizer(torch.optim.SGD, lr=0.0).zero_grad()
        found.append((fb(x, how), {name: p.grad.clone() for name, p in fb.named_parameters() if p.grad is not None}))
    return found


def check(apply: Any, values: list[Any], runs: list[list[Any]], x: Tensor) -> None:
    for run in runs:
        for how, (loss, gradients) in zip(values, run, strict=True):
            model = Net(apply)
            wanted = sum(model(part, how) for part in x.chunk(2)) / 2
            wanted.backward()
            torch.testing.assert_close(loss, wanted.detach())
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize(("case", "tracer", "ranks"), pairwise(list(CASES), ["auto", "symbolic"], [1, 2]))
def test_forward_is_given_the_object_itself(case: str, tracer: str, ranks: int) -> None:
    (apply, values), x = CASES[case], torch.randn(8, 4)
    run = partial(steps, apply, values, x, tracer=tracer)
    check(apply, values, run_strict(lambda rank: run(), 2) if ranks == 2 else [run()], x)


@pytest.mark.parametrize(("case", "ranks", "boundaries"), pairwise(list(WITH_EXAMPLE), [1, 2], [(), "auto"]))
def test_forward_branches_on_an_object_where_there_is_an_example(case: str, ranks: int, boundaries: Any) -> None:
    (apply, values), x = WITH_EXAMPLE[case], torch.randn(8, 4)
    run = partial(steps, apply, values, x, example_args=(x, values[0]), boundaries=boundaries)
    check(apply, values, run_strict(lambda rank: run(), 2) if ranks == 2 else [run()], x)


def test_the_class_of_a_parameter_is_known() -> None:
    class Doubling(Net):
        def forward(self, x: Tensor, how: Any) -> Tensor:
            is_parameter = isinstance(self.a.weight, nn.Parameter) and isinstance(self.a.weight, Tensor)
            return super().forward(2 * x if is_parameter else x, how) + 0 * self.a.weight.sum()

    model, x = Doubling(lambda h, how: h * how), torch.randn(8, 4)
    loss = fxpipe.compile(model, TWO, microbatches=1, tracer="symbolic")(x, 3)
    torch.testing.assert_close(loss, Net(lambda h, how: h * how)(2 * x, 3).detach())


class Apply(nn.Module):
    """What no tracer captures."""

    def forward(self, h: Tensor, how: Any) -> Tensor:
        return how(h) if h.sum().item() < 1e9 else h


def test_an_opaque_region_is_given_the_object_itself() -> None:
    values, x = [lambda h: 2 * h, F.gelu], torch.randn(8, 4)
    run = partial(steps, Apply(), values, x, example_args=(x, values[0]), boundaries={"apply_to": "whole"})
    check(Apply(), values, run_strict(lambda rank: run(), 2), x)


MASK = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")


@pytest.mark.parametrize("kind", [BlockMask, int, dict, Tensor])
def test_a_symbolic_trace_is_not_asked_for_classes(kind: type) -> None:
    with pytest.raises(TraceError, match=r"forward asks for the class of a value.*; give an example batch"):
        steps(lambda h, how: h.exp() if isinstance(how, kind) else h, [], torch.randn(8, 4))


def test_an_object_that_holds_tensors_is_refused_by_name_where_forward_asks_for_its_class() -> None:
    def apply(h: Tensor, how: Any) -> Tensor:
        return h.exp() if isinstance(how, BlockMask) else h

    with pytest.raises(TraceError, match=r"'how' holds a BlockMask, .* or keep the submodules .*\"whole\""):
        steps(apply, [MASK], x := torch.randn(8, 4), example_args=(x, MASK))


def test_an_object_of_which_nothing_is_known_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="'how' is or holds an object of class object, which is neither a tensor"):
        steps(lambda h, how: h.exp() if how is None else h, [object()], torch.randn(8, 4))


def test_an_object_that_forward_changes_is_refused() -> None:
    def apply(h: Tensor, how: Any) -> Tensor:
        how.x = how.x + 1
        return h * how.x

    with pytest.raises(TraceError, match=r"forward changes .*Holder\(.*, which is or is in input 'how'"):
        steps(apply, [], x := torch.randn(8, 4), example_args=(x, Holder(1)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((Red.SUM, Red.MEAN), r"'how' differs between .*: rank 0 has .*Red.SUM, rank 1 has .*Red.MEAN"),
        ((Config(1.0), Config(2.0)), r"'how' differs between .*: rank 0 has .*Config\(.*1.0.*, rank 1 has .*2.0"),
        (
            (F.gelu, None),
            r"'how' is or holds torch._C._nn.gelu, .* was given None; pass it on all ranks of a pipe group",
        ),
    ],
)
def test_ranks_are_given_the_same_object(values: Any, message: str) -> None:
    with pytest.raises(FxpipeError, match=message):
        run_strict(lambda rank: steps(lambda h, how: how(h), [values[rank]], torch.zeros(8, 4)), 2)


# --- what stands for an object ---


def closing_over(value: Any) -> Any:
    return lambda h: h * value


class Sized(int):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda v: Config(v),
        lambda v: Holder([v, {"a": (v,)}]),
        lambda v: SimpleNamespace(v=v),
        closing_over,
        lambda v: partial(F.gelu, approximate=v),
        lambda v: Sized(v),
        lambda v: {v},
        lambda v: range(v),
        lambda v: np.bool_(v == 1),
        lambda v: Holder(v).method,
        lambda v: [F.relu, torch.relu, torch.Tensor.relu, torch.ops.aten.relu, nn.ReLU][v],
    ],
)
def test_equal_objects_have_equal_stand_ins_and_others_have_others(make: Callable[[Any], Any]) -> None:
    first, again, other = (spec_of(make(value)) for value in (1, 1, 2))
    assert isinstance(first, ObjectValue)
    assert first == again != other


def test_what_holds_itself_is_no_value() -> None:
    first = Holder(None)
    first.x = first
    assert spec_of(first) == spec_of(Holder([0] * 2000)) == ObjectSpec("Holder", False)


def test_functions_are_known_by_what_they_do() -> None:
    """In a notebook a function is defined anew under its name."""
    spaces: list[dict[str, Any]] = [{"__name__": "notebook"} for _ in range(3)]
    for space, body in zip(spaces, ["h + 1", "h + 1", "h + 2"], strict=True):
        exec(f"def f(h): return {body}", space)
    first, again, other = (spec_of(space["f"]) for space in spaces)
    assert first == again != other


STAND_INS = """
import enum
from fxpipe.batch.objects import spec_of

Red = enum.Enum("Red", ["SUM"], module="user")

def closing_over(value):
    return lambda h: h * value

objects = [set("abcdefgh"), lambda h: h in {"x", "y", "z", "u", "v", "w"}, closing_over("v"), Red.SUM, Red]
print(hash("a"), *map(spec_of, objects))
"""


def test_stand_ins_are_the_same_in_every_process(
    tmp_path: Path, scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of a set and the addresses of objects are not."""
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    runpy.run_path(str(tmp_path / "stand_ins.py"), run_name="__main__")
    outputs = [capsys.readouterr().out.split(" ", 1), scripts.run(["stand_ins.py"], tmp_path).split(" ", 1)]
    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1] == outputs[1][1]
    assert "user.Red.SUM" in outputs[0][1]


@pytest.mark.parametrize(
    ("value", "is_data"),
    [
        (Holder(torch.ones(1)), True),
        (Holder(np.ones(3)), True),
        (MASK, True),
        (nn.Linear(2, 2), True),
        (closing_over(torch.ones(1)), True),
        (object(), False),
        (iter([]), False),
    ],
)
def test_what_holds_tensors_is_no_value(value: Any, is_data: bool) -> None:
    found = spec_of(value)
    assert isinstance(found, ObjectSpec)
    assert (found.kind, found.is_data) == (type(value).__name__, is_data)


class Masked(Layers):
    """Asks for an attribute of an object that holds the micro-batch, as models with optional masks do."""

    names, width = "a b", 4

    def forward(self, batch: Any) -> Tensor:
        h = self.a(batch.x)
        h = 3 * h if batch.mask is None else h * batch.mask
        return self.b(h).square().mean()


def test_an_attribute_that_is_none_makes_a_kind_of_its_own() -> None:
    model = Masked()
    forward_backward = fxpipe.compile(model, TWO, boundaries=["b"], microbatches=2)
    for mask in (None, torch.rand(4, 4), None):
        parts = [SimpleNamespace(x=torch.randn(4, 4), mask=mask) for _ in range(2)]
        expected = torch.stack([model(part) for part in parts]).mean()
        loss = forward_backward.step_microbatches([((part,), {}) for part in parts])
        torch.testing.assert_close(loss, expected.detach())


def test_an_input_that_is_a_number_of_numpys_is_described_as_one_of_pythons() -> None:
    values = {"x": np.float64(0.5), "y": [np.int64(3)]}
    assert describe(values, exact=True) == describe({"x": 0.5, "y": [3]}, exact=True)
