"""Same stages: adapts the stages of several captures so that one table can run them.

Takes the captures of a step's micro-batches. Gives their stage graphs with the same stages and shared names of values.

1. ``like``: a later capture gets the first capture's stages.
2. ``called_alike``: all micro-batches of a step use the same name for a value.
3. ``joint``: the union of the micro-batches' stages and values, for which the table is made.
4. ``captured_for``: a stage that runs once for several micro-batches is captured for their total number of rows.

In step 4 a tracer that needs shapes captures the model a second time, for the rows of a group. The stages after the
gather are from this capture, so that an ``arange(n)`` in them counts the group's rows.

It changes no graph's code, and chooses no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial

from fxpipe.batch.batch import joined, joined_description, with_rows
from fxpipe.batch.description import Description
from fxpipe.batch.pattern import Pattern
from fxpipe.batch.rows import row_count
from fxpipe.capture.captures import Captures, Source
from fxpipe.capture.capturing import Capturing
from fxpipe.capture.guard import Captured, Guard
from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.boundary import Gathered
from fxpipe.graph.gathering import Places
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph
from fxpipe.packed import BatchDim
from fxpipe.trace.checks.capture_check import Sample


def adapted_to(graph: StageGraph, first: StageGraph) -> StageGraph:
    """A later graph, adapted to the stages of ``first``. A stage without work here keeps its backward action, at which
    other replicas sum their gradients. PartitionError if the stages' names differ."""
    if graph.names != first.names:
        raise PartitionError(
            f"this kind of batch gives the stages {list(graph.names)}, the first kind gave {list(first.names)}; a pass "
            "of passes= must keep Program.first's stages"
        )
    idle = [not (stage.inputs or stage.outputs or stage.tensors or stage.returns_result) for stage in graph]
    return _with_backward(graph, [(first if is_idle else graph)[i].has_backward for i, is_idle in enumerate(idle)])


def map_distinct(graphs: Sequence[StageGraph], change: Callable[[StageGraph], StageGraph]) -> tuple[StageGraph, ...]:
    """Applies ``change`` to each different graph once; graphs that were one object remain one object."""
    different = {id(graph): graph for graph in graphs}
    changed = {key: change(graph) for key, graph in different.items()}
    return tuple(changed[id(graph)] for graph in graphs)


def with_shared_names(graphs: Sequence[StageGraph]) -> tuple[StageGraph, ...]:
    """The graphs of a step's micro-batches with shared names for their values, so that one table can run all of them.

    If no stage gathers, micro-batches may have different numbers of values between two stages. PartitionError if
    their stages differ, or if a stage gathers and the messages differ.
    """
    first, each = graphs[0], list({id(graph): graph for graph in graphs}.values())
    if len(each) == 1:
        return tuple(graphs)
    gathers = any(graph.gathers for graph in each)
    for graph in each:
        same = _facts(graph) == _facts(first) if gathers else graph.names == first.names
        if not same or graph.output_stage != first.output_stage:
            raise PartitionError(
                "the micro-batches of this batch have different shapes or inputs, and the stages captured for them "
                f"differ in what they exchange or return:\n{first}\n{graph}\npass micro-batches of one shape, a batch "
                "that divides evenly, and make a call for each kind of them"
            )
    # 2. Between two stages, all use the names of the micro-batch that has most values there.
    between: dict[tuple[int, int], list[Edge]] = {}
    for graph in each:
        for pair, edges in _edges_between(graph).items():
            between[pair] = max(between.get(pair, []), edges, key=len)
    backward = [any(stage.has_backward for stage in stages) for stages in zip(*each, strict=True)]

    def renamed(graph: StageGraph) -> StageGraph:
        # Sender and receiver belong to the same graph, so values between two stages may exchange names.
        names = {pair: iter(edges) for pair, edges in between.items()}
        called = {edge: next(names[_pair(edge)]) for edge in graph.edges}
        stages = [
            replace(
                stage,
                inputs=tuple(called[entry] if isinstance(entry, Edge) else entry for entry in stage.inputs),
                outputs=tuple(called[edge] for edge in stage.outputs),
            )
            for stage in graph
        ]
        return _with_backward(replace(graph, stages=tuple(stages)), backward)

    return map_distinct(graphs, renamed)


def union_of(graphs: Sequence[StageGraph]) -> StageGraph:
    """The union of the graphs' stages and values, for which the table is made. Equal values have equal names."""
    each = list({id(graph): graph for graph in graphs}.values())
    if len(each) == 1 or graphs[0].gathers:  # if a stage gathers, all graphs have the same values
        return graphs[0]
    stages = tuple(_union_of(stages) for stages in zip(*each, strict=True))
    return replace(graphs[0], stages=stages)


def _union_of(stages: Sequence[Stage]) -> Stage:
    return replace(
        max(stages, key=lambda stage: len(stage.inputs)),
        inputs=tuple(dict.fromkeys(entry for stage in stages for entry in stage.inputs)),
        outputs=tuple(dict.fromkeys(edge for stage in stages for edge in stage.outputs)),
        tensors={name: tensor for stage in stages for name, tensor in stage.tensors.items()},
        varies=any(stage.varies for stage in stages),
    )


def _edges_between(graph: StageGraph) -> dict[tuple[int, int], list[Edge]]:
    """(source stage, target stage) → the edges between them."""
    between: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges:
        between.setdefault(_pair(edge), []).append(edge)
    return between


def _with_backward(graph: StageGraph, backward: Sequence[bool]) -> StageGraph:
    stages = (replace(s, has_backward=has) for s, has in zip(graph, backward, strict=True))
    return replace(graph, stages=tuple(stages))


def _pair(edge: Edge) -> tuple[int, int]:
    return edge.source, edge.target


def _facts(graph: StageGraph) -> list[tuple[object, ...]]:
    """The facts of each stage on which the table and the messages of a graph depend."""
    return [
        (
            *(s.name, s.gathered, s.ways, sorted(map(_pair, s.outputs)), s.batch_inputs),
            *(s.returns_result, s.has_backward, s.held),
        )
        for s in graph
    ]


# --- stages that run for several micro-batches at once ---


def captured_for(captures: Captures, capturing: Capturing) -> tuple[Captures, list[Captured]]:
    """Returns the new captures, and the capture of each micro-batch. Gathered stages are captured for the rows of a
    group. Errors as ``Capturing.of``; PartitionError if groups do not fit the micro-batches."""
    captures, captured = capturing.of(captures)
    new, with_groups = for_groups(captures, captured, capturing)
    if new.wrong == captures.wrong:
        return new, with_groups
    return captured_for(new, capturing)  # capturing a group found the micro-batches' tracer wrong


def for_groups(captures: Captures, captured: list[Captured], capturing: Capturing) -> tuple[Captures, list[Captured]]:
    """Returns the new captures, and the captures of the micro-batches with the gathered stages of the groups."""
    # 4. Stages that run for several micro-batches at once.
    first, batch_dim, pattern = captured[0], captures.source.options.batch_dim, capturing.pattern
    first.graph.groups(pattern.microbatches)  # PartitionError if the groups do not divide the micro-batches
    gathers = [stage for stage in first.graph if stage.gathered is not None]
    if gathers and len(set(pattern.given)) > 1:
        raise PartitionError(
            f"stage {gathers[0].name!r} runs for several micro-batches at once, and some of these have inputs or plain "
            "values that others have not; order rows so that all have the same, or make a call for each kind"
        )
    if first.guard.sizes is None:
        return captures, captured
    # Each kind of group is captured for its own rows; its gathered stages replace those of the micro-batches.
    places: dict[tuple[str, int], tuple[int, ...]] = {}
    for gathered in dict.fromkeys(stage.gathered for stage in gathers):
        assert gathered is not None
        stages = {stage.index for stage in gathers if stage.gathered == gathered}
        size = gathered.group or pattern.microbatches
        groups = _pattern(pattern, gathered, size, batch_dim)
        for_group = replace(capturing, pattern=groups, sample=_sample(capturing.sample, size, batch_dim))
        captures, whole = for_group.of(captures)
        places |= _places(captures.source, pattern, (first, pattern.shapes[0]), (whole[0], groups.shapes[0]))
        merged = cache(partial(_with_stages, stages=stages))  # micro-batches of one capture remain one object
        captured = [merged(single, whole[index // size]) for index, single in enumerate(captured)]
    return captures, [replace(captured[0], places=places), *captured[1:]]


def places_of_rows(captures: Captures, used: Guard, pattern: Pattern) -> Places:
    """The row dimensions of gathered values, for a capture that is valid for any number of rows.

    ``used``: the guard of the capture from which the step's plan was made. Values are looked up by its names; another
    capture that is valid for these shapes may have other names.
    """
    single = next(each for each in captures if each.guard is used)
    shape, batch_dim = pattern.shapes[:1], captures.source.options.batch_dim
    few = 1 if (row_count(shape[0], batch_dim) or 0) > 1 else 2  # a dimension of 1 may be broadcast
    small, large = (joined_description(shape * n, batch_dim) for n in (few, 2 * few))
    return _places(captures.source, pattern, (single, small), (single, large))


def _places(
    source: Source, pattern: Pattern, *pair: tuple[Captured, Description]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """(value, leaf) → its row dimensions, for the inputs of the first capture's gathered stages, by the names there.
    ``pair``: two captures, with a micro-batch each.

    A single run cannot tell 4 rows from 4 features. So two runs on fake tensors have different numbers of rows, and a
    row dimension is as long as the number of rows in both runs. Values that need real numbers, or whose number of
    dimensions differs between the runs, are left out.
    """
    rows = tuple(row_count(shape, source.options.batch_dim) for _, shape in pair)
    # Without two different numbers of rows no dimension can be identified.
    if None in rows or len(set(rows)) == 1:  # equal numbers: a group of one micro-batch
        return {}
    programs = [(captured.program, shape) for captured, shape in pair]
    runs = [source.shapes(program, shape, pattern) for program, shape in programs if program is not None]
    (ours, other), (first, second) = (_edges_between(captured.graph) for captured, _ in pair), runs
    places: dict[tuple[str, int], tuple[int, ...]] = {}
    for between, edges in ours.items():  # both graphs have the same order
        if pair[0][0].graph[between[1]].gathered is None:
            continue
        for mine, its in zip(edges, other.get(between, ()), strict=False):
            leaves = zip(first.get(mine.value, ()), second.get(its.value, ()), strict=False)
            for leaf, (small, large) in enumerate(leaves):
                if small is not None and large is not None and len(small) == len(large):
                    sizes = enumerate(zip(small, large, strict=True))
                    places[mine.value, leaf] = tuple(dim for dim, each in sizes if each == rows)
    return places


def _pattern(pattern: Pattern, gathered: Gathered, size: int, batch_dim: BatchDim) -> Pattern:
    """The pattern of a batch whose micro-batches are the groups; stages that gather globally get all replicas' rows."""
    if len(gathered.modes) > 1:
        raise TraceError(
            'a stage is given values that are gathered as "batch" and as "global", whose numbers of rows the tracers '
            '"export" and "record" cannot distinguish; write tracer="symbolic", or gather all of them as "global"'
        )
    shapes: list[Description] = []
    for start in range(0, pattern.microbatches, size):
        shape = joined_description(pattern.shapes[start : start + size], batch_dim)
        if "global" in gathered.modes and pattern.everyone:
            rows = sum(pattern.everyone[start : start + size])
            shape = with_rows(shape, batch_dim, rows)
            if row_count(shape, batch_dim) not in (None, rows):
                raise TraceError(
                    "a stage gathers the rows of all replicas, of which each has packed inputs of its own; export and "
                    'record capture it for all rows: write tracer="symbolic", or gather="batch"'
                )
        shapes.append(shape)
    groups = tuple(shapes)
    inputs = pattern.given[: len(groups)]
    return replace(pattern, given=inputs, shapes=groups, everyone=(), answers=(), asks=False)


def _sample(sample: Sample | str, size: int, batch_dim: BatchDim) -> Sample | str:
    if isinstance(sample, str):
        return sample
    batches = sample.batches
    groups = [joined(batches[start : start + size], batch_dim) for start in range(0, len(batches), size)]
    return replace(sample, batches=groups)


def _with_stages(single: Captured, group: Captured, stages: Collection[int]) -> Captured:
    """``single`` with these stages of ``group``. PartitionError if the messages of the two captures differ."""
    _, theirs = with_shared_names([single.graph, group.graph])
    merged = tuple(theirs[stage.index] if stage.index in stages else stage for stage in single.graph)
    graph = replace(single.graph, stages=merged)
    text = f"{single.text}\nfor a group: {group.text}"
    return replace(single, graph=graph, text=text, groups=single.groups + group.guards)
