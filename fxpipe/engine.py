"""``ForwardBackward``: what ``fxpipe.compile`` returns, in place of the forward and backward of a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxpipe.agreement import Agreed, Agreement, Call, Options, plan_together
from fxpipe.batch import join
from fxpipe.checkpoint import full_state_dict, load_into
from fxpipe.costs import Cost
from fxpipe.errors import FxpipeError, RunError
from fxpipe.exchange import Exchange, Mailbox, WireExchange
from fxpipe.ir import StageGraph
from fxpipe.lower import Reduce, is_forward
from fxpipe.measure import Recording, clock_offset, has_run, mean_costs, timeline_of
from fxpipe.outcome import Outcome, conclude
from fxpipe.ownership import Ownership, RankModule
from fxpipe.plan import Plan, Planner
from fxpipe.reduce import sum_gradients
from fxpipe.run import Executor, Step
from fxpipe.schedule import Schedule
from fxpipe.schedules import Family, with_costs
from fxpipe.seeds import seed_of
from fxpipe.stopwatch import Stopwatch, clock_of
from fxpipe.timeline import Timeline
from fxpipe.topology import Topology
from fxpipe.transport import Transport, failing_together


class ForwardBackward:
    """One function in place of forward and backward: ``loss = forward_backward(*args, **kwargs)``.

    Every rank of a pipe group passes the same batch, or None for inputs that are not in its ``required_inputs``. The
    loss comes back detached, 0-dimensional, on every rank, on the device and without waiting for it; gradients are
    complete, averaged over the data axis, in ``.grad`` of this rank's ``parameters()``.
    """

    def __init__(
        self,
        planner: Planner,
        plan: Plan,
        topology: Topology,
        transport: Transport,
        module: RankModule,
        owners: Ownership,
        options: Options,
        base_seed: int,
        device: torch.device,
    ) -> None:
        self.topology, self.module = topology, module
        self.metrics: dict[str, Tensor] = {}
        """The other scalars of a loss that came in a dict, averaged as the loss was, after each step."""
        self._planner, self._plan, self._transport = planner, plan, transport
        self._owners, self._options, self._base_seed = owners, options, base_seed
        self._agreement = Agreement(planner, transport, options)
        self._step = 0
        self._outcomes: dict[int, Outcome] = {}
        self._is_sum: bool | None = None  # whether the loss is a fxpipe.Sum, once a step has shown it
        self._failure: str | None = None
        self._device = device
        self._records = False
        self._recording: Recording | None = None
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

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, each once."""
        return self.module.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of this rank's parameters."""
        self.module.zero_grad(set_to_none)

    def optimizer(self, cls: Callable[..., torch.optim.Optimizer], params: Any = None, **kw: Any) -> Any:
        """``cls(params, **kw)``, on every rank, one that owns no parameter included.

        ``params``: parameters or parameter groups out of ``named_parameters()``; None: all of this rank's.
        """
        groups = list(self.parameters()) if params is None else list(params)
        return cls(groups or [{"params": []}], **kw)

    def seed(self, stage: int | str, microbatch: int, step: int, replica: int = 0) -> int:
        """The seed under which a stage's forward of a micro-batch draws, in the step with that number from 0."""
        return seed_of(self._base_seed, step, self.stages[stage].index, microbatch, replica)

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward, backward and gradient reduction of one batch, done when it returns; the loss, detached."""
        return self._train([(args, kwargs)], split_evenly=True)

    def step_microbatches(self, microbatches: Sequence[Call]) -> Tensor:
        """The same for micro-batches already split: ``[(args, kwargs), ...]``, each of its own shape."""
        return self._train(microbatches, split_evenly=False)

    def evaluate(self, *args: Any, outputs: str = "last", **kwargs: Any) -> Any:
        """Forward only, in eval mode and without gradients: the model's output for the whole batch.

        It comes back on the ranks of the last stage (``outputs="last"``; None elsewhere) or on all (``"all"``). Rows
        of the micro-batches are concatenated; a 0-dimensional output is their weighted mean. With a ``loss_fn`` and
        ``target=`` given, the output is the loss.
        """
        if outputs not in ("last", "all"):
            raise RunError(f'outputs is {outputs!r}; it is "last" or "all"')
        with self._evaluating():
            agreed, batches = self._agree([(args, kwargs)], split_evenly=True, training=False)
            with self._failing_together():
                shares = self._shares(self._agreement.weights(agreed, batches))
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
            output = join(ordered, shares, agreed.sizes, self._options.batch_dim)
        if not everywhere or self._transport.pipe_rank is None:
            return output
        cpu = pytree.tree_map_only(Tensor, Tensor.cpu, output)
        output = self._transport.gather("pipe", cpu)[agreed.plan.output_rank]
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), output)

    def _train(self, calls: Sequence[Call], split_evenly: bool) -> Tensor:
        agreed, batches = self._agree(calls, split_evenly, training=True)
        with self._failing_together():
            weights = self._agreement.weights(agreed, batches)
            known = self._outcomes.get(agreed.kind)
            scaled = self._is_sum is not False or self._transport.data_size > 1
            with self._set_aside(scaled or bool(self._owners.tied)):
                executors = self._run(agreed, batches, self._shares(weights), training=True)
                at_output = next((e for e in executors if e.rank == agreed.plan.output_rank), None)
                outcome = conclude(
                    self._transport,
                    at_output.loss if at_output else None,
                    agreed.plan.output_rank,
                    sum(weights),
                    self._device,
                    known,
                )
                self._outcomes[agreed.kind], self._is_sum = outcome, outcome.is_sum
                self._reduce(agreed.plan, outcome.factor)
            if known is None:
                self._learn_bytes(executors)
            if self._records:
                self._recording = Recording(self._step, agreed.plan.schedule, [e.stopwatch for e in executors])
            self._step += 1
            self.metrics = dict(outcome.metrics)
            return outcome.loss

    def _run(
        self, agreed: Agreed, batches: list[dict[str, Any]], shares: Sequence[float], training: bool
    ) -> list[Executor]:
        """Plays this process's part of the table: one rank's row, or all of them in an order that works."""
        step_number, replica = self._step, self._transport.data_rank
        step = Step(
            batches,
            shares,
            lambda stage, microbatch: seed_of(self._base_seed, step_number, stage, microbatch, replica),
            training,
        )
        plan, rank = agreed.plan, self._transport.pipe_rank
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
        clock = clock_of(self._device) if self._records else None
        return Executor(plan.graph, rank, self._exchange, self._device, step, Stopwatch(clock))

    def _agree(self, calls: Sequence[Call], split_evenly: bool, training: bool) -> tuple[Agreed, list[dict[str, Any]]]:
        """The plan for this call, and this rank's inputs per micro-batch. Bad input fails on all ranks alike."""
        self._check_open()
        offer, given = self._agreement.offer(calls, split_evenly, training)
        # A refusal is raised by the whole pipe group alike; but other replicas are mid-step then, and must not wait.
        with self._failing_together(*([FxpipeError] if self._transport.data_size == 1 else [])):
            agreed = self._agreement.settle(offer)
        return agreed, self._agreement.batches(agreed, offer, given)

    @staticmethod
    def _shares(weights: Sequence[float]) -> tuple[float, ...]:
        total = sum(weights)
        return tuple(weight / total if total else 0.0 for weight in weights)

    # what ran

    def record_timeline(self, on: bool = True) -> None:
        """Whether the steps from now on are timed, for ``timeline()``; off by default. The same on every rank."""
        self._records = on

    def timeline(self) -> Timeline:
        """When each action of the last recorded step ran, in seconds. A collective call of a pipe group.

        The same kind of object as ``schedule.simulate()`` gives: print it, draw it, or ``fxpipe.compare`` it with a
        plan. A GPU's work is timed with events, and this call waits for them. RunError where no step was recorded.
        """
        with self._failing_together(FxpipeError):
            recording = self._last_recording("pipe")
            mine = recording.laps(clock_offset(self._transport))
            laps = itertools.chain(*self._transport.gather("pipe", mine))
            return timeline_of(recording.schedule, laps, in_turns=self._transport.pipe_rank is None)

    def reschedule(
        self,
        schedule: str | Family = "greedy",
        in_flight: int | Sequence[int] | None = None,
        memory: float | Sequence[float] | None = None,
        activation_bytes: Cost | None = None,
    ) -> Schedule:
        """Rebuilds the table from the costs measured in the last recorded step, for the steps that follow.

        A collective call of all ranks, with the same arguments, between two steps. The costs are each stage's medians
        and the latency of a hop, over replicas their mean. ``in_flight``, ``memory`` and ``activation_bytes``, which is
        not measured, are as in ``fxpipe.schedules.build``. The present table stays where it keeps within the limits
        and the new one would not be 1 % faster. RunError where no step was recorded, ScheduleError where there is no
        such table, on all ranks alike; then nothing has changed.
        """
        with self._failing_together(FxpipeError):
            self._last_recording("pipe", "data")
            timeline = self.timeline()
            everyone = self._transport.gather("data", timeline.costs if has_run(timeline) else None)
            measured = [costs for costs in everyone if costs is not None]
            if not measured:
                raise RunError(
                    "no micro-batch of the recorded step had weight, so no backward ran; record another step"
                )
            planners: list[Planner] = []

            def make() -> Plan:
                costs = mean_costs(measured, activation_bytes)
                planners.append(self._planner.rescheduled(with_costs(schedule, costs, in_flight, memory)))
                return planners[0].first

            plan = plan_together(self._transport, ("pipe", "data"), make)
        (self._planner,) = planners
        self._plan = dataclasses.replace(plan, graph=self.stages)
        self._agreement.replan(self._planner)
        return self.schedule

    def _last_recording(self, *scopes: str) -> Recording:
        """What was recorded last, or an error on all ranks of these groups alike."""
        self._check_open()
        steps = {self._recording.step if self._recording is not None else -1}
        for scope in scopes:
            steps = set().union(*self._transport.gather(scope, steps))
        if self._recording is None or -1 in steps:
            raise RunError("no step was recorded; call record_timeline() before the step, on every rank")
        if len(steps) > 1:
            raise RunError(f"the ranks last recorded different steps, {sorted(steps)}; call record_timeline() on all")
        return self._recording

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RunError(f"an earlier step failed ({self._failure}); compile again")

    # gradients

    @contextlib.contextmanager
    def _set_aside(self, needed: bool) -> Iterator[None]:
        """Keeps the gradients of earlier calls out of what is scaled and reduced now; adds them again at the end."""
        earlier = [(p, p.grad) for p in self.parameters() if p.grad is not None] if needed else []
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _reduce(self, plan: Plan, factor: Tensor | None) -> None:
        """Scales this step's gradients and sums them over the data axis, and over the owners of tied parameters."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if factor is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self._transport.data_size > 1:
            sum_gradients(parameters, self._transport, "data")
        rank = self._transport.pipe_rank
        if rank is not None:
            by_name = dict(self.module.named_parameters(remove_duplicate=False))
            for step in plan.instructions[rank]:
                if isinstance(step, Reduce):
                    names = self._owners.tied[step.ranks]
                    tied = [by_name[name] for name in names if name in by_name and by_name[name].requires_grad]
                    sum_gradients(tied, self._transport, step.ranks)

    def _learn_bytes(self, executors: list[Executor]) -> None:
        """After the first step with a kind of batch: what each edge carries, from all ranks."""
        mine = {edge: size for executor in executors for edge, size in executor.bytes_of.items()}
        sizes = {edge: size for part in self._transport.gather("pipe", mine) for edge, size in part.items()}
        self._plan = dataclasses.replace(self._plan, graph=dataclasses.replace(self.stages, bytes_of=sizes))

    # state

    def state_dict(self, full: bool = False) -> dict[str, Tensor]:
        """This rank's parameters and buffers by the model's own names; ``full=True``, called on all ranks, the whole
        model's on every rank, which a plain model loads."""
        if not full:
            return self.module.state_dict()
        with self._failing_together():
            return full_state_dict(self._planner.module, self.module, self._owners, self._transport, self._device)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a plain model's state dict, or this rank's part of one; CheckpointError where it does not fit."""
        load_into(self._planner.module, self.module, state)

    def close(self) -> None:
        """Gives back the process groups. For programs that compile many times; the last ones end with the process."""
        self._exchange.drop()
        self._transport.close()
        self._failure = self._failure or "it was closed"

    # failing

    def _failing_together(self, *spare: type[BaseException]) -> contextlib.AbstractContextManager[None]:
        return failing_together(self._transport, self._give_up, spare)

    def _give_up(self, reason: str) -> None:
        self._exchange.drop()
        if self._transport.pipe_rank is not None:
            self._failure = reason.splitlines()[0] if reason else "unknown"
        self._transport.abort(reason)
