"""Examining: cuts a tracer's program into stages, and looks for rows of a micro-batch that interact.

Takes a tracer's program, and the captures before it. Gives ``Examined``: the stages with their guard.

1. Nodes that only opaque calls or questions needed are dropped. Tensors that no node uses go to the opaque methods.
2. The passes run. The first program is cut by marks, names or a search, and each later program as the first was.
3. If the user left the stages' ranks open, a search places the stages of the first program.
4. ``split`` makes the stage graph, and the guard says for which micro-batches it is valid.

It does not run the stages: ``Capturing`` checks them against the model.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fxpipe import passes as default_passes
from fxpipe.batch.batch import joined_description
from fxpipe.batch.description import Description, for_any_words
from fxpipe.batch.pattern import Pattern
from fxpipe.capture.auto_opaque import unused, with_unused
from fxpipe.capture.captures import Captures, First, Source
from fxpipe.capture.guard import Captured, Guard, Sizes
from fxpipe.errors import PartitionError
from fxpipe.graph.program import Program, called_in, gather_of, is_boundary
from fxpipe.graph.stage_graph import ByLayers, StageGraph
from fxpipe.options import AUTO, Options
from fxpipe.packed import counted
from fxpipe.passes.chain import chain
from fxpipe.trace import Request
from fxpipe.trace.checks.row_check import check_reduction, rows_meet, warn_of_rows


class Examined(NamedTuple):
    """A tracer's program, cut into stages that were checked against the model."""

    program: Program
    """The program before the passes."""
    cut: Program
    captured: Captured
    first: First
    """The facts of the first capture."""
    checked: str = ""
    """The outcome of the check against the model, in words."""


def cut(captures: Captures, program: Program, request: Request, pattern: Pattern, this: Pattern) -> Examined:
    """Cuts a program into stages, without a check.

    Args:
        captures: the earlier captures: a later program is cut where the first program was.
        program: the tracer's program.
        request: its request, with its opaque regions.
        pattern: the pattern of the batch.
        this: the pattern of the micro-batch.

    Raises:
        PartitionError: a stage would wait for itself, or a pass or the search finds no stages.
    """
    source, first, traced = captures.source, captures.first, program
    balancing, options, shape, searched = source.balancing, source.options, this.shape, captures.searched
    once = balancing.once  # plans of other topologies share the first program
    # 1. Opaque calls were kept for their effects, and some nodes only answer questions: both kinds may be unused.
    if request.whole or program.answers:
        program = default_passes.drop_unused(program)
    names_unused = frozenset[str]() if first is None else first.unused
    if request.whole:
        names_unused = unused(program) if first is None else names_unused
        program = with_unused(program, names_unused)
    wanted = options.layers if request.training else ()
    may_checkpoint = options.recompute == AUTO and bool(wanted)
    layers = () if may_checkpoint else wanted

    def layered(program: Program) -> Callable[[], Program] | None:
        """Makes the program with the layers checkpointed that a search may checkpoint."""
        return partial(_checkpointed, program.replace(recompute=wanted), once) if may_checkpoint else None

    program = program.replace(first=captures.program, recompute=layers)
    # 2. A search finds the cuts, or the user marked them. Later captures are cut where the first capture was.
    if balancing.finds_cuts:
        ready = partial(chain, default_passes.before_balance(), program)
        program = once(("ready", traced.graph, program.recompute), ready)
        names = default_passes.name_stages, default_passes.gather
        if first is not None:
            program = default_passes.partition(program)
        elif balancing.found is not None:
            program = balancing.found.applied(program)
        else:
            if any(map(gather_of, filter(is_boundary, program.nodes))):
                program = chain((default_passes.partition, *names), program)
            searched = balancing.searched(_checkpointed(program, once), pattern, shape, layered(program))
            program = default_passes.without_checkpoints(searched.program).replace(recompute=layers)
        program = chain((*names, default_passes.checkpoint_layers), program)
    elif options.passes is None:
        program = once(("ready", traced.graph, program.recompute), partial(chain, default_passes.default(), program))
    else:
        if shape is not None:  # the user's own passes may read the shapes
            program = program.replace(shapes=source.shapes(program, shape, pattern))
        program = chain(options.passes, program)
    _check_layers(program, options)
    # 3. The ranks.
    if first is None and shape is not None and balancing.finds_placement_of(len(program.stage_names)):
        searched = balancing.placed(program, pattern, shape, layered(program))
    # 4. The stages and their guard.
    by_layers = None if (make := layered(program)) is None else make()

    def stages() -> tuple[StageGraph, str]:
        constants = [f"{name}: {_fingerprint(tensor)}" for name, tensor in program.constants.items()]
        graph, text = default_passes.split(program), [type(source.model).__name__, str(program), *constants]
        return graph if by_layers is None else _with_layers(graph, by_layers), "\n".join(text)

    cuts = program.graph, tuple(program.stage_of.items()), program.stage_names
    graph, text = once(("stages", *cuts, by_layers is None), stages)
    captured = Captured(
        graph,
        _guard(program, request, this),
        text,
        program.tracer,
        (program.plain or program) if program.gathered else None,
        program.fixed_sizes,
    )
    plain = program.plain or program
    first = first or First(plain, program, by_layers, searched, names_unused)
    return Examined(traced, plain, captured, first)


def _checkpointed(program: Program, once: Callable[[Hashable, Callable[[], Program]], Program]) -> Program:
    key = "layers", program.graph, tuple(program.stage_of.items()), program.recompute
    return once(key, partial(default_passes.checkpoint_layers, program))


def _with_layers(graph: StageGraph, layered: Program) -> StageGraph:
    """The graph whose stages also have their code in ``layered``, the same program with checkpointed layers."""
    paths: dict[int, list[str]] = {}
    for node in layered.nodes:
        if node.name in layered.inside:
            paths.setdefault(layered.stage_of[node.name], []).append(called_in(node)[-1])
    stages = []
    for stage, other in zip(graph, default_passes.split(layered), strict=True):
        is_same = (stage.inputs, stage.outputs) == (other.inputs, other.outputs)
        layers = tuple(dict.fromkeys(paths.get(stage.index, ())))
        code = ByLayers(other.module, layers) if layers and is_same else None
        stages.append(replace(stage, by_layers=code))
    return replace(graph, stages=tuple(stages))


def _check_layers(program: Program, options: Options) -> None:
    """PartitionError if layers are checkpointed that another option changes or compiles."""
    for option in ("parallelize", "stage_compiler") if program.layers else ():
        if getattr(options, option) is not None:
            raise PartitionError(
                f"recompute= checkpoints layers, such as {next(iter(program.layers))}, and {option}= replaces the code "
                "that would run again; write recompute=True, or names of stages"
                + ", or checkpoint_wrapper(layer) in parallelize"
                * (option == "parallelize")
            )


def _guard(program: Program, request: Request, this: Pattern) -> Guard:
    """The guard of a program that was captured for a micro-batch."""
    shape, values = this.shape, this.for_any_shape()
    if shape is None or program.holds_for_any_size:
        return Guard(values)
    shape = for_any_words(shape) if request.any_words else shape
    return Guard(values, Sizes(shape, request.varying, program.holds_for), program.answers)


def check_rows_apart(source: Source, program: Program, pattern: Pattern, shape: Description | None) -> None:
    """Warns if the first training capture, which was not checked, shows that rows of a micro-batch interact.
    RunError for a sum of them."""
    batch_dim = source.options.batch_dim
    if pattern.microbatches == 1 or not source.options.tracing.check:
        return
    check_reduction(program, pattern.microbatches)
    if shape is not None and not counted(batch_dim):
        doubled = joined_description([shape] * 2, batch_dim)
        both = (source.shapes(program, each, pattern) for each in (shape, doubled))
        warn_of_rows(rows_meet(program, *both))


def _fingerprint(tensor: Tensor) -> str:
    """A hash of a constant, by which ranks detect that they captured different constants from different seeds."""
    if tensor.is_meta:
        return "on the meta device"
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return f"constant {list(tensor.shape)} {hashlib.blake2b(buffer.getbuffer(), digest_size=8).hexdigest()}"
