"""Crossing: what every tracer does with a boundary that it meets, and checks about all of them at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxpipe.errors import TraceError
from fxpipe.graph.program import is_boundary
from fxpipe.torch_compat import pytree
from fxpipe.trace.patching import refuse


def crossing(value: Any, is_traced: Callable[[Any], bool], carry: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """``value`` with each traced tensor in it replaced by what ``carry`` gives for it, behind the boundary."""
    leaves, spec = pytree.tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if is_traced(leaf)]
    if not places:
        raise refuse(
            f"stage_boundary was given {type(value).__name__} {value!r:.60}, in which there is no traced tensor",
            "give it the tensors that cross the cut",
        )
    for place, behind in zip(places, carry([leaves[place] for place in places]), strict=True):
        leaves[place] = behind
    return pytree.tree_unflatten(leaves, spec)


def check_boundaries(graph: fx.Graph, executed: int) -> None:
    """After every capture: boundaries found in the graph are boundaries executed."""
    found = sum(is_boundary(node) for node in graph.nodes)
    if found != executed:
        raise TraceError(f"{executed} boundaries were executed while tracing, {found} are in the graph")
