"""The symbolic tracer: what it must get right without a batch."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe import PartitionError, TraceError, stage_boundary
from fxpipe.graph.program import Program, is_boundary, where
from fxpipe.passes.order_writes import order_writes
from fxpipe.trace import TRACERS, Request, capture
from tests.capturing import captured
from tests.device import DEVICE
from tests.trace.test_refused import surroundings


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return stage_boundary(self.linear(x))


class InContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Marked(), nn.ReLU()))
        self.table = nn.ModuleDict({"one": Marked(), "two": nn.Linear(4, 4)})
        self.rows = nn.ModuleList([Marked(), Marked()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.table["two"](self.table["one"](self.sequence(x)))
        for row in self.rows:
            x = row(x)
        return x


AMBIENT: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", AMBIENT, ids=AMBIENT)
def test_a_capture_is_the_same_whatever_mode_it_is_called_in(mode: str) -> None:
    model = InContainers()
    wanted = str(captured(model).graph)
    with AMBIENT[mode]():
        assert str(captured(model).graph) == wanted


def test_backward_hooks_on_a_leaf_module_run_as_ever() -> None:
    model = InContainers()
    model.sequence[0].register_full_backward_hook(lambda *_: None)
    assert next(iter(captured(model).graph.find_nodes(op="call_module"))).target == "sequence.0"


def test_an_unknown_tracer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TraceError, match=r"unknown tracer 'symbolics'; did you mean \"symbolic\""):
        capture(Request(InContainers(), ("x",)), "symbolics")
    assert "symbolic" in TRACERS


# ---- boundaries are found, or the capture is refused ----


def test_a_boundary_that_the_graph_has_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fxpipe.trace.cuts.cutting"], "is_boundary", lambda node: False)
    with pytest.raises(TraceError, match="1 boundaries were executed while tracing, 0 are in the graph"):
        captured(Marked())


# ---- what is captured, and right ----


class Model(nn.Module):
    """One line of forward, and what it may need."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.p = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.register_buffer("buf", torch.randn(4))
        self.anchors = [torch.ones(4), torch.zeros(4)]

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def run(program: Program, *inputs: Any) -> Any:
    names = {str(node.target) for node in program.graph.nodes if node.op in ("get_attr", "call_module")}
    module = fx.GraphModule({name: program.attribute(name) for name in names}, program.graph)
    return module(*inputs)


def add_in_place(m: Any, x: Tensor) -> Any:
    y = x * 1
    z = y
    y += m.p
    return z


def all_operators_in_place(m: Any, x: Tensor) -> Any:
    y, n = x * 1, (x * 3).long()
    z, k = y, n
    y += 1
    y -= 3
    y *= m.p
    y /= 2
    y **= 2
    y //= 0.3
    y %= 2
    n |= 3
    n &= 6
    n ^= 5
    n <<= 1
    n >>= 2
    return z, k


def factories_of_sizes(m: Any, x: Tensor) -> Any:
    n = x.shape[0]
    return (
        torch.zeros((n, 2)),
        torch.zeros(n),
        torch.ones(size=(n, 2)),
        torch.full((n, 2), 7.0),
        torch.full((2, 2), n),
        torch.eye(n),
        torch.linspace(0, 1, n),
        torch.tril(torch.ones(n, n)),
        torch.arange(0, n, 2),
        x.new_zeros(n, 2),
        x.new_full((n,), 3),
        torch.zeros(x.size()),
    )


def constant_made_in_forward(m: Any, x: Tensor) -> Any:
    weights = torch.arange(4)
    weights[0] = 3  # before its first use: an ordinary constant
    return x * weights + torch.tensor(2.0)


def nested_containers(m: Any, x: Tensor) -> Any:
    parts = {"a": [m.a(x), (x, 3)], "b": None}
    return {"out": (parts["a"][0] + parts["a"][1][0], [parts["b"], {"x": x}])}


CAPTURED: dict[str, Callable[[Any, Tensor], Any]] = {
    "add in place": add_in_place,
    "all operators in place": all_operators_in_place,
    "factories of sizes": factories_of_sizes,
    "a constant made in forward": constant_made_in_forward,
    "plain tensors of the model": lambda m, x: sum((x * anchor for anchor in m.anchors), x),
    "a buffer written": lambda m, x: m.buf.add_(x.mean()) * x,
    "data written": lambda m, x: m.p.data.mul_(0.5) * m.p * x,
    "nested containers": nested_containers,
    "a mode that changes nothing": torch.enable_grad()(lambda m, x: m.a(x)),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_the_program_computes_what_the_model_does_which_is_left_as_it_was(name: str) -> None:
    body = CAPTURED[name]
    traced, model = Model(body), Model(body)
    before, around = copy.deepcopy(traced.state_dict()), surroundings()
    program = captured(traced)
    assert surroundings() == around
    torch.testing.assert_close(dict(traced.state_dict()), dict(before), rtol=0, atol=0)
    for rows in (3, 5):  # sizes are followed, not fixed
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            torch.testing.assert_close(run(program, x), model(x), rtol=0, atol=0)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(program.module.state_dict()[name], tensor, rtol=0, atol=0)


def test_every_node_knows_its_line() -> None:
    program = captured(Model(add_in_place))
    lines = [where(node) for node in program.graph.nodes if node.op == "call_function"]
    first = inspect.getsourcelines(add_in_place)[1]
    assert [f"line {first + 1}," in lines[0], f"line {first + 3}," in lines[1]] == [True, True]
    assert "y += m.p" in lines[1]


@pytest.mark.parametrize("at", ["", "table.one"])
def test_forward_hooks_on_what_is_traced_through_are_a_part_of_the_program(at: str) -> None:
    model = InContainers()
    part = model.get_submodule(at)
    part.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    part.register_forward_hook(lambda module, inputs, output: stage_boundary(output * 2))
    program = captured(model)
    assert sum(map(is_boundary, program.graph.nodes)) == 5
    x = torch.ones(2, 4)
    assert torch.equal(run(program, x), model(x))


@pytest.mark.parametrize("training", [True, False])
def test_functional_dropout_keeps_the_mode_of_the_capture(training: bool) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    x = torch.ones(100)
    dropped = run(captured(Dropping().train(training)), x)
    assert torch.equal(dropped, x) is not training


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.scale * (output - target)).square().mean()


class Careless(nn.Module):
    """A loss that writes, in one way or another, what it holds."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("seen", torch.zeros(4))
        self.count = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.body(self, output)
        return F.mse_loss(output, target)


LOSS_WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "sets Careless.count": lambda loss, output: setattr(loss, "count", loss.count + 1),
    "writes seen": lambda loss, output: loss.seen.add_(1),
    "writes a tensor that is no buffer of the model": lambda loss, output: loss.seen.add_(output.detach().sum(0)),
}


@pytest.mark.parametrize("text", LOSS_WRITES)
def test_a_loss_that_writes_what_it_holds_is_refused(text: str) -> None:
    loss = Careless(LOSS_WRITES[text])
    with pytest.raises((TraceError, PartitionError), match=text) as caught:
        order_writes(capture(Request(InContainers(), ("x", "target"), loss_fn=loss)))
    assert __file__ in str(caught.value)
    assert (loss.count, loss.seen.tolist()) == (0, [0.0] * 4)


def test_a_loss_whose_parameters_are_the_models_is_captured() -> None:
    model = InContainers()
    model.loss = Scaled()
    program = capture(Request(model, ("x", "target"), loss_fn=model.loss))
    assert "loss.scale" in [node.target for node in program.graph.find_nodes(op="get_attr")]
    x, target = torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(run(program, x, target), model.loss(model(x), target))


class ByPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 2.0, /, *, end: float = 0.0) -> Tensor:
        y = stage_boundary(self.linear(x)) * scale
        return (y if shift is None else y + shift) + end


def test_arguments_are_inputs_absent_or_fixed_and_go_by_place_where_they_must() -> None:
    model, x, shift = ByPlace(), torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(run(captured(model, "x"), x), model(x))
    assert torch.equal(run(captured(model, "shift", "x", end=1.0), shift, x), model(x, shift, end=1.0))
    assert torch.equal(run(captured(model, "x", scale=3.0), x), model(x, None, 3.0))
    with pytest.raises(TraceError, match="'x'"):
        captured(model, "shift")
    assert torch.equal(run(captured(model, "x", shift=None, end=2.0), x), model(x, None, end=2.0))
    assert captured(model, "shift", "x").inputs == ("shift", "x")


COMPILED_TWICE = """
import gc, torch, fxpipe
from torch import nn
from fxpipe.trace.attributes import CaptureGuard
from fxpipe.snapshots.snapshot import Snapshot

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3, 3))
    def forward(self, x):
        return self.b(fxpipe.stage_boundary(nn.functional.gelu(self.a(x)) * self.scale.mean())).sum()

fxpipe.compile(Model(), fxpipe.Topology([("pipe", 2)]))
made = torch.compile(lambda x: x + torch.zeros(3), fullgraph=True, backend="eager")(torch.ones(3))
assert made.tolist() == [1, 1, 1]
gc.collect()
assert not [held for held in gc.get_objects() if isinstance(held, (CaptureGuard, Snapshot, Model))]
"""


def test_torch_compile_works_after_a_capture_and_nothing_is_kept() -> None:
    """In a process of its own: what torch imports at its first operation under a mode, it imports once."""
    done = subprocess.run([sys.executable, "-c", COMPILED_TWICE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_containers_of_user_modules_are_traced_through() -> None:
    model = InContainers()
    program = captured(model)
    assert sum(map(is_boundary, program.graph.nodes)) == 4
    assert [node.target for node in program.graph.find_nodes(op="call_module")] == [
        "sequence.0",
        "sequence.1.0.linear",
        "sequence.1.1",
        "table.one.linear",
        "table.two",
        "rows.0.linear",
        "rows.1.linear",
    ]
    x = torch.randn(2, 4)
    assert torch.equal(run(program, x), model(x))
