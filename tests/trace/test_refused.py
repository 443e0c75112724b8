"""What a trace would get wrong is refused with the user's line, and leaves model and generators as they were."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpipe import TraceError, stage_boundary
from tests.capturing import capture_by
from tests.device import DEVICE

TRACERS = ["symbolic", "export", "record"]
Body = Callable[[Any, Any], Any]
GENERATOR, LEAF, TABLE = torch.Generator(), torch.ones(4, requires_grad=True), torch.ones(4)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


class Marked(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return stage_boundary(h)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.calls += 1
        return x, 1.0 / self.calls


class Coin(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return x * 2, random.random() < 0.5


class HooksItsArgument(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.register_hook(torch.neg)
        return y * 2


class Victim(nn.Module):
    """A model with everything that a careless forward could change. ``body`` runs between its two layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b, self.mark = nn.Linear(4, 4), nn.Linear(4, 4), Marked()
        self.inner = nn.ModuleDict({"part": nn.Linear(4, 4)})
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4))
        self.cache = torch.ones(4)  # a plain tensor, no buffer
        self.view = self.a.weight.detach()[:1]
        self.named = {"deep": [1, 2], "tensor": torch.ones(2)}
        self.count = 0
        self.loose = [nn.Linear(4, 4)]
        self.gain, self.counts, self.coin = Gain(), Counts(), Coin()
        self.hooks, self.dropout = HooksItsArgument(), nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        made = self.body(self, h)
        return self.b(self.mark(made if hasattr(made, "shape") else h)).square().mean()


def autocast(m: Any, h: Tensor) -> Any:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):  # here
        return m.b(h)


def autocast_off(m: Any, h: Tensor) -> Any:
    with torch.autocast(DEVICE, enabled=False):  # here
        return m.b(h)


def autocast_set(m: Any, h: Tensor) -> Any:
    torch.set_autocast_enabled(DEVICE, True)
    h = m.b(h)  # here
    torch.set_autocast_enabled(DEVICE, False)
    return h


def inference_mode(m: Any, h: Tensor) -> Any:
    with torch.inference_mode():  # here
        return m.b(h)


def constant_written_after_its_use(m: Any, h: Tensor) -> Any:
    offset = torch.zeros(4)
    y = h + offset
    offset.add_(1)  # here
    return y + offset


def seeded(m: Any, h: Tensor) -> Any:
    torch.manual_seed(7)
    return m.b(h)  # here


def data_of_parameters(m: Any, h: Tensor) -> Any:
    for parameter in m.parameters():
        parameter.data = torch.zeros(4, 4)


def boundary_in_checkpoint(m: Any, h: Tensor) -> Any:
    return checkpoint(lambda h: stage_boundary(h * 2) * 2, h, use_reentrant=False)  # here


def write_in_checkpoint(m: Any, h: Tensor) -> Any:
    other = torch.zeros_like(h)
    return checkpoint(lambda h: other.add_(h), h, use_reentrant=False)  # here


def last(m: Any, h: Tensor) -> None:
    m.last = h + getattr(m, "last", 0.0)  # here


def last_of_a_part(m: Any, h: Tensor) -> None:
    part = m.inner["part"]
    part.last = h + getattr(part, "last", 0.0)  # here


def gain_of_a_part(m: Any, h: Tensor) -> Any:
    if m.gain.gain == 1.0:
        m.gain.gain = 2.0  # here
    return m.gain(h)


def evaluates_a_part(m: Any, h: Tensor) -> Any:
    m.dropout.eval()  # here
    h = m.dropout(h)
    m.dropout.train()
    return h


def counts(m: Any, h: Tensor) -> None:
    m.count += 1  # here


def condition(m: Any, h: Tensor) -> Any:
    return torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))


SETS, CHANGES, DATA = (
    "forward sets ",
    "forward changes Victim.",
    "forward sets .data of a tensor",
)
DRAWN, LOST = "random numbers are drawn or seeded", "would be lost; tracer='record' keeps it"
NO_PARAMETER, NO_TENSOR = "needs a gradient and is no parameter of the model", "in which there is no traced tensor"
CLASS, INFERENCE = "forward asks for the class of a value", "inference mode is entered inside forward"
BUFFER, FOLLOW = "forward sets the buffer ", "the symbolic tracer cannot follow the model"
BRANCHES, LOOKS = "branches on the value of a tensor", "forward looks at the values of a tensor"
IN_CHECKPOINT = "amid a function given to torch.utils.checkpoint"

Row = tuple[Body, str, str, str]
"""A body, and what symbolic, export and record say of it; "" where the tracer takes it, or need not say this."""

AT_ITS_LINE: list[Row] = [
    (autocast, "autocast is changed", "", ""),
    (autocast_off, "autocast is changed", "", ""),
    (autocast_set, "autocast is changed", "", ""),
    (inference_mode, INFERENCE, INFERENCE, ""),
    (lambda m, h: h + torch.inference_mode()(torch.sin)(h).sum(), INFERENCE, INFERENCE, ""),
    (last_of_a_part, f"{SETS}inner.part.last", f"{SETS}inner.part.last", "not made by an operation of torch"),
    (last, f"{SETS}Victim.last", f"{SETS}Victim.last", "not made by an operation of torch"),
    (counts, f"{SETS}Victim.count", f"{SETS}Victim.count", ""),
    (lambda m, h: setattr(m, "l", [h, getattr(m, "l", 0)]), f"{SETS}Victim.l", f"{SETS}Victim.l", f"{CHANGES}l"),
    (gain_of_a_part, "", "", f"{SETS}gain.gain from outside"),
    (evaluates_a_part, "", "", f"{SETS}dropout.training from outside"),
    (lambda m, h: setattr(m, "seen", h[0, :2]), f"{SETS}Victim.seen", f"{BUFFER}self.seen", f"{BUFFER}seen"),
    (lambda m, h: setattr(m.b.weight, "data", h[:, :1]), DATA, DATA, DATA),
    (lambda m, h: setattr(h, "data", h * 2), DATA, DATA, DATA),
    (lambda m, h: torch._foreach_mul_([p.data for p in m.parameters()], 0.5), "forward writes ", "", ""),
    (lambda m, h: next(m.buffers()).add_(1), "forward writes seen", "", ""),
    (lambda m, h: m.cache.add_(1), "forward writes cache", "", ""),
    (lambda m, h: TABLE.add_(1), "", "", "writes a tensor that is no buffer"),
    (constant_written_after_its_use, "writes a tensor that the program uses already", "", ""),
    (lambda m, h: sum((h + buffer * 2 for buffer in m.buffers()), h), "values that seen has", "", ""),
    (lambda m, h: h + torch.randn(4, 4), "aten.randn.default draws random numbers", "", ""),
    (lambda m, h: h * random.random(), DRAWN, DRAWN, DRAWN),
    (lambda m, h: h * float(np.random.rand()), DRAWN, DRAWN, DRAWN),
    (seeded, DRAWN, DRAWN, DRAWN),
    (lambda m, h: h + torch.rand(4, generator=GENERATOR), "aten.rand.generator draws", "", "is given a Generator"),
    (lambda m, h: m.b(h) + torch.rand(h.shape, generator=GENERATOR), "draws from a torch.Generator", "", "a Generator"),
    (lambda m, h: Double.apply(h), "torch.autograd.Function Double", "Double is applied in forward", ""),
    (lambda m, h: checkpoint(m.b, h, use_reentrant=False), LOST, LOST, ""),
    (lambda m, h: checkpoint(m.b, h, use_reentrant=True), LOST, LOST, ""),
    (boundary_in_checkpoint, LOST, LOST, IN_CHECKPOINT),
    (write_in_checkpoint, LOST, LOST, "writes a tensor from outside"),
    (lambda m, h: h if h.sum() > 0 else -h, BRANCHES, BRANCHES, f"{LOOKS} (__bool__)"),
    (lambda m, h: sum(m.b(row) for row in h), BRANCHES, "", ""),
    (lambda m, h: h / len(h), "'len' is not supported", "", ""),
    (lambda m, h: h if isinstance(h, Tensor) else -h, CLASS, "", ""),
    (lambda m, h: h["x"] if isinstance(h, Mapping) else h, CLASS, "", ""),
    (lambda m, h: h.sum().item(), "", "", f"{LOOKS} (item)"),
    (lambda m, h: h + torch.from_numpy(h.detach().numpy()), FOLLOW, "numpy", f"{LOOKS} (numpy)"),
    (lambda m, h: stage_boundary(types.MappingProxyType({"h": h}))["h"], NO_TENSOR, NO_TENSOR, NO_TENSOR),
    (lambda m, h: stage_boundary([1, 2]), NO_TENSOR, NO_TENSOR, NO_TENSOR),
    (lambda m, h: m.loose[0](h), NO_PARAMETER, NO_PARAMETER, NO_PARAMETER),
    (
        lambda m, h: h.register_hook(torch.neg),
        FOLLOW,
        "a hook on a tensor's gradient",
        "calls register_hook on a tensor",
    ),
    (lambda m, h: torch.autograd.grad(h.sum(), h)[0], "", "gradients are computed inside", "calls grad on a tensor"),
    (lambda m, h: m.nothing, "no attribute 'nothing'", "no attribute 'nothing'", "no attribute 'nothing'"),
]
IN_FORWARD: list[Row] = [
    (lambda m, h: delattr(m, "count"), f"{CHANGES}count", f"{CHANGES}count", ""),
    (lambda m, h: vars(m).update(count=1), f"{CHANGES}count", f"{CHANGES}count", ""),
    (lambda m, h: m.named["deep"].append(3), f"{CHANGES}named", f"{CHANGES}named", f"{CHANGES}named"),
    (counts, "", "", f"{CHANGES}count"),
    (lambda m, h: math.prod(m.counts(h)), "", "", "counts.calls"),
    (lambda m, h: math.prod(m.coin(h)), "", "", "random numbers are drawn"),
    (lambda m, h: m.hooks(h, h), "", "", "register_hook"),
    (data_of_parameters, f"{CHANGES}a.weight.data", "", ""),
    (lambda m, h: m.frozen.requires_grad_(True) and None, f"{CHANGES}frozen.weight.requires_grad", "", ""),
    (lambda m, h: h + torch.rand(4, generator=GENERATOR), "", "a Generator that is no input", ""),
    (lambda m, h: h + h.nonzero().sum(), "", "shape depends on the values", ""),
    (condition, "", "cannot be cut into stages", ""),
    (lambda m, h: torch.vmap(torch.sin)(h), "", "outside of the function around it", "uses torch.vmap on tensors that"),
    (lambda m, h: h * LEAF, "", NO_PARAMETER, ""),
    (lambda m, h: h + m.view, "", "view of a.weight that was made outside", ""),
]
"""What shows at the end of a capture only, and is told of forward."""
CASES = [
    pytest.param(body, tracer, said, rows is AT_ITS_LINE, id=f"{tracer}: {said}")
    for rows in (AT_ITS_LINE, IN_FORWARD)
    for body, *messages in rows
    for tracer, said in zip(TRACERS, messages, strict=True)
    if said
]


def line_of(body: Body) -> int:
    """The line of a function that ends in "# here", or that of a lambda."""
    first = body.__code__.co_firstlineno
    lines = inspect.getsource(body).splitlines()
    return first + next((number for number, line in enumerate(lines) if line.endswith("# here")), 0)


def seen(model: Victim) -> dict[str, Any]:
    """All there is to see of a model: the attributes' objects, what the containers hold, the tensors' numbers."""
    found: dict[str, Any] = {"deep": list(model.named["deep"])}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = id(value), type(value).__name__
            if isinstance(value, (list, dict, set)):
                found[f"{path}.{name} holds"] = copy.copy(value)
    for name, parameter in model.named_parameters():
        found[f"{name} is"] = id(parameter), parameter.data_ptr(), parameter.requires_grad
    tensors = [*model.state_dict().values(), model.cache, model.named["tensor"]]
    return found | {"numbers": [tensor.tolist() for tensor in tensors]}


def surroundings() -> tuple[Any, ...]:
    """The states of all generators, and torch's modes."""
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    return *states, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(DEVICE)


@pytest.mark.parametrize(("body", "tracer", "said", "at_its_line"), CASES)
def test_what_a_trace_would_get_wrong_is_refused_and_undone(
    body: Body, tracer: str, said: str, at_its_line: bool
) -> None:
    model, batch = Victim(body), {"x": torch.randn(4, 4)}
    before, around = seen(model), surroundings()
    with pytest.raises(TraceError) as caught:
        capture_by(tracer, model, batch)
    assert said in str(caught.value)
    line = line_of(body) if at_its_line else r"\d+"
    assert re.search(rf'File "{re.escape(__file__)}", line {line}, in ', str(caught.value))
    assert (seen(model), surroundings()) == (before, around)


AT = [*itertools.product(["", "mark"], TRACERS), ("b", "export")]


@pytest.mark.parametrize(("at", "tracer"), AT)
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_what_is_traced_through_are_refused(register: str, at: str, tracer: str) -> None:
    model = Victim(lambda m, h: h)
    getattr(model.get_submodule(at), register)(lambda *_: None)
    with pytest.raises(TraceError, match=r"(Victim|Marked|mark|b|forward) has backward hooks"):
        capture_by(tracer, model, {"x": torch.randn(4, 4)})


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_torchscript_module_is_refused() -> None:
    model = Victim(lambda m, h: h)
    model.b = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TraceError, match="b is a TorchScript module"):
        capture_by("record", model, {"x": torch.randn(4, 4)})
