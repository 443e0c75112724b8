"""What the tests of the passes share: from a model to its stages, and a stage graph run by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe import passes
from fxpipe.graph.program import Program, is_compute
from fxpipe.graph.stage_graph import Edge, StageGraph
from fxpipe.passes.chain import chain
from fxpipe.passes.split import split
from fxpipe.specs import TensorSpec
from fxpipe.trace import Request, capture


def captured(model: nn.Module, *inputs: str, **fixed: Any) -> Program:
    """The program of a model; ``inputs`` default to forward's arguments without a default."""
    names = inputs or tuple(
        name for name, p in Request.signature(model, None).parameters.items() if p.default is p.empty
    )
    return capture(Request(model, names, fixed))


def capture_by(tracer: str, model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Program:
    """The program that a tracer captures from a batch; None, flags and texts are no inputs of it."""
    fixed = {name: value for name, value in batch.items() if value is None or isinstance(value, (bool, str))}
    example = {
        name: pytree.tree_map_only(Tensor, TensorSpec.from_tensor, v) for name, v in batch.items() if name not in fixed
    }
    return capture(Request(model, tuple(example), fixed, example=example, **options), tracer)


def staged(program: Program) -> StageGraph:
    return split(chain(passes.default(), program))


def called(program: Program) -> list[str]:
    """The submodules, and the functions that stand for them, that a program calls as they are."""
    return [str(node.target) for node in program.graph.nodes if node.op == "call_module"]


def partitioned(model: nn.Module, *inputs: str) -> Program:
    return chain(passes.default(), captured(model, *inputs))


def label(node: fx.Node) -> str:
    """How the tests call a node: a module by its name, an operation by the node's."""
    return str(node.target) if node.op == "call_module" else node.name


def stages_of(program: Program) -> list[str]:
    """For each stage what it computes, in program order: ``["A", "B T loss"]``."""
    found: dict[int, list[str]] = {stage: [] for stage in sorted(set(program.stage_of.values()))}
    for node in program.graph.nodes:
        if is_compute(node) and node.name in program.stage_of:
            found[program.stage_of[node.name]].append(label(node))
    return [" ".join(names) for names in found.values()]


def edges_of(graph: StageGraph) -> set[str]:
    """Every value on its way: ``{"A: 0→1"}``."""
    return {f"{edge.value}: {edge.source}→{edge.target}" for edge in graph.edges}


def run_stages(graph: StageGraph, inputs: Mapping[str, Any]) -> Any:
    """The model's result, computed stage by stage."""
    arrived: dict[Edge, Any] = {}
    result = None
    for stage in graph:
        arguments = [inputs[entry] if isinstance(entry, str) else arrived[entry] for entry in stage.inputs]
        outputs = stage.run(*arguments)
        arrived |= dict(zip(stage.outputs, outputs, strict=False))
        result = outputs[-1] if stage.returns_result else result
    return result


def step(model: nn.Module, call: Callable[[], Any], seed: int = 3) -> tuple[Any, ...]:
    """(result, gradients, buffers) of one step whose loss is the sum of all that is returned."""
    model.zero_grad()
    torch.manual_seed(seed)
    random.seed(seed)
    result = call()
    sum(leaf.float().sum() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return pytree.tree_map_only(Tensor, Tensor.detach, result), gradients, dict(model.named_buffers())


def assert_equal(found: Any, wanted: Any) -> None:
    """The same containers, with the same in them: tensors to the last bit."""
    leaves, wanted_leaves = pytree.tree_leaves(found), pytree.tree_leaves(wanted)
    assert pytree.tree_structure(found) == pytree.tree_structure(wanted)
    tensors = [number for number, leaf in enumerate(wanted_leaves) if isinstance(leaf, Tensor)]
    for number in tensors:
        torch.testing.assert_close(leaves[number], wanted_leaves[number], rtol=0, atol=0, equal_nan=True)
    others = [number for number in range(len(leaves)) if number not in tensors]
    assert [leaves[number] for number in others] == [wanted_leaves[number] for number in others]


def assert_trains_alike(graph: StageGraph, model: nn.Module, plain: nn.Module, batch: Mapping[str, Any]) -> None:
    """The stages of a model give the plain one's result, gradients and buffers on copies of a batch, and a seed."""
    wanted = step(plain, lambda: plain(**copy.deepcopy(batch)))
    assert_equal(step(model, lambda: run_stages(graph, copy.deepcopy(batch))), wanted)


class Model(nn.Module):
    """A model whose forward is ``body``, with a parameter, a frozen layer and buffers for it to use."""

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


def names(nodes: list[fx.Node]) -> set[str]:
    return {node.name for node in nodes}
