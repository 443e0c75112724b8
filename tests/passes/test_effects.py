"""Effects: what operations write, share and draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxpipe.graph.operators import setitem
from fxpipe.graph.program import Effects, Program
from fxpipe.passes import effects
from fxpipe.passes.alias_groups import holders_of_written
from tests.capturing import Model, captured, names


def last_node(body: Callable[..., Any], **parts: nn.Module) -> tuple[Program, fx.Node]:
    """The program, and the last thing it does."""
    program = captured(Model(body, **parts), "x", "y")
    return program, [node for node in program.graph.nodes if node.op.startswith("call_")][-1]


RELU_IN_PLACE = {"part": nn.ReLU(inplace=True)}

WRITES: list[tuple[str, Callable[..., Any], set[str], dict[str, nn.Module]]] = [
    ("add_", lambda m, x, y: x.add_(y), {"x"}, {}),
    ("index_put_", lambda m, x, y: x.index_put_((y,), x), {"x"}, {}),
    ("out=", lambda m, x, y: torch.add(x, x, out=y), {"y"}, {}),
    ("two outs", lambda m, x, y: torch.max(x, 0, out=(x, y)), {"x", "y"}, {}),
    ("F.relu(inplace=True)", lambda m, x, y: F.relu(x, inplace=True), {"x"}, {}),
    ("F.relu(x, True)", lambda m, x, y: F.relu(x, True), {"x"}, {}),
    ("F.dropout(inplace=True)", lambda m, x, y: F.dropout(x, 0.1, True, True), {"x"}, {}),
    ("nn.ReLU(inplace=True)", lambda m, x, y: m.part(x), {"x"}, RELU_IN_PLACE),
    ("x += y", lambda m, x, y: x.__iadd__(y), {"x"}, {}),
    (
        "F.batch_norm",
        lambda m, x, y: F.batch_norm(x, m.running_mean, m.running_var, training=True),
        {"running_mean", "running_var"},
        {},
    ),
    ("add", lambda m, x, y: x + y, set(), {}),
    ("F.relu(inplace=False)", lambda m, x, y: F.relu(x, inplace=False), set(), {}),
    ("nn.ReLU", lambda m, x, y: m.part(x), set(), {"part": nn.ReLU()}),
    ("F.embedding(max_norm=1)", lambda m, x, y: F.embedding(x, m.buffer, max_norm=1.0), {"buffer"}, {}),
    ("F.embedding", lambda m, x, y: F.embedding(x, m.buffer), set(), {}),
]


@pytest.mark.parametrize(("body", "targets", "parts"), [w[1:] for w in WRITES], ids=[w[0] for w in WRITES])
def test_what_an_operation_writes(body: Callable[..., Any], targets: set[str], parts: dict[str, nn.Module]) -> None:
    assert names(effects.written(*last_node(body, **parts))) == targets


ALIASES: list[tuple[str, Callable[..., Any], dict[str, nn.Module]]] = [
    ("view", lambda m, x, y: x.view(-1), {}),
    ("getitem", lambda m, x, y: x[0], {}),
    ("chunk", lambda m, x, y: x.chunk(2), {}),
    ("x.T", lambda m, x, y: x.T, {}),
    ("x.data", lambda m, x, y: x.data, {}),
    ("detach", lambda m, x, y: x.detach(), {}),
    ("contiguous", lambda m, x, y: x.contiguous(), {}),
    ("to", lambda m, x, y: x.to(torch.float32), {}),
    ("expand", lambda m, x, y: x.expand(4, 4), {}),
    ("flatten", lambda m, x, y: torch.flatten(x), {}),
    ("broadcast_tensors", lambda m, x, y: torch.broadcast_tensors(x, x), {}),
    ("einsum", lambda m, x, y: torch.einsum("ij->ji", x), {}),
    ("dropout in eval", lambda m, x, y: F.dropout(x, 0.5, False), {}),
    ("nn.Dropout in eval", lambda m, x, y: m.part(x), {"part": nn.Dropout().eval()}),
    ("nn.Identity", lambda m, x, y: m.part(x), {"part": nn.Identity()}),
    ("nn.Flatten", lambda m, x, y: m.part(x), {"part": nn.Flatten()}),
    ("add_", lambda m, x, y: x.add_(1), {}),
    ("setitem", lambda m, x, y: setitem(x, 0, 1) if issubclass(type(x), Tensor) else x.fill_(1), {}),
]


@pytest.mark.parametrize(("body", "parts"), [a[1:] for a in ALIASES], ids=[a[0] for a in ALIASES])
def test_what_may_share_memory_with_its_input_is_known_to(
    body: Callable[..., Any], parts: dict[str, nn.Module]
) -> None:
    """The oracle is torch: the very function is run, and the memory of what comes back looked at."""
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(body(Model(body, **parts), x, y))
    storage = x.untyped_storage().data_ptr()
    assert any(result.untyped_storage().data_ptr() == storage for result in results)
    program, node = last_node(body, **parts)
    assert "x" in names(effects.aliased(program, node))


NEW: list[tuple[str, Callable[..., Any]]] = [
    ("add", lambda m, x, y: x + y),
    ("clone", lambda m, x, y: x.clone()),
    ("F.relu", lambda m, x, y: F.relu(x)),
    ("cat", lambda m, x, y: torch.cat([x, y])),
    ("zeros_like", lambda m, x, y: torch.zeros_like(x)),
    ("linear", lambda m, x, y: m.linear(x)),
    ("shape", lambda m, x, y: x.shape),
    ("size", lambda m, x, y: x.size(0)),
]


@pytest.mark.parametrize("body", [n[1] for n in NEW], ids=[n[0] for n in NEW])
def test_a_result_of_its_own_shares_nothing(body: Callable[..., Any]) -> None:
    """Too much sharing would be safe, and would refuse writes that are fine."""
    assert effects.aliased(*last_node(body)) == []


RANDOM: list[tuple[str, Callable[..., Any], bool, dict[str, nn.Module]]] = [
    ("rand_like", lambda m, x, y: torch.rand_like(x), True, {}),
    ("normal_", lambda m, x, y: x.normal_(), True, {}),
    ("bernoulli", lambda m, x, y: torch.bernoulli(x), True, {}),
    ("F.dropout", lambda m, x, y: F.dropout(x, 0.5, True), True, {}),
    ("attention", lambda m, x, y: F.scaled_dot_product_attention(x, x, x), False, {}),
    ("attention with dropout", lambda m, x, y: F.scaled_dot_product_attention(x, x, x, None, 0.1), True, {}),
    ("F.dropout in eval", lambda m, x, y: F.dropout(x, 0.5, False), False, {}),
    ("F.dropout of nothing", lambda m, x, y: F.dropout(x, 0.0), False, {}),
    ("nn.Dropout", lambda m, x, y: m.part(x), True, {"part": nn.Dropout()}),
    ("nn.MultiheadAttention", lambda m, x, y: m.part(x, x, x), True, {"part": nn.MultiheadAttention(4, 1)}),
    ("add", lambda m, x, y: x + y, False, {}),
    ("nn.Linear", lambda m, x, y: m.linear(x), False, {}),
]


@pytest.mark.parametrize(("body", "draws", "parts"), [r[1:] for r in RANDOM], ids=[r[0] for r in RANDOM])
def test_what_draws_random_numbers(body: Callable[..., Any], draws: bool, parts: dict[str, nn.Module]) -> None:
    assert effects.is_random(*last_node(body, **parts)) is draws


def test_a_function_of_another_package_whose_name_begins_with_torch_may_draw_them() -> None:
    def stochastic_depth(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"
    graph = fx.Graph()
    node = graph.call_function(stochastic_depth, (graph.placeholder("x"),))
    assert effects.is_random(Program(nn.Module(), graph), node)
    assert not effects.is_known(stochastic_depth)
    assert effects.is_known(F.gelu)


def spectral_norm() -> nn.Module:
    """A layer whose power iteration has not converged, so that the next one is seen to write."""
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    module.parametrizations.weight[0]._u.copy_(torch.tensor([1.0, 0, 0, 0]))
    return module


@pytest.mark.parametrize(
    ("module", "updates"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), False),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),
        (spectral_norm(), True),
        (nn.Embedding(4, 4, max_norm=1.0), True),
        (nn.Embedding(4, 4), False),
        (nn.LayerNorm(4), False),
        (nn.Linear(4, 4), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_modules_write_what_they_hold(module: nn.Module, updates: bool) -> None:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    indices = torch.arange(4)
    with torch.no_grad():
        module(indices if isinstance(module, nn.Embedding) else torch.randn(4, 4, 4))
    changed = any(not torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert changed is updates, "torch itself says so"
    assert bool(effects.own_writes(module)) is updates


# --- operators of torch.export, and opaque modules ---

aten = torch.ops.aten


def node_of(target: Any, *args: Any, **kwargs: Any) -> tuple[Program, fx.Node]:
    """A call of an operator, a fresh placeholder for each string among the arguments, of that name."""
    graph = fx.Graph()
    made = {name: graph.placeholder(name) for name in pytree.tree_leaves((args, kwargs)) if isinstance(name, str)}
    given, named = pytree.tree_map_only(str, made.__getitem__, (args, kwargs))
    return Program(nn.Module(), graph), graph.call_function(target, given, named)


OPERATORS: dict[str, tuple[tuple[Any, ...], str, str, bool]] = {
    "add_": ((aten.add_.Tensor, "x", "y"), "x", "x", False),
    "slice": ((aten.slice.Tensor, "x", 0, 0, 1), "", "x", False),
    "reshape": ((aten.reshape.default, "x", [2]), "", "x", False),
    "type_as": ((aten.type_as.default, "x", "y"), "", "x y", False),
    "index_put_": ((aten.index_put_.default, "x", ["y"], "z"), "x", "x", False),
    "batch_norm": ((aten.batch_norm.default, "x", "w", "b", "m", "v", True, 0.1, 1e-5, False), "m v", "m v", False),
    "dropout": ((aten.dropout.default, "x", 0.1, True), "", "x", True),
    "dropout in eval": ((aten.dropout.default, "x", 0.1, False), "", "x", False),
    "attention": ((aten.scaled_dot_product_attention.default, "x", "y", "z"), "", "", False),
    "dropping attention": ((aten.scaled_dot_product_attention.default, "x", "y", "z", None, 0.1), "", "", True),
    "randn": ((aten.randn.default, [4]), "", "", True),
    "bernoulli_": ((aten.bernoulli_.float, "x"), "x", "x", True),
    "linear": ((aten.linear.default, "x", "w", "b"), "", "", False),
}


@pytest.mark.parametrize(("call", "writes", "shares", "draws"), OPERATORS.values(), ids=list(OPERATORS))
def test_effects_of_operators(call: tuple[Any, ...], writes: str, shares: str, draws: bool) -> None:
    program, node = node_of(*call)
    assert [source.name for source in effects.written(program, node)] == writes.split()
    assert [source.name for source in effects.aliased(program, node)] == shares.split()
    assert effects.is_random(program, node) is draws


def test_effects_of_an_opaque_module_are_what_it_was_seen_to_do() -> None:
    module = nn.Module()
    module.part = nn.Linear(2, 2)
    module.register_buffer("state", torch.zeros(2))
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.create_node("call_module", "block", (x,), {"other": y}, name="first")
    second = graph.create_node("get_attr", "state", name="second")
    graph.output(graph.call_function(torch.add, (first, second)))
    seen = Effects(reads=("part.weight",), writes=("state",), shares=(1,), draws_random=True)
    program = Program(module, graph, opaque={"block": nn.Module()}, effects={"first": seen})
    assert effects.aliased(program, first) == [y]
    assert effects.is_random(program, first)
    assert holders_of_written(program) == [[first, second]]
