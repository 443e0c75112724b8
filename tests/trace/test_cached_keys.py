"""What a capture in a cache is found by: two models that would be captured otherwise never have one key.

All of these pairs have the same sources, lines included: what differs is what sources do not tell.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpipe import stage_boundary
from fxpipe.graph.like import TensorLike
from fxpipe.graph.modes import Autocast
from fxpipe.torch_compat import pytree
from fxpipe.trace import Request
from fxpipe.trace.cached import rehearsed
from fxpipe.trace.cached.not_kept import NotKept
from fxpipe.trace.cached.operator_digest import OperatorDigest
from fxpipe.trace.cached.rehearsed import rehearse

WIDTH = 4
Forward = Callable[..., Any]
SETTINGS = SimpleNamespace(number=2.0)
"""A global that forwards read."""
REGISTRY: dict[str, Callable[[Tensor], Tensor]] = {"act": torch.tanh}


class Probe(nn.Module):
    """A model whose forward is ``how``, with layers and buffers for it to use."""

    def __init__(self, how: Forward) -> None:
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(7, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.register_buffer("one", torch.ones(WIDTH))
        self.register_buffer("two", torch.ones(WIDTH))
        self.factor = 2.0

    def forward(self, x: Tensor, y: Any = None, loud: Any = None) -> Any:
        return self.how(self, x, y, loud)


def plainly(model: Any, x: Tensor, y: Any, loud: Any) -> Any:
    """Uses what the changes below change."""
    h = model.drop(model.norm(model.a(x))) * model.factor * SETTINGS.number
    h = REGISTRY["act"](F.relu(h)) * float(os.environ.get("FACTOR", "1"))
    h = model.b(h + model.one)
    return h * 2 if loud else h


def asked(
    how: Forward = plainly,
    change: Callable[[Any], Any] = lambda model: None,
    x: Tensor | None = None,
    fixed: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> Request:
    model = Probe(how)
    change(model)
    batch = {"x": torch.zeros(3, WIDTH) if x is None else x, **(given or {})}
    example = pytree.tree_map_only(Tensor, TensorLike.of, batch)
    return Request(model, tuple(batch), fixed or {}, example=example, **{"training": False} | options)


@pytest.fixture(autouse=True)
def _sources_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two functions on two lines are told apart by what they do alone."""
    monkeypatch.setattr(OperatorDigest, "_line", lambda self: "")


def key(request: Request) -> str:
    return rehearse(request).key


# --- what forward computes ---

FORWARDS: dict[str, tuple[Forward, Forward]] = {
    "a number": (lambda m, x, *_: m.a(x) * 2, lambda m, x, *_: m.a(x) * 3),
    "a whole number and its float": (lambda m, x, *_: m.a(x) * 2, lambda m, x, *_: m.a(x) * 2.0),
    "a number's last bit": (lambda m, x, *_: m.a(x) * 0.1, lambda m, x, *_: m.a(x) * math.nextafter(0.1, 1)),
    "zero and minus zero": (lambda m, x, *_: m.a(x) + 0.0, lambda m, x, *_: m.a(x) + -0.0),
    "a function": (lambda m, x, *_: m.a(x).relu(), lambda m, x, *_: m.a(x).tanh()),
    "which layer": (lambda m, x, *_: m.a(x), lambda m, x, *_: m.b(x)),
    "the order of layers": (lambda m, x, *_: m.a(m.b(x)), lambda m, x, *_: m.b(m.a(x))),
    "which operand comes first": (lambda m, x, *_: m.a(x) - m.b(x), lambda m, x, *_: m.b(x) - m.a(x)),
    "which earlier result": (lambda m, x, *_: twice(m.a(x), 0), lambda m, x, *_: twice(m.a(x), 1)),
    "which buffer of two alike": (lambda m, x, *_: m.a(x) + m.one, lambda m, x, *_: m.a(x) + m.two),
    "numbers of a tensor made in forward": (
        lambda m, x, *_: m.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda m, x, *_: m.a(x) * torch.tensor([1.0, 2.0, 3.0, 5.0]),
    ),
    "a number out of a tensor made in forward": (
        lambda m, x, *_: m.a(x) * torch.tensor(1.5).item(),
        lambda m, x, *_: m.a(x) * torch.tensor(2.5).item(),
    ),
    "written in place or not": (lambda m, x, *_: m.a(x).relu_(), lambda m, x, *_: m.a(x).relu()),
    "a buffer written or not": (
        lambda m, x, *_: (m.a(x), m.one.add(1))[0],
        lambda m, x, *_: (m.a(x), m.one.add_(1))[0],
    ),
    "detached": (lambda m, x, *_: m.b(m.a(x)), lambda m, x, *_: m.b(m.a(x).detach())),
    "without gradients": (lambda m, x, *_: m.b(m.a(x)), lambda m, x, *_: m.b(quietly(m.a, x))),
    "autocast inside": (lambda m, x, *_: m.a(x), lambda m, x, *_: cast(m.a, x, torch.bfloat16)),
    "the type of autocast": (
        lambda m, x, *_: cast(m.a, x, torch.float16),
        lambda m, x, *_: cast(m.a, x, torch.bfloat16),
    ),
    "the cache of autocast": (
        lambda m, x, *_: cast(m.a, x, torch.bfloat16),
        lambda m, x, *_: cast(m.a, x, torch.bfloat16, cache_enabled=False),
    ),
    "one region of autocast or two": (
        lambda m, x, *_: cast(lambda h: m.a(m.a(h)), x, torch.bfloat16),
        lambda m, x, *_: cast(m.a, cast(m.a, x, torch.bfloat16), torch.bfloat16),
    ),
    "how likely a dropout": (
        lambda m, x, *_: F.dropout(m.a(x), 0.1, True),
        lambda m, x, *_: F.dropout(m.a(x), 0.2, True),
    ),
    "noise": (lambda m, x, *_: m.a(x) + torch.zeros_like(x), lambda m, x, *_: m.a(x) + torch.rand_like(x)),
    "what only backward sees": (
        lambda m, x, *_: F.embedding(x.long(), m.words.weight),
        lambda m, x, *_: F.embedding(x.long(), m.words.weight, padding_idx=1),
    ),
    "what only backward sees, for frequent words": (
        lambda m, x, *_: F.embedding(x.long(), m.words.weight),
        lambda m, x, *_: F.embedding(x.long(), m.words.weight, scale_grad_by_freq=True),
    ),
    "an option of a loss": (
        lambda m, x, *_: F.cross_entropy(m.a(x), x[:, 0].long()),
        lambda m, x, *_: F.cross_entropy(m.a(x), x[:, 0].long(), ignore_index=0),
    ),
    "smoothing of a loss": (
        lambda m, x, *_: F.cross_entropy(m.a(x), x[:, 0].long()),
        lambda m, x, *_: F.cross_entropy(m.a(x), x[:, 0].long(), label_smoothing=0.1),
    ),
    "a mask of attention": (lambda m, x, *_: attention(m, x), lambda m, x, *_: attention(m, x, is_causal=True)),
    "the scale of attention": (
        lambda m, x, *_: attention(m, x, scale=0.5),
        lambda m, x, *_: attention(m, x, scale=0.25),
    ),
    "a dimension": (lambda m, x, *_: m.a(x).softmax(0), lambda m, x, *_: m.a(x).softmax(1)),
    "a part": (lambda m, x, *_: m.a(x)[:, :2], lambda m, x, *_: m.a(x)[:, 2:]),
    "a type": (lambda m, x, *_: m.a(x).to(torch.float64), lambda m, x, *_: m.a(x).to(torch.float16)),
    "expanded or repeated": (lambda m, x, *_: m.a(x)[:1].expand(3, -1), lambda m, x, *_: m.a(x)[:1].repeat(3, 1)),
    "the name of a boundary": (
        lambda m, x, *_: m.b(stage_boundary(m.a(x), name="one")),
        lambda m, x, *_: m.b(stage_boundary(m.a(x), name="two")),
    ),
    "a boundary": (lambda m, x, *_: m.b(m.a(x)), lambda m, x, *_: m.b(stage_boundary(m.a(x)))),
    "what a boundary gathers": (
        lambda m, x, *_: m.b(stage_boundary(m.a(x), gather="batch")),
        lambda m, x, *_: m.b(stage_boundary(m.a(x), gather="global")),
    ),
    "how many it gathers": (
        lambda m, x, *_: m.b(stage_boundary(m.a(x), gather="batch")),
        lambda m, x, *_: m.b(stage_boundary(m.a(x), gather="batch", group=2)),
    ),
    "in which submodule": (lambda m, x, *_: m.a(x), lambda m, x, *_: F.linear(x, m.a.weight, m.a.bias)),
    "the names in a result": (lambda m, x, *_: {"h": m.a(x)}, lambda m, x, *_: {"g": m.a(x)}),
    "the order in a result": (
        lambda m, x, *_: dict(zip("hg", (m.a(x), m.b(x)), strict=True)),
        lambda m, x, *_: dict(zip("gh", (m.a(x), m.b(x))[::-1], strict=True)),
    ),
    "a plain value in a result": (lambda m, x, *_: (m.a(x), 1), lambda m, x, *_: (m.a(x), 2)),
    "the container of a result": (lambda m, x, *_: (m.a(x),), lambda m, x, *_: [m.a(x)]),
    "which result": (lambda m, x, *_: pair(m.a(x))[0], lambda m, x, *_: pair(m.a(x))[1]),
}


def twice(h: Tensor, place: int) -> Tensor:
    first = h.relu(), h.relu()
    return first[place] + 1


def pair(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.relu(), h.relu()


def quietly(layer: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return layer(x)


def cast(layer: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    with torch.autocast("cpu", dtype, **options):
        return layer(x)


def attention(model: Any, x: Tensor, **options: Any) -> Tensor:
    h = model.a(x)[None]
    return F.scaled_dot_product_attention(h, h, h, **options)


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_that_do_something_else_have_keys_of_their_own(name: str) -> None:
    one, other = FORWARDS[name]
    assert key(asked(one)) == key(asked(one))
    assert key(asked(one)) != key(asked(other))


# --- what the model is ---


def retied(model: Any) -> None:
    model.b.weight = model.a.weight


def sharing(model: Any) -> None:
    model.two = model.one.view(WIDTH)


def doubling(model: Any) -> None:
    model.a.forward = lambda x: 2 * F.linear(x, model.a.weight, model.a.bias)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda model: setattr(model, "factor", 3.0),
    "a frozen parameter": lambda model: model.a.weight.requires_grad_(False),
    "another type": lambda model: model.double(),
    "evaluation": lambda model: model.eval(),
    "evaluation of one layer": lambda model: model.drop.eval(),
    "how likely its dropout is": lambda model: setattr(model.drop, "p", 0.5),
    "how fast its batch norm forgets": lambda model: setattr(model.norm, "momentum", 0.5),
    "a hook": lambda model: model.a.register_forward_hook(lambda module, args, output: 2 * output),
    "a hook before": lambda model: model.a.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "retied parameters": retied,
    "buffers that share memory": sharing,
    "a method of one object": doubling,
    "a parametrized weight": lambda model: nn.utils.parametrizations.weight_norm(model.a),
    "another layer in its place": lambda model: setattr(model, "norm", nn.LayerNorm(WIDTH)),
    "a layer without bias": lambda model: setattr(model, "a", nn.Linear(WIDTH, WIDTH, bias=False)),
    "a parameter in another layout": lambda model: setattr(
        model.a, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH).t().clone(memory_format=torch.preserve_format))
    ),
    "a parameter that is not used": lambda model: model.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a buffer that is a parameter": lambda model: turned(model),
}


def turned(model: Any) -> None:
    del model.one
    model.one = nn.Parameter(torch.ones(WIDTH), requires_grad=False)


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_are_changed_have_keys_of_their_own(name: str) -> None:
    assert key(asked()) == key(asked())
    assert key(asked()) != key(asked(change=CHANGES[name]))


# --- what stands around it ---


def loss_of(factor: float) -> Callable[..., Tensor]:
    return lambda output, target: output.sum() * factor


TARGET = {"target": torch.zeros(3)}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a fixed input": ({}, {"fixed": {"loud": True}}),
    "a fixed input's value": ({"fixed": {"loud": False}}, {"fixed": {"loud": True}}),
    "True and 1": ({"fixed": {"loud": 1}}, {"fixed": {"loud": True}}),
    "more rows": ({}, {"x": torch.zeros(5, WIDTH)}),
    "other strides": ({}, {"x": torch.zeros(WIDTH, 3).t()}),
    "an input that needs a gradient": ({}, {"x": torch.zeros(3, WIDTH, requires_grad=True)}),
    "one more input": ({}, {"given": {"y": torch.zeros(1)}}),
    "a plain value of an input": ({"given": {"y": 1}}, {"given": {"y": 2}}),
    "a plain value in an input": ({"given": {"y": {"n": 1}}}, {"given": {"y": {"n": 2}}}),
    "the container of an input": ({"given": {"y": (1, 2)}}, {"given": {"y": [1, 2]}}),
    "training": ({}, {"training": True}),
    "the type that it computes in": ({}, {"compute": torch.bfloat16}),
    "autocast around it": ({}, {"autocast": (Autocast("cpu", True, torch.bfloat16),)}),
    "a cut from outside": ({}, {"cuts": {"b": "before"}}),
    "the side of a cut": ({"cuts": {"a": "after"}}, {"cuts": {"a": "both"}}),
    "two losses of one name": (
        {"given": TARGET, "loss_fn": loss_of(1.0)},
        {"given": TARGET, "loss_fn": loss_of(2.0)},
    ),
    "a loss with another option": (
        {"given": {"target": torch.zeros(3, WIDTH)}, "loss_fn": nn.HuberLoss(delta=1.0)},
        {"given": {"target": torch.zeros(3, WIDTH)}, "loss_fn": nn.HuberLoss(delta=2.0)},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_asked_for_otherwise_has_a_key_of_its_own(name: str) -> None:
    one, other = REQUESTS[name]
    assert key(asked(**one)) == key(asked(**one))
    assert key(asked(**one)) != key(asked(**other))


@contextlib.contextmanager
def _default_type() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_function_that_is_patched_a_registry_a_global_and_the_environment_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [key(asked())]
    changes: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
        lambda patch: patch.setattr(F, "relu", F.gelu),
        lambda patch: patch.setitem(REGISTRY, "act", torch.sigmoid),
        lambda patch: patch.setattr(SETTINGS, "number", 3.0),
        lambda patch: patch.setenv("FACTOR", "3"),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            keys.append(key(asked()))
    assert len(set(keys)) == len(keys)
    assert key(asked()) == keys[0]


def test_the_type_of_what_forward_makes_is_seen() -> None:
    def makes(model: Any, x: Tensor, *_: Any) -> Tensor:
        return model.a(x) + torch.zeros(WIDTH)

    before = key(asked(makes))
    request = asked(makes)
    with _default_type():
        assert key(request) != before


def test_what_only_the_fused_operators_of_attention_do_not_tell_is_seen() -> None:
    """Without gradients in evaluation, an encoder runs one operator for both kinds of GELU; an export does not."""

    def encoding(approximate: str) -> Request:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, activation=nn.GELU(approximate), batch_first=True)
        return asked(lambda m, x, *_: layer(x[None]), lambda m: setattr(m, "layer", layer.eval().requires_grad_(False)))

    assert key(encoding("none")) == key(encoding("none")) != key(encoding("tanh"))
    assert torch.backends.mha.get_fastpath_enabled()


def test_models_on_other_devices_have_keys_of_their_own() -> None:
    with torch.device("meta"):
        model = Probe(plainly)
    on_meta = replace(asked(), module=model)
    assert key(on_meta) == key(on_meta) != key(asked())


def test_a_file_from_which_an_operator_is_called_is_a_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    source = tmp_path / "helpers_of_this_test.py"
    code = "def tripled(h):\n    return 3 * h\n"
    home: dict[str, Any] = {}
    exec(compile(code, source, "exec"), home)
    request = asked(lambda m, x, *_: home["tripled"](m.a(x)))
    keys = []
    for text in (code, code + "# more\n", code):
        source.write_text(text)
        keys.append(key(request))
    assert keys[0] == keys[2] != keys[1]


# --- what no key can tell ---

OUTSIDE, LOOSE = torch.ones(WIDTH), nn.Parameter(torch.ones(WIDTH))


class Twofold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def swallowed(model: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = x + OUTSIDE
    return model.a(x)  # type: ignore[no-any-return]


NOBODYS = r"uses a tensor of shape \[4\] that is neither an input nor one of the model's"
VALUE = "asks for the value of a tensor"
NOT_KEPT: dict[str, tuple[Forward, str]] = {
    "a tensor that nobody owns": (lambda m, x, *_: m.a(x) + OUTSIDE, NOBODYS),
    "such a tensor, and an error caught": (lambda m, x, *_: swallowed(m, x), NOBODYS),
    "a parameter that nobody owns": (lambda m, x, *_: m.a(x) + LOOSE, NOBODYS),
    "such a tensor in the result": (lambda m, x, *_: (m.a(x), OUTSIDE), NOBODYS),
    "such a tensor's value": (lambda m, x, *_: m.a(x) * float(OUTSIDE[0]), NOBODYS),
    "Python's random numbers": (lambda m, x, *_: m.a(x) * random.random(), "random numbers"),
    "a generator": (lambda m, x, *_: m.a(x) + torch.rand(4, generator=torch.Generator()), "is given a Generator"),
    "a number out of a computed tensor": (lambda m, x, *_: m.a(x) * m.a(x).sum().item(), VALUE),
    "a branch on a value": (lambda m, x, *_: m.a(x) if x.sum() > 0 else m.b(x), VALUE),
    "an attribute that is set": (lambda m, x, *_: (setattr(m, "seen", 1), m.a(x))[1], "forward sets self.seen"),
    "a checkpoint": (lambda m, x, *_: checkpoint(m.a, x, use_reentrant=False), "activation checkpointing"),
    "a function of autograd": (lambda m, x, *_: Twofold.apply(m.a(x)), "Twofold is applied"),
    "a hook on a gradient": (lambda m, x, *_: (h := m.a(x), h.register_hook(print))[0], "a hook on a tensor"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_not_all_seen_is_not_kept(name: str) -> None:
    before, (how, why) = key(asked()), NOT_KEPT[name]
    with pytest.raises(NotKept, match=why):
        rehearse(asked(how))
    assert key(asked()) == before


def test_a_rehearsal_leaves_the_model_as_it_was() -> None:
    request = asked()
    before = {name: id(value) for name, value in [*request.module.named_parameters(), *request.module.named_buffers()]}
    attributes = dict(vars(request.module))
    state = torch.get_rng_state()
    rehearsed.rehearse(request)
    after = {name: id(value) for name, value in [*request.module.named_parameters(), *request.module.named_buffers()]}
    assert after == before
    assert vars(request.module) == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert request.module.get_buffer("norm.num_batches_tracked") == 0
