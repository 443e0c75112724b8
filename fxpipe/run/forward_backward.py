"""``ForwardBackward``: what ``fxpipe.compile`` returns, in place of the forward and backward of a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fxpipe.distributed.metered_transport import Metered
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Traffic
from fxpipe.distributed.transport import failing_together
from fxpipe.errors import FxpipeError, RunError
from fxpipe.graph.modes import within
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.parameters.checkpoint import full_state_dict, load_into
from fxpipe.parameters.ownership import Ownership, RankModule
from fxpipe.plan.agreement import Agreed, Agreement, Call, Options, plan_together
from fxpipe.plan.batch import cast_batch
from fxpipe.plan.planner import Plan, Planner
from fxpipe.run.batch_check import BatchCheck
from fxpipe.run.detached import detached
from fxpipe.run.exchange import Exchange, Mailbox, WireExchange
from fxpipe.run.executor import Executor, Step
from fxpipe.run.finite import Watch
from fxpipe.run.outputs import join
from fxpipe.run.rank_state import Holding
from fxpipe.run.replicas import over_replicas
from fxpipe.run.step_outcome import Outcome, conclude
from fxpipe.run.timeline_recorder import Recorder
from fxpipe.schedules import Family, with_costs
from fxpipe.schedules.action import Action
from fxpipe.schedules.costs import Cost
from fxpipe.schedules.lower import is_forward
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.seeds import seed_of
from fxpipe.sharding.clip import clip_grad_norm_
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.torch_compat import pytree


class ForwardBackward:
    """One function in place of forward and backward: ``loss = forward_backward(*args, **kwargs)``.

    Every rank of a pipe group passes the same batch, or None for inputs that are not in its ``required_inputs``. The
    loss comes back detached, 0-dimensional, on every rank, on the device and without waiting for it; gradients are
    complete, averaged over the data axis, in ``.grad`` of this rank's ``parameters()``. The first loss that is inf or
    nan is told of in one warning, by the call after it, ``evaluate`` or ``state_dict(full=True)``: by then it is known
    without having waited for it.
    """

    def __init__(
        self,
        planner: Planner,
        topology: Topology,
        transport: Metered,
        holding: Holding,
        owners: Ownership,
        options: Options,
        base_seed: int,
        device: torch.device,
        check_batches: bool = True,
        error_if_nonfinite: bool = False,
    ) -> None:
        self.topology = topology
        self.metrics: dict[str, Tensor] = {}
        """The other scalars of a loss that came in a dict, averaged as the loss was, after each step."""
        self._planner, self._plan, self._transport = planner, planner.first, transport
        self._module, self._reducer, self._owners = holding.module, holding.reducer, owners
        self._precision, self._originals = holding.precision, holding.originals
        self._optimizers: WeakSet[DistributedOptimizer] = WeakSet()
        self._options, self._base_seed = options, base_seed
        self._agreement = Agreement(planner, transport, options)
        in_tensor_group = topology.size("tensor") > 1 and transport.pipe_rank is not None
        self._check = BatchCheck(transport, check_batches, in_tensor_group, lambda: topology.has_sampler)
        self._alike = (FxpipeError,) if transport.data_size == 1 and not in_tensor_group else ()
        self._step = 0
        self._sync = True
        self._outcomes: dict[int, Outcome] = {}
        self._is_sum: bool | None = None  # whether the loss is a fxpipe.Sum, once a step has shown it
        self._failure: str | None = None
        self._device = device
        self._recorder = Recorder(transport, device)
        alike = topology.coordinate(transport.rank)  # along other axes ranks do the same work on the same data
        leads = not any(place for axis, place in alike.items() if axis not in ("pipe", "data"))
        self._watch = Watch(transport, error_if_nonfinite, leads)
        self._exchange: Exchange = Mailbox() if transport.pipe_rank is None else WireExchange(transport, self._device)

    # what it is

    @property
    def stages(self) -> StageGraph:
        """The graph of stages; prints as a table, and ``.stages["text"].forward`` can be called and printed."""
        return self._plan.graph

    @property
    def schedule(self) -> Schedule:
        """The table that runs. ``print`` it."""
        return self._plan.schedule

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The inputs that this rank's stages use; for the others it may be given None."""
        return self._agreement.required(self._plan, self._transport.pipe_rank)

    @property
    def module(self) -> RankModule:
        """This rank's parameters and buffers under the model's own names, as the last optimizer step has left them."""
        self._reducer.settle()
        return self._module

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, each once."""
        return self.module.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters."""
        if set_to_none or self._reducer.way.sharded:
            self._reducer.clear()
        else:
            self.module.zero_grad(set_to_none=False)

    def optimizer(
        self,
        cls: Callable[..., torch.optim.Optimizer],
        params: Any = None,
        *,
        offload: bool = False,
        elementwise: bool | None = None,
        **kw: Any,
    ) -> DistributedOptimizer:
        """``cls(params, **kw)`` of which each rank steps its part. A collective call of all ranks.

        Several optimizers may each have some of the parameters. With ``zero`` its parameters are gathered beside the
        next forward: read them through ``forward_backward``, which waits for them. ``torch.distributed.checkpoint``
        saves it as it comes, see ``DistributedOptimizer``.

        Args:
            cls: an optimizer of torch, or one like them.
            params: parameters or groups of them; a group may name its parameters, by name, by a pattern ("*.bias") or
                by a predicate ``(name, parameter) -> bool``. None: all.
            offload: whether state and step are on the CPU.
            elementwise: whether ``cls`` steps each element by itself, so that a parameter can be cut; None: only those
                of torch.optim that are known to. All others get whole tensors, balanced over the ranks by their size.
            **kw: what ``cls`` takes besides, such as ``lr``.

        Raises:
            RunError: ``cls`` is LBFGS or SparseAdam; or a group asks for what is no parameter of the model.
        """
        held = dict(self.module.named_parameters(remove_duplicate=False))
        whole = dict(self._planner.module.named_parameters(remove_duplicate=False))
        optimizer = DistributedOptimizer(
            cls,
            params,
            kw,
            self._reducer,
            self._transport,
            held=held,
            whole=whole,
            precision=self._precision,
            offload=offload,
            device=self._device,
            originals=self._originals,
            elementwise=elementwise,
            cause=self._watch.cause,
        )
        self._optimizers.add(optimizer)
        return optimizer

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that the norm of the whole model's is at most ``max_norm``; returns that norm.

        As ``torch.nn.utils.clip_grad_norm_`` does on the plain model: a tied parameter counts once. A collective call
        of all ranks.
        """
        with self._failing_together(FxpipeError):
            self._check_open()
            return clip_grad_norm_(
                self._reducer.pieces(), self._transport, self._reducer.shards, max_norm, norm_type, error_if_nonfinite
            )

    def seed(self, stage: int | str, microbatch: int, step: int, replica: int = 0) -> int:
        """The seed under which a stage's forward of a micro-batch draws, in the step with that number from 0."""
        return seed_of(self._base_seed, step, self.stages[stage].index, microbatch, replica)

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward, backward and gradient reduction of one batch, done when it returns; the loss, detached."""
        return self._train([(args, kwargs)], split_evenly=True)

    def step_microbatches(self, microbatches: Sequence[Call]) -> Tensor:
        """A call for micro-batches already split: ``[(args, kwargs), ...]``, each of its own shape."""
        return self._train(microbatches, split_evenly=False)

    def evaluate(self, *args: Any, outputs: str = "last", **kwargs: Any) -> Any:
        """Forward only, in eval mode and without gradients: the model's output. A collective call of all ranks.

        Rows of the micro-batches are concatenated, and are those of this replica's batch. A 0-dimensional tensor is the
        whole batch's, over the data axis, too: a fraction is the mean, weighted as the loss of a step is (by rows or
        ``loss_weight``), an integer the sum; a ``fxpipe.Sum`` comes back with the sums of totals and counts. With a
        ``loss_fn`` and ``target=`` given, the output is the loss.

        Args:
            *args: a batch, as in a call.
            **kwargs: its inputs that are given by name.
            outputs: "last": the output comes back on the ranks of the last stage, and None elsewhere; "all": on all.

        Raises:
            RunError: the replicas' outputs have different numbers.
        """
        if outputs not in ("last", "all"):
            raise RunError(f'outputs is {outputs!r}; it is "last" or "all"')
        with self._evaluating():
            agreed, batches = self._agree([(args, kwargs)], split_evenly=True, training=False)
            with self._failing_together():
                self._tell_of_last()
                shares = self._shares(agreed, self._agreement.weights(agreed, batches), training=False)
                with self._reducer.evaluating(agreed.plan.graphs, self._actions(agreed.plan)):
                    executors = self._run(agreed, batches, shares, training=False)
                return self._collect(agreed, executors, shares, everywhere=outputs == "all")

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = list(self._planner.module.modules())
        flags = [module.training for module in modules]
        self._planner.module.eval()
        try:
            yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag

    def _collect(self, agreed: Agreed, executors: list[Executor], shares: Sequence[float], everywhere: bool) -> Any:
        results = {place: result for executor in executors for place, result in executor.results.items()}
        output = None
        if results:
            ordered = [results[place] for place in range(len(results))]
            joined = join(ordered, shares, agreed.sizes, self._options.batch_dim)
            output = over_replicas(self._transport, joined)
        if not everywhere or self._transport.pipe_rank is None:
            return output
        cpu = pytree.tree_map_only(Tensor, Tensor.cpu, output)
        output = self._transport.gather("pipe", cpu)[agreed.plan.output_rank]
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), output)

    def _train(self, calls: Sequence[Call], split_evenly: bool) -> Tensor:
        agreed, batches = self._agree(calls, split_evenly, training=True)
        with self._failing_together():
            shares = self._shares(agreed, self._agreement.weights(agreed, batches), training=True)
        with self._failing_together(FxpipeError):
            self._check_rows(agreed)
        with self._failing_together():
            known = self._outcomes.get(agreed.kind)
            scales = self._is_sum is not False
            self._reducer.begin(agreed.plan.graphs, self._actions(agreed.plan), self._sync, scales)
            executors = self._run(agreed, batches, shares, training=True)
            self._reducer.flush()
            at_output = next((e.loss for e in executors if e.rank == agreed.plan.output_rank), None)
            outcome = conclude(self._transport, at_output, agreed.plan.output_rank, self._device, known)
            self._outcomes[agreed.kind] = outcome
            self._check_kind_of_loss(outcome)
            self._reducer.end(outcome.factor)
            if known is None:
                self._learn_bytes(executors)
            self._recorder.keep(self._step, agreed.plan.schedule, [e.stopwatch for e in executors])
            broken = self._watch.end(self._step, outcome.loss, agreed.plan.graph.names)
            self._step += 1
            self.metrics = dict(outcome.metrics)
        if broken:  # nothing is under way, and all ranks raise it: one can go on
            raise RunError(f"{broken}. No optimizer has stepped; zero_grad() drops the gradients, and one can go on")
        loss: Tensor = detached(outcome.loss)
        return loss

    def _tell_of_last(self) -> None:
        """Where the ranks of a pipe group meet outside of a step."""
        text = self._watch.look("pipe")
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _run(
        self, agreed: Agreed, batches: list[dict[str, Any]], shares: Sequence[float], training: bool
    ) -> list[Executor]:
        """Plays this process's part of the table: one rank's row, or all of them in an order that works."""
        step_number, replica = self._step, self._transport.data_rank
        if self._precision is not None:
            batches = [cast_batch(batch, self._precision.compute) for batch in batches]
        batches = self._agreement.with_items(agreed, batches, shares)
        step = Step(
            batches,
            shares,
            lambda stage, microbatch: seed_of(self._base_seed, step_number, stage, microbatch, replica),
            training,
            agreed.pattern.autocast,
            step_number,
            self._watch.begin() if training else None,
        )
        with within([region._replace(enabled=False) for region in step.autocast]):
            return self._play(agreed, step)

    def _play(self, agreed: Agreed, step: Step) -> list[Executor]:
        plan, rank, training = agreed.plan, self._transport.pipe_rank, step.training
        self._exchange.begin(agreed.kind)
        if rank is None:
            executors = [self._executor(plan, r, step) for r in range(len(plan.instructions))]
            for owner, instruction in plan.order:
                if training or is_forward(instruction):
                    executors[owner].execute(instruction)
        else:
            executors = [self._executor(plan, rank, step)]
            for instruction in plan.instructions[rank]:
                if training or is_forward(instruction):
                    executors[0].execute(instruction)
        self._exchange.finish()
        return executors

    def _executor(self, plan: Plan, rank: int, step: Step) -> Executor:
        stopwatch = self._recorder.stopwatch()
        if step.training:
            self._reducer.watch(stopwatch)
        return Executor(plan.graphs, rank, self._exchange, self._device, step, self._reducer, stopwatch)

    def _actions(self, plan: Plan) -> Sequence[Action]:
        """What this process runs of the table."""
        rank = self._transport.pipe_rank
        rows = plan.schedule.rows
        return rows[rank] if rank is not None else tuple(itertools.chain(*rows))

    def _agree(self, calls: Sequence[Call], split_evenly: bool, training: bool) -> tuple[Agreed, list[dict[str, Any]]]:
        """The plan for this call, and this rank's inputs per micro-batch. Bad input fails on all ranks alike."""
        self._check_open()
        self._transport.begin_step()
        self._compare_batches(everywhere=True)
        offer, given = self._agreement.offer(calls, split_evenly, training)
        # A refusal is raised by the whole pipe group alike; but other replicas are mid-step then, and must not wait.
        with self._failing_together(*([FxpipeError] if self._transport.data_size == 1 else [])):
            agreed = self._agreement.settle(offer)
        self._check.note(agreed.kind, self._step, training, given)
        return agreed, self._agreement.batches(agreed, offer, given)

    def _compare_batches(self, everywhere: bool) -> None:
        """Compares what an earlier call has left. The pipe group raises alike; other groups must not wait for it."""
        with self._failing_together(*self._alike):
            self._check.compare(everywhere)

    def _check_kind_of_loss(self, outcome: Outcome) -> None:
        """Gradients of means and of sums cannot be accumulated together, nor in a type that has no room for sums."""
        if self._is_sum not in (None, outcome.is_sum):
            raise RunError("the loss is a fxpipe.Sum in one step and a mean in another; return the same kind always")
        if outcome.is_sum and self._precision is not None and self._precision.reduce == torch.float16:
            raise RunError(
                "gradients of a fxpipe.Sum are summed before they are divided by its count, for which float16 has no "
                "room; write Precision(reduce=torch.bfloat16) or float32"
            )
        self._is_sum = outcome.is_sum

    def _check_rows(self, agreed: Agreed) -> None:
        """With zero=2 replicas sum after each micro-batch, and with 3 behind each stage: they must run the same row."""
        zero = self._reducer.way.zero
        if zero < 2 or self._transport.data_size == 1:
            return
        if zero == 2:
            counts = self._transport.gather_int("data", len(agreed.sizes))
            if len(set(counts)) > 1:
                raise RunError(
                    f"zero=2 sums gradients after each micro-batch, but the replicas have {list(counts)} of them; "
                    "give all as many (drop_last=True in a DataLoader), or write zero=1"
                )
        digests = agreed.plan.row_digests if zero == 2 else agreed.plan.pass_digests
        if len(set(self._transport.gather_int("data", digests[self._transport.pipe_rank or 0]))) > 1:
            raise RunError(
                f"zero={zero} sums gradients in the order of the table, but the replicas' batches are of kinds with "
                "tables of their own; give all replicas batches of one kind, or write zero=1"
            )

    def _shares(self, agreed: Agreed, weights: Sequence[float], training: bool) -> tuple[float, ...]:
        """Each micro-batch's part of the weight of the step, over all replicas where it is more than whether it is 0:
        where the loss is made, or an input is weighted by it. RunError where replicas make different calls."""
        matters = self._transport.pipe_rank == agreed.plan.output_rank or self._options.items is not None
        if self._transport.data_size == 1 or not matters:
            return _normalised(weights)
        everyone = self._transport.gather_int("data", _told(sum(weights), training))
        steps = [number >= 0 for number in everyone]  # whatever else a step may meet for here tells none below 0
        if len(set(steps)) > 1:
            trains, evaluates = ([replica for replica, one in enumerate(steps) if one is way] for way in (True, False))
            raise RunError(
                f"the replicas {trains} make a step and {evaluates} call evaluate, which all ranks call together: call "
                "it on every rank, not under `if rank == 0`, and as often on each replica, with "
                "topo.sampler(dataset), which gives all of them as many rows"
            )
        return _normalised(weights, math.fsum(_weight(number) for number in everyone))

    # what ran

    def record_timeline(self, on: bool = True) -> None:
        """Whether the steps from now on are timed, for ``timeline()``; off by default. The same on every rank."""
        self._recorder.on = on

    def timeline(self) -> Timeline:
        """When each action of the last recorded step ran, in seconds. A collective call of a pipe group.

        The same kind of object as ``schedule.simulate()`` gives: print it, draw it, or ``fxpipe.compare`` it with a
        plan. A GPU's work is timed with events, and this call waits for them.

        Raises:
            RunError: no step was recorded.
        """
        with self._failing_together(FxpipeError):
            self._check_open()
            return self._recorder.timeline()

    def traffic(self) -> Traffic:
        """What this rank moved in the last call and since then: print it. Only of this rank, so no collective call.

        The time for which a call waits for the parameters that an optimizer's step before it has sent counts with that
        call.
        """
        return self._transport.traffic()

    def reschedule(
        self,
        schedule: str | Family = "greedy",
        in_flight: int | Sequence[int] | None = None,
        memory: float | Sequence[float] | None = None,
        activation_bytes: Cost | None = None,
    ) -> Schedule:
        """Rebuilds the table from the costs measured in the last recorded step, for the steps that follow.

        A collective call of all ranks, with the same arguments, between two steps. The costs are each stage's medians
        and the latency of a hop, over replicas their mean. The present table stays where it keeps within the limits and
        the new one would not be 1 % faster.

        Args:
            schedule: the family, as in ``fxpipe.schedules.build``.
            in_flight: the most micro-batches per stage, as there.
            memory: the most bytes per rank, as there.
            activation_bytes: what a stage holds per micro-batch in flight, one number or one per stage; it is not
                measured.

        Raises:
            RunError: no step was recorded.
            ScheduleError: there is no such table. Either is raised on all ranks alike, and nothing has changed then.
        """
        with self._failing_together(FxpipeError):
            self._check_open()
            costs = self._recorder.costs(activation_bytes)
            planners: list[Planner] = []

            def make() -> Plan:
                planners.append(self._planner.rescheduled(with_costs(schedule, costs, in_flight, memory)))
                return planners[0].first

            plan = plan_together(self._transport, ("pipe", "data"), make)
        (self._planner,) = planners
        self._plan = dataclasses.replace(plan, graph=self.stages)
        self._agreement.replan(self._planner)
        return self.schedule

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RunError(f"an earlier step failed ({self._failure}); compile again")

    # gradients

    def set_requires_gradient_sync(self, on: bool) -> None:
        """Whether the calls from now on sum gradients over replicas; the same on every rank.

        Without it gradients are only accumulated, until a call that sums them all.
        """
        self._sync = on

    def _learn_bytes(self, executors: list[Executor]) -> None:
        """After the first step with a kind of batch: what each edge carries, from all ranks."""
        mine = {edge: size for executor in executors for edge, size in executor.bytes_of.items()}
        sizes = {edge: size for part in self._transport.gather("pipe", mine) for edge, size in part.items()}
        self._plan = dataclasses.replace(self._plan, graph=dataclasses.replace(self.stages, bytes_of=sizes))

    # state

    def state_dict(self, full: bool = False) -> dict[str, Tensor]:
        """This rank's parameters and buffers by the model's own names.

        Args:
            full: the whole model's on every rank, which a plain model loads; a collective call of all ranks.
        """
        if not full:
            return self.module.state_dict()
        self._compare_batches(everywhere=False)
        with self._failing_together():
            self._tell_of_last()
            return full_state_dict(self._planner.module, self.module, self._owners, self._transport, self._device)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a plain model's state dict, or this rank's part of one; CheckpointError where it does not fit."""
        load_into(self._planner.module, self.module, state)
        self._originals.update({name: state[name].clone() for name in self._originals if name in state})
        self._originals.update(self._rounded(state))
        for optimizer in self._optimizers:
            optimizer.reload(state)

    def _rounded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What of a state dict parameters have only rounded, where no optimizer has masters of them yet."""
        if self._precision is None:
            return {}
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        return {
            name: state[name].clone()
            for name, parameter in self._module.named_parameters()
            if id(parameter) not in stepped
            and parameter.dtype == self._precision.compute != self._precision.master
            and name in state
            and state[name].dtype.itemsize > parameter.dtype.itemsize
        }

    def close(self) -> None:
        """Gives back the process groups. For programs that compile many times; the last ones end with the process."""
        self._exchange.drop()
        self._reducer.settle()
        self._reducer.close()
        self._transport.close()
        self._failure = self._failure or "it was closed"

    # failing

    def _failing_together(self, *spare: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        return failing_together(self._transport, self._give_up, spare, self._exchange.drop)

    def _give_up(self, reason: str) -> None:
        self._exchange.drop()
        if self._transport.pipe_rank is not None:
            self._failure = reason.splitlines()[0] if reason else "unknown"
        self._transport.abort(reason)


def _normalised(weights: Sequence[float], total: float | None = None) -> tuple[float, ...]:
    total = sum(weights) if total is None else total
    return tuple(weight / total if total else 0.0 for weight in weights)


def _told(weight: float, training: bool) -> int:
    """A weight by its bits, which is 0 or more in training, and below in evaluation."""
    bits: int = struct.unpack("<q", struct.pack("<d", weight))[0]
    return bits if training else ~bits


def _weight(number: int) -> float:
    """What ``_told`` told."""
    weight: float = struct.unpack("<d", struct.pack("<q", max(number, ~number)))[0]
    return weight
