"""The symbolic tracer: what it must refuse, naming the line and undoing the rest, and what it must get right."""

from __future__ import annotations

import copy
import inspect
import random
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
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

# ---- what is refused ----


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


class Victim(nn.Module):
    """A model with everything that a careless forward could change."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"part": nn.Linear(4, 4)})
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4))
        self.cache = torch.ones(4)  # a plain tensor, no buffer
        self.history: list[Any] = []
        self.named = {"deep": [1, 2], "tensor": torch.ones(2)}
        self.count = 0
        self.loose = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def class_of_a_value(m: Any, x: Tensor) -> Any:  # as torchvision's GeneralizedRCNN asks for its features'
    h = m.a(x)
    return h if isinstance(h, Tensor) else -h  # here


def entry_of_a_mapping(m: Any, x: Tensor) -> Any:
    return m.a(x["x"] if isinstance(x, Mapping) else x)  # here


def own_generator(m: Any, x: Tensor) -> Any:
    return m.a(x) + torch.rand(x.shape, generator=torch.Generator(DEVICE))  # here


def autocast(m: Any, x: Tensor) -> Any:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):  # here
        return m.a(x)


def autocast_off(m: Any, x: Tensor) -> Any:
    with torch.autocast(DEVICE, enabled=False):  # here
        return m.a(x)


def autocast_set(m: Any, x: Tensor) -> Any:
    torch.set_autocast_enabled(DEVICE, True)
    h = m.a(x)  # here
    torch.set_autocast_enabled(DEVICE, False)
    return h


def inference_mode(m: Any, x: Tensor) -> Any:
    with torch.inference_mode():  # here
        return m.a(x)


def attribute_of_a_submodule_carried(m: Any, x: Tensor) -> Any:
    part = m.inner["part"]
    part.last = x + getattr(part, "last", 0.0)  # here
    return m.a(x)


def attribute_set_behind_our_back(m: Any, x: Tensor) -> Any:
    vars(m)["count"] = 1
    return m.a(x)


def deep_list_appended(m: Any, x: Tensor) -> Any:
    m.named["deep"].append(3)
    return m.a(x)


def data_assigned(m: Any, x: Tensor) -> Any:
    m.a.weight.data = m.a.weight.data * 2  # here
    return m.a(x)


def data_of_parameters_assigned(m: Any, x: Tensor) -> Any:
    for parameter in m.parameters():
        parameter.data = torch.zeros(4, 4)
    return m.a(x)


def parameters_written_together(m: Any, x: Tensor) -> Any:
    torch._foreach_mul_([p.data for p in m.parameters()], 0.5)  # here
    return m.a(x)


def buffers_written(m: Any, x: Tensor) -> Any:
    next(m.buffers()).add_(1)  # here
    return m.a(x)


def plain_tensor_written(m: Any, x: Tensor) -> Any:
    m.cache.add_(1)  # here
    return m.a(x)


def constant_written_after_its_use(m: Any, x: Tensor) -> Any:
    offset = torch.zeros(4)
    y = x + offset
    offset.add_(1)  # here
    return m.a(y + offset)


def requires_grad_changed(m: Any, x: Tensor) -> Any:
    m.frozen.requires_grad_(True)
    return m.a(x)


def value_of_a_buffer_frozen(m: Any, x: Tensor) -> Any:
    for buffer in m.buffers():
        x = x + buffer * 2  # here
    return m.a(x)


def factory_random(m: Any, x: Tensor) -> Any:
    noise = torch.randn(4, 4)  # here
    return m.a(x) + noise


def python_random(m: Any, x: Tensor) -> Any:
    return m.a(x * random.random())  # here


def numpy_random(m: Any, x: Tensor) -> Any:
    return m.a(x * float(np.random.rand()))  # here


def torch_seeded(m: Any, x: Tensor) -> Any:
    torch.manual_seed(7)
    return m.a(x)  # here


def autograd_function(m: Any, x: Tensor) -> Any:
    return Double.apply(m.a(x))  # here


def branch_on_a_value(m: Any, x: Tensor) -> Any:
    if x.sum() > 0:  # here
        return m.a(x)
    return x


def loop_over_a_tensor(m: Any, x: Tensor) -> Any:
    return sum(m.a(row) for row in x)  # here


def length_of_a_tensor(m: Any, x: Tensor) -> Any:
    return m.a(x) / len(x)  # here


def boundary_on_an_unknown_container(m: Any, x: Tensor) -> Any:
    return m.a(stage_boundary(types.MappingProxyType({"x": x}))["x"])  # here


def module_in_a_plain_list(m: Any, x: Tensor) -> Any:
    return m.loose[0](x)  # here


def hook_on_an_activation(m: Any, x: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)  # here
    return m.a(x)


REFUSED = {
    autocast: "autocast is changed",
    autocast_set: "autocast is changed",
    autocast_off: "autocast is changed",
    inference_mode: "inference mode is entered",
    attribute_of_a_submodule_carried: "sets inner.part.last",
    attribute_set_behind_our_back: "changes Victim.count",
    deep_list_appended: "changes Victim.named",
    data_assigned: "sets .data of a tensor",
    data_of_parameters_assigned: "changes Victim.a.weight.data",
    parameters_written_together: "writes a.weight",
    buffers_written: "writes seen",
    plain_tensor_written: "writes cache",
    constant_written_after_its_use: "writes a tensor that the program uses already",
    requires_grad_changed: "changes Victim.frozen.weight.requires_grad",
    value_of_a_buffer_frozen: "values that seen has",
    factory_random: "aten.randn.default draws random numbers",
    python_random: "random numbers are drawn",
    numpy_random: "random numbers are drawn",
    torch_seeded: "seeded",
    autograd_function: "torch.autograd.Function Double",
    branch_on_a_value: "branches on the value of a tensor",
    loop_over_a_tensor: "cannot follow",
    length_of_a_tensor: "'len' is not supported",
    class_of_a_value: "forward asks for the class of a value",
    entry_of_a_mapping: "forward asks for the class of a value",
    own_generator: "forward draws from a torch.Generator, which cannot stand in a graph",
    boundary_on_an_unknown_container: "no traced tensor",
    module_in_a_plain_list: "no parameter",
    hook_on_an_activation: "cannot follow",
}


AMBIENT: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
}


def line_marked(body: Callable[..., Any]) -> int:
    """The line of a function's source that ends in "# here"."""
    lines, first = inspect.getsourcelines(body)
    (place,) = [place for place, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return first + place


def everything(model: nn.Module) -> dict[str, Any]:
    """All there is to see of a model: the attributes' objects, what the containers hold, the tensors' numbers."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = id(value), type(value).__name__
            if isinstance(value, (list, dict, set)):
                found[f"{path}.{name} holds"] = copy.copy(value)
    for name, parameter in model.named_parameters():
        found[f"{name} is"] = id(parameter), parameter.data_ptr(), parameter.requires_grad
    found["deep"] = list(model.named["deep"]) if isinstance(model, Victim) else None
    tensors = [
        *model.state_dict().values(),
        *([model.cache, model.named["tensor"]] if isinstance(model, Victim) else []),
    ]
    found["numbers"] = [tensor.tolist() for tensor in tensors]
    return found


def random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().tolist()


def modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(DEVICE)


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_what_a_trace_would_get_wrong_is_refused_and_undone(body: Callable[..., Any]) -> None:
    model = Victim(body)
    before, drawn, mode = everything(model), random_states(), modes()
    with pytest.raises(TraceError) as caught:
        captured(model)
    message = str(caught.value)
    assert REFUSED[body] in message
    assert f'File "{__file__}", line ' in message
    if "# here" in inspect.getsource(body):  # elsewhere it shows at the end only, and forward is named
        assert f'File "{__file__}", line {line_marked(body)}, in ' in message
    assert everything(model) == before
    assert random_states() == drawn
    assert modes() == mode


@pytest.mark.parametrize("mode", AMBIENT, ids=AMBIENT)
def test_a_capture_is_the_same_whatever_mode_it_is_called_in(mode: str) -> None:
    model = Outer()
    wanted = str(captured(model).graph)
    with AMBIENT[mode]():
        assert str(captured(model).graph) == wanted


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("at", ["", "block"])
def test_backward_hooks_on_what_is_traced_through_are_refused(register: str, at: str) -> None:
    model = Outer()
    getattr(model.get_submodule(at), register)(lambda *_: None)
    with pytest.raises(TraceError, match=f"{'Outer' if not at else 'Block'} has backward hooks"):
        captured(model)


def test_backward_hooks_on_a_leaf_module_run_as_ever() -> None:
    model = Outer()
    model.block.linear.register_full_backward_hook(lambda *_: None)
    assert [n.target for n in captured(model).graph.find_nodes(op="call_module")] == ["block.linear"]


def test_an_unknown_tracer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TraceError, match=r"unknown tracer 'symbolics'; did you mean \"symbolic\""):
        capture(Request(Outer(), ("x",)), "symbolics")
    assert "symbolic" in TRACERS


# ---- boundaries are found, or the capture is refused ----


def test_a_boundary_that_the_graph_has_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return stage_boundary(x + 1)

    monkeypatch.setattr(sys.modules["fxpipe.trace.cuts.cutting"], "is_boundary", lambda node: False)
    with pytest.raises(TraceError, match="1 boundaries were executed while tracing, 0 are in the graph"):
        captured(Model())


# ---- what is captured, and right ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Model(nn.Module):
    """One line of forward, and what it may need."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.p = nn.Parameter(torch.randn(4))
        self.plist = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
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


def item_written(m: Any, x: Tensor) -> Any:
    y = x.clone()
    y[:, 0] = 1
    y[0] += m.p
    return y


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


def plain_tensors_of_the_model(m: Any, x: Tensor) -> Any:
    return sum((x * anchor for anchor in m.anchors), x)


def buffer_written(m: Any, x: Tensor) -> Any:
    m.buf.add_(x.mean())
    return x * m.buf


def data_written_through_the_attribute(m: Any, x: Tensor) -> Any:
    m.p.data.mul_(0.5)
    return x * m.p


def nested_containers(m: Any, x: Tensor) -> Any:
    parts = {"a": [m.a(x), (x, 3)], "b": None}
    return {"out": (parts["a"][0] + parts["a"][1][0], [parts["b"], {"x": x}])}


def grad_mode_that_changes_nothing(m: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return m.a(x)


def function_with_out(m: Any, x: Tensor) -> Any:
    y = x * 1
    torch.add(y, 1, out=y)
    return y


CAPTURED = [
    add_in_place,
    all_operators_in_place,
    item_written,
    factories_of_sizes,
    constant_made_in_forward,
    plain_tensors_of_the_model,
    buffer_written,
    data_written_through_the_attribute,
    nested_containers,
    grad_mode_that_changes_nothing,
    function_with_out,
]


@pytest.mark.parametrize("body", CAPTURED, ids=lambda body: body.__name__)
def test_the_program_computes_what_the_model_does_which_is_left_as_it_was(body: Callable[..., Any]) -> None:
    traced, model = Model(body), Model(body)
    before, drawn = everything(traced), random_states()
    program = captured(traced)
    assert (everything(traced), random_states()) == (before, drawn)
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


@pytest.mark.parametrize("at", ["", "block"])
def test_forward_hooks_on_what_is_traced_through_are_a_part_of_the_program(at: str) -> None:
    model = Outer()
    part = model.get_submodule(at)
    part.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    part.register_forward_hook(lambda module, inputs, output: stage_boundary(output * 2))
    program = captured(model)
    assert sum(map(is_boundary, program.graph.nodes)) == 1
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


class Options(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, *, mask: Tensor | None = None, double: bool = False) -> Tensor:
        y = x * scale
        if mask is not None:
            y = y + mask
        return 2 * y if double else y


def test_optional_inputs_are_absent_inputs_or_fixed() -> None:
    x, scale, mask = torch.ones(2), torch.full((2,), 3.0), torch.full((2,), 10.0)
    assert run(captured(Options(), "x", "scale"), x, scale).tolist() == [3, 3]
    assert run(captured(Options(), "x", "scale", mask=None, double=True), x, scale).tolist() == [6, 6]
    program = captured(Options(), "scale", "mask", "x", double=True)
    assert program.inputs == ("scale", "mask", "x")
    assert run(program, scale, mask, x).tolist() == [26, 26]


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


def loss_counts(loss: Any, output: Tensor) -> None:
    loss.count += 1


def loss_writes_a_number(loss: Any, output: Tensor) -> None:
    loss.seen.add_(1)


def loss_writes_what_is_traced(loss: Any, output: Tensor) -> None:
    loss.seen.add_(output.detach().sum(0))


def test_a_loss_whose_parameters_are_the_models_is_captured() -> None:
    model = Outer()
    model.loss = Scaled()
    program = capture(Request(model, ("x", "target"), loss_fn=model.loss))
    assert "loss.scale" in [node.target for node in program.graph.find_nodes(op="get_attr")]
    x, target = torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(run(program, x, target), model.loss(model(x), target))


def test_a_loss_may_read_buffers_and_frozen_parameters() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.0, 1.0]))
    request = Request(Outer(), ("x", "target"), loss_fn=loss)
    x, target = torch.randn(3, 4), torch.tensor([0, 2, 1])
    assert torch.equal(run(capture(request), x, target), loss(request.module(x), target))
    frozen = Scaled().requires_grad_(False)
    request = Request(Outer(), ("x", "target"), loss_fn=frozen)
    target = torch.randn(3, 4)
    assert torch.equal(run(capture(request), x, target), frozen(request.module(x), target))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (loss_counts, "sets Careless.count"),
        (loss_writes_a_number, "writes seen"),
        (loss_writes_what_is_traced, "writes a tensor that is no buffer of the model"),
    ],
)
def test_a_loss_that_writes_what_it_holds_is_refused(body: Callable[..., Any], text: str) -> None:
    loss = Careless(body)
    with pytest.raises((TraceError, PartitionError), match=text) as caught:
        order_writes(capture(Request(Outer(), ("x", "target"), loss_fn=loss)))
    assert __file__ in str(caught.value)
    assert (loss.count, loss.seen.tolist()) == (0, [0.0] * 4)


class ByPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 2.0, /, *, end: float = 0.0) -> Tensor:
        y = stage_boundary(self.linear(x)) * scale
        return (y if shift is None else y + shift) + end


def test_arguments_that_go_by_place_alone_are_given_by_place() -> None:
    model, x, shift = ByPlace(), torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(run(captured(model, "x"), x), model(x))
    assert torch.equal(run(captured(model, "shift", "x", end=1.0), shift, x), model(x, shift, end=1.0))
    assert torch.equal(run(captured(model, "x", scale=3.0), x), model(x, None, 3.0))
    with pytest.raises(TraceError, match="'x'"):
        captured(model, "shift")


COMPILED_TWICE = """
import gc, torch, fxpipe
from torch import nn
from fxpipe.trace.state.attributes import CaptureGuard
from fxpipe.trace.state.snapshot import Snapshot

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


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return stage_boundary(self.linear(x))


class InContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Marked(), nn.ReLU()))
        self.table = nn.ModuleDict({"one": Marked(), "two": nn.Linear(4, 4)})
        self.rows = nn.ModuleList([Marked(), Marked()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.table["two"](self.table["one"](self.sequence(x)))
        for row in self.rows:
            x = row(x)
        return x


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


class Checkpointing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_would_be_lost_is_refused(reentrant: bool) -> None:
    with pytest.raises(TraceError, match=r"(?s)checkpoint.*would be lost; tracer='record' keeps it.*self\.reentrant"):
        capture(Request(Checkpointing(reentrant), ("x",)), "symbolic")
