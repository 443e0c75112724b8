"""Varying: the stages whose values, or the gradients of these, may look otherwise each time for inputs of one shape."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from torch import fx

from fxpipe.graph.opaque_call import has_opaque_calls
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import Edge, Stage


def varying_marked(program: Program, stages: Sequence[Stage]) -> list[Stage]:
    """The stages, marked which of them vary.

    That is one that holds an opaque region; those behind it that make values of sizes which come out of it,
    or of any size, where nothing is known of sizes, or that train nothing, so that what they send needs a gradient if
    what they are given does; and those before it: it may use what they send in one step, and not in the next, and then
    sends no gradient back.
    """
    regions = [node for node in program.graph.nodes if is_kept(program, node)]
    found = {program.stage_of[node.name] for node in regions}
    for stage in reversed(stages):
        if any(edge.target in found for edge in stage.outputs):
            found.add(stage.index)
    symbols = {name for node in regions for out in node.users for name in _symbols(out)}
    sizes = {node.name: _symbols(node) for node in program.graph.nodes}
    behind = {program.stage_of[node.name] for node in regions}
    for stage in stages if program.tracer == "symbolic" or symbols else ():
        if any(isinstance(entry, Edge) and entry.source in behind for entry in stage.inputs):
            behind.add(stage.index)
            if program.tracer == "symbolic" or any(sizes[edge.value] & symbols for edge in stage.outputs):
                found.add(stage.index)
    unsure = {program.stage_of[node.name] for node in regions}
    for stage in stages:
        given = any(isinstance(entry, Edge) and entry.source in unsure for entry in stage.inputs)
        if given and not any(parameter.requires_grad for parameter in stage.parameters.values()):
            unsure.add(stage.index)
    found |= unsure
    return [dataclasses.replace(stage, varies=stage.index in found) for stage in stages]


def is_kept(program: Program, node: fx.Node) -> bool:
    """Whether a node calls an opaque region."""
    return node.op == "call_module" and has_opaque_calls(program.opaque.get(str(node.target)))


def _symbols(node: fx.Node) -> set[str]:
    """The symbolic sizes that a node's own are made of."""
    return {name for size in node.meta.get("sizes", ()) for name in re.findall(r"[a-z]+\d+", size)}
