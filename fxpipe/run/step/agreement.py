"""Agreement: before each call the ranks of a pipe group agree on the kind of batch. Bad input fails on all ranks.

Takes: this rank's inputs, as a list of (args, kwargs). Gives: ``AgreedBatch``, with the plan that all ranks run, the
same on each.

1. ``propose``, on each rank alone: inputs are bound to names and described without their numbers. An error goes into
   the proposal.
2. ``settle``, together: each rank sends the number of its proposal, a digest. If these numbers are known, the kind is
   known, and no more is sent.
3. For new numbers, the ranks exchange their proposals, and merge them into one ``Batch``: a rank may lack inputs that
   it does not read.
4. The merged batch, the flags of the model and the answers to forward's questions make a ``Pattern``.
5. For a new pattern, all ranks make a plan at once, and keep it only if all of them made the same. If forward asks a
   new question, they answer it and settle again.

With ``microbatch_cost=`` a rank tells the others what each micro-batch of a step costs, after 3. The pattern, and the
plan for it, then have the micro-batches in the order in which the step runs them.

So a call with a known kind costs one small collective of integers. It does not look at the numbers of tensors, and does
not split the batch: the step does.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fxpipe.batch.batch import Batch
from fxpipe.batch.description import Description, bind, check_calls, describe, for_any_words, merge
from fxpipe.batch.label_count import with_number
from fxpipe.batch.pattern import Flags, Pattern, flags_of, modules_of, parameters_in, pattern_of
from fxpipe.batch.rows import Counts, check_cut, counts_of, merge_counts, whole_lists
from fxpipe.capture.captures import LATER, MOST
from fxpipe.distributed.activity import phase
from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import RunError
from fxpipe.graph.gathering import Places
from fxpipe.graph.question import Answers, Unanswered
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.packed import read_for, written
from fxpipe.plain_data import admitted, encode, number_of
from fxpipe.plan.plan import Plan
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import check_refusals, plan_together
from fxpipe.progress import log
from fxpipe.run.step.microbatch_functions import asks_costs, costs_of
from fxpipe.schedules.lower import pairs
from fxpipe.schedules.microbatch_order import pyramid
from fxpipe.specs import ITEMS, ObjectValue
from fxpipe.stage.modes import Ambient
from fxpipe.stage.with_loss import about_target, target_of
from fxpipe.trace.checks.capture_check import Sample

Item = TypeVar("Item")
KINDS = 256
"""The most kinds of batch that are remembered; above it, the least recently used eighth is forgotten."""

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""(args, kwargs)."""
Key = tuple[int, ...]
"""The numbers of all ranks' proposals."""
Rows = tuple[int, ...]
"""The rows of each micro-batch."""
Order = tuple[int, ...]
"""Micro-batches, by their numbers in the batch, in the order in which a step runs them."""


@admitted
@dataclass(frozen=True)
class Proposal:
    """One rank's side of a call: the description of its inputs, or an error."""

    training: bool
    split_evenly: bool
    flags: Flags = Flags(b"", b"")  # noqa: RUF009  (it is frozen)
    ambient: Ambient = Ambient()  # noqa: RUF009
    given: tuple[Description, ...] = ()
    counts: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...] = ()
    """For each of ``given``, the counts by which inputs are cut, as far as this rank knows them."""
    error: str = ""
    answers: tuple[Answers, ...] = ()
    """For each micro-batch, the answers to forward's questions about its inputs, as far as this rank knows them."""
    wants_loss: bool = False
    """Whether an evaluation is asked only for the loss."""


class ReportedCall(NamedTuple):
    """All ranks' proposals for a call, and the batch merged from them."""

    proposals: Sequence[Proposal]
    batch: Batch
    alike: tuple[int, ...] = ()
    """For each micro-batch, the first micro-batch that is described in the same way; empty if the step runs them in
    the batch's order."""


def _check_same_call(proposals: Sequence[Proposal], named: Callable[[int], str], model: nn.Module) -> None:
    """RunError if a rank has reported an error, or if the calls of two ranks differ. The message names both ranks.

    ``named``: a rank's name in messages. ``model``: for the names of parameters and modules.
    """
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.error:
            raise RunError(proposal.error if len(proposals) == 1 else f"{named(rank)}: {proposal.error}")
    for rank, proposal in enumerate(proposals):
        two = f"{named(0)} and {named(rank)}"
        if proposal.ambient != first.ambient:
            differ = first.ambient.difference(proposal.ambient)
            raise RunError(f"{two} call under different {differ}; set or enter the same on every rank")
        calls = [(call.training, call.split_evenly, len(call.given)) for call in (first, proposal)]
        if calls[0] != calls[1]:
            raise RunError(
                f"{two} make different calls, with {len(first.given)} and {len(proposal.given)} batches; all ranks of "
                "a pipe group make the same ones: none under `if rank == 0`"
            )
        if differ := first.flags.difference(proposal.flags, model):
            raise RunError(
                f"{two} differ in {differ}; change the model that was given to compile in the same way on every rank"
            )


@dataclass(frozen=True)
class AgreedBatch:
    """The facts of a call on which all ranks of a pipe group agree. ``kind`` numbers the kinds of batch seen so far."""

    kind: int
    pattern: Pattern
    plan: Plan
    call: ReportedCall
    places: Places
    """The row dimensions of gathered values, as far as they are known."""
    has_loss: bool
    """Whether the plan computes a loss; an evaluation may run without a loss function."""
    wire_layouts: tuple[int, ...]
    """A number for each micro-batch. Micro-batches with equal numbers, in any kind, send messages of equal layouts."""
    replica_rows: tuple[Rows, ...] = ()
    """Each replica's rows of each micro-batch, if stages see other replicas' rows; otherwise empty."""
    order: Order = ()
    """The micro-batch at each position of the table, by its number in the batch."""

    @property
    def sizes(self) -> Rows:
        """The number of rows of each micro-batch."""
        return self.call.batch.sizes


class Agreement:
    """Settles calls, and remembers kinds of batch: for a known kind, each rank sends only a number.

    All ranks of a pipe group must make the same calls of ``settle``, in the same order. They then remember and forget
    the same kinds in the same order.
    """

    def __init__(self, plans: Plans, transport: Transport, meets: bool) -> None:
        """``meets``: whether stages communicate with the same stages of other replicas."""
        self.plans, self._transport, self._options = plans, transport, plans.options
        """The plans, replaced after all ranks of a pipe group have made the same new plans."""
        self._types = {id(parameter): parameter.dtype for parameter in plans.module.parameters()}
        self._parameters = list(plans.module.parameters())  # keeps their ids from being reused
        self._take(plans.with_captures(reads=plans.captures.reads.after_compile()))
        self._kinds = itertools.count()
        self._reported: dict[Key, ReportedCall] = {}
        self._settled: dict[tuple[Key, Rows | None, Order], AgreedBatch] = {}
        """The known kinds, least recently used first, in the same order on all ranks of a pipe group. The second part
        of a key is each micro-batch's rows over all replicas, or None if the plan accepts any row counts. The third is
        the order of micro-batches, in which a number stands for all micro-batches that are described in the same way.
        """
        self._pairs = set(pairs(plans.first.instructions))  # the (sender, receiver) pairs with open queues
        self._layouts: dict[Hashable, int] = {}
        self._new_layouts = itertools.count()  # a forgotten number is never used again
        self._lists: set[str] = set()  # lists that a warning has named as not split
        self._meets = meets
        self.dropped: list[int] = []
        """The numbers of forgotten kinds. Callers that cache data per kind remove the numbers from this list."""

    def _take(self, plans: Plans) -> None:
        """Replaces the plans, sets its captures' memos, and has watched regions compare its reads."""
        if plans.captures.reads.memos:
            plans = plans.with_captures(reads=plans.captures.reads.with_memos_set())
        self.plans, plans.captures.source.latest.reads = plans, plans.captures.reads

    # this rank's inputs

    def propose(
        self, calls: Sequence[Call], split_evenly: bool, training: bool, wants_loss: bool = False
    ) -> tuple[Proposal, list[dict[str, Any]]]:
        """Returns this rank's proposal, and its inputs by name. An error goes into the proposal; all ranks raise it.

        Not collective: this rank alone describes its inputs, reads the counts of packed inputs (which waits for a GPU),
        and answers forward's questions about its inputs.

        Args:
            calls: one (args, kwargs) for a batch that fxpipe splits, or one for each micro-batch.
            split_evenly: whether fxpipe splits the batch.
            training: whether the call computes gradients.
            wants_loss: whether an evaluation is asked only for the loss.
        """
        batch_dim, objects = self._options.batch_dim, dict[ObjectValue, Any]()
        # 1. describe, and catch what is wrong
        try:
            modules = modules_of(self.plans.module)
            self._check_parameters(parameters := parameters_in(modules))
            if training and (torch.is_inference_mode_enabled() or not torch.is_grad_enabled()):
                block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
                raise RunError(f"torch.{block}() is on, in which no gradient can be; call it outside, or evaluate()")
            if not split_evenly:
                check_calls(calls)
            if not calls:
                raise RunError("a step needs at least one micro-batch")
            signature = self._signature_for(training)
            given = [with_number(bind(signature, args, kwargs)) for args, kwargs in calls]
            # Python's numbers are described only if a capture is tied to them: otherwise each number makes a new kind.
            described = tuple(describe(values, self.plans.needs_shapes, objects) for values in given)
            self._take(plans := self.plans.at_present(objects))
            if plans.captures.any_words:
                described = tuple(map(for_any_words, described))
            if training:
                _check_no_gradients(described)
            if split_evenly and plans.microbatches > 1:
                check_cut(given[0], batch_dim)
            counts = tuple(tuple(counts_of(values, batch_dim).items()) for values in given)
            # The walk over the modules serves the check and the flags.
            flags = flags_of(modules, parameters.values(), plans.captures.reads.number)
            facts = (training, split_evenly, flags, Ambient.now(), described, counts)
            return self._answered(Proposal(*facts, wants_loss=wants_loss), given), given
        except RunError as error:
            return Proposal(training, split_evenly, error=str(error)), []
        except TypeError as error:
            return Proposal(training, split_evenly, error=f"{error}{about_target(self._options.loss_fn, error)}"), []

    def _answered(self, proposal: Proposal, given: Sequence[dict[str, Any]]) -> Proposal:
        """The proposal with this rank's answers to forward's questions about the inputs of each micro-batch."""
        questions = self.plans.captures.questions
        # Questions are about micro-batches, so a rank cuts its own batch before all ranks agree on the cut.
        if questions.asked:
            parts: Sequence[dict[str, Any]] = given
            if proposal.split_evenly:
                batch = self._batch(proposal, proposal.given, list(map(dict, proposal.counts)))
                parts = [] if batch.rows is None else batch.split(given)  # this rank has no input that is cut
            proposal = replace(proposal, answers=tuple(map(questions.answers, parts)))
        _number(proposal)  # raises here, and not in a collective call, if the proposal cannot be sent
        return proposal

    def _check_parameters(self, parameters: Mapping[int, nn.Parameter]) -> None:
        """RunError if a parameter, or the type of a parameter, of the model is not the same as at compile."""
        # Parameters are compared by id: the check runs in every step, and a tensor's own hash is a call of Python.
        module, types = self.plans.module, self._types
        if {key: parameter.dtype for key, parameter in parameters.items()}.items() <= types.items():
            return
        name, found = next((name, p) for name, p in module.named_parameters() if types.get(id(p)) != p.dtype)
        if id(found) in types:
            raise RunError(
                f"the model's {name} is {found.dtype}, and was {types[id(found)]} when it was compiled; call "
                "model.to() before fxpipe.compile, or write compile(..., precision=fxpipe.Precision())"
            )
        raise RunError(
            f"the model's {name} is another parameter than when it was compiled, and its gradient would reach no "
            "optimizer; write values into what there is, as parameter.data.copy_() does, and load_state_dict() "
            "without assign=True, or change the model before fxpipe.compile"
        )

    def _signature_for(self, training: bool) -> inspect.Signature:
        """The signature of a call. In evaluation the target of a loss function is optional."""
        signature = self.plans.signature
        if training or target_of(self._options.loss_fn) is None:
            return signature
        parameters = [p.replace(default=None) if p.name == "target" else p for p in signature.parameters.values()]
        return signature.replace(parameters=parameters)

    def required(self, graph: StageGraph, rank: int | None, answering: bool = True) -> tuple[str, ...]:
        """The inputs that a rank must be given; None stands for all ranks. ``answering``: also the inputs from which
        the first rank answers forward's questions, and the inputs that captures hold objects from."""
        # 1. The inputs that the rank's stages read. On the ranks that make the loss, loss_weight= may read any input.
        # The rank that asks microbatch_cost= may read any input, too.
        weighs = self._options.loss_weight is not None and rank in graph.ranks(graph.output_stage)
        weighs = weighs or (self._options.microbatch_cost is not None and asks_costs(graph, rank))
        used = {
            name
            for stage in graph
            if rank is None or rank in graph.ranks(stage.index)
            for name in (graph.inputs if weighs else stage.batch_inputs)
        }
        # 2. The inputs that captures on all ranks take, that the first rank answers questions from, and that counts and
        # packed inputs are read from.
        captures, items = self.plans.captures, self.plans.items
        used |= captures.inputs_with_objects if answering else set()
        if answering and not rank:
            read = {name for stage in graph for name in stage.batch_inputs}
            asked = itertools.chain.from_iterable(each.inputs for each in captures.questions.asked.values())
            used |= {name for name in asked if name not in read}
        if ITEMS in used and not items.uncounted:
            used = (used | {"labels"}) - {ITEMS}  # the count is made from labels
        used |= read_for(used, self._options.batch_dim, graph.inputs)
        return tuple(name for name in dict.fromkeys((*graph.inputs, *sorted(used))) if name in used)

    # the agreement of all ranks

    def settle(self, proposal: Proposal, given: list[dict[str, Any]]) -> AgreedBatch:
        """Returns the same decision on every rank, or raises an error on every rank. A collective call.

        If forward asks a new question about the inputs, all ranks of the pipe group find the question, answer it, and
        settle again.

        Raises:
            RunError: a rank has reported an error, or the calls, inputs or models of two ranks differ.
            TraceError, PartitionError, ScheduleError: this rank cannot make a plan; other ranks raise a RunError that
                quotes it.
        """
        replica_rows: tuple[Rows, ...] = ()
        order: Order | None = None
        while True:
            # 2. and 3. Each rank sends a number: -1 for an error, whose text the others must read. Only a new set of
            # numbers needs a full exchange, and a set of equal numbers needs none.
            key = self._transport.gather_int("pipe", -1 if proposal.error else _number(proposal))
            try:
                if key not in self._reported:
                    is_same = len(set(key)) == 1 and key[0] >= 0
                    proposals = [proposal] * len(key) if is_same else self._transport.gather("pipe", proposal)
                    self._reported[key] = self._merged(proposals)
                reported = self._reported[key]
                costs = self._costs(reported, given) if order is None else ()
            except RunError as error:
                if order is None and not isinstance(error, PeerLost):  # other replicas wait for this one's rows
                    self._of_replicas(str(error), proposal.training)
                raise
            # 4. The numbers select the kind of batch, together with the order of its micro-batches, and all replicas'
            # rows if the kind's plan sees them.
            if order is None:  # all replicas gather these, once
                replica_rows, order = self._of_replicas((reported.batch.sizes, costs), proposal.training)
                everyone: Rows = tuple(map(sum, zip(*replica_rows, strict=True)))
            arranged = tuple(reported.alike[microbatch] for microbatch in order) if reported.alike else ()
            rows = everyone if (key, everyone, arranged) in self._settled else None
            agreed = self._settled.pop((key, rows, arranged), None)
            # 5. For a new kind, all ranks of the pipe group make captures and a plan at once.
            if agreed is None:
                try:
                    agreed = self._decide(reported, everyone, self._sample(reported, given, order), order)
                except Unanswered as error:
                    self._take(self.plans.asking(error))
                    described = tuple(describe(values, self.plans.needs_shapes) for values in given)
                    proposal = self._answered(replace(proposal, given=described), given)
                    continue
                # a plan for any shapes is stored under the pattern without shapes
                rows = everyone if agreed.pattern in self.plans.by_pattern else None
            self._settled[key, rows, arranged] = agreed  # moves the kind to the most recently used end
            self._drop()
            self.plans.captures.reads.drop_set()
            return replace(agreed, replica_rows=replica_rows, order=order) if replica_rows or arranged else agreed

    def _merged(self, proposals: Sequence[Proposal]) -> ReportedCall:
        """Merges the proposals into a batch; RunError on all ranks if calls differ or a rank has reported an error."""
        _check_same_call(proposals, partial(member, self._transport, "pipe"), self.plans.module)
        merged = list(map(merge, zip(*(proposal.given for proposal in proposals), strict=True)))
        counted = [list(map(dict, each)) for each in zip(*(proposal.counts for proposal in proposals), strict=True)]
        batch = self._batch(proposals[0], merged, list(map(merge_counts, counted)))
        is_cut = batch.is_whole and len(batch.sizes) > 1 and batch.rows is not None
        for path in whole_lists(merged[0], batch.batch_dim, sum(batch.sizes)) if is_cut else ():
            if path not in self._lists:
                self._lists.add(path)
                log(
                    f"fxpipe: input {path!r} is a list with as many entries as the batch has rows, and each "
                    f"micro-batch is given all of it; write {written(path, 'fxpipe.Packed(1)')} where it has one for "
                    f"each row, or {written(path, 'None')} where it has not"
                )
        ordered = self._options.microbatch_cost is not None and proposals[0].training
        return ReportedCall(proposals, batch, _alike(proposals, batch) if ordered and len(batch.sizes) > 1 else ())

    def _batch(self, call: Proposal, given: Sequence[Description], counts: Sequence[Counts]) -> Batch:
        microbatches = self.plans.microbatches if call.split_evenly else None
        return Batch.from_descriptions(
            given, counts, self._options.batch_dim, microbatches, may_be_fewer=not call.training
        )

    def _pattern(self, reported: ReportedCall, everyone: Rows, order: Order) -> Pattern:
        """The pattern on which the plan of a call depends. ``everyone``: each micro-batch's rows summed over all
        replicas, if stages see them."""
        first = reported.proposals[0]
        described = list(map(self.plans.items.described, _in_order(reported.batch.describe_parts(), order)))
        states = tuple(proposal.flags.state for proposal in reported.proposals)
        flags = first.flags if len(set(states)) == 1 else replace(first.flags, states=states)
        pattern = pattern_of(described, first.training, self._options.loss_fn, flags, first.ambient, first.wants_loss)
        # All ranks' answers about each micro-batch. If two ranks answer, the lower rank wins: dict() keeps the last.
        each = [proposal.answers for proposal in reversed(reported.proposals) if proposal.answers]
        answers = [
            dict(itertools.chain(*answers)) for answers in zip(*(_in_order(a, order) for a in each), strict=True)
        ]
        found = tuple(tuple(sorted(answer.items())) for answer in answers)
        return replace(pattern, everyone=everyone, answers=found)

    def _costs(self, reported: ReportedCall, given: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """A cost of each micro-batch, by which a step orders them; equal costs if it runs them as they come. A
        collective call of a pipe group if ``microbatch_cost=`` is given."""
        cost, graph = self._options.microbatch_cost, self.plans.first.graph
        if cost is None or not reported.alike:
            return (1.0,) * len(reported.batch.sizes)
        return costs_of(self._transport, cost, graph, self.plans.signature, partial(reported.batch.split, given))

    def _of_replicas(self, told: tuple[Rows, Sequence[float]] | str, training: bool) -> tuple[tuple[Rows, ...], Order]:
        """Each replica's rows of each micro-batch, if stages see them, otherwise empty; and the order of a step.
        RunError if another replica has told why it refuses its batch in place of rows and costs.

        A collective call of the data axis: all replicas make it, whether or not their captures depend on the rows.
        If stages communicate with other replicas, all replicas take the order of the costs' sums.
        """
        sees = self.plans.first.graph.sees_replicas
        orders = self._meets and training and self._options.microbatch_cost is not None
        everyone: list[Any] = [told]
        if self._transport.data_size > 1 and (sees or orders):
            everyone = self._transport.gather("data", told)
            check_refusals(self._transport, everyone)
        if isinstance(told, str):
            return (), ()
        rows, costs = zip(*everyone, strict=True)
        # Some replicas may have another number of micro-batches: then no group is common, and no order.
        is_even = len({*map(len, rows)}) == 1
        summed = list(map(sum, zip(*costs, strict=True))) if is_even else told[1]
        order = pyramid(summed) if training and len(set(summed)) > 1 else range(len(summed))
        return tuple(map(tuple, rows)) if sees and len(rows) > 1 and is_even else (), tuple(order)

    def _sample(self, reported: ReportedCall, given: list[dict[str, Any]], order: Order) -> Sample | str:
        """The micro-batches on which a new kind is checked, if this process has the whole model."""
        if self._transport.pipe_rank is not None:
            return LATER
        batches = _in_order(reported.batch.split(given), order)
        return Sample(self.plans.items.given(batches), self._options.batch_dim, later=True)

    def _decide(self, reported: ReportedCall, everyone: Rows, sample: Sample | str, order: Order) -> AgreedBatch:
        """A new kind, with its plan. All ranks of the pipe group call this together, for the same pattern.

        1. Make the plan, on all ranks or on none.
        2. Open queues for pairs of ranks that the plan connects and no plan before it has.
        3. Check that each rank was given the inputs that its stages read.
        4. Find the row dimensions of gathered values, and number the layouts of messages.

        RunError if a rank has no plan, or a different one; the plan state is then unchanged.
        """
        pattern = self._pattern(reported, everyone, order)
        # 1. The plan. If any rank fails, no rank keeps the plan, so that all ranks capture again in the next call.
        with phase("capture"):
            plans, plan = plan_together(self._transport, ("pipe",), partial(self.plans.plan, pattern, sample))
        self._take(plans)
        # 2. Process groups for pairs of ranks without earlier messages; all ranks create the groups in the same order.
        if new := set(pairs(plan.instructions)) - self._pairs:
            self._transport.open_more(sorted(new))
            self._pairs |= new
        # 3. The inputs that the plan requires of this batch.
        gathered = [stage.name for stage in plan.graph if stage.gathered is not None]
        if gathered and len(reported.batch.sizes) > 1 and reported.batch.rows is None:
            raise RunError(
                f"stage {gathered[0]!r} runs once for a group of micro-batches, but no input of this batch is cut into "
                "them: each has all of it, and a group would have it several times; see batch_dim=, or write "
                "microbatches=1"
            )
        self._check_required(plan, reported.proposals, order)
        # 4. The row dimensions for joining gathered values, and the layouts of messages.
        has_loss = pattern.with_loss or self._options.loss_fn is None
        joins = plan.graph.gathers and (len(reported.batch.sizes) > 1 or self._transport.data_size > 1)
        self.plans, places = self.plans.with_row_places(plan, pattern) if joins else (self.plans, {})
        layouts = self._layouts_of(plan, pattern, reported, order)
        return AgreedBatch(next(self._kinds), pattern, plan, reported, places, has_loss, layouts, order=order)

    def _check_required(self, plan: Plan, proposals: Sequence[Proposal], order: Order) -> None:
        """RunError for an input that a rank's stages read and that the rank was not given."""
        for rank, proposal in enumerate(proposals):
            # the batch, or each micro-batch
            given = proposal.given if proposal.split_evenly else _in_order(proposal.given, order)
            for description, graph in zip(given, plan.graphs, strict=False):
                needed = self.required(graph, rank if self._transport.pipe_rank is not None else None, False)
                present = {name for name, given in description if given.kind != "none"}
                missing = [name for name in needed if name not in present]
                if missing:
                    who = member(self._transport, "pipe", rank)
                    raise RunError(f"{who} needs input {missing[0]!r}, but was given None")

    def _layouts_of(self, plan: Plan, pattern: Pattern, reported: ReportedCall, order: Order) -> tuple[int, ...]:
        """A number for each micro-batch. Equal numbers mean messages of the same shapes, strides and types.

        Micro-batches have equal numbers if their stages come from the same capture, the table has their backwards in
        the same form, and each rank's inputs have the same description. A gathered stage reads several micro-batches:
        in a plan with a gathered stage, each micro-batch has its own number.
        """
        if plan.graph.gathers:
            return tuple(next(self._new_layouts) for _ in plan.graphs)
        proposals = reported.proposals
        # A proposal's digest is no key here: batches with different numbers of rows may have equal micro-batches.
        distinct = list(dict.fromkeys(proposal.given for proposal in proposals))  # most ranks have equal inputs
        who = tuple(distinct.index(proposal.given) for proposal in proposals)
        parts = [_in_order(reported.batch.describe_parts(given), order) for given in distinct]
        fixed = replace(pattern.for_any_shape(), given=pattern.given[:1])
        keys = [
            (plan.graph.edges, fixed, reported.batch.is_whole, who, *each)
            for each in zip(plan.captures, plan.halved, *parts, strict=True)
        ]
        return tuple(self._layouts.setdefault(key, next(self._new_layouts)) for key in keys)

    # the known kinds

    def _drop(self) -> None:
        """Drops the least recently used kinds above ``KINDS``, and the captures that only these kinds use.

        The first plan stays, and the present kind's plan; gradients, optimizers and buffers belong to no kind.
        """
        if not self._are_many:
            return
        while self._are_many and len(self._settled) > 1:
            # An eighth is dropped at once: otherwise each new kind would filter all plans and captures again.
            for key in list(self._settled)[: len(self._settled) // 8 + 1]:
                self.dropped.append(self._settled.pop(key).kind)
            self.plans = self.plans.only(self.known_plans)
        self._layouts.clear()
        # Of the exchanged proposals, only those of known kinds stay.
        self._reported = {key: agreed.call for (key, *_), agreed in self._settled.items()}

    @property
    def _are_many(self) -> bool:
        """Whether kinds, or captures, are above their limits."""
        return len(self._settled) > KINDS or len(self.plans.captures.guards) > MOST

    @property
    def known_plans(self) -> list[Plan]:
        """The plans of all known kinds."""
        return [agreed.plan for agreed in self._settled.values()]

    def replan(self, plans: Plans) -> None:
        """Replaces the plans after a change of tables; their micro-batches get new layout numbers."""
        self._take(plans)
        self._layouts.clear()
        for key, agreed in self._settled.items():
            _, plan = plans.plan(agreed.pattern)
            layouts = self._layouts_of(plan, agreed.pattern, agreed.call, agreed.order)
            self._settled[key] = replace(agreed, plan=plan, wire_layouts=layouts)


def _in_order(items: Sequence[Item], order: Order) -> list[Item]:
    """An item per micro-batch, in the order of a step."""
    return [items[microbatch] for microbatch in order]


def _alike(proposals: Sequence[Proposal], batch: Batch) -> tuple[int, ...]:
    """For each micro-batch, the first micro-batch that all ranks describe, and answer forward's questions of, alike."""
    given = dict.fromkeys(proposal.given for proposal in proposals)  # most ranks have equal inputs
    parts: list[Sequence[Any]] = [batch.describe_parts(each) for each in given]
    parts += [proposal.answers for proposal in proposals if proposal.answers]
    first: dict[Any, int] = {}
    return tuple(first.setdefault(key, number) for number, key in enumerate(zip(*parts, strict=True)))


@lru_cache(KINDS)
def _number(proposal: Proposal) -> int:
    """The number of a proposal, its digest. RunError if the proposal cannot be sent to other ranks."""
    return number_of(encode(proposal))


def _check_no_gradients(described: Sequence[Description]) -> None:
    """RunError for an input that requires a gradient: a step computes gradients of parameters only."""
    for name, given in itertools.chain(*described):
        if any(tensor.requires_grad for tensor in given.tensors):
            raise RunError(
                f"input {name!r} requires a gradient, and a step has none for what is outside of the model; compute it "
                "in the model's forward, or pass it as .detach() gives it"
            )
