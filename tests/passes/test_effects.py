"""The passes one by one: what operators do, the order of writes, who shares memory, what is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxpipe import PartitionError, stage_boundary
from fxpipe.graph.operators import setitem
from fxpipe.graph.program import Program
from fxpipe.passes import alias_groups, mark_copies, order_writes
from fxpipe.passes.analysis import effects
from fxpipe.passes.analysis.union import Union
from tests.capturing import captured


class Model(nn.Module):
    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.linear = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("buffer", torch.ones(4))
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, x, y)


def last_node(body: Callable[..., Any], **parts: nn.Module) -> tuple[Program, fx.Node]:
    """The program, and the last thing it does."""
    program = captured(Model(body, **parts), "x", "y")
    return program, [node for node in program.graph.nodes if node.op.startswith("call_")][-1]


def names(nodes: list[fx.Node]) -> set[str]:
    return {node.name for node in nodes}


RELU_IN_PLACE = {"part": nn.ReLU(inplace=True)}

WRITES: list[tuple[str, Callable[..., Any], set[str], dict[str, nn.Module]]] = [
    ("add_", lambda m, x, y: x.add_(y), {"x"}, {}),
    ("relu_", lambda m, x, y: torch.relu_(x), {"x"}, {}),
    ("index_put_", lambda m, x, y: x.index_put_((y,), x), {"x"}, {}),
    ("copy_", lambda m, x, y: x.copy_(y), {"x"}, {}),
    ("masked_fill_", lambda m, x, y: x.masked_fill_(y > 0, 1), {"x"}, {}),
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
    ("F.relu", lambda m, x, y: F.relu(x), set(), {}),
    ("F.relu(inplace=False)", lambda m, x, y: F.relu(x, inplace=False), set(), {}),
    ("nn.ReLU", lambda m, x, y: m.part(x), set(), {"part": nn.ReLU()}),
    ("F.embedding(max_norm=1)", lambda m, x, y: F.embedding(x, m.buffer, max_norm=1.0), {"buffer"}, {}),
    ("F.embedding", lambda m, x, y: F.embedding(x, m.buffer), set(), {}),
    ("torch.where", lambda m, x, y: torch.where(x > 0, x, y), set(), {}),
]


@pytest.mark.parametrize(("body", "targets", "parts"), [w[1:] for w in WRITES], ids=[w[0] for w in WRITES])
def test_what_an_operation_writes(body: Callable[..., Any], targets: set[str], parts: dict[str, nn.Module]) -> None:
    assert names(effects.written(*last_node(body, **parts))) == targets


def test_what_an_item_assignment_writes() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        x[0] = y

    assert names(effects.written(*last_node(body))) == {"x"}


ALIASES: list[tuple[str, Callable[..., Any], dict[str, nn.Module]]] = [
    ("view", lambda m, x, y: x.view(-1), {}),
    ("reshape", lambda m, x, y: x.reshape(2, -1), {}),
    ("getitem", lambda m, x, y: x[0], {}),
    ("chunk", lambda m, x, y: x.chunk(2), {}),
    ("split", lambda m, x, y: torch.split(x, 2), {}),
    ("unbind", lambda m, x, y: x.unbind(0), {}),
    ("transpose", lambda m, x, y: torch.transpose(x, 0, 1), {}),
    ("x.T", lambda m, x, y: x.T, {}),
    ("x.data", lambda m, x, y: x.data, {}),
    ("detach", lambda m, x, y: x.detach(), {}),
    ("contiguous", lambda m, x, y: x.contiguous(), {}),
    ("to", lambda m, x, y: x.to(torch.float32), {}),
    ("float", lambda m, x, y: x.float(), {}),
    ("type_as", lambda m, x, y: x.type_as(x), {}),
    ("expand", lambda m, x, y: x.expand(4, 4), {}),
    ("expand_as", lambda m, x, y: x.expand_as(x), {}),
    ("squeeze", lambda m, x, y: x.squeeze(), {}),
    ("flatten", lambda m, x, y: torch.flatten(x), {}),
    ("movedim", lambda m, x, y: x.movedim(0, 1), {}),
    ("atleast_2d", lambda m, x, y: torch.atleast_2d(x), {}),
    ("broadcast_tensors", lambda m, x, y: torch.broadcast_tensors(x, x), {}),
    ("einsum", lambda m, x, y: torch.einsum("ij->ji", x), {}),
    ("dropout in eval", lambda m, x, y: F.dropout(x, 0.5, False), {}),
    ("nn.Dropout in eval", lambda m, x, y: m.part(x), {"part": nn.Dropout().eval()}),
    ("nn.Identity", lambda m, x, y: m.part(x), {"part": nn.Identity()}),
    ("nn.Flatten", lambda m, x, y: m.part(x), {"part": nn.Flatten()}),
    ("add_", lambda m, x, y: x.add_(1), {}),
    ("setitem", lambda m, x, y: setitem(x, 0, 1) if isinstance(x, Tensor) else x.fill_(1), {}),
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
    ("matmul", lambda m, x, y: x @ y),
    ("F.relu", lambda m, x, y: F.relu(x)),
    ("F.gelu", lambda m, x, y: F.gelu(x)),
    ("softmax", lambda m, x, y: x.softmax(-1)),
    ("cat", lambda m, x, y: torch.cat([x, y])),
    ("sum", lambda m, x, y: x.sum()),
    ("zeros_like", lambda m, x, y: torch.zeros_like(x)),
    ("linear", lambda m, x, y: m.linear(x)),
    ("shape", lambda m, x, y: x.shape),
    ("size", lambda m, x, y: x.size(0)),
    ("layer_norm", lambda m, x, y: F.layer_norm(x, (4,))),
]


@pytest.mark.parametrize("body", [n[1] for n in NEW], ids=[n[0] for n in NEW])
def test_a_result_of_its_own_shares_nothing(body: Callable[..., Any]) -> None:
    """Too much sharing would be safe, and would refuse writes that are fine."""
    assert effects.aliased(*last_node(body)) == []


RANDOM: list[tuple[str, Callable[..., Any], bool, dict[str, nn.Module]]] = [
    ("rand_like", lambda m, x, y: torch.rand_like(x), True, {}),
    ("normal_", lambda m, x, y: x.normal_(), True, {}),
    ("bernoulli", lambda m, x, y: torch.bernoulli(x), True, {}),
    ("multinomial", lambda m, x, y: torch.multinomial(x, 1), True, {}),
    ("F.dropout", lambda m, x, y: F.dropout(x, 0.5, True), True, {}),
    ("F.dropout2d", lambda m, x, y: F.dropout2d(x), True, {}),
    ("attention", lambda m, x, y: F.scaled_dot_product_attention(x, x, x), False, {}),
    ("attention with dropout", lambda m, x, y: F.scaled_dot_product_attention(x, x, x, None, 0.1), True, {}),
    ("F.dropout in eval", lambda m, x, y: F.dropout(x, 0.5, False), False, {}),
    ("F.dropout of nothing", lambda m, x, y: F.dropout(x, 0.0), False, {}),
    ("nn.Dropout", lambda m, x, y: m.part(x), True, {"part": nn.Dropout()}),
    ("nn.MultiheadAttention", lambda m, x, y: m.part(x, x, x), True, {"part": nn.MultiheadAttention(4, 1)}),
    ("add", lambda m, x, y: x + y, False, {}),
    ("softmax", lambda m, x, y: F.softmax(x, -1), False, {}),
    ("nn.Linear", lambda m, x, y: m.linear(x), False, {}),
    ("getitem", lambda m, x, y: x[0], False, {}),
]


@pytest.mark.parametrize(("body", "draws", "parts"), [r[1:] for r in RANDOM], ids=[r[0] for r in RANDOM])
def test_what_draws_random_numbers(body: Callable[..., Any], draws: bool, parts: dict[str, nn.Module]) -> None:
    assert effects.is_random(*last_node(body, **parts)) is draws


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


# ---- order_writes ----


def operands(program: Program, name: str) -> set[str]:
    return names(next(node for node in program.graph.nodes if node.name == name).all_input_nodes)


def test_what_reads_after_a_write_comes_to_use_its_result() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        before = x * 2
        x.add_(y)
        return before, x * 3

    program = order_writes(captured(Model(body)))
    assert operands(program, "mul") == {"x"}
    assert operands(program, "mul_1") == {"add_"}


def test_an_item_assignment_becomes_an_expression_that_keeps_its_line() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        x[0] = y
        x[1] = 2
        return x * 3

    program = order_writes(captured(Model(body)))
    first, second = program.graph.find_nodes(op="call_function", target=setitem)
    assert names(second.all_input_nodes) == {first.name}
    assert operands(program, "mul") == {second.name}
    assert "x[0] = y" in (first.stack_trace or "")
    x, y = torch.zeros(2, 2), torch.ones(2)
    assert torch.equal(fx.GraphModule(nn.Module(), program.graph)(x, y), torch.tensor([[3.0, 3.0], [6.0, 6.0]]))


@pytest.mark.parametrize(
    "write",
    [
        lambda m, x, y: x.add_(y),
        lambda m, x, y: F.relu(x, inplace=True),
        lambda m, x, y: F.relu(x, True),
        lambda m, x, y: torch.add(y, 1, out=x),
        lambda m, x, y: m.part(x),
        lambda m, x, y: x.__imul__(y),
    ],
)
def test_every_kind_of_write_is_an_edge_to_the_next_read(write: Callable[..., Any]) -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        write(m, x, y)
        return x - 3

    program = order_writes(captured(Model(body, part=nn.ReLU(inplace=True))))
    (read,) = [node for node in program.graph.nodes if node.name == "sub"]
    (written,) = read.all_input_nodes
    assert written.op.startswith("call_")


def test_batch_norm_does_not_return_what_it_writes() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        z = F.batch_norm(x, m.running_mean, m.running_var, training=True)
        return z * m.running_mean

    assert operands(order_writes(captured(Model(body))), "mul") == {"batch_norm", "running_mean"}


def test_the_given_program_stays_as_it_is() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        x[0] = 1
        return x * 2

    program = captured(Model(body))
    before = str(program)
    order_writes(program)
    assert str(program) == before


def test_a_write_to_a_tensor_made_while_tracing_is_refused() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        total = torch.zeros(4)
        total[0] = x.sum()
        return total

    with pytest.raises(PartitionError, match=r"register it as a buffer") as caught:
        order_writes(captured(Model(body)))
    assert "total[0] = x.sum()" in str(caught.value)


# ---- alias_groups and mark_copies ----


def groups(body: Callable[..., Any], **parts: nn.Module) -> set[frozenset[str]]:
    return set(alias_groups(order_writes(captured(Model(body, **parts)))).written)


def test_a_group_holds_all_that_shares_the_memory_of_a_write_and_nothing_else() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        h = m.linear(x)
        left, right = h.chunk(2, -1)
        left.add_(1)
        other = y.view(-1)
        return h, right * 2, other

    assert groups(body) == {frozenset({"linear", "chunk", "getitem", "getitem_1", "add_"})}


def test_two_writes_to_two_tensors_are_two_groups() -> None:
    assert groups(lambda m, x, y: (x.add_(1), y.mul_(2))) == {frozenset({"x", "add_"}), frozenset({"y", "mul_"})}


def test_memory_ends_at_a_boundary() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        v = stage_boundary(m.linear(x))
        v.add_(1)
        return v

    (group,) = groups(body)
    assert "linear" not in group
    assert "add_" in group


def test_without_a_write_there_is_no_group() -> None:
    assert groups(lambda m, x, y: x.view(-1) + y.view(-1)) == set()


COPIED: list[tuple[str, Callable[..., Any], set[str]]] = [
    ("on inputs", lambda m, x, y: (x > 0, m.linear(x)), {"gt"}),
    ("on two inputs", lambda m, x, y: (x + y) * 2, {"add", "mul"}),
    ("on a parameter alone", lambda m, x, y: m.scale.exp(), {"exp"}),
    ("on a parameter and an input", lambda m, x, y: m.scale * x, set()),
    ("on a buffer and an input", lambda m, x, y: m.buffer * x, {"mul"}),
    ("on a frozen parameter and an input", lambda m, x, y: m.frozen(x), set()),
    ("on what is not copied", lambda m, x, y: m.linear(x) + 1, set()),
    ("on a constant", lambda m, x, y: x * torch.arange(4), {"mul"}),
    ("module without parameters", lambda m, x, y: m.part(x), {"part"}),
    ("random", lambda m, x, y: torch.rand_like(x) + 1, set()),
    ("writing", lambda m, x, y: x.clone().add_(1) + 1, set()),
    ("sizes", lambda m, x, y: torch.zeros(x.shape[0], 2), {"getattr_1", "getitem", "zeros"}),
    ("a mask behind a boundary", lambda m, x, y: stage_boundary((x > 0, m.linear(x)))[0].float(), {"gt", "float_1"}),
]


@pytest.mark.parametrize(("body", "copied"), [c[1:] for c in COPIED], ids=[c[0] for c in COPIED])
def test_what_each_stage_computes_for_itself(body: Callable[..., Any], copied: set[str]) -> None:
    program = captured(Model(body, part=nn.GELU()))
    assert mark_copies(alias_groups(order_writes(program))).copied == copied


def test_what_depends_on_a_buffer_that_is_written_is_not_copied() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        m.buffer.add_(1)
        return m.buffer * 2

    assert mark_copies(alias_groups(order_writes(captured(Model(body))))).copied == set()


def test_what_depends_on_running_statistics_that_a_module_writes_is_not_copied() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        return m.part(x), m.part.running_mean * 2

    program = captured(Model(body, part=nn.BatchNorm1d(4)))
    assert mark_copies(alias_groups(order_writes(program))).copied == set()


# ---- union ----


def test_union_joins_groups_and_keeps_their_order() -> None:
    union = Union("abcdef")
    union.join("a", "c")
    union.join("d", "f")
    union.join("c", "f")
    assert union.groups() == [list("acdf"), ["b"], ["e"]]
    assert union.members("f") == list("acdf")
    assert union.same("a", "d")
    assert not union.same("a", "b")
    assert "a" in union
    assert "z" not in union


def test_the_first_of_two_joined_stands_for_both() -> None:
    union = Union("abc")
    union.join("a", "b")
    union.join("c", "b")
    assert {union.find(item) for item in "abc"} == {"c"}


def test_a_long_chain_of_joins_is_no_recursion() -> None:
    union = Union(range(100_000))
    for item in range(99_999):
        union.join(item + 1, item)
    assert union.find(0) == 99_999
