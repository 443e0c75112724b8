"""Groups: the stages that run once for several micro-batches, captured for as many rows.

A tracer that needs shapes captures the model a second time, for the rows of a group, and the stages behind the gather
come from there: an ``arange(n)`` in them is the group's. Both captures must have the same stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cache, partial

from fxpipe.errors import PartitionError, TraceError
from fxpipe.graph.boundary import Gathered
from fxpipe.graph.gathering import Places
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.packed import BatchDim
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.capture.captures import Captured, Captures
from fxpipe.plan.capture.on_fakes import shapes_of
from fxpipe.plan.capture.same_stages import called_alike, edges_between
from fxpipe.plan.inputs.batch import Description, example_of
from fxpipe.plan.inputs.cuts import joined, joined_description, with_rows
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.plan.inputs.rows import row_count


def for_groups(captured: list[Captured], captures: Captures, pattern: Pattern, sample: Sample | str) -> list[Captured]:
    """The captures of the micro-batches, with the gathered stages as they are captured for the rows of a group."""
    first, batch_dim = captured[0], captures.options.batch_dim
    first.graph.groups(pattern.microbatches)  # PartitionError where they do not divide them
    gathers = [stage for stage in first.graph if stage.gathered is not None]
    if gathers and len(set(pattern.given)) > 1:
        raise PartitionError(
            f"stage {gathers[0].name!r} runs for several micro-batches at once, and some of these have inputs or plain "
            "values that others have not; order rows so that all have the same, or make a call for each kind, and then "
            "optimizer.step()"
        )
    if not first.of_one_shape:
        return captured
    # Each kind of group is captured for its own rows; its gathered stages replace those of the micro-batches.
    places: dict[tuple[str, int], tuple[int, ...]] = {}
    for gathered in dict.fromkeys(stage.gathered for stage in gathers):
        assert gathered is not None
        stages = {stage.index for stage in gathers if stage.gathered == gathered}
        size = gathered.group or pattern.microbatches
        groups = _pattern(pattern, gathered, size, batch_dim)
        whole = captures.of(groups, _sample(sample, size, batch_dim))
        places |= _places(captures, pattern, (first, pattern.shapes[0]), (whole[0], groups.shapes[0]))
        merged = cache(partial(_with_stages, stages=stages))  # micro-batches of one capture remain one object
        captured = [merged(one, whole[place // size]) for place, one in enumerate(captured)]
    return [dataclasses.replace(captured[0], places=places), *captured[1:]]


def places_of_rows(captures: Captures, used: Pattern, pattern: Pattern) -> Places:
    """Where values that are gathered have their rows, for a capture that holds for any number of rows.

    ``used``: the capture that the step's plan was made from, whose names its values have; another capture that holds
    for these shapes may have others.
    """
    one, shape, batch_dim = captures.kept[used], pattern.shapes[:1], captures.options.batch_dim
    few = 1 if (row_count(shape[0], batch_dim) or 0) > 1 else 2  # a dimension of 1 may mean another thing
    small, large = (joined_description(shape * n, batch_dim) for n in (few, 2 * few))
    return _places(captures, pattern, (one, small), (one, large))


def _places(
    captures: Captures, pattern: Pattern, *pair: tuple[Captured, Description]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """(value, leaf) → its dimensions of rows, for what gathered stages of the first capture are given, by the names
    there. ``pair``: captures, and a micro-batch for each.

    One run cannot tell 4 rows from 4 features. A dimension of rows has as many entries as there are rows in two runs on
    fake tensors, for different numbers of rows. What cannot run without numbers, or has not as many dimensions each
    time, is left out.
    """
    rows = tuple(row_count(shape, captures.options.batch_dim) for _, shape in pair)
    # Two numbers of rows, or nothing can be told.
    if None in rows or len(set(rows)) == 1:  # a group of one micro-batch, whose rows may lie anywhere
        return {}
    how = captures.device, pattern.ambient.autocast, captures.balancing.compute
    runs = [shapes_of(one.program, example_of(shape), *how) for one, shape in pair if one.program is not None]
    (one, other), (first, second) = (edges_between(captured.graph) for captured, _ in pair), runs
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for between, edges in one.items():  # in one order in both
        if pair[0][0].graph[between[1]].gathered is None:
            continue
        for mine, its in zip(edges, other.get(between, ()), strict=False):
            leaves = zip(first.get(mine.value, ()), second.get(its.value, ()), strict=False)
            for leaf, (small, large) in enumerate(leaves):
                if small is not None and large is not None and len(small) == len(large):
                    sizes = enumerate(zip(small, large, strict=True))
                    found[mine.value, leaf] = tuple(dim for dim, each in sizes if each == rows)
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
    given = pattern.given[: len(groups)]
    return dataclasses.replace(pattern, given=given, shapes=groups, everyone=(), answers=(), asks=False)


def _sample(sample: Sample | str, size: int, batch_dim: BatchDim) -> Sample | str:
    if isinstance(sample, str):
        return sample
    batches = sample.batches
    groups = [joined(batches[start : start + size], batch_dim) for start in range(0, len(batches), size)]
    return dataclasses.replace(sample, batches=groups)


def _with_stages(one: Captured, group: Captured, stages: Collection[int]) -> Captured:
    """``one`` with these stages of ``group``. PartitionError where they would not be sent the same values."""
    # What the stages before send must be what the group's stage takes, in one order and with the same gradients.
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
