"""Stages compiled by a function of the user's: when, how often, and that they compute what they did."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxpipe
from fxpipe import StageGraph, passes, stage_boundary
from fxpipe.plan.stage_compiler import StageCompiler, compiled_lazily
from fxpipe.trace import TRACERS
from tests.capturing import partitioned, run_stages
from tests.thinned import pairwise


class Writing(nn.Module):
    """Three stages: a skip connection around two boundaries, a buffer written, and a write behind a boundary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.seen.add_(h.detach().sum(0))
        y = stage_boundary(h * 2)
        y.mul_(3)
        y = stage_boundary(self.b(y))
        return (self.c(y + h) * h).square().mean()  # type: ignore[no-any-return]


def compiled(graph: StageGraph, stage_compiler: StageCompiler) -> StageGraph:
    return replace(graph, stages=tuple(compiled_lazily(stage, stage_compiler) for stage in graph))


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def trained(model: nn.Module, compute: Callable[[], Any]) -> dict[str, Tensor]:
    """The loss, the gradients, and what is in the buffers afterwards."""
    model.zero_grad()
    for buffer in model.buffers():
        buffer.zero_()
    loss = compute()
    loss.backward()
    found = {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_stages_compute_what_the_model_does() -> None:
    model = Writing()
    counter = CompileCounterWithBackend("aot_eager")
    graph = compiled(
        passes.split(partitioned(model)), lambda module: torch.compile(module, backend=counter, fullgraph=True)
    )
    run_stages(graph, {"x": batch(6)})
    assert counter.frame_count == len(graph), "each stage is one graph"
    for rows in (6, 9):
        x = batch(rows)
        wanted = trained(model, lambda x=x: model(x))
        found = trained(model, lambda x=x: run_stages(graph, {"x": x}))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(run_stages(graph, {"x": x}), model(x), rtol=0, atol=0)


class Block(nn.Module):
    """A layer with noise. ``is_cut``: with a boundary inside."""

    def __init__(self, is_cut: bool = False) -> None:
        super().__init__()
        self.linear, self.is_cut = nn.Linear(4, 4), is_cut

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.linear(x), 0.5)
        return x + torch.tanh(stage_boundary(y) if self.is_cut else y)


class Blocks(nn.Module):
    """``compiler``: what compiles its blocks; ``how``: in which way."""

    def __init__(self, compiler: Any = None, how: str = "method", is_cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.loss = nn.ModuleList([Block(is_cut), Block()]), F.mse_loss
        if how == "loss":
            self.loss = torch.compile(F.mse_loss, backend="eager")
        for number, block in enumerate(self.layers if compiler else ()):
            if how == "method":
                block.compile(backend=compiler)
            elif how == "wrapped":
                self.layers[number] = torch.compile(block, backend=compiler)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.layers:
            y = block(y)
        return self.loss(y, x)


class CountedCalls:
    """A compiler that counts the calls of what it has compiled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, compiled: torch.fx.GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls += 1
            return compiled.forward(*args)

        return call


TWO: dict[str, Any] = {"topo": fxpipe.Topology([("pipe", 2)]), "microbatches": 2, "example_args": (batch(4),)}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(("cuts", "how", "tracer"), pairwise(["before", "auto"], ["method", "wrapped"], list(TRACERS)))
def test_blocks_that_the_user_has_compiled_run_compiled(cuts: str, how: str, tracer: str) -> None:
    counted = CountedCalls()
    # "auto" cuts a plain block inside, and noise is a stage's own: so blocks that are one call are compared.
    boundaries = {"*": "auto"} if cuts == "auto" else {"layers.1": "before"}
    opaque = {"layers.*": "whole"} if cuts == "auto" else {}

    def trained(model: Blocks, boundaries: dict[str, str], **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        forward_backward = fxpipe.compile(model, **TWO, boundaries=boundaries, tracer=tracer, **options)
        assert any(stage.varies for stage in forward_backward.stages) == ("whole" in boundaries.values())
        counted.calls = 0
        loss = forward_backward(batch(4))
        return [loss, *(parameter.grad for parameter in model.parameters())]

    for recompute, calls in [(False, 4), (True, 8)]:  # of two blocks, by two micro-batches; again in recomputation
        plain = trained(Blocks(), boundaries | opaque, recompute=recompute)
        found = trained(Blocks(counted, how), boundaries, recompute=recompute)
        assert all(map(torch.equal, found, plain))
        assert 4 <= counted.calls <= calls


class Asks(Block):
    """In evaluation it is given what no opaque region may be given: an object that forward makes."""

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return super().forward(x) if self.training else x + torch.tanh(self.linear(x)) * cache.scale


class Asked(Blocks):
    def __init__(self, compiler: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Asks(), Asks()])
        for block in self.layers if compiler else ():
            block.compile(backend=compiler)

    def forward(self, x: Tensor) -> Tensor:
        y, cache = x, SimpleNamespace(scale=2.0)
        for block in self.layers:
            y = block(y) if self.training else block(y, cache)
        return self.loss(y, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_where_a_later_capture_cannot_keep_a_compiled_block_as_one_call_it_runs_as_plain_code() -> None:
    counted = CountedCalls()

    def losses(model: Asked) -> list[Tensor]:
        torch.manual_seed(1)
        forward_backward = fxpipe.compile(model, **TWO, boundaries=["layers.1"])
        return [forward_backward(batch(4)), forward_backward.evaluate(batch(4)), forward_backward(batch(6))]

    assert losses(Asked(counted)) == losses(Asked())
    assert counted.calls == 8  # of two blocks by two micro-batches, in two steps


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(("how", "name"), [("method", "layers.0, layers.1"), ("loss", "loss")])
def test_what_the_user_has_compiled_and_is_cut_is_said_to_run_as_plain_code(how: str, name: str) -> None:
    told = f"{name} run as plain code, though compiled; stage_compiler=torch.compile compiles what a stage runs"
    cut = Blocks("eager", how, is_cut=True)
    assert told in str(fxpipe.compile(cut, **TWO).stages)
    compiled = fxpipe.compile(cut, **TWO, stage_compiler=lambda stage: stage)
    assert "plain code" not in str(compiled.stages)


def test_a_callable_of_the_users_is_compiled_as_the_function_of_its_stage() -> None:
    asked: list[Any] = []
    graph = StageGraph.from_callables({"a": nn.Linear(4, 4), "b": torch.sin}, [("a", "b")], inputs={"a": ["x"]})
    made = compiled(graph, lambda function: asked.append(function) or function)
    x = batch(6)
    assert torch.equal(run_stages(made, {"x": x}), run_stages(graph, {"x": x}))
    assert asked == [stage.function for stage in graph]


def test_compile_asks_for_each_stage_once() -> None:
    asked: list[Any] = []

    def counting(module: Callable[..., Any]) -> Callable[..., Any]:
        asked.append(module)
        return module

    model, plain, x = Writing(), Writing(), batch(6)
    topology = fxpipe.Topology([("pipe", 3)])
    forward_backward = fxpipe.compile(model, topology, microbatches=3, stage_compiler=counting)
    assert asked == []
    for _ in range(2):
        loss = forward_backward(x)
    assert len(asked) == len(set(asked)) == len(forward_backward.stages) == 3
    for _ in range(2):
        wanted = torch.stack([plain(part).detach() / 3 for part in x.split(2)]).sum()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(model.seen, plain.seen, rtol=0, atol=0)


class Counting(nn.Module):
    """Counts in a buffer without dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2)
        return (self.linear(x) * self.scale).square().mean()


def test_a_write_that_torch_loses_is_refused() -> None:
    """``torch.compile(backend="aot_eager")`` of such a function leaves the buffer as it was."""
    options = {"microbatches": 1, "stage_compiler": lambda function: function}

    def step(dtype: torch.dtype) -> None:
        with torch.device("cpu"):  # on a GPU it does not
            fxpipe.compile(Counting(dtype), fxpipe.Topology([("pipe", 1)]), **options)(torch.ones(2, 4))

    step(torch.float32)
    with pytest.raises(fxpipe.RunError, match=r"writes scale, a number in float64 without dimensions"):
        step(torch.float64)


AFTER_A_CAPTURE = """
import torch
import fxpipe


class Model(torch.nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).mean()  # which TorchDynamo traces


model = Model(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
pipe = fxpipe.Topology([("pipe", 2)])
try:
    fxpipe.compile(model, pipe, boundaries=["1"], tracer="TRACER", example_args=(torch.ones(4, 4),))
except fxpipe.TraceError:
    pass


@torch.compile(backend="eager", fullgraph=True)
def compiled(x):
    return 2 * x if torch.compiler.is_compiling() else x


print(compiled(torch.ones(())).item())
"""


@pytest.mark.long
@pytest.mark.parametrize("tracer", ["export", "record"])
def test_code_that_is_compiled_after_a_capture_asks_as_before(tracer: str, tmp_path: Path) -> None:
    """TorchDynamo, which a capture imports first, kept the replaced function, whether or not the model is captured.

    Only a process of its own has not imported TorchDynamo before.
    """
    (tmp_path / "program.py").write_text(AFTER_A_CAPTURE.replace("TRACER", tracer))
    ran = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.stdout == "2.0\n", ran.stderr
