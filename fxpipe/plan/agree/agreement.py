"""Agreement: before each call the ranks of a pipe group settle what kind of batch this is. Bad input fails on all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fxpipe.distributed.activity import phase
from fxpipe.distributed.transport import Transport, member
from fxpipe.errors import FxpipeError, RunError
from fxpipe.graph.gathering import Places
from fxpipe.graph.like import ITEMS
from fxpipe.graph.modes import Ambient
from fxpipe.graph.plain_data import encode
from fxpipe.graph.question import Unanswered
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.packed import read_for, written
from fxpipe.plan.agree.reported_call import Proposal, ReportedCall, sizes_of
from fxpipe.plan.agree.together import plan_together
from fxpipe.plan.capture.capture_check import Sample
from fxpipe.plan.capture.captures import LATER, MOST
from fxpipe.plan.inputs.batch import Description, bind, check_calls, describe
from fxpipe.plan.inputs.counts import Counts, check_cut, counts_of
from fxpipe.plan.inputs.cuts import split
from fxpipe.plan.inputs.label_count import with_number
from fxpipe.plan.inputs.pattern import Flags, Pattern, modules_of, parameters_in
from fxpipe.plan.inputs.rows import row_count, whole_lists
from fxpipe.plan.plan import Plan, digest_of
from fxpipe.plan.planner import Planner
from fxpipe.progress import log
from fxpipe.schedules.lower import pairs
from fxpipe.torch_compat import global_hook_tables

KINDS = 256
"""Kinds of batch that are remembered: beyond them the eighth that was not used for longest is met as if it were new."""

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""(args, kwargs)."""


@dataclass(frozen=True)
class AgreedBatch:
    """What every rank of a pipe group knows of a call. ``kind`` numbers the kinds of batch seen so far."""

    kind: int
    pattern: Pattern
    plan: Plan
    sizes: tuple[int, ...]
    """Rows of each micro-batch."""
    counts: Counts
    """Of what is cut by a count, for a batch that is cut."""
    places: Places
    """Where values that are gathered have their rows, as far as it is known."""
    has_loss: bool
    """Whether the plan computes a loss; in evaluation a loss function may be left out."""
    wire_layouts: tuple[int, ...]
    """A number for each micro-batch; those of one number, in any kind, make messages of the same layouts."""


_NOT_LOOKED_AT = Flags(b"", b"")
"""Those of a call that is refused before: its error is what all ranks raise."""


class _GivenToAll(NamedTuple):
    """What a call comes to if all ranks are given the same, with a plan that is there."""

    reported: ReportedCall
    plan: Plan

    def number_with(self, number: int) -> int:
        """The number of a proposal, and of this plan."""
        return digest_of([str(number), self.plan.digest])


class Agreement:
    """Settles calls, and remembers: of a kind of batch met before, and where all ranks are given the same, only a
    number per rank travels."""

    def __init__(self, planner: Planner, transport: Transport) -> None:
        self._planner, self._transport, self._options = planner, transport, planner.options
        self._numbers: dict[Proposal, int] = {}
        self._parameters = list(planner.module.parameters())
        self._types = {id(parameter): parameter.dtype for parameter in self._parameters}
        if planner.captures is not None:
            planner.captures.reads.begin()
        self._count, self._kinds = itertools.count(), itertools.count()
        self._reported: dict[tuple[int, ...], ReportedCall] = {}
        self._rows: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._settled: dict[tuple[tuple[int, ...], tuple[int, ...] | None], AgreedBatch] = {}
        """The kinds, the least recently used first: all ranks of a pipe group have them in one order. Beside what was
        reported stand the rows of all replicas; None where the plan holds for any."""
        self._pairs = set(pairs(planner.first.instructions))  # between which queues are open
        self._layouts = WireLayouts()
        self._hooks, self._known_hooks = global_hook_tables(), sum(map(len, global_hook_tables()))
        self._lists: set[str] = set()  # of which a message said that they are not split
        self.dropped: list[int] = []
        """Kinds that are not known any more, for those who keep something of each; they take them out."""

    def propose(
        self, calls: Sequence[Call], split_evenly: bool, training: bool
    ) -> tuple[Proposal, list[dict[str, Any]]]:
        """This rank's side, and its inputs by name."""
        flags = _NOT_LOOKED_AT
        try:
            self._check_parameters()
            flags = self._planner.flags
            if training and torch.is_inference_mode_enabled():
                raise RunError(
                    "torch.inference_mode() is on, in which no gradient can be; call it outside, or evaluate()"
                )
            if sum(map(len, self._hooks)) > self._known_hooks:
                self._log_hooks()
            if not split_evenly:
                check_calls(calls)
            given = [bind(self._signature_for(training), args, kwargs) for args, kwargs in calls]
            given = given if self._planner.items is None else list(map(with_number, given))
        except RunError as error:
            return Proposal(training, split_evenly, flags, Ambient(), (), error=str(error)), []
        except TypeError as error:
            hint = "; the target is passed as target=" if self._options.loss_fn is not None else ""
            return Proposal(training, split_evenly, flags, Ambient(), (), error=f"{error}{hint}"), []
        nothing = "" if given else "a step needs at least one micro-batch"
        try:
            described = tuple(describe(values, self._planner.needs_shapes) for values in given)
            _check_no_gradients(described if training else ())
            if split_evenly and self._planner.microbatches > 1:
                check_cut(given[0], self._options.batch_dim)
            counts = tuple(tuple(counts_of(values, self._options.batch_dim).items()) for values in given)
        except RunError as error:  # which the others, who may have been given something else, raise, too
            return Proposal(training, split_evenly, flags, Ambient(), (), error=str(error)), []
        proposal = Proposal(training, split_evenly, flags, Ambient.now(), described, counts, nothing)
        return self._answered(proposal, given), given

    def _answered(self, proposal: Proposal, given: Sequence[dict[str, Any]]) -> Proposal:
        """The proposal, with what this rank can answer of what forward asks about the inputs of each micro-batch."""
        captures = self._planner.captures
        if captures is None or not captures.questions.asked or proposal.error:
            return proposal
        parts = given
        if proposal.split_evenly:
            batch_dim, counts = self._options.batch_dim, dict(proposal.counts[0])
            rows = row_count(proposal.given[0], batch_dim, counts)
            if rows is None:  # this rank was given nothing that is cut
                return proposal
            parts = split(given[0], batch_dim, sizes_of([rows], proposal, self._planner.microbatches), counts)
        return dataclasses.replace(proposal, answers=tuple(map(captures.questions.answers, parts)))

    def _check_parameters(self) -> None:
        """RunError where the model has others than those whose gradients and optimizers are known, or other types."""
        module, types = self._planner.module, self._types
        if not all(types.get(id(one)) == one.dtype for one in parameters_in(modules_of(module))):
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

    def _log_hooks(self) -> None:
        self._known_hooks = sys.maxsize
        if self._planner.captures is not None:
            log(
                "fxpipe: a hook for all modules was registered after fxpipe.compile; it is called for submodules that "
                "stages call as they are, and not for those that were traced through: register it before"
            )

    def settle(self, proposal: Proposal, given: list[dict[str, Any]]) -> AgreedBatch:
        """The same decision on every rank, or an error on every rank. A collective call.

        Where forward asks something new about the inputs, all ranks of the pipe group find that out, answer it, and
        settle again.
        """
        everyone: tuple[int, ...] | None = None
        while True:
            reported, key, is_predicted = self._exchanged(proposal)
            everyone = self._rows_of_everyone(reported.sizes) if everyone is None else everyone  # all replicas, once
            try:
                return self._known_or_decided(reported, key, everyone, is_predicted, given)
            except Unanswered:
                proposal = self._answered(proposal, given)

    def _exchanged(self, proposal: Proposal) -> tuple[ReportedCall, tuple[int, ...], bool]:
        """What all ranks report, its key, and whether all have shown each other that they have the same plan for it."""
        is_new = proposal not in self._numbers
        if is_new:
            self._numbers[proposal] = self._number(proposal.sent())
        number = self._numbers[proposal]
        predicted = self._predicted(proposal) if is_new and number >= 0 else None
        key = self._transport.gather_int("pipe", number if predicted is None else predicted.number_with(number))
        is_predicted = predicted is not None and len(set(key)) == 1
        if predicted is not None and is_predicted:
            key = (number,) * len(key)
            self._reported.setdefault(key, predicted.reported)
        elif key not in self._reported:
            key, proposals = self._proposals(proposal.sent(), number, key)
            if key not in self._reported:
                self._reported[key] = self._merged(proposals, proposal)
        return self._reported[key], key, is_predicted

    def _known_or_decided(
        self,
        reported: ReportedCall,
        key: tuple[int, ...],
        everyone: tuple[int, ...],
        is_predicted: bool,
        given: list[dict[str, Any]],
    ) -> AgreedBatch:
        rows = everyone if (key, everyone) in self._settled else None
        agreed = self._settled.pop((key, rows), None)
        if agreed is None:
            agreed = self._decide(reported, everyone, is_predicted, self._sample(reported, given))
            rows = everyone if self._planner.is_of_shapes(agreed.pattern) else None
        self._settled[key, rows] = agreed
        self._drop()
        return agreed

    def _number(self, reported: Proposal) -> int:
        """The same on all ranks that report the same; below 0, on this rank alone, of what cannot be sent."""
        try:
            digest = hashlib.blake2b(encode(reported), digest_size=7).digest()
        except RunError:
            return ~next(self._count)
        return int.from_bytes(digest, "little")

    def _predicted(self, proposal: Proposal) -> _GivenToAll | None:
        """What a call comes to if all ranks are given the same as this one; None where that is a plan yet to be made,
        or an error."""
        try:
            reported = self._merged([proposal.sent()] * len(self._transport.ranks("pipe")), proposal)
            plan = self._planner.held(reported.pattern(self._planner, ()))
        except FxpipeError:
            return None
        return None if plan is None else _GivenToAll(reported, plan)

    def _merged(self, proposals: Sequence[Proposal], mine: Proposal) -> ReportedCall:
        reported = ReportedCall.of(proposals, mine, self._planner, partial(member, self._transport, "pipe"))
        self._log_lists(reported)
        return reported

    def _proposals(
        self, reported: Proposal, number: int, brought: tuple[int, ...]
    ) -> tuple[tuple[int, ...], Sequence[Proposal]]:
        """What all ranks report, and the numbers of that; of which they have ``brought`` something."""
        if len(set(brought)) == 1 and brought[0] >= 0:
            return brought, [reported] * len(brought)
        numbers, proposals = zip(*self._transport.gather("pipe", (number, reported)), strict=True)
        return numbers, proposals

    def _drop(self) -> None:
        """Drops the least recently used kinds beyond a bound, and what was captured for them alone.

        The first plan stays, and what the kind at hand needs; gradients, optimizers and buffers belong to no kind.
        """
        if not self._are_many:
            return
        for _ in range(KINDS // 8 + 1 if len(self._settled) > KINDS else 0):  # or each new kind would tidy everything
            self._drop_one()
        self._planner.keep(self.plans)
        while self._are_many and len(self._settled) > 1:
            self._drop_one()
            self._planner.keep(self.plans)
        if self.dropped:
            self._layouts.keep(self.wire_layouts)
            self._reported = {key: self._reported[key] for key, _ in self._settled}
            known = set(itertools.chain(*self._reported))
            for proposal in [proposal for proposal, number in self._numbers.items() if number not in known]:
                del self._numbers[proposal]

    def _drop_one(self) -> None:
        self.dropped.append(self._settled.pop(next(iter(self._settled))).kind)

    @property
    def _are_many(self) -> bool:
        captures = self._planner.captures
        return len(self._settled) > KINDS or (captures is not None and len(captures.kept) > MOST)

    @property
    def graphs(self) -> list[StageGraph]:
        """The stages of all kinds that are known."""
        return self._planner.graphs

    @property
    def plans(self) -> list[Plan]:
        """Of all kinds that are known."""
        return [agreed.plan for agreed in self._settled.values()]

    @property
    def wire_layouts(self) -> set[int]:
        """The numbers of the micro-batches of all kinds that are known."""
        return {number for agreed in self._settled.values() for number in agreed.wire_layouts}

    @property
    def kinds(self) -> set[int]:
        """The kinds that are known."""
        return {agreed.kind for agreed in self._settled.values()}

    def replan(self, planner: Planner) -> None:
        """Takes up another planner's plans; their micro-batches have new numbers."""
        self._planner = planner
        self._layouts.keep(())
        for key, agreed in self._settled.items():
            plan = planner.plan(agreed.pattern)
            layouts = self._layouts_of(plan, agreed.pattern, self._reported[key[0]])
            self._settled[key] = dataclasses.replace(agreed, plan=plan, wire_layouts=layouts)

    def batches(self, agreed: AgreedBatch, proposal: Proposal, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This rank's inputs per micro-batch."""
        return split(given[0], self._options.batch_dim, agreed.sizes, agreed.counts) if proposal.split_evenly else given

    def required(self, graph: StageGraph, rank: int | None, answering: bool = True) -> tuple[str, ...]:
        """The inputs that a rank (None: all of them) must be given. ``answering``: with those by which the first rank
        answers what forward asks, and that no stage reads."""
        weighs = self._options.loss_weight is not None and rank in graph.ranks(graph.output_stage)
        used = {
            name
            for stage in graph
            if rank is None or rank in graph.ranks(stage.index)
            for name in (graph.inputs if weighs else stage.batch_inputs)
        }
        captures, items = self._planner.captures, self._planner.items
        if answering and captures is not None and not rank:
            read = {name for stage in graph for name in stage.batch_inputs}
            used |= {name for one in captures.questions.asked.values() for name in one.inputs if name not in read}
        if ITEMS in used and items is not None and items.counts:
            used = (used | {"labels"}) - {ITEMS}  # from which it is made
        used |= read_for(used, self._options.batch_dim, graph.inputs)
        return tuple(name for name in dict.fromkeys((*graph.inputs, *sorted(used))) if name in used)

    def _signature_for(self, training: bool) -> inspect.Signature:
        """In evaluation the target of a loss function may be left out."""
        signature = self._planner.signature
        if training or self._options.loss_fn is None:
            return signature
        parameters = [p.replace(default=None) if p.name == "target" else p for p in signature.parameters.values()]
        return signature.replace(parameters=parameters)

    def _rows_of_everyone(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The rows of each micro-batch on all replicas together, where stages see them; else nothing.

        A collective call of the data axis: all replicas ask, whether or not captures of theirs depend on it by now.
        """
        if self._transport.data_size == 1 or not self._planner.first.graph.sees_replicas:
            return ()
        key = self._transport.gather_int("data", digest_of(map(str, sizes)))
        if key not in self._rows:
            everyone = self._transport.gather("data", list(sizes))
            is_even = len({*map(len, everyone)}) == 1
            self._rows[key] = tuple(map(sum, zip(*everyone, strict=True))) if is_even else ()
            if len(self._rows) > KINDS:  # on all replicas, who have asked for the same
                del self._rows[next(iter(self._rows))]
        return self._rows[key]

    def _log_lists(self, reported: ReportedCall) -> None:
        if not (reported.has_rows and reported.proposals[0].split_evenly and len(reported.sizes) > 1):
            return
        for path in whole_lists(reported.merged[0], self._options.batch_dim, sum(reported.sizes)):
            if path not in self._lists:
                self._lists.add(path)
                log(
                    f"fxpipe: input {path!r} is a list with as many entries as the batch has rows, and each "
                    f"micro-batch is given all of it; write {written(path, 'fxpipe.Packed(1)')} where it has one for "
                    f"each row, or {written(path, 'None')} where it has not"
                )

    def _sample(self, reported: ReportedCall, given: list[dict[str, Any]]) -> Sample | str:
        """What a new kind of batch is checked on: its own micro-batches, where this process has the whole model."""
        if self._transport.pipe_rank is not None:
            return LATER
        batch_dim, items = self._options.batch_dim, self._planner.items
        batches = (
            split(given[0], batch_dim, reported.sizes, reported.counts[0])
            if reported.proposals[0].split_evenly
            else given
        )
        return Sample(batches if items is None else items.given(batches), batch_dim, later=True)

    def _decide(
        self, reported: ReportedCall, everyone: tuple[int, ...], is_predicted: bool, sample: Sample | str
    ) -> AgreedBatch:
        """``is_predicted``: whether all ranks have shown each other that they have the plan, and the same."""
        pattern = reported.pattern(self._planner, everyone)
        with phase("capture"), contextlib.nullcontext() if is_predicted else self._planner.rolled_back_on_error():
            make = partial(self._planner.plan, pattern, sample)
            plan = plan_together(self._transport, () if is_predicted else ("pipe",), make)
        self._open(plan)
        if len(reported.sizes) > 1 and not reported.has_rows:
            _check_nothing_gathered(plan)
        self._check_required(plan, reported.proposals)
        has_loss = pattern.with_loss or self._options.loss_fn is None
        joins = plan.graph.gathers and (len(reported.sizes) > 1 or self._transport.data_size > 1)
        places = self._planner.row_places(plan, pattern) if joins else {}
        layouts = self._layouts_of(plan, pattern, reported)
        return AgreedBatch(
            next(self._kinds), pattern, plan, reported.sizes, reported.counts[0], places, has_loss, layouts
        )

    def _layouts_of(self, plan: Plan, pattern: Pattern, reported: ReportedCall) -> tuple[int, ...]:
        """The number of each micro-batch, by what all ranks were given of it."""
        is_cut = reported.proposals[0].split_evenly and len(reported.sizes) > 1
        fixed = dataclasses.replace(pattern, microbatches=1, shapes=(), everyone=(), answers=())
        return self._layouts.of(plan, (fixed, is_cut), reported.inputs(self._options.batch_dim))

    def _open(self, plan: Plan) -> None:
        """Opens queues between ranks that have sent each other nothing before. A collective call of a pipe group."""
        new = set(pairs(plan.instructions)) - self._pairs
        if new:
            self._transport.open_more(sorted(new))
            self._pairs |= new

    def _check_required(self, plan: Plan, proposals: Sequence[Proposal]) -> None:
        for rank, proposal in enumerate(proposals):
            for description, graph in zip(proposal.given, plan.graphs, strict=False):  # the batch, or each micro-batch
                needed = self.required(graph, rank if self._transport.pipe_rank is not None else None, False)
                present = {name for name, given in description if given.kind != "none"}
                missing = [name for name in needed if name not in present]
                if missing:
                    who = member(self._transport, "pipe", rank)
                    raise RunError(f"{who} needs input {missing[0]!r}, but was given None")


def _check_no_gradients(described: Sequence[Description]) -> None:
    """RunError for an input that would be given a gradient by plain PyTorch: a step's reach parameters alone."""
    led = next((name for one in described for name, given in one if given.needs_gradient), None)
    if led is not None:
        raise RunError(
            f"input {led!r} requires a gradient, and a step has none for what is outside of the model; compute it in "
            "the model's forward, or pass it as .detach() gives it"
        )


def _check_nothing_gathered(plan: Plan) -> None:
    """RunError where a group would hold the whole batch once for each micro-batch."""
    gathered = [stage.name for stage in plan.graph if stage.gathered is not None]
    if gathered:
        raise RunError(
            f"stage {gathered[0]!r} runs once for a group of micro-batches, but no input of this batch is cut into "
            "them: each has all of it, and a group would have it several times; see batch_dim=, or write microbatches=1"
        )


# --- Wire layouts: which micro-batches make messages of the same layouts. All ranks number them in the same way ---


class WireLayouts:
    """Numbers micro-batches: those of one number make messages of the same shapes, strides and types.

    They do where the stages come from one capture, the table has their backwards in the same form, and each rank was
    given inputs of the same description. A gathered stage sees other micro-batches: with one, each has its own number.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()

    def of(self, plan: Plan, fixed: Hashable, inputs: Sequence[Hashable]) -> tuple[int, ...]:
        """The number of each micro-batch. ``fixed``: what else all depend on. ``inputs``: of each, what each rank
        was given."""
        if plan.graph.gathers:
            return tuple(next(self._count) for _ in inputs)
        captures = plan.captures or (None,) * len(inputs)
        alike = plan.graph.edges, fixed
        each = zip(captures, plan.halved, inputs, strict=True)
        return tuple(self._number((alike, *one)) for one in each)

    def _number(self, key: Hashable) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = next(self._count)
        return number

    def keep(self, used: Collection[int]) -> None:
        """Forgets all numbers but these; a forgotten one never comes back."""
        self._numbers = {key: number for key, number in self._numbers.items() if number in used}
