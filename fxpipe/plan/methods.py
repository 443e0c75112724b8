"""Methods: what a region that is a method may use, beyond what it was seen to, is held where it runs."""

from __future__ import annotations

import dataclasses

from torch import nn

from fxpipe.graph.kept import kept_in
from fxpipe.graph.stage_graph import Stage, StageGraph, all_tensors


def unused(graph: StageGraph) -> frozenset[str]:
    """The parameters and buffers that no stage uses, by name."""
    used = {id(tensor) for stage in graph for tensor in stage.tensors.values()}
    return frozenset(name for name, tensor in all_tensors(graph.module).items() if id(tensor) not in used)


def with_unused(graph: StageGraph, names: frozenset[str]) -> StageGraph:
    """The stages; what no stage uses of these ``names`` goes with the first that calls a method of a submodule that
    holds it: a branch that the example did not take may use it."""
    first = {id(tensor): name for name, tensor in reversed(all_tensors(graph.module).items())}
    left = names & unused(graph)
    stages = []
    for stage in graph:
        held = [tensor for owner in _owners(stage) for tensor in all_tensors(owner).values()]
        more = {first[id(tensor)]: tensor for tensor in held if first[id(tensor)] in left}
        left -= more.keys()
        stages.append(dataclasses.replace(stage, tensors={**stage.tensors, **more}) if more else stage)
    return dataclasses.replace(graph, stages=tuple(stages))


def _owners(stage: Stage) -> list[nn.Module]:
    """The submodules of whose methods a stage has calls that are kept whole."""
    return [part.owner for part in kept_in(stage.module) if part.is_method]
