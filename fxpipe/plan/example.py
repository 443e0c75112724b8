"""Example: the batch that ``compile`` was shown, cut as a call would cut it; and what can be called at all."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxpipe.errors import FxpipeError, RunError, TraceError
from fxpipe.graph.modes import Ambient, evaluating
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.options import Options
from fxpipe.packed import check_names
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.inputs.batch import bind, describe, required_names
from fxpipe.plan.inputs.counts import Counts, check_cut, counts_of
from fxpipe.plan.inputs.cuts import split
from fxpipe.plan.inputs.label_count import with_number
from fxpipe.plan.inputs.pattern import Pattern, pattern_of
from fxpipe.plan.inputs.rows import row_count, split_rows
from fxpipe.plan.planner import Planner
from fxpipe.torch_compat import pytree
from fxpipe.trace import Request
from fxpipe.validation import shown

_WRAPPERS = {
    "DistributedDataParallel": "give the model inside, its .module: the data axis of the topology does what it does",
    "DataParallel": "give the model inside, its .module: the data axis of the topology does what it does",
    "FullyShardedDataParallel": "give the model as it was before that, and write compile(..., zero=3)",
    "OptimizedModule": "give the model inside, its ._orig_mod, and write compile(..., stage_compiler=torch.compile)",
    "RecursiveScriptModule": "give the model that it was made from",
}
"""What stands around a model by habit, and what to write instead."""


def check_model(model: nn.Module | StageGraph, options: Options) -> None:
    """RunError for what is no model, and for options that do not go with it: what would be ignored is refused."""
    if isinstance(model, StageGraph):
        if options.loss_fn is not None:
            raise RunError("loss_fn= is for traced models; the last of the user's own stages returns the loss")
        if options.boundaries:
            raise RunError("boundaries= is for traced models; the user's own stages are cut already")
        check_names(options.batch_dim, model.inputs)
        return
    if not isinstance(model, nn.Module):
        made = f"; write {model.__name__}(...)" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise RunError(f"model is {shown(model)}; it is an nn.Module, or a fxpipe.StageGraph{made}")
    name = type(model).__name__
    if name in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise RunError(f"model is a {name}; {_WRAPPERS[name]}")
    lazy = next((name for name, tensor in all_tensors(model).items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise RunError(f"{lazy} has no shape yet; call the model once on a batch before compiling it")
    parameters = Request.signature(model, options.loss_fn).parameters
    if options.loss_fn is not None and "target" in inspect.signature(model.forward).parameters:
        raise RunError("forward itself takes 'target', which loss_fn= would take from it; rename the argument")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # else any name may come
        check_names(options.batch_dim, tuple(parameters))


def with_first_plan(
    planner: Planner, options: Options, answers: tuple[Answers, ...] = (), keeps_part: bool = False
) -> Planner:
    """The planner, with the plan for the example, on whose numbers its stages are checked; and with that for evaluating
    it, where it can be had, and where evaluation may use what training does not, or what its capture takes is little
    and a rank that ``keeps_part`` of the model cannot check it later. ``answers``: what forward asks about each
    micro-batch, as far as it is known; ``Unanswered`` where it asks more."""
    sample = _sample(planner, options)
    planner.plan(first_pattern(planner, options, answers), sample)
    captures = planner.captures
    is_symbolic = captures is not None and captures.first is not None and captures.first.tracer == "symbolic"
    if captures is None or not (planner.leaves_unused or (keeps_part and is_symbolic)):
        return planner
    wrong = captures.wrong
    with evaluating(planner.module):
        pattern = dataclasses.replace(first_pattern(planner, options, answers), training=False)
        try:
            with planner.rolled_back_on_error():
                planner.plan(pattern, sample, at_compile=True)
        except Unanswered:
            raise
        except FxpipeError:  # raised when evaluation is asked for, perhaps with other inputs
            captures.wrong = wrong
    return planner


def answers_of_example(planner: Planner, options: Options) -> tuple[Answers, ...]:
    """What forward asks about each micro-batch of the example, as far as this is known."""
    questions = None if planner.captures is None else planner.captures.questions
    if questions is None or not questions.asked:
        return ()
    return tuple(map(questions.answers, _numbered(planner, options)))


def first_pattern(planner: Planner, options: Options, answers: tuple[Answers, ...] = ()) -> Pattern:
    """The pattern of the example, or of a call with the required inputs alone."""
    flags, items = planner.flags, planner.items
    if not options.has_example:
        inputs = tuple(required_names(planner.signature))
        return Pattern(inputs, (), planner.microbatches, options.loss_fn is not None, flags, ambient=Ambient.now())
    parts = _microbatches(planner, options)
    if items is None:
        described = [describe(part, exact=True) for part in parts]
    else:
        described = [items.described(describe(with_number(part), exact=True)) for part in parts]
    pattern = pattern_of(described, True, options.loss_fn, flags, Ambient.now())
    return dataclasses.replace(pattern, answers=answers, asks=_has_numbers(parts))


def with_previewed_plan(planner: Planner, options: Options) -> Planner:
    """The planner, with the plan for the example, of which nothing is run; but where a region is opaque, and
    neither said what it returns nor on the meta device, the model once. RunError where a call could not cut it."""
    if options.has_example:
        _, rows, _ = _given(planner, options)
        split_rows(rows, planner.microbatches)
    asked = planner.captures is not None and any(region.returns is None for region in planner.captures.whole)
    has_numbers = options.has_example and _has_numbers(_microbatches(planner, options))
    sample = _sample(planner, options) if asked and has_numbers else "nothing is run"
    answers: tuple[Answers, ...] = ()
    while True:
        try:
            planner.plan(first_pattern(planner, options, answers), sample)
            return planner
        except Unanswered:
            answers = answers_of_example(planner, options)
        except TraceError:  # a part may be opaque by itself, once it has run
            if not (has_numbers and options.auto_opaque) or isinstance(sample, Sample):
                raise
            sample = _sample(planner, options)


def _has_numbers(parts: Any) -> bool:
    return not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(parts))


def _sample(planner: Planner, options: Options) -> Sample | str:
    """The example's micro-batches with their numbers; or why none are run."""
    if not options.has_example:
        return "no example batch"
    return Sample(_numbered(planner, options), options.batch_dim)


def _numbered(planner: Planner, options: Options) -> list[dict[str, Any]]:
    """The micro-batches of the example, with the number of their labels where these are counted."""
    parts = _microbatches(planner, options)
    return parts if planner.items is None else planner.items.given(parts)


def _microbatches(planner: Planner, options: Options) -> list[dict[str, Any]]:
    """The micro-batches of the example: what a call would make of it; or, of a smaller one, itself each time."""
    given, rows, counts = _given(planner, options)
    if rows is None or rows < planner.microbatches:
        return [given] * planner.microbatches
    return split(given, options.batch_dim, split_rows(rows, planner.microbatches), counts)


def _given(planner: Planner, options: Options) -> tuple[dict[str, Any], int | None, Counts]:
    """The example by its inputs' names, its rows, and what of it is counted."""
    args = () if options.example_args is None else tuple(options.example_args)
    try:
        given = bind(planner.signature, args, options.example_kwargs or {})
    except TypeError as error:
        raise RunError(f"example_args= and example_kwargs= are no batch of the model: {error}") from None
    if planner.microbatches > 1:
        check_cut(given, options.batch_dim)
    counts = counts_of(given, options.batch_dim)
    return given, row_count(describe(given), options.batch_dim, counts), counts
