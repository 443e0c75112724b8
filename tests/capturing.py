"""What the tests of the passes share: from a model to its stages, and a stage graph run by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe import passes
from fxpipe.graph.program import Program, is_compute
from fxpipe.graph.stage_graph import Edge, StageGraph
from fxpipe.passes.chain import chain
from fxpipe.trace import Request, capture


def captured(model: nn.Module, *inputs: str, **fixed: Any) -> Program:
    """The program of a model; ``inputs`` default to forward's arguments without a default."""
    names = inputs or tuple(
        name for name, p in Request.signature(model, None).parameters.items() if p.default is p.empty
    )
    return capture(Request(model, names, fixed))


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
