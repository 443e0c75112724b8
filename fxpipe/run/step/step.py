"""Step: one call of ``ForwardBackward`` from its beginning to its end, on this rank.

agree on the batch → weigh the micro-batches → play this rank's row → combine the losses → sum the gradients
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fxpipe.distributed.activity import Alike, announced
from fxpipe.distributed.metered_transport import Metered
from fxpipe.distributed.stopwatch import ACTIONS, Stopwatch
from fxpipe.distributed.topology import Topology
from fxpipe.errors import FxpipeError
from fxpipe.graph.like import cast_batch
from fxpipe.graph.loss import StepLoss, Sum, loss_in
from fxpipe.graph.modes import evaluating
from fxpipe.graph.stage_graph import Edge
from fxpipe.labels import label
from fxpipe.packed import Packed
from fxpipe.plan.agree.agreement import AgreedBatch, Agreement, Call
from fxpipe.plan.agree.together import check_rows
from fxpipe.plan.capture.sizes import with_sizes
from fxpipe.plan.inputs.rows import entries_of, is_entries, pieces_of
from fxpipe.plan.plan import Plan
from fxpipe.plan.planner import Planner
from fxpipe.run.actions.bind import Bound, bind
from fxpipe.run.actions.executor import BoundFor, Executor, StepInput, StepResult
from fxpipe.run.actions.group_inputs import GroupInputs
from fxpipe.run.actions.side_effects import EffectsOf
from fxpipe.run.failing import Failing
from fxpipe.run.rank_state import RankState
from fxpipe.run.step.batch_check import BatchCheck
from fxpipe.run.step.finite import Watch
from fxpipe.run.step.outputs import OutputRows, RowsOf, from_rank, join, without_entries
from fxpipe.run.step.replicas import over_replicas
from fxpipe.run.step.step_outcome import (
    ItemNumbers,
    News,
    StepOutcome,
    check_kind,
    conclude,
    of_groups,
    shares_of,
    weights_of,
)
from fxpipe.run.timeline_recorder import TimelineRecorder
from fxpipe.run.wire.exchange import Exchange
from fxpipe.schedules.action import Action
from fxpipe.seeds import seed_of

MOST_BOUND = 32
"""Plans, and which of their micro-batches have weight, that calls are kept bound for."""


@dataclass(frozen=True)
class Trained:
    """What a step leaves. ``bytes_of``: what each edge carries, where it is the first step of a plan.
    ``broken``: what was not finite, where that is to be raised; all ranks have it, and nothing is under way."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    bytes_of: Mapping[Edge, int] | None
    broken: str


class Steps:
    """Makes steps and evaluations, and holds what one leaves for the next."""

    def __init__(
        self, topology: Topology, transport: Metered, state: RankState, exchange: Exchange, failing: Failing
    ) -> None:
        options = state.planner.options
        self._transport, self._state, self._exchange, self._failing = transport, state, exchange, failing
        self._options, self._module, self._gradients = options, state.planner.module, state.reducer
        self.agreement = Agreement(state.planner, transport)
        self._items = ItemNumbers(transport, state.planner.items)
        in_tensor_group = topology.size("tensor") > 1 and transport.pipe_rank is not None
        self._check = BatchCheck(transport, options.check_batches, in_tensor_group, lambda: topology.has_sampler)
        self._alike = (FxpipeError,) if transport.data_size == 1 and not in_tensor_group else ()
        place = topology.coordinate(transport.rank)  # along other axes ranks do the same work on the same data
        leads = not any(number for axis, number in place.items() if axis not in ("pipe", "data"))
        self.watch = Watch(transport, options.error_if_nonfinite, leads)
        self.recorder = TimelineRecorder(transport, state.device)
        number = transport.number
        self._which = f", of compile {number}" if number > 1 else ""
        self.sync = True
        self._unsummed = False  # whether the last call has left gradients that are not summed yet
        self.seed, self.number = state.seed, 0
        """What random numbers come from, and how many steps were made: the next one's number."""
        self._outcomes: dict[tuple[int, int | None], StepOutcome] = {}
        self._trained: set[int] = set()  # the kinds, of those known, that steps were made with
        self._bound: dict[Hashable, Bound] = {}
        self._news = News(transport, state.device)
        failing.drops.append(self._news.drop)
        self._sized: set[int] = set()  # the ids of the plans, of known kinds, of which a message said what edges carry
        self._effects, self._places = EffectsOf(), OutputRows()
        self._is_sum: bool | None = None  # whether the loss is a fxpipe.Sum, once a step has shown it

    # the course of a step

    def train(self, calls: Sequence[Call], split_evenly: bool, alike: Alike) -> Trained:
        """Forward, backward and gradient reduction of one batch, once ``recorder.begin`` was called. A collective call
        of all ranks.

        ``alike``: what they must have beside the batch.
        """
        with announced(f"forward_backward, step {self.number}{self._which}", alike=alike):
            return self._train(calls, split_evenly)

    def _train(self, calls: Sequence[Call], split_evenly: bool) -> Trained:
        agreed, batches = self._agree(calls, split_evenly, training=True)
        passed = self.recorder.passed
        passed("settling")
        with self._failing.together():
            shares = self._shares(agreed, batches, training=True)
        with self._failing.together(FxpipeError):
            check_rows(self._transport, agreed.plan, self._gradients.way.zero)
        with self._failing.together(), self._keeping_earlier_gradients():
            known, is_new = self._outcomes.get(self._same_loss(agreed)), agreed.kind not in self._trained
            self._gradients.begin(agreed.plan.graphs, self._row(agreed.plan), self.sync, self._is_sum is not False)
            runs = self._runs(agreed, shares)
            step = self._input(agreed, batches, shares, split_evenly, training=True, proves=is_new)
            self._effects.begin()
            bound = self._bound_for(agreed, tuple(runs))
            passed("preparing")
            self._news.listen(known, agreed.plan.output_ranks[0])
            made = self._play(agreed, bound, step)
            passed("messages")
            self._gradients.flush()
            passed("reduction")
            outcome = self._outcome(agreed, made, known)
            passed("loss")
            self._gradients.end(outcome.factor)
            passed("reduction")
            self._unsummed = not self.sync
            bytes_of = self._bytes_of(agreed.plan, made) if is_new else None
            graph = agreed.plan.graph
            broken = self.watch.end(self.number, outcome.loss, graph.names, agreed.plan.group, graph.sees_replicas)
            passed("rest")
            self._trained.add(agreed.kind)
            self.recorder.keep(self.number, agreed.plan.schedule, [one.stopwatch for one in made])
            self.number += 1
        return Trained(outcome.loss, outcome.metrics, bytes_of, broken)

    @contextlib.contextmanager
    def _keeping_earlier_gradients(self) -> Iterator[None]:
        """Where one process plays all ranks, one can go on behind a step that has failed."""
        try:
            yield
        except BaseException:
            if self._transport.pipe_rank is None:
                self._gradients.drop()
            raise

    @property
    def has_unsummed(self) -> bool:
        """Whether this rank has gradients that a later call is to sum, and nobody has cleared them."""
        return self._unsummed and any(parameter.grad is not None for parameter in self._module.parameters())

    def evaluate(self, call: Call, outputs: str) -> Any:
        """Forward only, in eval mode: the output on the ranks that have it ("last"), or on "all"; or the "loss" alone,
        on all. As collective."""
        asked = f"evaluate, before step {self.number}" + f', outputs="{outputs}"' * (outputs != "last")
        with evaluating(self._module), announced(asked + self._which):
            agreed, batches = self._agree([call], split_evenly=True, training=False)
            with self._failing.together():
                self.watch.warn("pipe")
                check_rows(self._transport, agreed.plan, 0)
                shares = self._shares(agreed, batches, training=False)
                with self._gradients.evaluating(agreed.plan.graphs, self._row(agreed.plan)):
                    step = self._input(agreed, batches, shares, True, training=False)
                    made = self._play(agreed, self._bound_for(agreed, tuple(self._runs(agreed, shares))), step)
                return self._output(agreed, made, shares, outputs)

    def _agree(
        self, calls: Sequence[Call], split_evenly: bool, training: bool
    ) -> tuple[AgreedBatch, list[dict[str, Any]]]:
        """The plan for this call, and this rank's inputs per micro-batch. Bad input fails on all ranks."""
        self._failing.check_open()
        self._transport.begin_step()
        self.compare_batches(everywhere=True)
        proposal, given = self.agreement.propose(calls, split_evenly, training)
        # A refusal is raised by the whole pipe group; but other replicas are mid-step then, and must not wait.
        with self._failing.together(*([FxpipeError] if self._transport.data_size == 1 else [])), label("settle"):
            agreed = self.agreement.settle(proposal, given)
        self._forget()
        self._check.note(agreed.plan, agreed.kind, self.number, training, given)
        return agreed, self.agreement.batches(agreed, proposal, given)

    def _forget(self) -> None:
        """Drops what is kept of kinds of batch that are not known any more; the same on all ranks of a pipe group."""
        kinds, self.agreement.dropped = self.agreement.dropped, []
        self._trained.difference_update(kinds)
        if kinds:
            self._check.counts.keep(self.agreement.plans)
            plans = set(map(id, self.agreement.plans))
            outcomes, known = self._outcomes.items(), {None, *self._trained}
            self._outcomes = {key: one for key, one in outcomes if key[0] in plans and key[1] in known}
            self._sized &= plans
            self._bound = {key: bound for key, bound in self._bound.items() if id(bound.kind.plan) in plans}
            self._exchange.keep(self.agreement.kinds, {m for n in self.agreement.wire_layouts for m in (n, ~n)})
            self._effects.keep(self.agreement.graphs)

    def replan(self, planner: Planner) -> None:
        """Takes up another planner's plans, between two steps of all ranks. Messages may have other layouts then."""
        self.agreement.replan(planner)
        self._exchange.keep((), ())
        self._bound.clear()
        self._sized.clear()
        self._check.counts.keep(())
        self._outcomes.clear()

    def compare_batches(self, everywhere: bool) -> None:
        """Compares what an earlier call has left. The pipe group raises together; other groups must not wait for it."""
        with self._failing.together(*self._alike):
            self._check.compare(everywhere)

    def _shares(self, agreed: AgreedBatch, batches: Sequence[Mapping[str, Any]], training: bool) -> tuple[float, ...]:
        """Each micro-batch's part of the weight of the step, over all replicas where it is more than whether it is 0:
        where the loss is made, or an input is weighted by it. Where the loss is of a group, its micro-batches have the
        group's."""
        weights = weights_of(self._transport, agreed, self._options.loss_weight, batches)
        weights = of_groups(weights, agreed.plan.group)
        matters = self._transport.pipe_rank in agreed.plan.output_ranks or self._items.items is not None
        shares, group = shares_of(self._transport, weights, training, over_replicas=matters), agreed.plan.group
        return shares if group == 1 else tuple(share for share in shares for _ in range(group))

    def _runs(self, agreed: AgreedBatch, shares: Sequence[float]) -> Sequence[bool]:
        """Which micro-batches get a backward. A collective call of the data axis where stages see other replicas'."""
        mine = [share != 0 for share in shares]
        if not agreed.plan.graph.sees_replicas or self._options.loss_weight is None:
            return mine
        if all(self._transport.gather_int("data", int(all(mine)))):
            return mine
        return [any(runs) for runs in zip(*self._transport.gather("data", mine), strict=True)]

    def _row(self, plan: Plan) -> Sequence[Action]:
        """What this process runs of the table."""
        rank, rows = self._transport.pipe_rank, plan.schedule.rows
        return rows[rank] if rank is not None else tuple(itertools.chain(*rows))

    def _input(
        self,
        agreed: AgreedBatch,
        batches: list[dict[str, Any]],
        shares: Sequence[float],
        is_cut: bool,
        training: bool,
        proves: bool = False,
    ) -> StepInput:
        number, replica, precision = self.number, self._transport.data_rank, self._options.precision
        if precision is not None:
            batches = [cast_batch(batch, precision.compute) for batch in batches]
        batches = with_sizes(batches, agreed.plan.graphs, agreed.pattern.shapes)
        return StepInput(
            self._items.add(agreed.plan.graph, batches, shares),
            shares,
            GroupInputs(self._transport, self._options.batch_dim, agreed.sizes, is_cut, agreed.places),
            lambda stage, microbatch: seed_of(self.seed, number, stage, microbatch, replica),
            number,
            self.watch.begin() if training else None,
            proves,
        )

    def _play(self, agreed: AgreedBatch, bound: Bound, step: StepInput) -> list[StepResult]:
        """Plays this process's part of the table: one rank's row, or all of them in an order that works."""
        self._exchange.begin(agreed.kind, _numbers(agreed, step.shares), bound.receives)
        made = bound.run(step, self._stopwatch if bound.kind.training else self.recorder.stopwatch)
        self.recorder.passed(ACTIONS)
        self._exchange.finish()
        return made

    def _stopwatch(self) -> Stopwatch:
        stopwatch = self.recorder.stopwatch()
        self._gradients.watch(stopwatch)
        return stopwatch

    def _bound_for(self, agreed: AgreedBatch, runs: tuple[bool, ...]) -> Bound:
        """The calls for a plan, for whichever of its micro-batches have weight; bound where they are not."""
        pattern = agreed.pattern
        autocast = pattern.ambient.autocast
        key = id(agreed.plan), runs, pattern.training, autocast  # of what is bound, which keeps the plan
        bound = self._bound.pop(key, None)
        if bound is None:
            kind = BoundFor(agreed.plan, runs, pattern.training, autocast)
            bound = bind(kind, self._transport.pipe_rank, partial(self._executor, kind))
        self._bound[key] = bound  # the last that was used is behind all others
        if len(self._bound) > MOST_BOUND:
            del self._bound[next(iter(self._bound))]
        return bound

    def _executor(self, kind: BoundFor, rank: int) -> Executor:
        return Executor(kind, rank, self._exchange, self._state.device, self._gradients, self._effects)

    def _same_loss(self, agreed: AgreedBatch) -> tuple[int, int | None]:
        """Of a call, the same for those whose losses are of one form: the ``id`` of its plan, and where that does not
        show all the kind of batch."""
        is_fixed = agreed.plan.fixes_loss and self._options.parallelize is None
        return id(agreed.plan), None if is_fixed else agreed.kind

    def _outcome(self, agreed: AgreedBatch, made: Sequence[StepResult], known: StepOutcome | None) -> StepOutcome:
        """The loss of the step, the same on every rank."""
        ranks, microbatches = agreed.plan.output_ranks, len(agreed.plan.graphs)
        mine = [one.loss for one in made if one.rank in ranks]
        at_output = StepLoss.of_ranks(mine) if mine else None
        with label("loss"):
            outcome = conclude(self._transport, at_output, ranks, microbatches, self._news, known)
        self._outcomes[self._same_loss(agreed)] = outcome
        check_kind(outcome, self._is_sum, self._options.precision)
        self._is_sum = outcome.is_sum
        return outcome

    def _bytes_of(self, plan: Plan, made: Sequence[StepResult]) -> dict[Edge, int] | None:
        """What each edge carries, from all ranks; once for a plan."""
        if id(plan) in self._sized:
            return None
        self._sized.add(id(plan))
        mine = {edge: size for one in made for edge, size in one.bytes_of.items()}
        return {edge: size for part in self._transport.gather("pipe", mine) for edge, size in part.items()}

    def _output(self, agreed: AgreedBatch, made: Sequence[StepResult], shares: Sequence[float], outputs: str) -> Any:
        """The whole batch's output, out of the micro-batches'."""
        results = {place: result for one in made for place, result in one.results.items()}
        ranks, output = agreed.plan.output_ranks, None
        if len(ranks) > 1 and self._transport.pipe_rank is not None:  # each of them has some
            parts = [from_rank(rank, results, self._transport, self._state.device) for rank in ranks]
            here = parts if self._transport.pipe_rank in ranks else []
            results = {place: result for part in here for place, result in part.items()}
        if results:
            places = sorted(results)  # one for each group, where a group makes it
            sizes = of_groups(agreed.sizes, agreed.plan.group)
            ordered, shares = [results[place] for place in places], [shares[place] for place in places]
            made_by = agreed.plan.graph[agreed.plan.graph.output_stage].gathered
            is_of_all = made_by is not None and made_by.modes == {"global"}
            if is_of_all:
                sizes = tuple(map(sum, zip(*self._transport.gather("data", list(sizes)), strict=True)))
            if outputs == "loss":
                ordered = list(map(loss_in, ordered))
            joined = join(ordered, shares, self._rows_of(agreed, sizes), self._places)
            output = without_entries(over_replicas(self._transport, joined, is_of_all))
            if outputs == "loss" and isinstance(output, Sum):
                output = output.total / output.count
        if outputs == "last" or self._transport.pipe_rank is None:
            return output
        return from_rank(ranks[0], output, self._transport, self._state.device)

    def _rows_of(self, agreed: AgreedBatch, sizes: tuple[int, ...]) -> RowsOf:
        """The rows of the outputs, each of a micro-batch, or of a group of them."""
        batch_dim, group = self._options.batch_dim, agreed.plan.group
        pieces = pieces_of(batch_dim, agreed.sizes, agreed.counts)
        entries = entries_of(agreed.pattern.shapes[0], batch_dim)
        packed = [
            (one.rule.dim, of_groups(pieces[path], group), is_entries(one.like))
            for path, one in entries.items()
            if isinstance(one.rule, Packed)
        ]
        along = sorted({one.rule for one in entries.values() if isinstance(one.rule, int) and any(one.shapes)})
        tensors = [(dim, sizes) for dim, sizes, is_list in packed if not is_list]
        return RowsOf(sizes, along, tensors, any(is_list for *_, is_list in packed))


def _numbers(agreed: AgreedBatch, shares: Sequence[float]) -> Sequence[int]:
    """A number for each micro-batch, by the layout of its messages: of one without weight no gradient may come."""
    return [layout if share else ~layout for layout, share in zip(agreed.wire_layouts, shares, strict=True)]
