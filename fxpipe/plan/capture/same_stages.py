"""Same stages: a later capture's stages, as those of the first one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fxpipe.errors import PartitionError
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph


def like(graph: StageGraph, first: StageGraph) -> StageGraph:
    """``graph`` with the numbers and names that its stages have in ``first``; stages that it lacks do nothing in it.

    An input that is absent, such as an image of a batch of text, leaves out the stages that work on it. PartitionError
    where a stage is not one of the first graph's.
    """
    if graph.names == first.names:
        return graph
    # Numbers must rise along every edge in both graphs, or the first one's table would run a stage before its input.
    found = {stage.index: _counterpart(stage, first) for stage in graph}
    number = {index: place for index, place in found.items() if place is not None}
    present = {place: graph[index] for index, place in number.items()}
    if len(present) < len(graph) or any(number[e.source] >= number[e.target] for e in graph.edges):
        raise PartitionError(
            f"this kind of batch gives the stages {list(graph.names)}, the first kind gave {list(first.names)}; a "
            "model must keep its stages. Use example_args= of the kind that uses most of it"
        )
    called = {edge: Edge(number[edge.source], number[edge.target], edge.value) for edge in graph.edges}
    stages = [
        _relabelled(present[s.index], called, index=s.index, name=s.name) if s.index in present else _idle(s)
        for s in first
    ]
    graph = dataclasses.replace(graph, stages=tuple(stages)).with_backward()
    # A stage that does nothing keeps its backward: its place in the row is where other replicas sum its gradients.
    return _with_backward(graph, [(s if s.index in present else first[s.index]).has_backward for s in graph])


def called_alike(graphs: Sequence[StageGraph]) -> list[StageGraph]:
    """The graphs of a step's micro-batches, with their values called by the first one's names: they run one table.

    Where no stage gathers, a micro-batch may have fewer values between two stages than another. PartitionError where
    their stages differ, or the messages between stages that gather.
    """
    first, each = graphs[0], list({id(graph): graph for graph in graphs}.values())
    if len(each) == 1:
        return list(graphs)
    gathers = any(graph.gathers for graph in each)
    for graph in each:
        same = _facts(graph) == _facts(first) if gathers else graph.names == first.names
        if not same or graph.output_stage != first.output_stage:
            raise PartitionError(
                "the micro-batches of this batch have different shapes or inputs, and the stages captured for them "
                f"differ in what they exchange or return:\n{first}\n{graph}\npass micro-batches of one shape, a batch "
                "that divides evenly, and make a call for each kind of them"
            )
    # Between two stages, the names of the micro-batch that has most values there.
    between: dict[tuple[int, int], list[Edge]] = {}
    for graph in each:
        for pair, edges in edges_between(graph).items():
            between[pair] = max(between.get(pair, []), edges, key=len)
    backward = [any(stage.has_backward for stage in stages) for stages in zip(*each, strict=True)]
    # Any value between two stages may bear the name of any other, as both ends are of one graph.
    found: dict[int, StageGraph] = {}
    for graph in each:
        names = {pair: iter(edges) for pair, edges in between.items()}
        called = {edge: next(names[_pair(edge)]) for edge in graph.edges}
        stages = tuple(_relabelled(stage, called) for stage in graph)
        found[id(graph)] = _with_backward(dataclasses.replace(graph, stages=stages), backward)
    return [found[id(graph)] for graph in graphs]


def joint(graphs: Sequence[StageGraph]) -> StageGraph:
    """All stages and values that any of these has, for which their table is made. Their values have the same names."""
    each = list({id(graph): graph for graph in graphs}.values())
    if len(each) == 1 or graphs[0].gathers:  # with which all have the same
        return graphs[0]
    stages = tuple(_joint(stages) for stages in zip(*each, strict=True))
    return dataclasses.replace(graphs[0], stages=stages)


def _joint(stages: Sequence[Stage]) -> Stage:
    return dataclasses.replace(
        max(stages, key=lambda stage: len(stage.inputs)),
        inputs=tuple(dict.fromkeys(entry for stage in stages for entry in stage.inputs)),
        outputs=tuple(dict.fromkeys(edge for stage in stages for edge in stage.outputs)),
        tensors={name: tensor for stage in stages for name, tensor in stage.tensors.items()},
        varies=any(stage.varies for stage in stages),
    )


def edges_between(graph: StageGraph) -> dict[tuple[int, int], list[Edge]]:
    """The values from one stage to another."""
    between: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges:
        between.setdefault(_pair(edge), []).append(edge)
    return between


def _with_backward(graph: StageGraph, backward: Sequence[bool]) -> StageGraph:
    stages = (dataclasses.replace(s, has_backward=has) for s, has in zip(graph, backward, strict=True))
    return dataclasses.replace(graph, stages=tuple(stages))


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


def _relabelled(stage: Stage, called: Mapping[Edge, Edge], **changes: Any) -> Stage:
    return dataclasses.replace(
        stage,
        inputs=tuple(called[entry] if isinstance(entry, Edge) else entry for entry in stage.inputs),
        outputs=tuple(called[edge] for edge in stage.outputs),
        **changes,
    )


def _counterpart(stage: Stage, first: StageGraph) -> int | None:
    """The stage of ``first`` with this name, or else the one that holds its tensors; None where there is none."""
    mine = set(stage.tensors) & {name for other in first for name in other.tensors}  # what is new, the planner judges
    holding = [other for other in first if mine <= set(other.tensors)]
    named = [other.index for other in holding if other.name == stage.name]
    others = [other.index for other in holding if mine]
    return named[0] if named else others[0] if len(others) == 1 else None


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
