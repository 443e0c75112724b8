"""Same stages: a later capture's stages, as those of the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fxpipe.errors import PartitionError
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph


def like(graph: StageGraph, first: StageGraph) -> StageGraph:
    """``graph`` with the numbers and names that its stages have in ``first``; stages that it lacks do nothing in it.

    An input that is absent, such as an image of a batch of text, leaves out the stages that work on it. PartitionError
    where a stage is not one of the first graph's.
    """
    if graph.names == first.names:
        return graph
    number = {stage.index: _counterpart(stage, first) for stage in graph}
    if len(set(number.values())) < len(number) or any(number[e.source] >= number[e.target] for e in graph.edges):
        raise _different(graph, first)
    by_number = {number[stage.index]: _renumbered(stage, number, first) for stage in graph}
    present = dataclasses.replace(
        graph, stages=tuple(by_number.get(s.index) or _idle(s) for s in first)
    ).with_backward()
    # A stage that does nothing keeps its backward: its place in the row is where other replicas sum its gradients.
    backward = [
        stage.has_backward if stage.index in by_number else first[stage.index].has_backward for stage in present
    ]
    stages = (dataclasses.replace(s, has_backward=has) for s, has in zip(present, backward, strict=True))
    return dataclasses.replace(present, stages=tuple(stages))


def alike(graph: StageGraph, first: StageGraph) -> StageGraph:
    """``graph`` with its values called as in ``first``: the micro-batches of one step run one table.

    PartitionError where their stages or the messages between them differ.
    """
    if graph is first:
        return first
    if _facts(graph) != _facts(first):
        raise PartitionError(
            "the micro-batches of this batch have different shapes, and the stages captured for them exchange "
            f"different values:\n{first}\n{graph}\npass micro-batches of one shape, a batch that divides evenly"
        )
    # Any value between two stages may bear the name of any other: both ends are of this graph.
    between = {pair: [edge for edge in first.edges if _pair(edge) == pair] for pair in map(_pair, first.edges)}
    called = {edge: between[_pair(edge)].pop(0) for edge in graph.edges}
    stages = tuple(_relabelled(stage, called) for stage in graph)
    return dataclasses.replace(graph, stages=stages)


def _pair(edge: Edge) -> tuple[int, int]:
    return edge.source, edge.target


def _facts(graph: StageGraph) -> list[tuple[object, ...]]:
    """What the table and the messages of a graph depend on."""
    return [
        (
            *(s.name, s.gathered, s.ways, sorted(map(_pair, s.outputs)), s.batch_inputs),
            *(s.returns_result, s.has_backward, sorted(s.tensors)),
        )
        for s in graph
    ]


def _relabelled(stage: Stage, called: Mapping[Edge, Edge]) -> Stage:
    return dataclasses.replace(
        stage,
        inputs=tuple(called[entry] if isinstance(entry, Edge) else entry for entry in stage.inputs),
        outputs=tuple(called[edge] for edge in stage.outputs),
    )


def _counterpart(stage: Stage, first: StageGraph) -> int:
    """The stage of ``first`` with this name, or else the one that holds its tensors."""
    mine = set(stage.tensors) & {name for other in first for name in other.tensors}  # what is new, the planner judges
    named = [other.index for other in first if other.name == stage.name and mine <= set(other.tensors)]
    holding = [other.index for other in first if mine and mine <= set(other.tensors)]
    if not named and len(holding) != 1:
        raise _different(StageGraph((stage,), (), first.module), first)
    return (named or holding)[0]


def _different(graph: StageGraph, first: StageGraph) -> PartitionError:
    return PartitionError(
        f"this kind of batch gives the stages {list(graph.names)}, the first kind gave {list(first.names)}; a model "
        "must keep its stages. Use example_args= of the kind that uses most of it"
    )


def _renumbered(stage: Stage, number: Mapping[int, int], first: StageGraph) -> Stage:
    edges = [*stage.outputs, *(entry for entry in stage.inputs if isinstance(entry, Edge))]
    called = {edge: Edge(number[edge.source], number[edge.target], edge.value) for edge in edges}
    index = number[stage.index]
    return dataclasses.replace(_relabelled(stage, called), index=index, name=first[index].name)


def _idle(stage: Stage) -> Stage:
    """The stage without its work."""
    return dataclasses.replace(
        stage,
        module=_nothing,
        function=_nothing,
        inputs=(),
        ways=(),
        outputs=(),
        returns_result=False,
        tensors={},
        draws_random=False,
    )


def _nothing() -> tuple[()]:
    return ()
