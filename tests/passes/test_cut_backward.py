"""Cut backward: which half makes what, and that the two make what the whole does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.passes.cut_backward import BackwardPart, Halves, cut_backward

ATEN: Any = torch.ops.aten


def captured(function: Callable[..., Sequence[Tensor | None]], given: Sequence[Tensor]) -> fx.GraphModule:
    return make_fx(function)(*given)


def halved(function: Callable[..., Any], given: Sequence[Tensor], later: Sequence[int]) -> Halves:
    """The halves of a function, which have made what it makes."""
    halves = cut_backward(captured(function, given), later)
    values = dict(zip(halves.arguments, given, strict=True))
    for part in (halves.of_input, halves.of_weights):
        values |= dict(zip(part.gives, part.code(*[values[name] for name in part.takes]), strict=True))
    for name, wanted in zip(halves.gradients, function(*given), strict=True):
        assert (name is None) == (wanted is None)
        assert name is None or torch.equal(values[name], wanted)
    return halves


def calls(part: BackwardPart) -> list[Any]:
    return [node.target for node in part.code.graph.nodes if node.op == "call_function"]


def numbers(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_i_makes_what_comes_back_and_w_the_weights_gradient() -> None:
    def linear(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        return dy.mm(weight), dy.t().mm(x), None

    halves = halved(linear, numbers((6, 3), (6, 4), (3, 4)), later=[1])
    dy, x, weight = halves.arguments
    assert (halves.of_input.takes, calls(halves.of_input)) == ((dy, weight), [ATEN.mm.default])
    assert (halves.of_weights.takes, calls(halves.of_weights)) == ((dy, x), [ATEN.t.default, ATEN.mm.default])


def test_w_takes_what_i_has_made_and_makes_views_again() -> None:
    def activated(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        dh = dy * x.cos()
        turned = dh.t()
        return weight.t().mm(turned).t(), turned.mm(x)

    halves = halved(activated, numbers((6, 3), (6, 3), (3, 3)), later=[1])
    assert [ATEN.cos.default, ATEN.mul.Tensor] == calls(halves.of_input)[:2]
    assert calls(halves.of_weights) == [ATEN.t.default, ATEN.mm.default]
    assert len(halves.of_input.gives) == 2


def test_a_call_that_makes_both_becomes_one_for_each() -> None:
    def normed(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        _, mean, inverse = ATEN.native_layer_norm(x, [4], weight, weight, 1e-5)
        made = ATEN.native_layer_norm_backward(dy, x, [4], mean, inverse, weight, weight, [True, True, True])
        return made[0], made[1], made[2]

    halves = halved(normed, numbers((6, 4), (6, 4), (4,)), later=[1, 2])
    masks = [
        node.args[-1]
        for part in (halves.of_input, halves.of_weights)
        for node in part.code.graph.nodes
        if node.target is ATEN.native_layer_norm_backward.default
    ]
    assert masks == [[True, False, False], [False, True, True]]


def test_a_call_whose_kernel_cannot_make_one_alone_stays_in_i() -> None:
    def normed(dy: Tensor, x: Tensor, weight: Tensor) -> Any:
        _, mean, inverse = ATEN.native_group_norm(x, weight, weight, 2, 4, 9, 2, 1e-5)
        made = ATEN.native_group_norm_backward(dy, x, mean, inverse, weight, 2, 4, 9, 2, [True, True, True])
        return made[0], made[1], made[2]

    halves = halved(normed, numbers((2, 4, 3, 3), (2, 4, 3, 3), (4,)), later=[1, 2])
    assert not halves.of_weights.does_anything
    assert {*halves.gradients} <= {*halves.of_input.gives}


def test_i_makes_a_weights_gradient_that_it_needs() -> None:
    def shared(dy: Tensor, x: Tensor) -> Any:
        dw = dy.t().mm(x)
        return x.mm(dw), dw

    halves = halved(shared, numbers((3, 3), (3, 3)), later=[1])
    assert halves.gradients[1] in halves.of_input.gives
    assert not halves.of_weights.does_anything


def test_a_gradient_that_was_given_is_made_by_neither() -> None:
    halves = halved(lambda dy: (dy, dy), numbers((3,)), later=[1])
    assert not halves.of_input.does_anything
    assert not halves.of_weights.does_anything


def test_what_writes_is_in_i() -> None:
    def writing(dy: Tensor, buffer: Tensor) -> Any:
        buffer.copy_(dy * 2)
        return None, dy * 3

    halves = halved(writing, numbers((3,), (3,)), later=[1])
    assert calls(halves.of_input) == [ATEN.mul.Tensor, ATEN.copy_.default]
    assert calls(halves.of_weights) == [ATEN.mul.Tensor]
