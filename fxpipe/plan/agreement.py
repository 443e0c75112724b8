"""Agreement: before each call the ranks of a pipe group settle what kind of batch this is. Bad input fails on all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.like import ITEMS
from fxpipe.graph.modes import Autocast, ambient_autocast
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.batch import (
    BatchDim,
    Description,
    bind,
    cut_description,
    describe,
    merge,
    row_count,
    split,
    split_rows,
)
from fxpipe.plan.captures import Flags, Pattern
from fxpipe.plan.label_count import Items, as_number, with_number
from fxpipe.plan.planner import Plan, Planner
from fxpipe.trace import Request

_NUMBERS_CHECKED = 3
"""In how many calls it is looked at what number of items the user gives: it waits for the device."""

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""(args, kwargs)."""


@dataclass(frozen=True)
class Options:
    """What a call needs to know of compile's options."""

    microbatches: int
    batch_dim: BatchDim
    loss_weight: Callable[..., Any] | None
    loss_fn: Callable[..., Any] | None
    items: Items | None = None


@dataclass(frozen=True)
class Agreed:
    """What all ranks of a pipe group know alike of a call. ``kind`` numbers the kinds of batch seen so far."""

    kind: int
    pattern: Pattern
    plan: Plan
    sizes: tuple[int, ...]
    """Rows of each micro-batch."""
    has_loss: bool
    """Whether the plan computes a loss; in evaluation a loss function may be left out."""


@dataclass(frozen=True)
class _Offer:
    """One rank's side of a call: what it was given, described; or what is wrong with it."""

    training: bool
    split_evenly: bool
    flags: Flags
    autocast: tuple[Autocast, ...]
    """What is on around the call."""
    given: tuple[Description, ...]
    error: str = ""


class Agreement:
    """Settles calls, and remembers: for a kind of batch met before, only one number per rank travels."""

    def __init__(self, planner: Planner, transport: Transport, options: Options) -> None:
        self._planner, self._transport, self._options = planner, transport, options
        self._signature = call_signature(planner, options.loss_fn)
        self._numbers: dict[_Offer, int] = {}
        self._settled: dict[tuple[int, ...], Agreed] = {}
        self._numbers_given = 0

    def offer(self, calls: Sequence[Call], split_evenly: bool, training: bool) -> tuple[_Offer, list[dict[str, Any]]]:
        """This rank's side, and its inputs by name."""
        flags = flags_of(self._planner.module)
        try:
            given = [bind(self._signature_for(training), args, kwargs) for args, kwargs in calls]
            given = given if self._options.items is None else list(map(with_number, given))
        except TypeError as error:
            hint = "; the target is passed as target=" if self._options.loss_fn is not None else ""
            return _Offer(training, split_evenly, flags, (), (), f"{error}{hint}"), []
        nothing = "" if given else "a step needs at least one micro-batch"
        try:
            described = tuple(describe(values, self._planner.needs_shapes) for values in given)
        except RunError as error:  # which the others, who may have been given something else, raise, too
            return _Offer(training, split_evenly, flags, (), (), str(error)), []
        return _Offer(training, split_evenly, flags, ambient_autocast(), described, nothing), given

    def settle(self, offer: _Offer) -> Agreed:
        """The same decision on every rank, or an error on every rank. A collective call."""
        number = self._numbers.setdefault(offer, len(self._numbers))
        key = self._transport.gather_int("pipe", number)
        if key not in self._settled:
            self._settled[key] = self._decide(self._transport.gather("pipe", offer))
        return self._settled[key]

    def replan(self, planner: Planner) -> None:
        """Takes up another planner's plans, for the kinds of batch that are settled, too."""
        self._planner = planner
        for key, agreed in self._settled.items():
            self._settled[key] = dataclasses.replace(agreed, plan=planner.plan(agreed.pattern))

    def batches(self, agreed: Agreed, offer: _Offer, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This rank's inputs per micro-batch."""
        return split(given[0], self._options.batch_dim, agreed.sizes) if offer.split_evenly else given

    def with_items(
        self, agreed: Agreed, batches: Sequence[dict[str, Any]], shares: Sequence[float]
    ) -> list[dict[str, Any]]:
        """The micro-batches, each with its share of the number of items: the user's, or else the whole batch's count.

        A collective call of the data axis.
        """
        items, rank = self._options.items, self._transport.pipe_rank
        if items is None:
            return list(batches)
        graph = agreed.plan.graph
        is_asked = any(ITEMS in s.batch_inputs for s in graph if rank in (None, graph.placement[s.index]))
        numbers: list[Any] = [batch.get(ITEMS) for batch in batches]
        is_given = any(number is not None for number in numbers)
        if len(set(self._transport.gather_int("data", is_asked + is_asked * is_given))) > 1:
            raise RunError(
                f"the loss of some replicas divides by {ITEMS} and that of others does not, or it was given to some; "
                "pass the same inputs on all"
            )
        if not is_asked:
            return list(batches)
        if is_given:
            self._check_number(items, next(number for number in numbers if number is not None), batches)
        else:
            numbers = [self._counted(items, batches)] * len(batches)
        return [
            batch | {ITEMS: number * (share or 1.0)}  # nothing comes of one without weight, nor should it divide by 0
            for batch, number, share in zip(batches, numbers, shares, strict=True)
        ]

    def _check_number(self, items: Items, number: Tensor, batches: Sequence[Mapping[str, Any]]) -> None:
        """RunError, on all replicas alike, where they were given the numbers of their own parts of the batch."""
        self._numbers_given += 1
        if self._transport.data_size == 1 or self._numbers_given > _NUMBERS_CHECKED:
            return
        mine, counts = int(number), items.counts_of(batches)
        told = mine, mine in counts, sum(counts[:1])
        everyone = self._transport.gather("data", told)
        given = [one for one, _, _ in everyone]
        whole = sum(count for _, _, count in everyone)
        if len(set(given)) > 1 or any(is_own and one < whole for one, is_own, _ in everyone):
            raise RunError(
                f"{ITEMS} is that of the whole batch, over all replicas, and the same on all; the replicas were given "
                f"{given}, for {whole} labels in all. Leave it out, and it is counted; or add it up over the "
                "replicas, as by torch.distributed.all_reduce(number, group=topo.group('data'))"
            )

    def _counted(self, items: Items, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """The items of the whole batch, over all replicas: 0-dimensional, float32."""
        count = items.count(batches).to(self._transport.device)
        self._transport.all_reduce("data", count)
        return as_number(count.clamp(min=1))

    def weights(self, agreed: Agreed, batches: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
        """The weight of each micro-batch, the same on every rank."""
        weigh = self._options.loss_weight
        if weigh is None or not agreed.has_loss:
            return tuple(map(float, agreed.sizes))
        rank = self._transport.pipe_rank
        mine = _weigh(weigh, batches) if rank in (None, agreed.plan.output_rank) else None
        decided = next(item for item in self._transport.gather("pipe", mine) if item is not None)
        if isinstance(decided, str):
            raise RunError(decided)
        return tuple(decided)

    def required(self, plan: Plan, rank: int | None) -> tuple[str, ...]:
        """The inputs that a rank (None: all of them) must be given."""
        graph = plan.graph
        weighs = self._options.loss_weight is not None and rank == plan.output_rank
        used = {
            name
            for stage in graph
            if rank is None or graph.placement[stage.index] == rank
            for name in (graph.inputs if weighs else stage.batch_inputs)
        }
        if ITEMS in used:
            used = (used | {"labels"}) - {ITEMS}  # from which it is made
        return tuple(name for name in graph.inputs if name in used)

    def _signature_for(self, training: bool) -> inspect.Signature:
        """In evaluation the target of a loss function may be left out."""
        if training or self._options.loss_fn is None:
            return self._signature
        parameters = [p.replace(default=None) if p.name == "target" else p for p in self._signature.parameters.values()]
        return self._signature.replace(parameters=parameters)

    def _decide(self, offers: Sequence[_Offer]) -> Agreed:
        _check_same_call(offers)
        first = offers[0]
        merged = [merge([offer.given[place] for offer in offers]) for place in range(len(first.given))]
        sizes = self._sizes(merged, first)
        if first.split_evenly:
            merged = [cut_description(merged[0], self._options.batch_dim, size) for size in sizes]
        items = self._options.items
        if items is not None:
            merged = [items.described(description) for description in merged]
        pattern = pattern_of(merged, first.training, self._options.loss_fn, first.flags, first.autocast)
        plan = plan_together(self._transport, ("pipe",), partial(self._planner.plan, pattern))
        self._check_required(plan, offers)
        has_loss = pattern.with_loss or self._options.loss_fn is None
        return Agreed(len(self._settled), pattern, plan, sizes, has_loss)

    def _sizes(self, merged: Sequence[Description], call: _Offer) -> tuple[int, ...]:
        counts = [row_count(description, self._options.batch_dim) for description in merged]
        if not call.split_evenly:
            return tuple(1 if count is None else count for count in counts)
        wanted = self._options.microbatches
        return split_rows(counts[0], wanted if call.training else min(wanted, counts[0] or wanted))

    def _check_required(self, plan: Plan, offers: Sequence[_Offer]) -> None:
        for rank, offer in enumerate(offers):
            needed = self.required(plan, rank if self._transport.pipe_rank is not None else None)
            for description in offer.given:
                present = {name for name, given in description if given.kind != "none"}
                missing = [name for name in needed if name not in present]
                if missing:
                    raise RunError(f"pipe rank {rank} needs input {missing[0]!r}, but was given None")


def _check_same_call(offers: Sequence[_Offer]) -> None:
    first = offers[0]
    for rank, offer in enumerate(offers):
        if offer.error:
            raise RunError(offer.error if len(offers) == 1 else f"pipe rank {rank}: {offer.error}")
    for rank, offer in enumerate(offers):
        alike = offer.training == first.training and offer.split_evenly == first.split_evenly
        if offer.autocast != first.autocast:
            raise RunError(
                f"pipe ranks 0 and {rank} call under different autocast, {list(first.autocast)} and "
                f"{list(offer.autocast)}; enter the same on every rank"
            )
        if not alike or offer.flags != first.flags or len(offer.given) != len(first.given):
            raise RunError(
                f"pipe ranks 0 and {rank} differ in the call itself, in a module's training flag or in a "
                "parameter's requires_grad; all ranks of a pipe group make the same call, and freeze or unfreeze "
                "in the model that was given to compile, on every rank"
            )


def pattern_of(
    microbatches: Sequence[Description],
    training: bool,
    loss_fn: Callable[..., Any] | None,
    flags: Flags,
    autocast: tuple[Autocast, ...] = (),
) -> Pattern:
    """The capture that micro-batches like these need; RunError where they have different inputs."""
    has_target = any(name == "target" and given.kind != "none" for name, given in microbatches[0])
    with_loss = loss_fn is not None and (training or has_target)
    shapes = tuple(
        tuple((name, given) for name, given in description if with_loss or loss_fn is None or name != "target")
        for description in microbatches
    )
    facts = {(_inputs(description), _fixed(description)) for description in shapes}
    if len(facts) > 1:
        raise RunError("the micro-batches of one step must have the same inputs")
    ((inputs, fixed),) = facts
    return Pattern(inputs, fixed, len(shapes), with_loss, flags, training, shapes, autocast)


def _inputs(description: Description) -> tuple[str, ...]:
    return tuple(name for name, given in description if given.kind == "input")


def _fixed(description: Description) -> tuple[tuple[str, Any], ...]:
    return tuple((name, given.detail) for name, given in description if given.kind != "input")


def first_plan_together(
    transport: Transport, scopes: Sequence[str], make: Callable[[], Plan], planner: Planner
) -> Plan:
    """``plan_together`` where captures are checked: a tracer found wrong on one rank's example is passed over on all.

    A collective call.
    """
    captures = planner.captures
    if captures is None:
        return plan_together(transport, scopes, make)
    attempt, tried, agreed = _attempt(make), set(captures.wrong), set[str]()
    while True:
        for scope in scopes:
            for theirs in transport.gather(scope, captures.wrong):
                captures.wrong = {**theirs, **captures.wrong}
        if captures.wrong.keys() == agreed:  # which is the same question on all ranks
            return plan_together(transport, scopes, attempt)
        agreed = set(captures.wrong)
        if tried != agreed:
            planner.forget()
            attempt, tried = _attempt(make), set(captures.wrong)


def _attempt(make: Callable[[], Plan]) -> Callable[[], Plan]:
    """A function that returns the plan, or raises what making it has raised."""
    try:
        plan = make()
    except Exception as error:
        failure = error

        def fail() -> Plan:
            raise failure

        return fail
    return lambda: plan


def plan_together(transport: Transport, scopes: Sequence[str], make: Callable[[], Plan]) -> Plan:
    """The plan, the same on every rank; where one rank has none, or another, every rank raises. A collective call."""
    plan, failure, wrong = None, None, ""
    try:
        plan = make()
    except Exception as error:
        failure, wrong = error, f"could not compile: {type(error).__name__}: {error}"
    for scope in scopes:  # all of them, whatever has been found: others wait in the next one
        everyone = transport.gather(scope, (plan.digest if plan is not None else "", wrong))
        told = [f"{scope} rank {rank} {other}" for rank, (_, other) in enumerate(everyone) if other]
        digests = [digest for digest, _ in everyone]
        if told:
            wrong = wrong or told[0]
        elif len(set(digests)) > 1 and plan is not None:
            texts = transport.gather(scope, plan.description)
            odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            wrong = _difference(scope, odd, digests, texts)
    if failure is not None:
        raise failure
    if wrong or plan is None:
        raise RunError(wrong)
    return plan


def _difference(scope: str, odd: int, digests: Sequence[str], texts: Sequence[str]) -> str:
    ours, theirs = texts[0].splitlines(), texts[odd].splitlines()
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(ours), len(theirs))
    lines = [text[place] if place < len(text) else "(ends)" for text in (ours, theirs)]
    return (
        f"{scope} ranks 0 and {odd} have compiled different programs ({digests[0]} and {digests[odd]}); they first "
        f"differ in\n  rank 0: {lines[0]}\n  rank {odd}: {lines[1]}\nbuild the same model "
        "and ask for the same schedule on every rank"
    )


def flags_of(model: nn.Module) -> Flags:
    """Each module's training flag and each parameter's requires_grad."""
    return Flags(
        training=bytes(module.training for module in model.modules()),
        trainable=bytes(parameter.requires_grad for parameter in model.parameters()),
    )


def call_signature(planner: Planner, loss_fn: Callable[..., Any] | None) -> inspect.Signature:
    """The signature of ``forward_backward``."""
    if isinstance(planner.model, StageGraph):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in planner.model.inputs])
    return Request.signature(planner.model, loss_fn)


def _weigh(weigh: Callable[..., Any], batches: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | str:
    """The weights, or what is wrong with them."""
    try:
        weights = tuple(float(weigh(*batch.values())) for batch in batches)
    except Exception as error:
        return f"loss_weight failed: {type(error).__name__}: {error}"
    if not all(0 <= weight < float("inf") for weight in weights):
        return f"loss_weight returned {weights}; weights are finite and not negative"
    return weights
