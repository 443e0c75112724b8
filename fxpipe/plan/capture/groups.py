"""Groups: the stages that run once for several micro-batches, captured for as many rows.

A tracer that needs shapes captures the model a second time, for the rows of a group, and the stages behind the gather
come from there: an ``arange(n)`` in them is the group's. Both captures must have the same stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.boundary import Gathered
from fxpipe.graph.gathering import Places
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.packed import BatchDim
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.capture.captures import Captured, Captures
from fxpipe.plan.capture.on_fakes import Shapes, shapes_of
from fxpipe.plan.capture.same_stages import called_alike, edges_between
from fxpipe.plan.inputs.batch import Description, example_of
from fxpipe.plan.inputs.cuts import joined, joined_description, with_rows
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.plan.inputs.rows import row_count

Capture = Callable[[Pattern, Sample | str], list[Captured]]


def for_groups(
    captured: list[Captured], capture: Capture, pattern: Pattern, sample: Sample | str, batch_dim: BatchDim
) -> list[Captured]:
    """The captures of the micro-batches, with the gathered stages as ``capture`` has them for the rows of a group."""
    first = captured[0]
    sizes = first.graph.groups(pattern.microbatches)
    gathers = [stage.name for stage in first.graph if stage.gathered is not None]
    if gathers and len(set(pattern.kinds)) > 1:
        raise PartitionError(
            f"stage {gathers[0]!r} runs for several micro-batches at once, of which some have inputs or plain values "
            "that others have not; order rows so that all have the same, or make a call for each kind, and then "
            "optimizer.step()"
        )
    if not first.of_one_shape:
        return captured
    for gathered in dict.fromkeys(stage.gathered for stage in first.graph):
        if gathered is None:
            continue
        stages = {stage.index for stage in first.graph if stage.gathered == gathered}
        size = sizes[min(stages)]
        whole = capture(_pattern(pattern, gathered, size, batch_dim), _sample(sample, size, batch_dim))
        made: dict[tuple[int, int], Captured] = {}
        for place, one in enumerate(captured):
            group = whole[place // size]
            key = (id(one), id(group))
            made[key] = made.get(key) or _with_stages(one, group, stages)
            captured = [*captured[:place], made[key], *captured[place + 1 :]]
    return captured


def places_of_rows(captures: Captures, used: Sequence[Pattern], pattern: Pattern) -> Places:
    """Where what a step of such micro-batches gathers has its rows, as the shapes for two numbers of rows show it;
    nothing where groups have no more rows than these.

    Then a group is one micro-batch, whose rows may lie anywhere. ``used``: the captures that the step's plan was made
    from, whose names its values have; another capture that holds for these shapes may have others. Where the model is
    captured for shapes, the captures of a micro-batch and of a group are run, each for its own.
    """
    batch_dim, one = captures.options.batch_dim, captures.kept[used[0]]
    rows = row_count(pattern.shapes[0], batch_dim) if pattern.shapes else None
    if rows is None:
        return {}

    def shown(captured: Captured, shape: Description, count: int) -> _Shown:
        assert captured.program is not None
        device, autocast, compute = captures.device, pattern.ambient.autocast, captures.balancing.compute
        shapes = shapes_of(captured.program, example_of(shape), device, autocast, compute)
        return _Shown(captured.graph, shapes, count)

    if not one.of_one_shape:
        few = 1 if rows > 1 else 2  # a dimension of 1 may mean another thing
        several = {n * rows: joined_description(pattern.shapes[:1] * n, batch_dim) for n in (few, 2 * few)}
        return _places(*(shown(one, shape, count) for count, shape in several.items()))
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for_them = list(used[pattern.microbatches :])  # in the order in which ``for_groups`` has asked for them
    for gathered in dict.fromkeys(stage.gathered for stage in one.graph if stage.gathered is not None):
        groups = _pattern(pattern, gathered, gathered.group or pattern.microbatches, batch_dim)
        more = row_count(groups.shapes[0], batch_dim)
        group, for_them = captures.kept[for_them[0]], for_them[groups.microbatches :]
        if more is not None and more != rows:
            found |= _places(shown(one, pattern.shapes[0], rows), shown(group, groups.shapes[0], more))
    return found


class _Shown(NamedTuple):
    """Stages, and the shapes of their values for so many rows."""

    graph: StageGraph
    shapes: Mapping[str, Shapes]
    rows: int


def _places(one: _Shown, other: _Shown) -> dict[tuple[str, int], tuple[int, ...]]:
    """(value, leaf) → its dimensions of rows, for what gathered stages of ``one`` are given, by the names there.

    What cannot run without numbers, or has not as many dimensions each time, is left out.
    """
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    theirs = edges_between(other.graph)
    for (source, target), edges in edges_between(one.graph).items():  # in one order in both
        if one.graph[target].gathered is None:
            continue
        for mine, its in zip(edges, theirs.get((source, target), ()), strict=False):
            pairs = zip(one.shapes.get(mine.value, ()), other.shapes.get(its.value, ()), strict=False)
            for leaf, (shape, larger) in enumerate(pairs):
                if shape is not None and larger is not None and len(shape) == len(larger):
                    sizes = enumerate(zip(shape, larger, strict=True))
                    found[mine.value, leaf] = tuple(d for d, pair in sizes if pair == (one.rows, other.rows))
    return found


def _pattern(pattern: Pattern, gathered: Gathered, size: int, batch_dim: BatchDim) -> Pattern:
    """The pattern of a batch whose micro-batches are the groups, with the rows of all replicas where these are seen."""
    if len(gathered.modes) > 1:
        raise TraceError(
            'a stage is given values that are gathered as "batch" and as "global", of different numbers of rows, which '
            'the tracers "export" and "record" cannot distinguish; write tracer="symbolic", or gather all of them as '
            '"global", where each replica computes the loss of all rows'
        )
    shapes: list[Description] = []
    for start in range(0, pattern.microbatches, size):
        shape = joined_description(pattern.shapes[start : start + size], batch_dim)
        if "global" in gathered.modes and pattern.everyone:
            rows = sum(pattern.everyone[start : start + size])
            shape = with_rows(shape, batch_dim, rows)
            if row_count(shape, batch_dim) not in (None, rows):
                raise TraceError(
                    "a stage gathers the rows of all replicas, which packed inputs give, and each replica knows its "
                    'own; the tracers "export" and "record" capture it for all rows: write tracer="symbolic", or '
                    'gather="batch"'
                )
        shapes.append(shape)
    groups = tuple(shapes)
    kinds = pattern.kinds[: len(groups)]
    return dataclasses.replace(pattern, kinds=kinds, shapes=groups, everyone=(), answers=(), asks=False)


def _sample(sample: Sample | str, size: int, batch_dim: BatchDim) -> Sample | str:
    if isinstance(sample, str):
        return sample
    batches = sample.batches
    groups = [joined(batches[start : start + size], batch_dim) for start in range(0, len(batches), size)]
    return dataclasses.replace(sample, batches=groups)


def _with_stages(one: Captured, group: Captured, stages: set[int]) -> Captured:
    """``one`` with these stages of ``group``. PartitionError where they would not be sent the same values."""
    _, theirs = called_alike([one.graph, group.graph])
    if _messages(one.graph) != _messages(theirs):
        raise PartitionError(
            "the stages captured for the rows of a micro-batch and for those of a group exchange different values, so "
            f"what is gathered is not what the group's stage takes:\n{one.graph}\n{group.graph}\nkeep code that "
            "depends on how many rows there are out of the stages before it"
        )
    merged = tuple(theirs[stage.index] if stage.index in stages else stage for stage in one.graph)
    graph = dataclasses.replace(one.graph, stages=merged)
    return dataclasses.replace(one, graph=graph, text=f"{one.text}\nfor a group: {group.text}")


def _messages(graph: StageGraph) -> list[object]:
    return [
        (
            *(stage.name, [entry for entry in stage.inputs if entry not in stage.sizes]),  # sizes are no messages
            *(stage.ways, stage.outputs, stage.has_backward),
        )
        for stage in graph
    ]
