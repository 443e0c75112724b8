"""Example: the example batch of ``compile``, the first plan, which is made for it, and checks of the model.

Takes: a ``Plans`` without plans, and the options with the example. Gives: the state with its first plan, for
``compile`` (``plan_first``) or for ``preview`` (``previewed``).

1. ``check_model`` refuses values that are no model, wrappers, and options that the model would ignore.
2. ``Example`` binds the example's inputs, splits it as a call would, and describes the micro-batches.
3. ``plan_first`` plans a training step on it. Evaluation is planned, too, if it may use more of the model.
4. If forward asks a question about the micro-batches, the question is answered, and step 3 repeats.

It does not talk to other ranks: ``together`` does.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fxpipe.batch.batch import Batch
from fxpipe.batch.description import Description, bind, describe, required_names
from fxpipe.batch.label_count import with_number
from fxpipe.batch.pattern import GivenInputs, Pattern, pattern_of
from fxpipe.batch.rows import check_cut, counts_of
from fxpipe.errors import RunError, TraceError
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph, all_tensors
from fxpipe.options import Options
from fxpipe.packed import check_names
from fxpipe.parameters.ownership import check_no_extra_state
from fxpipe.plan.plans import Plans
from fxpipe.specs import ObjectValue
from fxpipe.stage.modes import Ambient, evaluating
from fxpipe.stage.with_loss import about_target, target_of
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace import Request
from fxpipe.trace.checks.capture_check import Sample
from fxpipe.validation import shown

_WRAPPERS = {
    "DistributedDataParallel": "give the model inside, its .module: the data axis of the topology does what it does",
    "DataParallel": "give the model inside, its .module: the data axis of the topology does what it does",
    "FullyShardedDataParallel": "give the model as it was before that, and write compile(..., zero=3)",
    "OptimizedModule": "give the model inside, its ._orig_mod, and write compile(..., stage_compiler=torch.compile)",
    "RecursiveScriptModule": "give the model that it was made from",
}
"""Common wrappers around a model, and the code to write instead."""


def check_model(model: nn.Module | StageGraph, options: Options) -> None:
    """RunError if ``model`` is no model, has a state that no checkpoint would hold, or would ignore an option."""
    # 1. values that are no model
    for part in (model.module if isinstance(model, StageGraph) else model, options.loss_fn):
        if isinstance(part, nn.Module):
            check_no_extra_state(part)
    if isinstance(model, StageGraph):
        for name in ("loss_fn", "boundaries"):
            if getattr(options, name):
                raise RunError(
                    f"{name}= is for traced models; the user's own stages are cut, and the last returns the loss"
                )
        check_names(options.batch_dim, model.inputs)
        return
    if not isinstance(model, nn.Module):
        made = f"; write {model.__name__}(...)" if isinstance(model, type) and issubclass(model, nn.Module) else ""
        raise RunError(f"model is {shown(model)}; it is an nn.Module, or a fxpipe.StageGraph{made}")
    name = type(model).__name__
    if name in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise RunError(f"model is a {name}; {_WRAPPERS[name]}")
    # A lazy parameter gets its shape in the first call, which also changes the class of its module.
    lazy = next((name for name, tensor in all_tensors(model).items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise RunError(f"{lazy} has no shape yet; call the model once on a batch before compiling it")
    parameters = Request.signature(model, options.loss_fn).parameters
    if target_of(options.loss_fn) is not None and "target" in inspect.signature(model.forward).parameters:
        raise RunError("forward itself takes 'target', which loss_fn= would take from it; rename the argument")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # else any name fits
        check_names(options.batch_dim, tuple(parameters))


@dataclass(frozen=True)
class Example:
    """The example batch of ``compile``, cut into micro-batches as a call cuts it; empty if the user gave no example.

    ``options``: the options of ``compile`` with the example, which the options of ``plans`` lack.
    """

    plans: Plans
    options: Options

    @cached_property
    def given(self) -> dict[str, Any]:
        """The inputs by name. RunError if they are no inputs of the model, or cannot be split."""
        args = () if self.options.example_args is None else tuple(self.options.example_args)
        try:
            given = with_number(bind(self.plans.signature, args, self.options.example_kwargs or {}))
        except TypeError as error:
            hint = about_target(self.options.loss_fn, error)
            raise RunError(f"example_args= and example_kwargs= are no batch of the model: {error}{hint}") from None
        if self.plans.microbatches > 1:
            check_cut(given, self.options.batch_dim)
        return given

    def batch(self, may_be_fewer: bool = True) -> Batch:
        """The batch. RunError if its inputs contradict each other; or for too few rows, unless ``may_be_fewer``."""
        given, batch_dim = self.given, self.options.batch_dim
        counts = [counts_of(given, batch_dim)]
        return Batch.from_descriptions([describe(given)], counts, batch_dim, self.plans.microbatches, may_be_fewer)

    @cached_property
    def microbatches(self) -> list[dict[str, Any]]:
        """The micro-batches of the batch. If the batch has too few rows, each micro-batch is the whole batch."""
        batch, count = self.batch(), self.plans.microbatches
        return batch.split([self.given]) if len(batch.sizes) == count else [self.given] * count

    @property
    def numbered(self) -> list[dict[str, Any]]:
        """The micro-batches, with the number of labels if labels are counted."""
        return self.plans.items.given(self.microbatches)

    @property
    def has_numbers(self) -> bool:
        """Whether a model can run on the example: no tensor of it is on the meta device."""
        return self.options.has_example and not any(tensor.is_meta for tensor in tensors_in(self.microbatches))

    @property
    def sample(self) -> Sample | str:
        """The micro-batches on which stages are checked, or the reason for no check."""
        return Sample(self.numbered, self.options.batch_dim) if self.options.has_example else "no example batch"

    @property
    def answers(self) -> tuple[Answers, ...]:
        """For each micro-batch, the answers to forward's known questions about its inputs."""
        questions = self.plans.captures.questions
        return tuple(map(questions.answers, self.numbered)) if questions.asked else ()

    @cached_property
    def described(self) -> tuple[list[Description], dict[ObjectValue, Any]]:
        """The description of each micro-batch, and the objects in all of them."""
        objects: dict[ObjectValue, Any] = {}
        parts = [self.plans.items.described(describe(part, True, objects)) for part in self.microbatches]
        return parts, objects

    def pattern(self, answers: tuple[Answers, ...] = (), training: bool = True) -> Pattern:
        """The pattern of the example; without an example, the pattern of a call with only the required inputs."""
        plans, loss_fn = self.plans, self.options.loss_fn
        if not self.options.has_example:
            given = (GivenInputs(tuple(required_names(plans.signature))),) * plans.microbatches
            with_loss = loss_fn is not None and (training or target_of(loss_fn) is not None)
            return Pattern(given, with_loss, plans.flags, training, ambient=Ambient.now())
        pattern = pattern_of(self.described[0], training, loss_fn, plans.flags, Ambient.now())
        return replace(pattern, answers=answers, asks=self.has_numbers)

    @property
    def with_objects(self) -> Plans:
        """The plans whose captures take the objects of the example."""
        return self.plans.at_present(self.described[1] if self.options.has_example else {})


def plan_first(
    example: Example, answers: tuple[Answers, ...] = (), keeps_part: bool = False
) -> tuple[Plans, Unanswered | None]:
    """Returns the plans with the plan for a step on the example, whose stages are checked against the model; or plans
    and a question of forward about the micro-batches that ``answers`` lack.

    Evaluation is planned, too, if it may use parameters that training does not use, and the example can be evaluated.

    Args:
        example: may be empty. Then only the symbolic tracer can capture the model, and stages are not checked.
        answers: for each micro-batch, the known answers to forward's questions.
        keeps_part: whether this rank keeps a part of the model only. It then cannot check later captures, so evaluation
            is also planned if the capture holds for any sizes: such captures are fast, and one is enough.

    Raises:
        TraceError, PartitionError, ScheduleError: no plan can be made.
    """
    # 3. the plans, training first
    plans = example.with_objects
    try:
        plans, _ = plans.plan(example.pattern(answers), example.sample)
        first = plans.captures.program
        if first is not None and (plans.leaves_unused or (keeps_part and first.holds_for_any_size)):
            with evaluating(plans.module):
                example = replace(example, plans=plans.at_present({}))
                plans = example.plans.plan_evaluation(example.pattern(answers, training=False), example.sample)
    except Unanswered as error:  # 4. a question
        return plans.asking(error), error
    return plans, None


def previewed(plans: Plans, options: Options) -> Plans:
    """The plans with the plan for the example, whose stages do not run.

    If an opaque region does not declare its results, the model runs once to show them, unless the example is on the
    meta device. RunError if a call could not cut the example.
    """
    example = Example(plans, options)
    if options.has_example:
        example.batch(may_be_fewer=False)
    runs = any(region.returns is None for region in plans.captures.regions.whole) and example.has_numbers
    plans = example.with_objects
    while True:
        answers = Example(plans, options).answers
        try:
            return plans.plan(example.pattern(answers), example.sample if runs else "nothing is run")[0]
        except Unanswered as error:
            plans = plans.asking(error)
        except TraceError:
            if runs or not (options.tracing.opaque and example.has_numbers):
                raise
            runs = True  # a run shows the results of parts that no tracer can capture
