"""Groups: the stages that run once for several micro-batches, captured for as many rows.

A tracer that needs shapes captures the model a second time, for the rows of a group, and the stages behind the gather
come from there: an ``arange(n)`` in them is the group's. Both captures must have the same stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.boundary import Gathered
from fxpipe.graph.gathering import Places
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.packed import BatchDim
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.capture.captures import Captured, Captures
from fxpipe.plan.capture.row_places import Shown, row_places
from fxpipe.plan.capture.same_stages import alike
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
    if pattern.mixed and (gathers := [stage.name for stage in first.graph if stage.gathered is not None]):
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
    """Where what a step of such micro-batches gathers has its rows; nothing where groups have no more rows than these.

    Then a group is one micro-batch, whose rows may lie anywhere. ``used``: the captures that the step's plan was made
    from, whose names its values have; another capture that holds for these shapes may have others.
    """
    batch_dim, one = captures.options.batch_dim, captures.kept[used[0]]
    rows = row_count(pattern.shapes[0], batch_dim) if pattern.shapes else None
    if rows is None:
        return {}
    autocast, compute = pattern.ambient.autocast, captures.balancing.compute
    places = partial(row_places, device=captures.device, autocast=autocast, compute=compute)
    if not one.of_one_shape:
        few = 1 if rows > 1 else 2  # a dimension of 1 may mean another thing
        several = {n * rows: joined_description(pattern.shapes[:1] * n, batch_dim) for n in (few, 2 * few)}
        return places(*(_shown(one, pattern, shape, count) for count, shape in several.items()))
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for_them = list(used[pattern.microbatches :])  # in the order in which ``for_groups`` has asked for them
    for gathered in dict.fromkeys(stage.gathered for stage in one.graph if stage.gathered is not None):
        groups = _pattern(pattern, gathered, gathered.group or pattern.microbatches, batch_dim)
        more = row_count(groups.shapes[0], batch_dim)
        group, for_them = captures.kept[for_them[0]], for_them[groups.microbatches :]
        if more is not None and more != rows:
            mine = _shown(one, pattern, pattern.shapes[0], rows)
            found |= places(mine, _shown(group, pattern, groups.shapes[0], more))
    return found


def _shown(captured: Captured, pattern: Pattern, shape: Description, rows: int) -> Shown:
    assert captured.program is not None
    return Shown(captured.graph, captured.program, example_of(shape), rows)


def _rows_of(pattern: Pattern, modes: Collection[str], batch_dim: BatchDim) -> Sequence[int]:
    """How many rows of each micro-batch are in a group's stage: its own, or those of all replicas."""
    if len(modes) > 1:
        raise TraceError(
            'a stage is given values that are gathered as "batch" and as "global", of different numbers of rows, which '
            'the tracers "export" and "record" cannot distinguish; write tracer="symbolic", or gather all of them as '
            '"global", where each replica computes the loss of all rows'
        )
    if "global" in modes and pattern.everyone:
        return pattern.everyone
    return [row_count(one, batch_dim) or 0 for one in pattern.shapes]


def _pattern(pattern: Pattern, gathered: Gathered, size: int, batch_dim: BatchDim) -> Pattern:
    """The pattern of a batch whose micro-batches are the groups."""
    rows, starts = _rows_of(pattern, gathered.modes, batch_dim), range(0, pattern.microbatches, size)
    groups = {start: joined_description(pattern.shapes[start : start + size], batch_dim) for start in starts}
    shapes = tuple(with_rows(group, batch_dim, sum(rows[start : start + size])) for start, group in groups.items())
    for start, shape in zip(starts, shapes, strict=True):
        if row_count(shape, batch_dim) not in (None, sum(rows[start : start + size])):
            raise TraceError(
                "a stage gathers the rows of all replicas, which packed inputs give, and each replica knows its own; "
                'the tracers "export" and "record" capture it for all rows: write tracer="symbolic", or gather="batch"'
            )
    return dataclasses.replace(pattern, microbatches=len(shapes), shapes=shapes, everyone=(), answers=(), asks=False)


def _sample(sample: Sample | str, size: int, batch_dim: BatchDim) -> Sample | str:
    if isinstance(sample, str):
        return sample
    batches = sample.batches
    groups = [joined(batches[start : start + size], batch_dim) for start in range(0, len(batches), size)]
    return dataclasses.replace(sample, batches=groups)


def _with_stages(one: Captured, group: Captured, stages: set[int]) -> Captured:
    """``one`` with these stages of ``group``. PartitionError where they would not be sent the same values."""
    try:
        theirs = alike(group.graph, one.graph)
        fits = _messages(one.graph) == _messages(theirs)
    except PartitionError:
        fits = False
    if not fits:
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
