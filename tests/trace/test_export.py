"""The export tracer: the stages of what it captures compute what plain PyTorch does, and what it must refuse."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxpipe import TraceError, passes, stage_boundary
from fxpipe.graph.like import ObjectLike, TensorLike
from fxpipe.graph.modes import Modes, ambient_autocast
from fxpipe.graph.program import Effects, Program, where
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.passes import effects
from fxpipe.passes.alias_groups import holders_of_written
from fxpipe.passes.chain import chain
from fxpipe.passes.split import split
from fxpipe.torch_compat import known_truth
from fxpipe.trace import Request, capture
from fxpipe.trace.export.operators import guards_of
from tests.capturing import run_stages
from tests.device import DEVICE

WIDTH = 6
Batch = dict[str, Any]


def exported(model: nn.Module, batch: Batch, **options: Any) -> Program:
    fixed = {name: value for name, value in batch.items() if value is None or isinstance(value, (bool, str))}
    example = {name: pytree.tree_map_only(Tensor, TensorLike.of, v) for name, v in batch.items() if name not in fixed}
    return capture(Request(model, tuple(example), fixed, example=example, **options), "export")


def stages_of(program: Program) -> StageGraph:
    return split(chain(passes.default(), program))


def vectors() -> Batch:
    return {"x": torch.randn(4, WIDTH), "y": torch.randn(4, WIDTH)}


def tokens() -> Batch:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    ids = torch.randint(1, 50, (2, 7))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(1, 50, (2, 7))}


# ---- what is captured ----


class Two(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(h).float(), y)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(stage_boundary(self.a(x)), y)


class Residual(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(self.a(x)).relu() + x
        h = stage_boundary(h)
        return F.mse_loss(self.second(self.b(h)) + h, y)


class ShiftRight(nn.Module):
    """As Hugging Face's encoder-decoder models shift labels: in place, on views of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        h = stage_boundary(self.embed(input_ids) * attention_mask[..., None])
        shifted = labels.new_zeros(labels.shape)
        shifted[:, 1:] = labels[:, :-1].clone()
        shifted[:, 0] = 0
        shifted.masked_fill_(shifted == 7, 0)
        h = (h + self.embed(shifted)).transpose(0, 1)
        h[0].mul_(2)
        h[1:, 0, :2] += 1
        h = stage_boundary(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.t().reshape(-1))


class Buffers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(WIDTH))
        self.register_buffer("row", torch.zeros(2, WIDTH), persistent=False)
        self.calls: Tensor
        self.ema: Tensor
        self.row: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(self.a(x))
        before = self.ema
        with torch.no_grad():
            self.ema = 0.9 * self.ema + 0.1 * h.mean(0)
            self.calls += 1
            self.row[1].add_(h.sum(0))
        h = h - self.ema + before
        return self.loss(h, y) * self.row[1].tanh().mean() + self.calls


class AutocastAround(Two):
    """Boundaries inside autocast regions, one nested in another."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            h = stage_boundary(self.a(x), name="inside")
            h = self.b(h)
            with torch.autocast(DEVICE, enabled=False):
                h = stage_boundary(h.float() @ self.c.weight, name="nested")
                h = h @ self.c.weight
            h = h.matmul(h.mT).sum(0)
        return h.float().sum() + y.sum()


class Noisy(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.5, self.training) + torch.randn(WIDTH) + torch.rand_like(x)
        attended = F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0]
        return self.loss(attended, y)


class Keywords(Two):
    def forward(
        self, x: Tensor, *, y: Tensor, scale: float, count: int = 2, mask: Tensor | None = None, square: bool = False
    ) -> dict[str, Any]:
        h = self.a(x) * scale
        for _ in range(count):
            h = h.tanh()
        h = stage_boundary(h if mask is None else h * mask)
        loss = self.loss(h.square() if square else h, y)
        return {"loss": loss, "parts": [loss.detach() * 2, None, ("mean", {"h": h})], "count": count, "scale": scale}


class Point(NamedTuple):
    x: Tensor
    rest: list[Tensor]


class Containers(Two):
    def forward(self, inputs: Mapping[str, Any], point: Point) -> tuple[Tensor, Point]:
        h = stage_boundary({"h": self.a(inputs["x"]), "n": 1, "rest": [point.rest[0]]})
        loss = self.loss(h["h"] + h["rest"][0], inputs["deep"]["y"]) * h["n"]
        return loss, Point(h["h"], [point.x])


class Constants(Two):
    def __init__(self) -> None:
        super().__init__()
        self.unregistered = torch.linspace(0, 1, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.others = [torch.ones(WIDTH), self.scale]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x) * self.unregistered + torch.tensor([1.0] * WIDTH)
        h[:, 0] = 3.0
        h = stage_boundary(h) * self.others[1] + self.others[0]
        return self.loss(h, y)


class InPlaceBehind(Two):
    """What crosses a boundary is made by a batch norm, and written behind it; another is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.twice = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.relu(stage_boundary(self.norm(self.a(x))))
        h = stage_boundary(self.twice(self.twice(h).tanh()))
        return self.loss(h.mul(2).tanh_(), y)


class WritesInput(Two):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.a(x)
        loss = self.loss(stage_boundary(h), y.mul_(2)[1:].add_(1).new_ones(4, 1) * y)
        return loss, x, self.b.bias


@torch.library.custom_op("fxpipe_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return 3 * x


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda ctx, gradient: 3 * gradient)


@torch.library.custom_op("fxpipe_tests::increase", mutates_args=("x",))
def increase(x: Tensor) -> None:
    x.add_(1)


class OwnOperators(Two):
    """Operators of the user's own, one of which writes and returns nothing; and writes through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.calls: Tensor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = stage_boundary(thrice(self.a(x)))
        increase(self.calls)
        torch._foreach_add_([self.calls], 1.0)
        h.data.mul_(2)
        return self.loss(h * self.calls, y)


class Unet(nn.Module):
    """Skips around the boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(1 + i, 2 + i, 3, padding=1) for i in range(2))
        self.middle = nn.Conv1d(3, 3, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv1d(6, 2, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one = self.down[0](x[:, None])
        two = self.down[1](one)
        h = stage_boundary(self.middle(stage_boundary(two)))
        h = self.up[0](torch.cat([h, two], 1))
        h = self.up[1](torch.cat([h, one], 1))
        return F.mse_loss(h[:, 0], y)


def keyword_batch() -> Batch:
    return {**vectors(), "scale": 0.5, "mask": None, "square": True}


def container_batch() -> Batch:
    x, y = vectors().values()
    return {"inputs": {"x": x, "deep": {"y": y}}, "point": Point(torch.randn(4), [torch.randn(4, WIDTH)])}


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch] = vectors
    stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "writes to views": Case(ShiftRight, tokens, 3),
    "buffers": Case(Buffers),
    "boundaries inside autocast": Case(AutocastAround, stages=3),
    "random": Case(Noisy, stages=1),
    "keywords, none, scalars": Case(Keywords, keyword_batch),
    "containers": Case(Containers, container_batch),
    "constants": Case(Constants),
    "operators of the user's": Case(OwnOperators),
    "written behind a boundary": Case(InPlaceBehind, stages=3),
    "inputs written and returned": Case(WritesInput),
    "cut from outside": Case(Unet, stages=4, options={"cuts": {"up.0": "before"}}),
}


def loss_of(result: Any) -> Tensor:
    if isinstance(result, Mapping):
        result = result["loss"]
    return result if isinstance(result, Tensor) else result[0]


def assert_same(result: Any, expected: Any) -> None:
    leaves, spec = pytree.tree_flatten(result)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, wanted in zip(leaves, expected_leaves, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(leaf, wanted, rtol=0, atol=0)
        else:
            assert leaf == wanted


def assert_trains_alike(
    graph: StageGraph, model: nn.Module, plain: nn.Module, batch: Batch, wanted: Any = None
) -> None:
    """Result, gradients and buffers of one call, to the last bit, on copies of the same batch and the same seed."""
    results = []
    for call in (lambda given: run_stages(graph, given), lambda given: plain(**given)):
        torch.manual_seed(3)
        results.append(call(copy.deepcopy(batch)))
        loss_of(results[-1]).backward()
    assert_same(*results)
    for (name, tensor), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (tensor.grad is None) == (reference.grad is None), name
        if reference.grad is not None:
            torch.testing.assert_close(tensor.grad, reference.grad, rtol=0, atol=0, msg=name)
    for (name, tensor), reference in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_stages_equal_eager_to_the_last_bit(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build()
    plain = copy.deepcopy(model)
    returns_loss = isinstance(copy.deepcopy(plain)(**case.batch()), Tensor)  # or all that it returns is compared
    graph = stages_of(exported(model, case.batch(), training=returns_loss, **case.options))
    assert len(graph) == case.stages
    for _ in range(2):
        assert_trains_alike(graph, model, plain, case.batch())


def test_the_result_comes_back_in_its_own_containers_with_what_is_no_tensor() -> None:
    program = exported(Keywords(), keyword_batch(), training=False)
    assert program.inputs == ("x", "y", "scale")
    result = run_stages(stages_of(program), keyword_batch())
    assert list(result) == ["loss", "parts", "count", "scale"]
    assert (result["count"], result["scale"], result["parts"][1]) == (2, 0.5, None)


class Cached(Two):
    """Returns an object that no graph can hold."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.a(x)
        return {"loss": self.loss(h, y), "cache": TensorLike.of(h), "rows": h, "norm": h.norm()}


def test_in_training_the_loss_and_the_scalars_beside_it_are_returned() -> None:
    batch = vectors()
    trained = run_stages(stages_of(exported(Cached(), batch)), batch)
    assert list(trained) == ["loss", "norm"]
    evaluated = run_stages(stages_of(exported(Cached(), batch, training=False)), batch)
    assert list(evaluated) == ["loss", "cache", "rows", "norm"]
    assert evaluated["cache"] is None


def test_a_loss_module_is_captured_too_and_its_buffers_are_constants() -> None:
    model, loss = nn.Sequential(nn.Linear(WIDTH, 50)), nn.CrossEntropyLoss(torch.rand(50))
    batch = {"input": torch.randn(4, WIDTH), "target": torch.randint(0, 50, (4,))}
    program = exported(model, batch, loss_fn=loss)
    assert [constant is loss.weight or torch.equal(constant, loss.weight) for constant in program.constants.values()]
    result = run_stages(stages_of(program), batch)
    assert torch.equal(result, loss(model(batch["input"]), batch["target"]))


def test_parameters_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Residual()
    program = exported(model, vectors(), device=torch.device(DEVICE))
    assert all(parameter.is_meta for parameter in model.parameters())
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]
    assert {value.device.type for value in values if isinstance(value, Tensor)} == {DEVICE}


def test_every_node_has_a_value_a_line_and_the_submodules_it_is_in() -> None:
    program = exported(Residual(), vectors())
    nodes = [node for node in program.graph.nodes if node.op != "output"]
    assert all("val" in node.meta for node in nodes)
    linear = next(node for node in nodes if node.name == "linear")
    assert linear.meta["val"].shape == (4, WIDTH)
    assert [path for path, _ in linear.meta["nn_module_stack"].values()] == ["", "a"]
    assert where(linear).endswith("h = self.first(self.a(x)).relu() + x)")


def test_nodes_know_the_modes_that_forward_has_changed() -> None:
    class Regions(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                x = x.sin()
                with torch.no_grad():
                    x = x.cos()
                x = x.tan()
            with torch.autocast(DEVICE, torch.bfloat16):
                x = x.exp()
            return x.sum()

    program = exported(Regions(), vectors())
    found = {node.name: node.meta.get("modes") for node in program.graph.nodes if node.op == "call_function"}
    region = (DEVICE, True, torch.bfloat16, True)
    assert found == {
        "sin": Modes(None, (region,), 1),
        "cos": Modes(False, (region,), 2),
        "tan": Modes(None, (region,), 1),
        "exp": Modes(None, (region,), 3),
        "sum_1": None,
    }


def test_autocast_around_the_call_is_no_part_of_the_program() -> None:
    torch.manual_seed(0)
    model, batch = Residual(), vectors()
    plain = copy.deepcopy(model)
    with torch.autocast(DEVICE, torch.bfloat16):
        ambient = ambient_autocast()
    program = exported(model, batch, autocast=ambient, training=False)
    assert not any("modes" in node.meta for node in program.graph.nodes)
    graph = stages_of(program)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = run_stages(graph, batch)
        expected = plain(**batch)
    assert torch.equal(result, expected)


def test_numbers_in_the_result_are_those_of_the_call() -> None:
    class Counts(Two):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": self.loss(self.a(x), y), "positive": (x > 0).sum().item(), "half": x.sum().item() / 2}

    graph = stages_of(exported(Counts(), vectors()))
    batch = vectors()
    result = run_stages(graph, batch)
    assert result["positive"] == (batch["x"] > 0).sum().item()
    assert result["half"] == batch["x"].sum().item() / 2


def test_a_module_under_two_names_has_one_place() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.blocks[1](self.blocks[0](x)), y)

    nodes = [node for node in exported(Shared(), vectors()).graph.nodes if node.name.startswith("linear")]
    assert [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes] == ["blocks.0", "blocks.1"]
    assert {node.all_input_nodes[1].target for node in nodes} == {"blocks.0.weight"}


def test_a_count_of_calls_runs_with_its_submodule() -> None:
    class Counter(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = stage_boundary(self.norm(self.a(x)))
            self.calls += 1
            return self.loss(h, y)

    program = chain(passes.default(), exported(Counter(), vectors()))
    stage_of = {str(node.all_input_nodes[0]): program.stage_of[node.name] for node in counts_of(program)}
    assert stage_of == {"norm_num_batches_tracked": 0, "calls": 1}
    assert len(set(program.stage_of.values())) == 2


def counts_of(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.name.startswith("add_")]


# ---- what is refused ----


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


class Does(Two):
    """Does something in forward, between its two layers."""

    log: list[int]

    def __init__(self, deed: Callable[[Does, Tensor], Any]) -> None:
        super().__init__()
        self.deed, self.log, self.count = deed, [], 0
        self.register_buffer("buffer", torch.zeros(2))
        self.head = self.a.weight.detach()[:1]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        made = self.deed(self, h)
        return self.loss(stage_boundary(made if isinstance(made, Tensor) else h), y)


def _gradient(model: Does, h: Tensor) -> Tensor:
    return torch.autograd.grad(h.sum(), h)[0]


def _branch(model: Does, h: Tensor) -> Tensor:
    return h if h.sum() > 0 else -h


def _condition(model: Does, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))  # type: ignore[no-any-return]


GENERATOR = torch.Generator()
STRANGER, LEAF = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, requires_grad=True)

REFUSED: dict[str, tuple[Callable[[Does, Tensor], Any], str]] = {
    "autograd.Function": (lambda m, h: Double.apply(h), "Double is applied.*record"),
    "checkpoint": (lambda m, h: checkpoint(m.b, h, use_reentrant=False), "activation checkpointing.*record"),
    "random": (lambda m, h: h * random.random(), "random numbers"),
    "submodule's": (lambda m, h: setattr(m.a, "last", h + getattr(m.a, "last", 0.0)), "sets a.last"),
    "deleted": (lambda m, h: delattr(m, "count"), "changes Does.count"),
    "buffer's shape": (lambda m, h: setattr(m, "buffer", h.sum(0)), r"buffer self.buffer of torch.float32 \[2\]"),
    "tensor hook": (lambda m, h: h.register_hook(lambda g: 2 * g), "hook on a tensor.*record"),
    "gradient": (_gradient, "gradients are computed inside"),
    "branch": (_branch, "branches on the value of a tensor"),
    "nonzero": (lambda m, h: h + h.nonzero().sum(), "shape depends on the values"),
    "stranger": (lambda m, h: STRANGER(h), "parameter that is not the model's"),
    "leaf": (lambda m, h: h * LEAF, "needs a gradient and is no parameter of the model"),
    "view": (lambda m, h: h + m.head, "view of a.weight that was made outside"),
    "cond": (_condition, "cannot be cut into stages"),
    "vmap": (lambda m, h: torch.vmap(torch.sin)(h), "outside of the function around it.*record"),
    "inference mode": (lambda m, h: h + torch.inference_mode()(torch.sin)(h).sum(), "inference mode is entered"),
    "generator": (lambda m, h: h + torch.rand(WIDTH, generator=GENERATOR), "a Generator that is no input"),
    "data set": (lambda m, h: setattr(m.b.weight, "data", h[:, :1]), "sets .data"),
    "numpy of a tensor": (lambda m, h: h + torch.from_numpy(h.detach().numpy()), "numpy"),
    "no tensor": (lambda m, h: stage_boundary(3), "in which there is no tensor"),
}


@pytest.mark.parametrize(("deed", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_a_graph_would_get_wrong_is_refused(deed: Callable[[Does, Tensor], Any], message: str) -> None:
    model, batch = Does(deed), vectors()
    held = {**vars(model), **vars(model.a)}
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    tensors = list(model.state_dict(keep_vars=True).values())
    with pytest.raises(TraceError, match=f"(?s){message}") as caught:
        exported(model, batch)
    assert f'File "{__file__}", line ' in str(caught.value)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    assert torch.equal(now[0], state[0])
    assert now[1:] == state[1:]
    assert {**vars(model), **vars(model.a)} == held
    assert model.log == []
    assert all(one is other for one, other in zip(model.state_dict(keep_vars=True).values(), tensors, strict=True))


def test_backward_hooks_are_refused() -> None:
    model = Two()
    model.b.register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(TraceError, match="b has backward hooks"):
        exported(model, vectors())


def test_an_object_among_the_inputs_is_refused() -> None:
    with pytest.raises(TraceError, match="input 'y' holds a Snapshot, which is neither a tensor nor a plain value"):
        exported(Two(), {"x": torch.randn(4, WIDTH), "y": [ObjectLike("Snapshot")]})


# ---- what the passes know of operators ----

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


def test_what_ranges_decide_of_a_size_that_values_decide_is_known() -> None:
    """How many places there are is never negative, and inputs decide whether they are three."""
    found: list[bool | None] = []

    class Counts(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            size = mask.nonzero().shape[0]
            found.extend([known_truth(size < 0), known_truth(size >= 0), known_truth(size == 3)])
            return mask + 1

    torch.export.export(Counts(), (torch.ones(4),), strict=False)
    assert found[:3] == [False, True, None]


def test_how_a_tensor_lies_in_memory_is_no_clause_of_what_a_region_returns() -> None:
    """torch asks for strides to choose a kernel: those of the inputs beside the sizes of what a region returns, too."""
    sizes, strides = "L['t1'].size()[0] == L['t0'].size()[0]", "L['t1'].size()[0] <= L['t0'].stride()[0]"
    (guard,) = guards_of([sizes, strides], [("region", range(1, 2))])
    assert guard.clauses == (sizes,)
