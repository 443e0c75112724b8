"""Example: the batch that ``compile`` was shown, the first plan, which is made for it, and what can be compiled."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fxpipe.batch.batch import Batch
from fxpipe.batch.counts import check_cut, counts_of
from fxpipe.batch.description import bind, describe, required_names
from fxpipe.batch.label_count import with_number
from fxpipe.batch.pattern import GivenInputs, Pattern, pattern_of
from fxpipe.errors import FxpipeError, RunError, TraceError
from fxpipe.graph.modes import Ambient, evaluating
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.options import Options
from fxpipe.packed import check_names
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.planner import Planner
from fxpipe.torch_compat import tensors_in
from fxpipe.trace import Request
from fxpipe.trace.request import target_of
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
    # A lazy parameter gets its shape in the first call, which changes its module's class as well.
    lazy = next((name for name, tensor in all_tensors(model).items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise RunError(f"{lazy} has no shape yet; call the model once on a batch before compiling it")
    parameters = Request.signature(model, options.loss_fn).parameters
    if target_of(options.loss_fn) is not None and "target" in inspect.signature(model.forward).parameters:
        raise RunError("forward itself takes 'target', which loss_fn= would take from it; rename the argument")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # else any name may come
        check_names(options.batch_dim, tuple(parameters))


@dataclass(frozen=True)
class Example:
    """The batch that ``compile`` was shown, in micro-batches as a call would cut it; all is empty where there is none.

    ``options``: those of ``compile``, with the example, which the planner does not keep.
    """

    planner: Planner
    options: Options

    @cached_property
    def given(self) -> dict[str, Any]:
        """The inputs by name. RunError where they are no inputs of the model, or cannot be split."""
        args = () if self.options.example_args is None else tuple(self.options.example_args)
        try:
            given = with_number(bind(self.planner.signature, args, self.options.example_kwargs or {}))
        except TypeError as error:
            raise RunError(f"example_args= and example_kwargs= are no batch of the model: {error}") from None
        if self.planner.microbatches > 1:
            check_cut(given, self.options.batch_dim)
        return given

    def batch(self, may_be_fewer: bool = True) -> Batch:
        """The batch. RunError where its inputs do not go together; or for too few rows, unless it ``may_be_fewer``."""
        given, batch_dim = self.given, self.options.batch_dim
        counts = [counts_of(given, batch_dim)]
        return Batch.of([describe(given)], counts, batch_dim, self.planner.microbatches, may_be_fewer)

    @cached_property
    def microbatches(self) -> list[dict[str, Any]]:
        """The batch split into micro-batches; one of too few rows is each micro-batch itself."""
        batch, count = self.batch(), self.planner.microbatches
        return batch.split([self.given]) if len(batch.sizes) == count else [self.given] * count

    @property
    def numbered(self) -> list[dict[str, Any]]:
        """The micro-batches, with the number of their labels where these are counted."""
        return self.planner.items.given(self.microbatches)

    @property
    def has_numbers(self) -> bool:
        """Whether a model can be run on it: none of its tensors is on the meta device."""
        if not self.options.has_example:
            return False
        return not any(tensor.is_meta for tensor in tensors_in(self.microbatches))

    @property
    def sample(self) -> Sample | str:
        """The micro-batches to run stages on; or why none are run."""
        return Sample(self.numbered, self.options.batch_dim) if self.options.has_example else "no example batch"

    @property
    def answers(self) -> tuple[Answers, ...]:
        """What forward asks about each micro-batch, as far as this is known."""
        captures = self.planner.captures
        if captures is None or not captures.questions.asked:
            return ()
        return tuple(map(captures.questions.answers, self.numbered))

    def pattern(self, answers: tuple[Answers, ...] = (), training: bool = True) -> Pattern:
        """What its plan depends on; without an example, what a call with the required inputs alone has."""
        planner, loss_fn = self.planner, self.options.loss_fn
        if not self.options.has_example:
            given = (GivenInputs(tuple(required_names(planner.signature))),) * planner.microbatches
            with_loss = loss_fn is not None and (training or target_of(loss_fn) is not None)
            return Pattern(given, with_loss, planner.flags, training, ambient=Ambient.now())
        parts = self.microbatches
        described = [planner.items.described(describe(part, True, planner.objects)) for part in parts]
        pattern = pattern_of(described, training, loss_fn, planner.flags, Ambient.now())
        return replace(pattern, answers=answers, asks=self.has_numbers)


def plan_first(example: Example, answers: tuple[Answers, ...] = (), keeps_part: bool = False) -> Planner:
    """The planner, with the plan for a step on the example, whose stages are run against the model.

    Evaluation is planned, too, if it may use parameters that training does not use, and the example can be evaluated.
    So it is where a rank ``keeps_part`` of the model, and cannot check a later capture, if a capture takes little time,
    as by symbolic. ``answers``: what forward asks about each micro-batch; ``Unanswered`` where it asks more.
    """
    planner = example.planner
    planner.plan(example.pattern(answers), example.sample)
    captures = planner.captures
    is_symbolic = captures is not None and captures.first is not None and captures.first.tracer == "symbolic"
    if captures is None or not (planner.leaves_unused or (keeps_part and is_symbolic)):
        return planner
    wrong = captures.wrong
    with evaluating(planner.module):
        pattern = example.pattern(answers, training=False)
        try:
            with planner.rolled_back_on_error():
                planner.plan(pattern, example.sample, at_compile=True)
        except Unanswered:
            raise
        except FxpipeError:  # evaluate() raises it again, unless it is given other inputs
            captures.wrong = wrong  # not rolled back: a tracer that was found wrong is not tried again
    return planner


def with_previewed_plan(planner: Planner, options: Options) -> Planner:
    """The planner, with the plan for the example, whose stages are not run.

    Where an opaque region did not say what it returns, the model runs once to show it, unless it is on the meta device.
    RunError where a call could not cut the example.
    """
    example = Example(planner, options)
    if options.has_example:
        example.batch(may_be_fewer=False)
    regions = () if planner.captures is None else planner.captures.whole
    runs = any(region.returns is None for region in regions) and example.has_numbers
    answers: tuple[Answers, ...] = ()
    while True:
        try:
            planner.plan(example.pattern(answers), example.sample if runs else "nothing is run")
            return planner
        except Unanswered:
            answers = example.answers
        except TraceError:
            if runs or not (options.auto_opaque and example.has_numbers):
                raise
            runs = True  # a part that no tracer takes may be opaque, once a run has shown what it returns
