"""Opaque methods: what a region that is a method may use, beyond what it was seen to, is held where it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.passes.alias_groups import held


def unused(program: Program) -> frozenset[str]:
    """The parameters and buffers that no node uses, by name."""
    used = frozenset[int]().union(*(held(program, node) for node in program.graph.nodes))
    return frozenset(name for name, tensor in all_tensors(program.module).items() if id(tensor) not in used)


def with_unused(program: Program, names: frozenset[str]) -> Program:
    """What no node uses of these ``names`` goes with the first call of a method of a submodule that holds it: a branch
    that the example did not take may use it."""
    first = {id(tensor): name for name, tensor in reversed(all_tensors(program.module).items())}
    left, effects = names & unused(program), dict(program.effects)
    for node in program.graph.nodes:
        mine = {first[id(tensor)]: None for tensor in _of_owners(program, str(node.target)).values()}
        more = tuple(name for name in mine if name in left)
        if more:
            effects[node.name] = dataclasses.replace(effects[node.name], reads=(*effects[node.name].reads, *more))
            left -= set(more)
    return program.replace(effects=effects)


def _of_owners(program: Program, target: str) -> Mapping[str, Tensor]:
    """What the submodules hold of whose methods a node has opaque calls."""
    calls = (call for call in opaque_calls(program.opaque.get(target)) if call.is_method)
    return {f"{call.name} {name}": tensor for call in calls for name, tensor in all_tensors(call.owner).items()}
