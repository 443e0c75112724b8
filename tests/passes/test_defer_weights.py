"""Defer weights: which gradients are left to W, and that I and then W make those of plain PyTorch, to the last bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.graph.stage_graph import Stage
from fxpipe.passes.defer_weights import CALLS, MODULES, defer_weights
from fxpipe.passes.split import split
from tests.capturing import Model, partitioned
from tests.device import DEVICE

Body = Callable[..., Tensor]


class Case(NamedTuple):
    """A model's forward, its parts beside ``Model``'s own, and the parameters that stay in I."""

    body: Body
    parts: Callable[[], Mapping[str, nn.Module]] = dict
    in_input: frozenset[str] = frozenset()


def square(value: Tensor) -> Tensor:
    return value.square().sum()


def three_uses(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return square(m.linear(torch.tanh(m.linear(x))) + m.linear(y) * 3)


def made_once(m: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = m.linear.weight * m.scale
    return square(F.linear(torch.tanh(F.linear(x, weight)), weight) + y @ weight.t())


def used_twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = torch.tanh(m.linear(x))
    return square(m.second(h) * m.norm(h) + h + m.third(h))


def biased_in_place(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x @ m.linear.weight
    h += m.linear.bias
    return square(h)


def attended(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.linear(x).reshape(2, 3, 4)
    return square(h + m.part(h, h, h)[0])


def kept_elsewhere(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """What an LSTM uses, a listed call uses, too: its sums must all come at once; and its bias goes with it."""
    weight = m.part.weight_ih_l0[:4]
    return square(m.part(F.linear(x, weight, m.linear.bias))[0] + m.norm(x))


def norms() -> dict[str, nn.Module]:
    return {"second": nn.Linear(4, 4, bias=False), "third": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}


def part(make: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"part": make(), "norm": nn.LayerNorm(4)}


def images(value: Tensor) -> Tensor:
    return value.reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)


def watched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


LSTM = frozenset({"part.weight_ih_l0", "part.weight_hh_l0", "part.bias_ih_l0", "part.bias_hh_l0"})
SPLIT: dict[str, Case] = {
    "three dimensions, no bias": Case(lambda m, x, y: square(m.second(x.reshape(2, 3, 4).transpose(0, 1))), norms),
    "a scaled weight": Case(made_once),
    "rows that the batch names": Case(lambda m, x, y: square(m.linear.weight[y.argmax(1)] * x)),
    "as long as the batch": Case(lambda m, x, y: square(m.linear.weight[: x.shape[1]] + x[:4])),
    "the same layer thrice": Case(three_uses),
    "a value used often": Case(used_twice, norms),
    "written behind": Case(lambda m, x, y: square(m.linear(x).relu_())),
    "frozen": Case(lambda m, x, y: square(m.linear(torch.tanh(m.frozen(x))))),
    "dropout behind": Case(lambda m, x, y: square(F.dropout(m.linear(x), 0.5, training=True))),
    "convolution": Case(lambda m, x, y: square(m.part(images(x + y))), part(lambda: nn.Conv2d(3, 5, 2))),
    "batch norm": Case(
        lambda m, x, y: square(m.part(images(x)) * y.reshape(2, 3, 2, 2)), part(lambda: nn.BatchNorm2d(3))
    ),
    "embedding": Case(lambda m, x, y: square(m.part(y.argmax(1)) * x), part(lambda: nn.Embedding(4, 4))),
    "attention": Case(attended, part(lambda: nn.MultiheadAttention(4, 2, dropout=0.5))),
}
STAYS: dict[str, Case] = {
    "added in place": Case(biased_in_place, in_input=frozenset({"linear.bias"})),
    "a layer of many operations": Case(
        lambda m, x, y: square(m.part(m.linear(x))[0]), part(lambda: nn.LSTM(4, 4)), LSTM
    ),
    "what that layer shares": Case(kept_elsewhere, part(lambda: nn.LSTM(4, 4)), LSTM | {"linear.bias"}),
    "one value twice in a call": Case(
        lambda m, x, y: square((h := torch.tanh(m.linear(x))) + torch.cat((h, h, m.scale.expand(1, 4)))[3:9]),
        in_input=frozenset({"scale"}),
    ),
    "group norm": Case(
        lambda m, x, y: square(m.part(images(x)) * y.reshape(2, 3, 2, 2)),
        part(lambda: nn.GroupNorm(3, 3)),
        frozenset({"part.weight", "part.bias"}),
    ),
    "a hook that changes the result": Case(
        lambda m, x, y: square(m.part(m.linear(x))), part(watched), frozenset({"part.weight", "part.bias"})
    ),
    "rows renormed in place": Case(
        lambda m, x, y: square(m.part(y.argmax(1)) * x),
        part(lambda: nn.Embedding(4, 4, max_norm=1.0)),
        frozenset({"part.weight"}),
    ),
}
CASES = SPLIT | STAYS


def inputs_of(stage: Stage) -> list[Tensor]:
    return [dict(zip("xy", batch(), strict=True))[name] for name in stage.input_names]


def stage_of(model: nn.Module) -> Stage:
    """A model that is one stage, in halves."""
    (stage,) = split(partitioned(model))
    return defer_weights(stage)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator).requires_grad_(), torch.randn(6, 4, generator=generator)


def given(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_the_two_halves_make_the_gradients_of_plain_pytorch(name: str, autocast: bool) -> None:
    body, parts, in_input = CASES[name]
    model = Model(body, **parts())
    plain = copy.deepcopy(model)
    region = torch.autocast(DEVICE, torch.bfloat16) if autocast else contextlib.nullcontext()
    x, y = batch()
    torch.manual_seed(2)
    with region:
        loss = plain(x, y)
    loss.backward()

    stage = stage_of(model)
    assert set(stage.in_input) == in_input
    torch.manual_seed(2)
    with region:
        (result,), saved = stage.forward_in_halves(*inputs_of(stage))
    assert torch.equal(result, loss)
    found = stage.backward(saved, [True])
    assert_same_input(dict(zip(stage.input_names, found, strict=True)), x.grad)
    assert_same(given(model), {name: given(plain)[name] for name in in_input})
    if saved.deferred is not None:
        stage.backward.weights(saved.deferred)
    assert_same(given(model), given(plain))
    assert set(given(plain)) >= in_input | {next(iter(given(plain)))}
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()))


def assert_same_input(found: Mapping[str, Tensor | None], wanted: Tensor | None) -> None:
    got = found.get("x")
    assert (got is None) == (wanted is None)
    assert got is None or torch.equal(got, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["one object by two names", "attention without a batch"])
def test_what_only_the_call_can_tell_falls_back_to_a_whole_backward(name: str) -> None:
    """``contiguous()`` of what is so already is the same object; of inputs without a batch attention makes views."""

    def repeated(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(m.linear(x))
        return square(h + torch.cat((h, h.contiguous(), m.scale.expand(1, 4)))[3:9])

    def unbatched(m: Any, x: Tensor, y: Tensor) -> Tensor:
        h = m.linear(x)
        return square(h + m.part(h, h, h)[0])

    body = repeated if name.startswith("one") else unbatched
    model = Model(body, part=nn.MultiheadAttention(4, 2))
    plain = copy.deepcopy(model)
    plain(*batch()).backward()
    stage = stage_of(model)
    assert stage.in_input == ()
    _, saved = stage.forward_in_halves(*inputs_of(stage))
    stage.backward(saved, [True])
    assert set(given(model)) == set(given(plain)) - {"linear.weight", "linear.bias"}
    assert saved.deferred is not None
    stage.backward.weights(saved.deferred)
    assert_same(given(model), given(plain))


def test_the_plain_forward_is_left_as_it_was() -> None:
    model = Model(three_uses)
    (stage,) = split(partitioned(model))
    halves = defer_weights(stage)
    assert halves.forward.code == stage.forward.code
    assert halves.module is stage.module
    (_,), saved = halves.forward(*inputs_of(halves))
    halves.backward(saved, [True])
    assert saved.deferred is None
    assert set(given(model)) == {"linear.weight", "linear.bias"}


def test_a_hook_that_was_put_on_a_layer_later_is_called_as_often_as_in_a_whole_backward() -> None:
    model = Model(lambda m, x, y: square(m.second(torch.tanh(m.linear(x)))), **norms())
    plain = copy.deepcopy(model)
    stage, calls = stage_of(model), [0, 0]
    for place, held in enumerate((model, plain)):

        def doubled(module: nn.Module, gradients: Any, place: int = place) -> Any:
            calls[place] += 1
            return tuple(gradient * 2 for gradient in gradients)

        held.get_submodule("linear").register_full_backward_pre_hook(doubled)
    plain(*batch()).backward()
    _, saved = stage.forward_in_halves(*inputs_of(stage))
    stage.backward(saved, [True])
    assert saved.deferred is not None
    stage.backward.weights(saved.deferred)
    assert_same(given(model), given(plain))
    assert calls == [1, 1]


# --- what the lists claim ---


def edges_to(result: Tensor, leaf: Tensor) -> int:
    """How many gradients come back to a leaf."""
    node = leaf.view_as(leaf).grad_fn
    assert node is not None
    end, seen, waiting, count = node.next_functions[0][0], set(), [result.grad_fn], 0
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        count += sum(following is end for following, _ in function.next_functions)
        waiting += [following for following, _ in function.next_functions if following is not end]
    return count


W = torch.randn(4, 4).requires_grad_()
B = torch.randn(4).requires_grad_()
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W, B),
    "bilinear": lambda x: F.bilinear(x, torch.randn(x.shape), torch.randn(4, 4, 4).requires_grad_()),
    "conv1d": lambda x: F.conv1d(x, torch.randn(5, 4, 2).requires_grad_(), padding="same"),
    "conv2d": lambda x: F.conv2d(x, torch.randn(5, 2, 2, 2).requires_grad_()),
    "conv3d": lambda x: F.conv3d(x[None], torch.randn(5, 2, 2, 2, 2).requires_grad_()),
    "convolution": lambda x: torch.convolution(
        x, torch.randn(5, 2, 2, 2).requires_grad_(), None, [1], [0], [1], False, [0], 1
    ),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.randn(4, 4, 2).requires_grad_()),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.randn(2, 4, 2, 2).requires_grad_()),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x[None], torch.randn(2, 4, 2, 2, 2).requires_grad_()),
    "matmul": lambda x: x @ W,
    "mm": lambda x: x.mm(W),
    "bmm": lambda x: x.bmm(W.expand(2, 4, 4)),
    "mv": lambda x: x.mv(B),
    "addmm": lambda x: torch.addmm(B, x, W),
    "baddbmm": lambda x: torch.baddbmm(B, x, W.expand(2, 4, 4)),
    "einsum": lambda x: torch.einsum("bij,jk->bki", x, W),
    "tensordot": lambda x: torch.tensordot(x, W, 1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), B, B),
    "batch_norm": lambda x: F.batch_norm(x.transpose(0, 1), None, None, B, B, training=True),
    "instance_norm": lambda x: F.instance_norm(x, weight=B, bias=B),
    "embedding": lambda x: x * F.embedding(torch.zeros(4, dtype=torch.long), W),
    "index_select": lambda x: x * W.index_select(0, torch.zeros(4, dtype=torch.long)),
    "index": lambda x: x * torch.ops.aten.index.Tensor(W, [torch.zeros(4, dtype=torch.long)]),
    "getitem": lambda x: x * W[torch.zeros(4, dtype=torch.long)],
    "prelu": lambda x: F.prelu(x, B),
    "add": lambda x: x + B,
    "sub": lambda x: x - B,
    "mul": lambda x: x * B,
    "div": lambda x: x.div(B),
    "truediv": lambda x: x / B,
    "cat": lambda x: torch.cat((x, W[None].expand(x.shape))),
    "concat": lambda x: torch.concat((x, W[None].expand(x.shape))),
    "stack": lambda x: torch.stack((x, W[None].expand(x.shape))),
    "where": lambda x: torch.where(x > 0, x, B),
}
SHAPES = {"conv2d": (2, 2, 4, 4), "convolution": (2, 2, 4, 4), "conv_transpose2d": (2, 2, 4, 4), "mv": (6, 4)}
SHAPES |= dict.fromkeys(("conv3d", "conv_transpose3d"), (2, 4, 4, 4)) | dict.fromkeys(
    ("mm", "addmm", "batch_norm"), (4, 4)
)


def test_each_listed_function_uses_its_input_once() -> None:
    assert FUNCTIONS.keys() == CALLS
    for name, function in FUNCTIONS.items():
        x = torch.randn(SHAPES.get(name, (2, 4, 4))).requires_grad_()
        assert edges_to(function(x), x) == 1, name


def test_each_listed_module_uses_its_input_once() -> None:
    for kind in MODULES:
        dimensions = int(kind.__name__[-2]) if kind.__name__.endswith("d") else 1
        x = torch.randn(2, *[4] * (dimensions + 1)).requires_grad_()
        if kind is nn.MultiheadAttention:
            result = nn.MultiheadAttention(4, 2)(x, x, x)[0]
        elif kind is nn.Bilinear:
            result = nn.Bilinear(4, 4, 4)(x, torch.randn(x.shape))
        elif kind is nn.Embedding:
            continue  # of numbers, which have no gradient
        else:
            sizes: tuple[int, ...] = (4, 4, 2) if "Conv" in kind.__name__ else (4, 4) if kind is nn.Linear else (4,)
            result = kind(*sizes, **({"affine": True} if "Instance" in kind.__name__ else {}))(x)
        assert edges_to(result, x) == 1, kind.__name__


# --- what users see ---


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = fxpipe.stage_boundary(self.first(x))
        return square(self.lstm(x)[0])


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.second = layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(fxpipe.stage_boundary(self.first(x))).square().mean()


def test_the_stages_name_the_tracer_that_leaves_more_to_w() -> None:
    """torch's encoder layer is a module of many calls, which the record tracer keeps."""
    told = {}
    for tracer in ("record", "export"):
        options = {"schedule": "zb_h1", "tracer": tracer, "example_args": (torch.randn(4, 3, 8),)}
        told[tracer] = str(fxpipe.compile(Encoders(), fxpipe.Topology([("pipe", 2)]), microbatches=2, **options).stages)
    assert "(100% of its parameters)" in told["record"]
    assert 'tracer="export" takes modules apart, and leaves more gradients to W' in told["record"]
    assert "I makes" not in told["export"]


def test_what_stays_in_the_first_half_is_told_with_the_stages() -> None:
    forward_backward = fxpipe.compile(Mixed(), fxpipe.Topology([("pipe", 2)]), microbatches=2, schedule="zb_h1")
    told = str(forward_backward.stages)
    assert (
        "lstm: I makes the gradients of lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0, too"
        in told
    )
    assert "(100% of its parameters)" in told
    assert "first: I makes" not in told
    plain = fxpipe.compile(Mixed(), fxpipe.Topology([("pipe", 2)]), microbatches=2)
    assert "I makes" not in str(plain.stages)
    assert all(stage.deferring is None for stage in plain.stages)
    assert isinstance(plain.stages[0].module, fx.GraphModule)
