"""Step: runs a call of ``ForwardBackward`` on this rank.

agree on the batch → weigh and order the micro-batches → play this rank's row → combine the losses → sum the gradients
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.batch.group_inputs import GroupInputs
from fxpipe.batch.outputs import OutputRows, Where, from_rank, over_replicas, without_entries
from fxpipe.device import HostCopies
from fxpipe.distributed.activity import announced
from fxpipe.distributed.collective import PeerLost
from fxpipe.distributed.grid import ROLES
from fxpipe.distributed.observer import ACTIONS, REST, EdgeSizes, StepObserver, Watched
from fxpipe.distributed.traffic import Metered
from fxpipe.distributed.transport import failing_together
from fxpipe.errors import FxpipeError, RunError
from fxpipe.graph.gathering import of_groups
from fxpipe.graph.stage_graph import Edge, StageGraph
from fxpipe.labels import label
from fxpipe.numerics.recording import ValueRecorder
from fxpipe.plan.plan import Plan
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import check_rows, shared_rows
from fxpipe.run.actions.actions import Bound, apart_from, bind
from fxpipe.run.actions.executor import Executor, StepInput, StepResult
from fxpipe.run.actions.recompute import EffectsOf
from fxpipe.run.exchange import Exchange
from fxpipe.run.memory_recorder import MemoryRecorder
from fxpipe.run.rank_state import RankState
from fxpipe.run.step.agreement import AgreedBatch, Agreement, Call
from fxpipe.run.step.batch_check import BatchCheck
from fxpipe.run.step.finite import Watch
from fxpipe.run.step.hooked import HookedParameters
from fxpipe.run.step.microbatch_functions import weights_of
from fxpipe.run.step.recorded_values import RecordedValues
from fxpipe.run.step.step_outcome import Facts, ItemNumbers, LossMessage, StepOutcome, conclude, shares_of
from fxpipe.run.timeline_recorder import TimelineRecorder
from fxpipe.schedules.action import Action
from fxpipe.seeds import seed_of
from fxpipe.specs import cast_batch
from fxpipe.stage.loss import LossKind, StepLoss, Sum, loss_in
from fxpipe.stage.modes import Autocast, evaluating
from fxpipe.stage.own_generators import own_generators
from fxpipe.torch_compat.tensors import with_hooks
from fxpipe.trace.checks.sizes import with_sizes

MOST_BOUND = 32
"""The most bound calls that are cached per plan: a call for each set of micro-batches that have weight."""


class Failing:
    """Records why this rank has failed, and makes the other ranks fail with it."""

    def __init__(self, transport: Metered, exchange: Exchange) -> None:
        self._transport = transport
        self._reason: str | None = None
        self.drops = [exchange.drop]
        """Functions that drop the communication that is under way."""

    def together(self, *spare: type[BaseException]) -> AbstractContextManager[None]:
        """An error inside this context fails every rank, except ``spare`` errors; see ``failing_together``."""
        return failing_together(self._transport, self._give_up, spare, self._drop)

    def check_open(self) -> None:
        """RunError if an earlier step has failed."""
        if self._reason is not None:
            raise RunError(f"an earlier step failed ({self._reason}); compile again")

    def close(self) -> None:
        """Makes later calls fail."""
        self._reason = self._reason or "it was closed"

    def _drop(self) -> None:
        for drop in self.drops:
            drop()

    def _give_up(self, reason: str) -> None:
        self._drop()
        if self._transport.pipe_rank is not None:
            self._reason = reason.splitlines()[0] if reason else "unknown"
        self._transport.abort(reason)


@dataclass
class _PlanRecord:
    """State that calls of a plan keep for later calls of the same plan."""

    plan: Plan
    bound: Callable[[tuple[bool, ...], bool, tuple[Autocast, ...]], Bound]
    """(which micro-batches get a backward, whether the call trains, autocast) → the bound calls."""
    calls: int = 0
    is_sized: bool = False  # whether the pipe group has gathered the bytes of each edge
    losses: dict[int | None, LossKind] = field(default_factory=dict)
    # kind of batch → the form of the loss; the key is None if the form does not depend on the kind
    outputs: dict[tuple[int, str], str] = field(default_factory=dict)
    """(kind of batch, the asked outputs) → the form of the numbers in an evaluation's output."""


class _AgreedCall(NamedTuple):
    """``batches``, ``shares``: each micro-batch's inputs, and its share of the step's weight, in the order in which
    they run. ``everyone``: all replicas' facts, once if equal."""

    agreed: AgreedBatch
    batches: list[dict[str, Any]]
    shares: Sequence[float]
    everyone: Sequence[Facts]

    @property
    def form(self) -> Any:
        """The form of the numbers that replicas add up in this call; None if a replica does not know it yet."""
        return self.everyone[0].form if len({facts.form for facts in self.everyone}) == 1 else None


class Steps:
    """Runs steps and evaluations, and holds the state between them.

    ``module``: the whole model, of which only this rank's part has values.
    """

    def __init__(
        self, transport: Metered, plans: Plans, state: RankState, exchange: Exchange, failing: Failing
    ) -> None:
        options, topology = plans.options, plans.topology
        self.topology, self.transport, self.rank_state = topology, transport, state
        self.failing, self._exchange = failing, exchange
        self._options, self.module, self._gradients = options, plans.module, state.reducer
        self.agreement = Agreement(plans, transport, state.reducer.meets)
        in_tensor_group = topology.size("tensor") > 1 and transport.pipe_rank is not None
        in_context_group = topology.size("context") > 1 and transport.pipe_rank is not None
        self._items = ItemNumbers(transport, plans.items, in_context_group)
        self._check = BatchCheck(transport, topology, options.checks.batches)
        self._alike = (FxpipeError,) if transport.data_size == 1 and not in_tensor_group else ()
        coordinate = topology.coordinate(transport.rank)  # ranks along other axes do the same work on the same data
        leads = not any(number for axis, number in coordinate.items() if ROLES[axis] == "tensor")
        self.watch = Watch(transport, options.checks.nonfinite == "raise", leads)
        self.recorder = TimelineRecorder(transport, state.device)
        # a suffix of the announced call names
        self.which = f", of compile {transport.number}" if transport.number > 1 else ""
        self.sync, self.is_averaged = True, False
        """Whether calls sum gradients; and whether the parameters are averages, in ``Average.applied``."""
        self._unsummed = False  # whether the last call left gradients that are not yet summed over replicas
        self.norm: Tensor | None = None
        """The norm of the last step's whole gradient before it was clipped, if it was."""
        self.microbatch_losses: dict[int, Tensor] = {}
        self.seed, self.number = state.seed, 0
        """The base seed of random numbers; and the number of steps so far, which is the next step's number."""
        self._plans: dict[int, _PlanRecord] = {}  # id(plan) → its state
        self._trained: set[int] = set()  # the known kinds of batch that a step was made with
        self._message = LossMessage(transport, state.device)
        self._parameters = list(state.module.named_parameters())
        self.has_loss_fn = options.loss_fn is not None
        """Whether ``compile`` was given a loss function."""
        failing.drops.append(self._message.drop)
        if transport.pipe_rank is None:  # a single process can go on after a failed step: earlier gradients stay
            failing.drops.append(state.reducer.drop)
        self._effects, self._in_lists = EffectsOf(), set[Where]()
        self._executor_of = partial(
            Executor,
            exchange=exchange,
            device=state.device,
            parameters=state.reducer,
            effects=self._effects,
            copies=HostCopies(state.device),
        )
        self._is_sum: bool | None = None  # whether the loss is a fxpipe.Sum; None before the first step
        self.values: RecordedValues | None = None

    def generators(self, of_rank: bool = False) -> dict[str, Any]:
        """The random generators of the model's own, by name. ``of_rank``: only those whose state goes on in a stage of
        this rank."""
        graph, rank = self.agreement.plans.first.graph, self.transport.pipe_rank
        self._renew_generators([graph])
        return {
            name: each.value
            for name, each in graph.generators.items()
            if not of_rank or (each.stage is not None and rank in (None, *graph.ranks(each.stage)))
        }

    def _renew_generators(self, graphs: Iterable[StageGraph]) -> None:
        """Finds the model's own random generators anew, as the user may have replaced them."""
        known = [item for graph in graphs for item in graph.generators.items()]
        now = own_generators(self.module, self._options.loss_fn) if known else {}
        for name, each in known:
            each.value = now.get(name, each.value)

    def check_trained(self, error: type[FxpipeError] = RunError) -> None:
        """Raises an error inside of ``with average.applied():``, for a call that needs the trained parameters."""
        if self.is_averaged:
            raise error("the parameters are averages inside of `with average.applied():`; make this call outside of it")

    # the phases of a step

    def train(self, calls: Sequence[Call], split_evenly: bool) -> tuple[StepOutcome, Mapping[Edge, int] | None]:
        """Runs forward, backward and gradient reduction of a batch, after ``recorder.begin``. Returns the outcome, and
        the bytes of each edge in the first step of a plan, else None. A collective call of all ranks."""
        self.check_trained()
        stopwatch = self.recorder.stopwatch
        observers: list[StepObserver] = [] if stopwatch is None else [stopwatch]

        def passed(part: str) -> None:
            for observer in reversed(observers):
                observer.on_step(part)

        agreed, batches, shares, everyone = call = self._agree(calls, split_evenly, training=True)
        plan, record = agreed.plan, self._plans[id(agreed.plan)]
        passed("settling")
        # Two guards: in the first all ranks raise an FxpipeError with nothing under way, so training can go on.
        with self.failing.together(FxpipeError):
            check_rows(plan, [facts.rows for facts in everyone])
        with self.failing.together():
            loss_kind, is_new = record.losses.get(self._form(agreed)), agreed.kind not in self._trained
            # Until a step has shown that the loss is a mean, gradients may still be multiplied by 1 / count.
            scales = self._is_sum is not False and not plan.counts
            if hooked := with_hooks(self._parameters):
                has_late_count = scales and bool(self._is_sum or plan.graph.counting is not None)
                observers.append(HookedParameters(hooked, plan.graph, self.transport, has_late_count))
            self._gradients.stopwatch = stopwatch
            self._gradients.begin(plan.graphs, self._row(plan), self.sync, scales)
            bound = self._bound(record, agreed, shares)
            if self.recorder.with_memory:
                self.recorder.memory = MemoryRecorder(bound.executors)
                observers.insert(0, self.recorder.memory)  # outside of the times of actions
            if self.values is not None:
                self.values.begin(self.number, batches, plan.graph, self.sync, agreed.order)
                observers.append(self.values)
            sizes = [EdgeSizes()] if is_new and not record.is_sized else []
            observers += [*self.watch.begin(shares, agreed.order), *sizes]
            step = self._input(call, is_new, observers)
            self._effects.begin()
            passed("preparing")
            # Listen before the first action, so that the receive is posted before the loss is sent.
            self._message.listen(loss_kind, plan.output_ranks[0])
            result = self._play(agreed, bound, step)
            passed(ACTIONS)
            self._exchange.finish()
            passed("messages")
            # All backwards have ended: flush starts the reductions that no backward has started.
            self._gradients.flush()
            passed("reduction")
            outcome = self._outcome(plan, result.loss, loss_kind, call.form is not None)
            record.losses[self._form(agreed)] = outcome.kind
            passed("loss")
            self._gradients.end(outcome.factor)
            passed("reduction")
            self._unsummed = not self.sync
            bytes_of = None
            if sizes:
                record.is_sized, bytes_of = True, sizes[0].gather(self.transport)
            broken = self.watch.end(self.number, outcome.loss, result.loss, plan)
            passed(REST)
            self._trained.add(agreed.kind)
            self.norm = None
            numbers = map(agreed.order.__getitem__, result.loss.own)
            self.microbatch_losses = dict(sorted(zip(numbers, result.loss.own.values(), strict=True)))
            self.recorder.keep(self.number, plan.schedule, agreed.order)
            self.number += 1
        if broken:  # all ranks raise this with nothing under way, so training can go on
            raise RunError(f"{broken}. No optimizer has stepped; zero_grad() drops the gradients, and one can go on")
        return outcome, bytes_of

    # recorded values

    @contextlib.contextmanager
    def recording_values(self, recorder: ValueRecorder) -> Iterator[None]:
        """Records the numbers of the steps inside."""
        try:
            recorder.step = self.number - 1
            self.values = RecordedValues(recorder, self._gradients, self.module, self.rank_state.module)
            self.values.record_parameters()
            yield
            self.values.record_parameters()
        finally:
            self.values = None
            recorder.close()

    @property
    def has_unsummed(self) -> bool:
        """Whether this rank has gradients, not cleared since, that a later call must sum over replicas."""
        return self._unsummed and any(parameter.grad is not None for parameter in self.module.parameters())

    def evaluate(self, calls: Sequence[Call], split_evenly: bool, outputs: str) -> Any:
        """Runs forward in eval mode. A collective call of all ranks.

        Returns the output on the ranks of the last stage ("last") or on "all" ranks, or only the "loss" on all ranks.
        If the caller has split the batch, the output is a list.
        """
        name = f"evaluate, before step {self.number}" + f', outputs="{outputs}"' * (outputs != "last")
        with evaluating(self.module), announced(name + self.which):
            return self._run_forward(calls, split_evenly, outputs)

    def update_buffers(self, call: Call) -> None:
        """Runs forward in training mode, on the whole batch as a micro-batch. A collective call of all ranks."""
        with evaluating(self.module, training=True), announced("update_batch_norm" + self.which):
            self._run_forward([call], False, None)

    def _run_forward(self, calls: Sequence[Call], split_evenly: bool, outputs: str | None) -> Any:
        """Runs forward in the modes of the model's modules. ``outputs``: None for no output."""
        agreed, _, shares, everyone = call = self._agree(calls, split_evenly, training=False, outputs=outputs)
        with self.failing.together(FxpipeError):
            check_rows(agreed.plan, [facts.rows for facts in everyone])
        with self.failing.together():
            with self._gradients.evaluating(agreed.plan.graphs, self._row(agreed.plan)):
                step = self._input(call)
                result = self._play(agreed, self._bound(self._plans[id(agreed.plan)], agreed, shares), step)
                self._exchange.finish()
                # An output that is a parameter, or a view of it, outlives the parameters that the call has gathered.
                results = apart_from(self._gradients.gathered(), result.results)
            self.watch.warn()  # after the forward, so that the device has work while the host waits for a loss
            return None if outputs is None else self._output(call, results, outputs)

    def _agree(
        self, calls: Sequence[Call], split_evenly: bool, training: bool, outputs: str | None = None
    ) -> _AgreedCall:
        """Agrees on this call. If a replica refuses its batch, all ranks of all replicas raise an FxpipeError and can
        go on: nothing has changed."""
        self.failing.check_open()
        self.transport.begin_step()
        with self.failing.together(*self._alike):  # the pipe group raises together; other ranks must not wait for it
            # This comes first: an error about the previous batch is clearer than the errors that result from it.
            self._check.compare()
        proposal, inputs = self.agreement.propose(calls, split_evenly, training, outputs == "loss")
        with self.failing.together(FxpipeError), label("settle"):
            try:
                agreed = self.agreement.settle(proposal, inputs)
                batches = agreed.call.batch.split(inputs)
                weights = self._weights(agreed, batches)
                if agreed.call.alike:  # else the order is the batch's
                    batches = [batches[number] for number in agreed.order]
                    weights = [weights[number] for number in agreed.order]
            except PeerLost:
                raise
            except FxpipeError as error:  # the whole pipe group raises it, and the other replicas must not wait
                shares_of(self.transport, [math.nan], training, refusal=str(error))
                raise
            self._forget()
            plan, gradients = agreed.plan, self._gradients
            record = self._plans.get(id(plan))
            if record is None:
                bound = partial(bind, plan, self.transport.pipe_rank, self._executor_of)
                record = self._plans[id(plan)] = _PlanRecord(plan, lru_cache(MOST_BOUND)(bound))
            group = plan.group  # if the loss is of a group of micro-batches, each of them has the group's share
            earlier = record.losses.get(self._form(agreed)) if training else None
            form: Any = (earlier.is_sum, earlier.metrics, plan.counts) if earlier is not None else None
            form = form if training else record.outputs.get((agreed.kind, str(outputs)))
            zero = gradients.sums.zero if training else 0
            rows = shared_rows(plan, zero, gradients.shards_parameters, gradients.meets, training)
            facts = Facts(rows, self._items.uses(plan.graph, batches), form)
            by_group, everyone = shares_of(self.transport, of_groups(weights, group), training, facts)
            shares = [share for share in by_group for _ in range(group)]
        # The device starts the digest here; the next call compares it, when the device has long computed it.
        self._check.note(record.calls, agreed.kind, self.number, training, inputs)
        record.calls += 1
        return _AgreedCall(agreed, batches, shares, everyone)

    def _weights(self, agreed: AgreedBatch, batches: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """Each micro-batch's weight, its rows or the value of ``loss_weight``. A collective call of a pipe group."""
        weight, signature = self._options.loss_weight, self.agreement.plans.signature
        if weight is None or not agreed.has_loss:
            return list(map(float, agreed.sizes))
        # The output rank asks the user's function: other ranks may lack its inputs.
        asks = self.transport.pipe_rank in (None, agreed.plan.output_ranks[0])
        return weights_of(self.transport, asks, weight, signature, batches)

    def _form(self, agreed: AgreedBatch) -> int | None:
        """The plan's losses have a single form, None, or may have another form for each kind of batch."""
        return None if agreed.plan.fixes_loss and self._options.parallelize is None else agreed.kind

    def _forget(self) -> None:
        """Drops the state of the kinds of batch that the agreement has dropped, on all ranks of a pipe group."""
        kinds, self.agreement.dropped = self.agreement.dropped, []
        if not kinds:
            return
        self._trained.difference_update(kinds)
        plans = set(map(id, self.agreement.known_plans))
        self._plans = {key: record for key, record in self._plans.items() if key in plans}
        for record in self._plans.values():
            for kind in kinds:
                record.losses.pop(kind, None)
            record.outputs = {key: form for key, form in record.outputs.items() if key[0] not in kinds}
        self._exchange.forget()
        self._effects.keep(self.agreement.plans.graphs)

    def replan(self, plans: Plans) -> None:
        """Switches to the plans of another schedule, between two steps of all ranks. Message layouts may change."""
        self.agreement.replan(plans)
        self._exchange.forget()
        self._plans.clear()

    def _row(self, plan: Plan) -> Sequence[Action]:
        """Returns the actions of the schedule that this process runs."""
        rank, rows = self.transport.pipe_rank, plan.schedule.rows
        return rows[rank] if rank is not None else tuple(itertools.chain(*rows))

    def _bound(self, record: _PlanRecord, agreed: AgreedBatch, shares: Sequence[float]) -> Bound:
        """Returns the plan's bound calls for the micro-batches that get a backward. A collective call of the data axis
        if stages see other replicas' rows."""
        # A stage that sees the rows of all replicas, or meets their stages, runs its backward if the micro-batch of any
        # replica has weight.
        runs = [share != 0 for share in shares]
        sees = record.plan.graph.sees_replicas and self._options.loss_weight is not None
        if sees or self._gradients.meets:
            runs = [any(each) for each in zip(*self.transport.gather("data", runs), strict=True)]
        return record.bound(tuple(runs), agreed.pattern.training, agreed.pattern.ambient.autocast)

    def _input(self, call: _AgreedCall, proves: bool = False, observers: Sequence[StepObserver] = ()) -> StepInput:
        agreed, batches, shares, everyone = call
        self._renew_generators(agreed.plan.graphs)
        number, replica, precision = self.number, self.transport.data_rank, self._options.precision
        if precision is not None:
            batches = [cast_batch(batch, precision.compute) for batch in batches]
        batches = with_sizes(batches, agreed.plan.graphs, agreed.pattern.shapes)
        counted = self._items.add(batches, shares, {facts.items for facts in everyone})
        is_cut, places = agreed.call.batch.is_whole, agreed.places
        return StepInput(
            counted,
            shares,
            GroupInputs(self.transport, self._options.batch_dim, agreed.sizes, is_cut, places, agreed.replica_rows),
            lambda stage, position: seed_of(self.seed, number, stage, agreed.order[position], replica),
            agreed.order,
            number,
            self._per_item(agreed.plan, counted, shares) if agreed.pattern.training else None,
            proves,
            Watched.by(observers),
        )

    def _per_item(self, plan: Plan, batches: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> Tensor | None:
        """Returns 1 / (items in all replicas' micro-batches), on the ranks that compute the loss, if the loss is a
        ``Sum`` whose count follows from the inputs; else None. A collective call of these ranks' data axes."""
        if self._is_sum is False or self.transport.pipe_rank not in (None, *plan.output_ranks):
            return None
        items = torch.zeros((), dtype=torch.float64, device=self.rank_state.device)
        if plan.counts:
            for graph, batch, share in zip(plan.graphs, batches, shares, strict=True):
                assert graph.counting is not None
                if share:
                    items += graph.counting.of(batch, items)
        # Before the first step, replicas whose loss is a mean take part, too: another replica's loss may be a Sum.
        self.transport.all_reduce("data", items)
        return 1 / torch.where(items == 0, 1.0, items) if plan.counts else None

    def _play(self, agreed: AgreedBatch, bound: Bound, step: StepInput) -> StepResult:
        """Runs this process's part of the schedule: a rank's row, or all rows in an order that does not deadlock."""
        # Micro-batches with equal layout numbers have equal message layouts; without weight they may get no gradient.
        layouts = zip(agreed.wire_layouts, step.shares, strict=True)
        self._exchange.begin(agreed.kind, [each if share else ~each for each, share in layouts], bound.receives)
        return bound.run(step)

    def _outcome(self, plan: Plan, loss: StepLoss, earlier: LossKind | None, is_agreed: bool) -> StepOutcome:
        """Returns the outcome of the step, the same on every rank. RunError if the loss is a Sum in some steps and a
        mean in others, or if gradients of a Sum would be reduced in float16, which would overflow."""
        precision = self._options.precision
        transport, ask = self.transport, self._gradients.ask
        at_output = loss if transport.pipe_rank in (None, *plan.output_ranks) else None
        # The rank that adds the replicas' losses up asks with the same message.
        adds = transport.data_size > 1 and (transport.pipe_rank,) == plan.output_ranks
        with label("loss"):
            if not adds:
                ask(None)
            add_up = ask if adds else partial(transport.all_reduce, "data")
            outcome = conclude(transport, at_output, plan, self._message, earlier, is_agreed, add_up)
        is_sum = outcome.kind.is_sum
        if self._is_sum not in (None, is_sum):
            raise RunError("the loss is a fxpipe.Sum in one step and a mean in another; return the same kind always")
        if is_sum and not plan.counts and precision is not None and precision.reduce == torch.float16:
            raise RunError(
                "gradients of a fxpipe.Sum are summed before they are divided by its count, for which float16 has no "
                "room; write Precision(reduce=torch.bfloat16) or float32"
            )
        self._is_sum = is_sum
        return outcome

    def _output(self, call: _AgreedCall, results: Mapping[int, Any], outputs: str) -> Any:
        """Joins the micro-batches' outputs to the whole batch's output."""
        agreed, shares = call.agreed, call.shares
        plan, transport, device, output = agreed.plan, self.transport, self.rank_state.device, None
        ranks = plan.output_ranks
        if len(ranks) > 1 and transport.pipe_rank is not None:  # each output rank has some micro-batches' results
            parts = [from_rank(rank, results, transport, device) for rank in ranks]
            here = parts if transport.pipe_rank in ranks else []
            results = {index: result for part in here for index, result in part.items()}
        if results:
            places = sorted(results)  # a place per micro-batch, or per group if a group computes the output
            ordered, shares = [results[index] for index in places], [shares[index] for index in places]
            sizes = of_groups(agreed.sizes, plan.group)
            if plan.has_all_rows and agreed.replica_rows:
                sizes = of_groups(tuple(map(sum, zip(*agreed.replica_rows, strict=True))), plan.group)
            if outputs == "loss":
                ordered = list(map(loss_in, ordered))
            if agreed.call.batch.is_whole or outputs == "loss":
                rows = OutputRows.from_batch(agreed.call.batch, plan.group, sizes, self._in_lists)
                joined = rows.join(ordered, shares)
                joined, form = over_replicas(transport, joined, plan.has_all_rows, call.form)
                output = without_entries(joined)
                if outputs == "loss" or self._form(agreed) is None:
                    self._plans[id(plan)].outputs[agreed.kind, outputs] = form
            else:
                output = ordered
            if outputs == "loss" and isinstance(output, Sum):
                output = output.total / output.count
        if outputs == "last" or transport.pipe_rank is None or len(transport.ranks("pipe")) == 1:
            return output
        return from_rank(ranks[0], output, transport, device)
