"""What nodes cost, told from shapes: against counting by hand, and against what autograd really keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import passes
from fxpipe.errors import PartitionError
from fxpipe.graph.program import Program
from fxpipe.hardware import Hardware
from fxpipe.passes.chain import chain
from fxpipe.search.node_costs import NodeCosts, OperatorMeter, costs_from_shapes
from fxpipe.specs import TensorSpec
from fxpipe.stage.modes import Autocast
from fxpipe.trace import Request, capture
from fxpipe.trace.export.repeats import Repeats
from tests.device import DEVICE
from tests.trace.test_repeats import WIDTH, Layer, Model, Writes, frozen, hooked, of_layers, tied

PLAIN = Hardware(flops=1.0, flops_16=1.0, bandwidth=1e30, launch=0.0)
"""On which a product takes as many seconds as it has operations, and all else takes none."""
MEMORY = Hardware(flops=1e30, flops_16=1e30, bandwidth=1.0, launch=0.0)
"""On which an operator takes as many seconds as it moves bytes."""


def spec(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> TensorSpec:
    return TensorSpec(shape, dtype, torch.empty(shape, device="meta").stride(), DEVICE, grad)


def program_of(model: nn.Module, tracer: str = "symbolic", **example: Any) -> Program:
    return chain(passes.before_balance(), capture(Request(model, tuple(example), example=example), tracer))


def costs_of(model: nn.Module, hardware: Hardware = PLAIN, tracer: str = "symbolic", **example: Any) -> NodeCosts:
    return costs_from_shapes(program_of(model, tracer, **example), example, hardware=hardware)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).sum()


def test_a_linear_layer_is_two_operations_for_each_weight_and_row() -> None:
    costs = costs_of(Two(), x=spec(5, 8))
    assert costs["first"].flops == 2 * 5 * 8 * 16
    assert costs["second"].flops == 2 * 5 * 16 * 4
    assert costs["first"].forward == costs["first"].flops


def test_backward_is_a_product_for_each_factor_that_needs_a_gradient() -> None:
    costs = costs_of(Two(), x=spec(5, 8))
    first, second = costs["first"], costs["second"]
    assert first.backward == first.weight == first.forward  # its input needs none
    assert second.backward == 2 * second.forward
    assert second.weight == second.forward


def test_w_needs_what_its_calls_were_given_and_the_gradients_of_what_they_made() -> None:
    costs = costs_of(Two(), x=spec(5, 8))
    sizes = [sum(costs.memory[key] for key in costs[name].deferred) for name in ("first", "relu", "second")]
    assert sizes == [4 * 5 * 16, 0, 4 * 5 * (16 + 4)]  # the batch is there anyway
    frozen = Two().requires_grad_(False)
    assert not costs_of(frozen, x=spec(5, 8))["first"].deferred


def test_a_frozen_layer_behind_a_trained_one_makes_the_gradient_of_its_input_alone() -> None:
    model = Two()
    model.second.requires_grad_(False)
    second = costs_of(model, x=spec(5, 8))["second"]
    assert second.backward == second.forward
    assert second.weight == 0


class Inner(nn.Module):
    """Its second product is of a function whose gradients stay in I (``passes.defer_weights.CALLS``)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8, bias=False), nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.inner(fxpipe.stage_boundary(self.first(x)), self.weight).mean()


def test_w_takes_no_time_where_the_gradients_stay_in_i_and_the_planned_bubble_counts_so() -> None:
    """Of 2 micro-batches, in products: rank 0 takes F 1, I 0, W 1, and rank 1 F 1, I 2, W 0. So rank 1 runs from 1 to
    7, and the last W of rank 0 ends at 8: bubbles of 4/8 and 2/8."""
    hardware = replace(PLAIN, latency=0.0, link=1e30)
    options: dict[str, Any] = {"example_args": (torch.ones(4, 8),), "tracer": "symbolic", "hardware": hardware}
    topology = fxpipe.Topology([("pipe", 2)])
    preview = fxpipe.preview(Inner(), topology, microbatches=2, schedule="zb_h1", **options)
    product = 2 * 2 * 8 * 8
    assert preview.timeline.costs.weight == (product, 0)
    assert preview.timeline.costs.backward == (product, 2 * product)
    assert preview.bubble == pytest.approx((4 / 8 + 2 / 8) / 2)
    assert "fxpipe.preview counts the part that W has" in str(preview.graph)


def test_attention_counts_its_two_products_and_five_in_backward() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v).sum()

    shape = spec(2, 3, 7, 8, grad=True)
    attention = costs_of(Attention(), q=shape, k=shape, v=shape)["scaled_dot_product_attention"]
    assert attention.flops == 2 * 2 * (2 * 3 * 7 * 7 * 8)
    assert attention.backward == 2.5 * attention.forward


def test_what_is_no_product_takes_the_bytes_that_it_moves_and_a_view_takes_nothing() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.transpose(0, 1)).sum()

    costs = costs_of(Plain(), MEMORY, x=spec(4, 6))
    assert costs["transpose"].forward == 0
    assert costs["relu"].forward == 2 * 4 * 6 * 4
    assert costs["relu"].bytes_out == 4 * 6 * 4


def test_an_embedding_reads_the_rows_that_it_returns_and_its_gradient_is_as_large_as_its_table() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).sum()

    table = costs_of(Words(), MEMORY, x=spec(3, dtype=torch.long))["table"]
    row_bytes = 3 * 8 * 4
    assert table.forward == 2 * row_bytes
    assert table.backward == table.weight == 100 * 8 * 4 + row_bytes


def test_types_of_two_bytes_have_a_peak_of_their_own() -> None:
    hardware = Hardware(flops=1.0, flops_16=4.0, bandwidth=1e30, launch=0.0)
    model = Two()
    example = {"x": spec(5, 8)}
    program = program_of(model, **example)
    plain = costs_from_shapes(program, example, hardware=hardware)
    within = costs_from_shapes(program, example, autocast=(Autocast(DEVICE, True, torch.bfloat16),), hardware=hardware)
    assert within["first"].forward == plain["first"].forward / 4


class Mixed(nn.Module):
    """Several kinds of layers; ``relu`` keeps what the next layer keeps, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = torch.softmax(h @ h.transpose(0, 1), -1) @ h
        y = x + self.second(torch.relu(self.first(h)))
        return (F.gelu(y) * y).mean()


def kept_by_autograd(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the memory that a forward keeps for backward, parameters and inputs excluded."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *inputs]}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*inputs)
    del result
    return sum(kept.values())


@pytest.mark.parametrize("model", [Two, Mixed], ids=lambda model: model.__name__)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_what_is_kept_for_backward_is_what_autograd_keeps(model: type[nn.Module], tracer: str) -> None:
    module = model()
    program = program_of(module, tracer, x=spec(5, 8))
    costs = costs_from_shapes(program, {"x": spec(5, 8)})
    names = [node.name for node in program.graph.nodes]
    assert costs.saved_bytes(costs.block(names).saved) == kept_by_autograd(module, torch.randn(5, 8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_keeps_its_input_and_computes_again(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.first(x)).sum()

    model = Model()
    program = program_of(model, "record", x=spec(5, 8))
    costs = costs_from_shapes(program, {"x": spec(5, 8)}, hardware=PLAIN)
    (block,) = [cost for cost in costs.nodes.values() if cost.flops == 3 * 2 * 5 * 8 * 8]
    assert sum(costs.memory[key] for key in block.saved) == 5 * 8 * 4
    assert block.backward == 3 * block.forward


@pytest.mark.parametrize("tracer", ["export", "record"])
def test_tracers_agree_on_what_a_model_costs(tracer: str) -> None:
    def total(name: str) -> tuple[float, float]:
        costs = costs_of(Mixed(), PLAIN, name, x=spec(5, 8))
        nodes = costs.nodes.values()
        return sum(node.flops for node in nodes), sum(node.backward for node in nodes)

    assert total(tracer) == total("symbolic")


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    program = program_of(model, input=spec(5, 8))
    state = torch.get_rng_state()
    costs_from_shapes(program, {"input": spec(5, 8)})
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_an_input_without_an_example_is_named() -> None:
    with pytest.raises(PartitionError, match=r"example of every input; \['x'\] are missing"):
        costs_from_shapes(program_of(Two(), x=spec(5, 8)), {})


def test_a_node_that_looks_at_numbers_is_reckoned_from_what_its_capture_saw() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * 2 if bool((x > 0).any()) else self.layer(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.looks = nn.Linear(8, 8), Looks()

        def forward(self, x: Tensor) -> Tensor:
            return self.looks(self.first(x)).sum()

    costs = costs_of(Model(), PLAIN, "record", x=spec(5, 8))
    looks = next(costs[name] for name in costs.nodes if name.startswith("looks"))
    parameters = 8 * 8 + 8
    assert looks.forward == 2 * 5 * parameters
    assert looks.trains


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "alike": lambda: [Layer(number) for number in range(4)],
    "of two widths": lambda: [Layer(), Layer(width=32), Layer(), Layer(width=32)],
    "one is frozen": lambda: [Layer(), frozen(Layer()), Layer()],
    "with tied parameters": lambda: [*tied([Layer(), Layer()]), Layer()],
    "with a hook": lambda: [Layer(), hooked(Layer()), Layer()],
    "of another dtype": lambda: [Layer(), Layer(), Doubles()],
    "one writes in place": lambda: [Layer(), Writes(), Layer()],
}


class Doubles(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return (x.double() @ self.up.weight.double().T @ self.up.weight).to(x.dtype)


def told(costs: NodeCosts) -> list[Any]:
    """The costs of all nodes, and each piece of memory by its bytes and the nodes that keep it."""
    keep: dict[int, list[str]] = {}
    for name, cost in costs.nodes.items():
        for key in cost.saved | cost.deferred:
            keep.setdefault(key, []).append(name)
    plain = {name: replace(cost, saved=frozenset(), deferred=frozenset()) for name, cost in costs.nodes.items()}
    return [plain, sorted((costs.memory[key], names) for key, names in keep.items()), costs.parameters]


@pytest.mark.parametrize("name", LAYERS)
def test_costs_are_as_if_each_node_were_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = {"x": spec(3, WIDTH)}
    program = program_of(Model(LAYERS[name]()), "export", **example)
    costs = costs_from_shapes(program, example)
    monkeypatch.setattr("fxpipe.search.node_costs.has_only_pure_operators", lambda nodes: False)
    each = costs_from_shapes(program, example)
    assert told(costs) == told(each)


def test_as_many_nodes_run_for_eight_layers_as_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    run = OperatorMeter.__torch_dispatch__

    def counted(meter: OperatorMeter, func: object, *args: Any, **kwargs: Any) -> Any:
        ran.append(func)
        return run(meter, func, *args, **kwargs)

    monkeypatch.setattr(OperatorMeter, "__torch_dispatch__", counted)
    counts = []
    for layers in (4, 8):
        program = program_of(of_layers(layers), "export", x=spec(3, WIDTH))
        ran.clear()
        costs_from_shapes(program, {"x": spec(3, WIDTH)})
        counts.append(len(ran))
    assert counts[0] == counts[1] > 0


def test_a_preview_is_as_if_each_layer_were_traced_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        pipe = fxpipe.Topology([("pipe", 2)])
        x = torch.ones(6, WIDTH)
        plan = fxpipe.preview(of_layers(5), pipe, boundaries="auto", microbatches=2, tracer="export", example_args=(x,))
        return str(plan)

    plan = shown()
    monkeypatch.setattr("fxpipe.search.node_costs.has_only_pure_operators", lambda nodes: False)
    monkeypatch.setattr(Repeats, "watched", lambda repeats: contextlib.nullcontext())
    assert plan == shown()
