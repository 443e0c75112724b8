"""One operation after another in the forward of a small model: captured by each tracer, it computes what torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe import passes
from fxpipe.passes.chain import chain
from fxpipe.passes.split import split
from fxpipe.specs import TensorSpec
from fxpipe.trace import NEED_SHAPES, TRACERS, Request
from tests.capturing import run_stages
from tests.device import DEVICE
from tests.harness import assert_same, gradients_of
from tests.thinned import in_turn

Operation = Callable[[Tensor, Tensor], Tensor]
SIZE = 4
every_tracer = pytest.mark.parametrize("tracer", sorted(NEED_SHAPES))


class One(nn.Module):
    """A layer, the operation on what it gives and on an input, and in a stage of its own another layer."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.a, self.b, self.operation = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), operation

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.a(x)
        return self.operation(x, y).float().mul(1.5).sum() + self.b(x).tanh().sum()


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(SIZE, SIZE, generator=generator), "y": torch.randn(SIZE, SIZE, generator=generator)}


def assert_captured(operation: Operation, tracer: str) -> None:
    """Its stages give eager's losses and gradients, on other numbers than were captured."""
    model = One(operation)
    eager = copy.deepcopy(model)
    example = {name: TensorSpec.from_tensor(tensor) for name, tensor in batch(0).items()}
    program = TRACERS[tracer](Request(model, ("x", "y"), example=example, cuts={"b": "before"}))
    graph = split(chain(passes.default(), program))
    for number in (1, 2):
        torch.manual_seed(number)
        got = run_stages(graph, batch(number))
        torch.manual_seed(number)
        wanted = eager(**batch(number))
        assert_same(got, wanted, "loss")
        got.backward()
        wanted.backward()
    gradients = gradients_of(eager.named_parameters())
    for name, gradient in gradients_of(model.named_parameters()).items():
        assert_same(gradient, gradients[name], name)


EXPRESSIONS = [
    *["x + 1", "1 + x", "1 - x", "2 * x", "2 / x.exp()", "x**2", "2**x", "x.abs() ** 0.5", "x % 2", "-x", "abs(x)"],
    *[
        "x @ x.T",
        "x > 0",
        "x != y",
        "~(x > 0)",
        "(x > 0) & (y > 0)",
        "(x > 0) | (y > 0)",
        "+x",
        "x.T",
        "x.mT",
        "x.real",
    ],
    *["x[0]", "x[:, 1:]", "x[..., None]", "x[x.argmax(1)]", "x[torch.tensor([0, 1])]", "x[:, [0, 2]]"],
    *["x.shape[0] * x", "len(x) * x", "x.numel() * x", "float(x.shape[0]) * x", "torch.finfo(x.dtype).eps + x"],
    *[
        "x.to(y)",
        "x.type_as(y)",
        "x.double()",
        "x.half().float()",
        "x.new_zeros(3) + x[0, :3]",
        "x.new_tensor([1.0]) + x",
    ],
    *[
        "torch.zeros_like(x) + x",
        "torch.full((4,), 2.0) * x",
        "torch.arange(4) * x",
        "torch.triu(torch.ones(4, 4)) @ x",
    ],
    *["torch.cat([x, y])", "torch.stack([x, y])", "x.chunk(2)[0]", "x.unbind(0)[1]", "torch.split(x, [1, 3])[1]"],
    *["x.max(1)[0]", "x.max(1).values", "x.topk(2).indices", "x.sort().values", "torch.where(x > 0, x, y)"],
    *["x.view(-1)", "x.reshape(2, -1)", "x.permute(1, 0)", "x.transpose(0, 1).contiguous()", "x.expand(2, *x.shape)"],
    *["x.sum()", "x.mean(-1, keepdim=True)", "x.var(-1)", "x.norm()", "x.cumsum(1)", "x.logsumexp(0)", "x.softmax(-1)"],
    *["F.pad(x, (1, 1))", "F.layer_norm(x, (4,))", "F.normalize(x)", "F.cross_entropy(x, y.argmax(1))", "F.gelu(x)"],
    *["F.scaled_dot_product_attention(x[None], y[None], y[None])", "torch.einsum('ij,kj->ik', x, y)", "x.diagonal()"],
    *["F.interpolate(x[None, None], scale_factor=2)", "x.unfold(1, 2, 1)", "x.gather(1, y.argmax(1, keepdim=True))"],
    *[
        "x.scatter(1, y.argmax(1, keepdim=True), 1.0)",
        "x.repeat_interleave(2, 0)",
        "torch.roll(x, 1, 0)",
        "x.detach() * x",
    ],
    *[
        "torch.complex(x, y).abs()",
        "x.is_floating_point() * x",
        "x.requires_grad * x",
        "(x > 0).all() * x",
        "x.data * x",
    ],
    *["F.dropout(x, 0.5)", "torch.rand_like(x) * x", "torch.randn(4, 4) * x", "torch.bernoulli(x.sigmoid()) * x"],
]
"""Of ``x``, which needs a gradient, and ``y``, which does not."""


@pytest.mark.parametrize(("expression", "tracer"), in_turn(EXPRESSIONS, sorted(NEED_SHAPES)))
def test_an_expression(expression: str, tracer: str) -> None:
    scope: dict[str, Any] = {"torch": torch, "F": F}
    assert_captured(eval(f"lambda x, y: {expression}", scope), tracer)


# --- writes ---


def add_to(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z += y
    return z


def set_column(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:, 0] = y[:, 1]
    return z


def set_where(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[x > 0] = 0
    return z


def through_transpose(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.t().mul_(y)
    return z


def through_view_of_view(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.view(-1)[::2].add_(1)
    return z


def view_read_after_write(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    row = z[1]
    z.mul_(2)
    return row


def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z.data.mul_(2)
    return z


def in_place_activation(x: Tensor, y: Tensor) -> Tensor:
    return F.relu(x.clone(), inplace=True)


def into_out(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    torch.add(y, y, out=z)
    return z * x


WRITES = [
    *[add_to, set_column, set_where, through_transpose, through_view_of_view, view_read_after_write],
    *[without_gradient, in_place_activation, into_out],
]


@pytest.mark.parametrize(
    ("operation", "tracer"), [*in_turn(WRITES, sorted(NEED_SHAPES)), *product(WRITES, ["symbolic"])]
)
def test_a_write(operation: Operation, tracer: str) -> None:
    assert_captured(operation, tracer)


# --- modes ---


def without_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = x * 2
    return z + x


def with_grad_inside(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = x * 2
        with torch.enable_grad():
            z = z + x
    return z


def in_bfloat16(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return x @ y


def in_float32_again(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        z = x @ y
        with torch.autocast(DEVICE, enabled=False):
            return z.float() @ y


def on_device(x: Tensor, y: Tensor) -> Tensor:
    with torch.device(DEVICE):
        return torch.ones(4) * x


@every_tracer
@pytest.mark.parametrize(
    "operation", [without_grad, with_grad_inside, in_bfloat16, in_float32_again, on_device, torch.no_grad()(torch.mul)]
)
def test_a_mode(operation: Operation, tracer: str) -> None:
    assert_captured(operation, tracer)
