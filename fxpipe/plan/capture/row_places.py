"""Row places: in which dimension the values that are gathered have their rows, as micro-batches of two sizes show it.

A program is run on fake tensors, which have shapes and no numbers, for so many rows and for others: the dimensions that
follow are those of the rows. Where the model is captured for shapes, both captures are run, each for its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.errors import TraceError
from fxpipe.graph.gathering import Places
from fxpipe.graph.modes import Autocast, modes_restored, within
from fxpipe.graph.opaque_call import has_opaque_calls
from fxpipe.graph.program import Program
from fxpipe.graph.stage_graph import Edge, StageGraph
from fxpipe.plan.capture.on_fakes import attribute, call_node, faked, left_as_it_is, modes_of
from fxpipe.schedules.no_gc import paused
from fxpipe.torch_compat import pytree
from fxpipe.trace import NEED_SHAPES
from fxpipe.trace.fake import FakeModel, fake_model

Shapes = tuple[tuple[int, ...] | None, ...]
"""Of each leaf of a value; None for what is no tensor."""


@dataclass(frozen=True)
class Shown:
    """Stages and the program that they were cut from, and the inputs of a micro-batch of so many rows."""

    graph: StageGraph
    program: Program
    example: Mapping[str, Any]
    rows: int


def row_places(
    one: Shown, other: Shown, device: torch.device, autocast: Sequence[Autocast], compute: torch.dtype | None
) -> Places:
    """(value, leaf) → its dimensions of rows, for what gathered stages of ``one`` are given, by the names there.

    What cannot run without numbers, or has not as many dimensions each time, is left out.
    """
    seen = [shapes_of(each.program, each.example, device, autocast, compute) for each in (one, other)]
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for mine, its in _pairs(one.graph, other.graph):
        shapes = zip(seen[0].get(mine.value, ()), seen[1].get(its.value, ()), strict=False)
        for leaf, (shape, larger) in enumerate(shapes):
            if shape is not None and larger is not None and len(shape) == len(larger):
                sizes = enumerate(zip(shape, larger, strict=True))
                found[mine.value, leaf] = tuple(d for d, pair in sizes if pair == (one.rows, other.rows))
    return found


def check_rows_known(
    one: StageGraph,
    program: Program,
    example: Mapping[str, Any],
    device: torch.device,
    autocast: Sequence[Autocast],
    compute: torch.dtype | None,
) -> None:
    """TraceError where the rows of what is gathered are not known, since it comes out of an opaque region
    and runs on numbers alone: captures for shapes have seen it for the rows of a micro-batch, and of a group."""
    if not program.gathered or program.tracer in NEED_SHAPES or not any(map(has_opaque_calls, program.opaque.values())):
        return
    shapes = shapes_of(program, example, device, autocast, compute)
    for edge in one.edges:
        if one[edge.target].gathered and edge.value not in shapes:
            raise TraceError(
                f"stage {one.names[edge.target]!r} gathers {edge.value}, which comes out of an opaque region and "
                "cannot run without numbers, so that the symbolic tracer does not know which dimension its rows are; "
                'leave tracer= out, or write tracer="export" or "record", and pass an example batch (example_args=)'
            )


def _pairs(one: StageGraph, other: StageGraph) -> Iterator[tuple[Edge, Edge]]:
    """What gathered stages are given, as both captures call it: their edges between two stages are in one order."""
    for stage in one:
        if stage.gathered is None:
            continue
        for source in range(stage.index):
            yield from zip(*(_between(graph, source, stage.index) for graph in (one, other)), strict=False)


def _between(graph: StageGraph, source: int, target: int) -> list[Edge]:
    return [edge for edge in graph.edges if (edge.source, edge.target) == (source, target)]


@paused()
def shapes_of(
    program: Program,
    example: Mapping[str, Any],
    device: torch.device,
    autocast: Sequence[Autocast],
    compute: torch.dtype | None,
) -> dict[str, Shapes]:
    """Node → the shapes of what it makes for an example, whose tensors are ``TensorLike``; those that are known."""
    values: dict[fx.Node, Any] = {}
    with (
        left_as_it_is(program.module),
        fake_model(program.module, device, compute) as fake,
        torch.enable_grad(),
        modes_restored(),
        within(autocast),
        fake.mode,
    ):
        for node in program.graph.nodes:
            if node.op != "output" and all(operand in values for operand in node.all_input_nodes):
                _note(program, node, values, fake, example)
    return {node.name: tuple(map(_shape, pytree.tree_leaves(value))) for node, value in values.items()}


def _note(
    program: Program, node: fx.Node, values: dict[fx.Node, Any], fake: FakeModel, example: Mapping[str, Any]
) -> None:
    """What a node makes; where it looks at numbers, what its capture saw it make, if that is of this size alone."""
    try:
        if node.op == "placeholder":
            name = str(node.target)
            values[node] = fake.inputs({name: example[name]})[name]
        elif node.op == "get_attr":
            values[node] = attribute(program, node, fake)
        else:
            with modes_of(node):
                values[node] = call_node(program, node, values)
    except Exception:  # whatever it is, nothing is known of what it makes
        if program.tracer in NEED_SHAPES and program.holds_for is None and "val" in node.meta:
            values[node] = faked(node.meta["val"], fake)


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else None
