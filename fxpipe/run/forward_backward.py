"""``ForwardBackward``: the object that ``fxpipe.compile`` returns; replaces forward and backward of a training loop."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from fxpipe.capture.capture_list import CaptureList
from fxpipe.distributed.activity import NOTHING, Alike, announced
from fxpipe.distributed.traffic import Metered, Traffic
from fxpipe.errors import CheckpointError, FxpipeError, RunError, nearest
from fxpipe.forecast.advice import Advice, advise
from fxpipe.forecast.figures import planned_costs, with_figures
from fxpipe.forecast.uneven import saving_of
from fxpipe.graph.cuts import Cuts
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.notebook import preformatted
from fxpipe.numerics.recording import ValueRecorder
from fxpipe.parameters.ownership import RankModule, full_state_dict, load_into
from fxpipe.plan.placement import Place, place_stages
from fxpipe.plan.plan import Plan
from fxpipe.plan.plans import Plans
from fxpipe.plan.together import EVERYONE, plan_together
from fxpipe.progress import log
from fxpipe.run.exchange import Exchange, Mailbox, WireExchange
from fxpipe.run.rank_state import RankState
from fxpipe.run.step.agreement import Call
from fxpipe.run.step.step import Failing, Steps
from fxpipe.run.step.step_outcome import detached
from fxpipe.schedules import Family, ScheduleName, with_costs
from fxpipe.schedules.costs import Cost, Costs
from fxpipe.schedules.families.limits import InFlight
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.seeds import seed_of
from fxpipe.sharding.clip import clip_grad_norm_, grad_norms
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.parameter_groups import first_names, names_of
from fxpipe.stage.with_loss import plain_model
from fxpipe.validation import Expected, check, is_flag, is_number, is_whole, list_of, shown


class ForwardBackward:
    """One function in place of forward and backward: ``loss = forward_backward(*args, **kwargs)``.

    Every rank of a pipe group passes the same batch, or None for inputs that are not in its ``required_inputs``. Every
    rank gets the loss as a detached, 0-dimensional tensor on its device, in at least float32; the host does not wait
    for its value.
    Gradients are complete, averaged over the data axis, in ``.grad`` of this rank's ``parameters()``. One warning
    reports the first loss that is inf or nan. The next call or ``evaluate`` gives this warning, and so does
    ``state_dict(full=True)`` if all ranks form one pipe group: by then the value has reached the host without a wait.
    """

    def __init__(self, transport: Metered, plans: Plans, state: RankState) -> None:
        self.topology = plans.topology
        self.metrics: dict[str, Tensor] = {}
        """The other numbers of the last step's loss dict, as 0-dimensional tensors, of all micro-batches and replicas.
        Integers are added, floating-point numbers averaged by weight as the loss is; a ``Sum`` is Σ total / Σ count.
        ``evaluate`` has the same rule. Tensors with rows are in the output of ``evaluate`` alone."""
        self._transport, self._rank_state = transport, state
        self._module, self._reducer = state.module, state.reducer
        self._made: list[ref[DistributedOptimizer]] = []
        self._clipped: Any = None
        self._steppers: WeakValueDictionary[str, DistributedOptimizer] = WeakValueDictionary()
        self._exchange: Exchange = Mailbox() if transport.pipe_rank is None else WireExchange(transport, state.device)
        self._failing = Failing(transport, self._exchange)
        self._running = self._logged_drift = self._has_stepped = False
        self._steps = Steps(transport, plans, state, self._exchange, self._failing)
        self._plan = self._shown(plans.first)

    # properties and parameters

    @property
    def stages(self) -> StageGraph:
        """The graph of stages. ``print`` shows a table; ``.stages["text"].forward`` can be called and printed."""
        return self._plan.graph

    @property
    def schedule(self) -> Schedule:
        """The schedule that the steps run; ``print`` shows its table."""
        return self._plan.schedule

    @property
    def microbatch_losses(self) -> dict[int, Tensor]:
        """Micro-batch of the last step → its own loss, without a weight; total / count for a ``Sum``.

        Only of the micro-batches with weight whose loss this rank computes: empty on ranks without the last stage. The
        first micro-batch of a group has the group's loss.
        """
        return self._steps.microbatch_losses

    @property
    def cuts(self) -> Cuts | None:
        """The stages that ``boundaries="auto"`` found: print them, save them, or pass them as ``boundaries=``. None
        where the cuts are named or marked."""
        return self._plans.cuts

    @property
    def captures(self) -> CaptureList:
        """The captures of the model. ``print`` shows for each its kind of batch, its guard, and why it was made.

        The list does not change: each access makes a new list. It has the captures that fxpipe remembers, which are 64
        and the captures of the present batch. It is empty for the user's own stages. All ranks of a pipe group have the
        same captures. Not a collective call.

        ``captures.entries`` has for each capture ``kind``, ``guard`` and ``why``, as text.
        """
        return CaptureList.of(self._plans.captures)

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that this rank's stages use; this rank may pass None for all other inputs."""
        return self._steps.agreement.required(self._plan.graph, self._transport.pipe_rank)

    @property
    def module(self) -> RankModule:
        """This rank's parameters and buffers under the model's own names, with the last optimizer step applied."""
        with self._failing.together():
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
        _check_flag(set_to_none=set_to_none)
        if set_to_none or self._reducer.sums.sharded:
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
        """Returns an optimizer ``cls(params, **kw)``; each rank steps its part. A collective call of all ranks.

        Several optimizers may each have some of the parameters. With ``zero`` the all-gather of the stepped parameters
        overlaps the next forward: read them through ``forward_backward``, which waits for the all-gather.
        ``torch.distributed.checkpoint`` saves the optimizer without conversion, see ``DistributedOptimizer``.

        Args:
            cls: an optimizer class of torch, or a callable with the same interface.
            params: parameters or parameter groups; a group may select its parameters by name, by a pattern ("*.bias")
                or by a predicate ``(name, parameter) -> bool``. None: all parameters.
            offload: whether the optimizer state and the step are on the CPU.
            elementwise: whether ``cls`` updates each element independently, so that a parameter can be sharded; None:
                True for the elementwise classes of torch.optim. Other classes get whole tensors, balanced by size.
            **kw: further arguments of ``cls``, such as ``lr``.

        Raises:
            RunError: ``cls`` is LBFGS or SparseAdam; or a name or pattern of a group fits no parameter of the model.
        """
        _check_flag(offload=offload)
        self._steps.check_trained()
        if elementwise is not None:
            _check_flag(elementwise=elementwise)
        # Tied parameters have several names: a group may use any of them.
        own = dict(self.module.named_parameters(remove_duplicate=False))
        whole = dict(self._plans.module.named_parameters(remove_duplicate=False))
        optimizer = DistributedOptimizer(
            cls,
            params,
            kw,
            self._reducer,
            self._transport,
            own=own,
            whole=whole,
            precision=self._plans.options.precision,
            offload=offload,
            originals=self._rank_state.originals,
            elementwise=elementwise,
            cause=self._steps.watch.cause,
            steppers=self._steppers,
            alone=self._stepping,
        )
        self._made.append(ref(optimizer))
        return optimizer

    @property
    def _optimizers(self) -> list[DistributedOptimizer]:
        """The optimizers that the caller still holds."""
        return [optimizer for reference in self._made if (optimizer := reference()) is not None]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, parameters: Any = None
    ) -> Tensor:
        """Scales the gradients so that the norm over the whole model is at most ``max_norm``; returns the norm before.

        The result equals ``torch.nn.utils.clip_grad_norm_`` on the plain model: a tied parameter counts once.
        ``parameters`` selects a part of the model by names, patterns or predicates as in ``optimizer``, or by the
        parameters that each rank has of that part. A collective call of all ranks.
        """
        with self._collective("clip_grad_norm_"):
            pieces = self._reducer.pieces()
            if parameters is not None:
                pieces = list(itertools.chain(*self._part(parameters, "parameters=").values()))
            sharded = self._reducer.shards
            norm = clip_grad_norm_(pieces, self._transport, sharded, max_norm, norm_type, error_if_nonfinite)
            self._steps.norm = norm if parameters is None else None
            self._clipped = float(max_norm), float(norm_type)
            return norm

    def grad_norms(self, patterns: Any = None, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Returns name → the norm of that parameter's gradient: 0-dimensional, float64, on the device, with the same
        bits on every rank.

        Every ``zero`` is supported, and so are parameters sharded over a tensor group. A parameter without a gradient
        has the norm 0. A tied parameter has one entry. A collective call of all ranks.

        Args:
            patterns: selects parameters by names, patterns ("*.bias") or predicates ``(name, parameter) -> bool``;
                None: all parameters.
            norm_type: the order of the norm, or inf for the largest absolute value.

        Raises:
            RunError: an entry of ``patterns`` fits no parameter of the model, or is a parameter, which one rank has.
        """
        with self._collective("grad_norms"):
            part = self._part(patterns, "patterns=", tensors=False)
            return grad_norms(part, self._transport, self._reducer.shards, norm_type)

    def _part(self, selected: Any, asker: str, tensors: bool = True) -> dict[str, list[Piece]]:
        """Returns name → this rank's pieces of that parameter, for the parameters that ``selected`` names."""
        whole = dict(self._plans.module.named_parameters(remove_duplicate=False))
        part: dict[str, list[Piece]] = {name: [] for name in names_of(selected, whole, asker, tensors)}
        first = first_names(whole)
        for piece in self._reducer.pieces():
            part.get(first[piece.name], []).append(piece)
        return part

    def seed(self, stage: int | str, microbatch: int, step: int, replica: int = 0) -> int:
        """Returns the random seed of a stage's forward of a micro-batch, in step ``step``, counted from 0."""
        for number in (microbatch, step, replica):
            if not is_whole(number) or not 0 <= number < 2**63:
                raise RunError(f"seed() is given {shown(number)}; micro-batch, step and replica count from 0")
        return seed_of(self._steps.seed, step, self.stages[stage].index, microbatch, replica)

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs forward, backward and gradient reduction of one batch to completion; returns the detached loss."""
        return self._train([(args, kwargs)], split_evenly=True)

    def step_microbatches(self, microbatches: Sequence[Call]) -> Tensor:
        """Runs a step on micro-batches that the caller has split: ``[(args, kwargs), ...]``; shapes may differ."""
        return self._train(microbatches, split_evenly=False)

    def evaluate(self, *args: Any, outputs: Literal["last", "all", "loss"] = "last", **kwargs: Any) -> Any:
        """Runs forward in eval mode without gradients; returns the model's output. A collective call of all ranks.

        Rows of the micro-batches are concatenated to the rows of this replica's batch. A number, or 0-dimensional
        tensor, is reduced over micro-batches and over the data axis. Integers are summed. Floating-point numbers are
        averaged in at least float32, with the weights of a step's loss (rows or ``loss_weight``). A ``fxpipe.Sum``
        holds the sums of totals and counts. If ``loss_fn`` and ``target=`` are given, the output is the loss. If the
        ``loss_fn`` needs no target, only ``outputs="loss"`` gives the loss. A tensor whose dimension 0, or the inputs'
        batch dimension, does not hold its micro-batch's rows is returned as a list with an entry for each micro-batch.

        Args:
            *args: a batch, as in a call.
            **kwargs: the inputs of the batch that are passed by name.
            outputs: "last": the ranks of the last stage return the output, other ranks None. "all": every rank returns
                the output. "loss": every rank returns the loss alone as a number. A ``Sum`` gives total / count.

        Raises:
            RunError: the replicas' outputs have different numbers.
        """
        return self._evaluate([(args, kwargs)], True, outputs)

    def evaluate_microbatches(
        self, microbatches: Sequence[Call], outputs: Literal["last", "all", "loss"] = "last"
    ) -> Any:
        """Runs ``evaluate`` on micro-batches that the caller has split: ``[(args, kwargs), ...]``; shapes may differ.

        Returns a list with the output of each micro-batch, or of each group of them, as it is; with ``outputs="loss"``
        the loss over all micro-batches and replicas. A collective call of all ranks.
        """
        return self._evaluate(microbatches, False, outputs)

    def _evaluate(self, calls: Sequence[Call], split_evenly: bool, outputs: str) -> Any:
        if outputs not in ("last", "all", "loss"):
            raise RunError(f'outputs is {outputs!r}; it is "last", "all" or "loss"')
        with self._alone():
            return self._steps.evaluate(calls, split_evenly, outputs)

    def _train(self, calls: Sequence[Call], split_evenly: bool) -> Tensor:
        with self._alone():
            self._steps.recorder.begin()
            called = f"forward_backward, step {self._steps.number}{self._steps.which}"
            with announced(called, alike=self._settings()):
                done, bytes_of = self._steps.train(calls, split_evenly)
        if bytes_of is not None:
            self._plan = replace(self._plan, graph=replace(self.stages, bytes_of=bytes_of))
        self.metrics = dict(done.metrics)
        loss: Tensor = detached(done.loss)
        return loss

    def _settings(self) -> Alike:
        """Returns the settings that must be the same on all ranks when the next step begins, besides the batch.

        Only ranks that still hold and step all optimizers compare: a rank without parameters may have dropped some.
        """
        # A rank that has dropped an optimizer does not know that optimizer's settings, so it compares nothing.
        own = [optimizer for optimizer in self._optimizers if optimizer.steps_here]
        if len(own) < len(self._made):
            return NOTHING
        facts: dict[str, Any] = {
            "set_requires_gradient_sync()": self._steps.sync,
            "(max_norm, norm_type) of clip_grad_norm_()": self._clipped,
        }
        for number, optimizer in enumerate(own):
            which = f" of optimizer {number}" if number else ""
            facts[f"the number of calls of optimizer.step(){which}"] = optimizer.steps
            facts[f"the class of optimizer {number}"] = optimizer.kind
        groups = [(optimizer, group) for optimizer in own for group in optimizer.param_groups]
        for index, (optimizer, group) in enumerate(groups):
            for key in sorted(optimizer.user_keys.union(_SCHEDULED)):
                value = group.get(key)
                # reading a tensor's value would wait for the device
                is_plain = isinstance(value, (str, int, float)) or is_number(value) or list_of(is_number)(value)
                facts[f"{key} of parameter group {index}"] = value if is_plain else None
        # A digest has 31 bits of a mark; the digest 0 means that nothing is compared.
        digest = zlib.crc32(repr(facts).encode()) >> 1 or 1
        return Alike(digest, lambda: {name: repr(value) for name, value in facts.items()})

    @contextlib.contextmanager
    def _alone(self, called: str = "forward_backward") -> Iterator[None]:
        """RunError for a nested call, which would use the values and messages of the call that is running."""
        if self._running:
            raise RunError(
                f"{called} is called while a call of forward_backward runs: from a hook, a function that it calls or "
                "another thread; call it when that has returned"
            )
        self._running = True
        try:
            yield
        finally:
            self._running = False

    @contextlib.contextmanager
    def _collective(self, name: str, of_all: bool = True, extends: bool = False) -> Iterator[None]:
        """A collective call between two steps; the caller can go on after an FxpipeError in the call."""
        with self._alone(name), announced(name, of_all, extends), self._failing.together(FxpipeError):
            self._failing.check_open()
            yield

    def _stepping(self, called: str) -> contextlib.AbstractContextManager[None]:
        """``_alone`` for an optimizer's step. RunError, or a log line, if replicas would step by unsummed gradients."""
        self._steps.check_trained()
        if not self._has_stepped:
            self._has_stepped = True
            # Parameters that no group selects belong to no optimizer and would never change.
            named = self._plans.module.named_parameters()
            left = [name for name, parameter in named if parameter.requires_grad and name not in self._steppers]
            if left:
                log(
                    f"fxpipe: no optimizer steps {len(left)} of the model's trainable parameters, first {left[0]!r}; "
                    "give them a parameter group, or freeze them with requires_grad_(False)"
                )
        if self._transport.data_size > 1 and self._steps.has_unsummed:
            fact = f"{called} comes behind a call with set_requires_gradient_sync(False)"
            if self._reducer.shards:
                raise RunError(f"{fact}, and each replica steps a part; set it to True before the last call")
            if not self._logged_drift:
                self._logged_drift = True
                log(f"fxpipe: {fact}: the replicas' parameters drift apart; set it to True before the last call")
        return self._alone(called)

    # measurements

    def record_timeline(self, on: bool = True, memory: bool = False) -> None:
        """Turns timing of later steps for ``timeline()`` on or off; off by default. Call with the same on all ranks.

        Args:
            on: whether later steps are timed.
            memory: whether they also record the bytes around each action, for ``timeline(memory=True)``. On the CPU
                this takes the host about 15 µs for each node of autograd's graph, between the actions.
        """
        _check_flag(on=on, memory=memory)
        self._steps.recorder.on, self._steps.recorder.with_memory = on, on and memory
        self._transport.timed |= on

    def timeline(self, memory: bool = False) -> Timeline:
        """Returns the times of all actions of the last recorded step, in seconds. A collective call of a pipe group.

        ``schedule.simulate()`` returns the same type: print it, draw it, or ``fxpipe.compare`` it with a plan.
        ``spent`` divides each rank's step into compute, waiting for each message, Python between actions, and the parts
        before the first action and after the last; the optimizer's step is not included. Events time the work of a
        GPU, and this call waits for the events.

        Args:
            memory: whether the timeline has the bytes of each rank, at the start and end of each action: ``memory``,
                ``peak_bytes``, and a curve in pictures. On a GPU they are ``torch.cuda.memory_allocated()``, in the
                order in which the host ran the actions. On the CPU they are the activations: what autograd, or a
                recomputation, holds for later actions, without parameters and the batch. The bytes that an action
                takes and frees while it runs are in neither.

        Raises:
            RunError: no step was recorded, or not the bytes that ``memory`` asks for. All ranks raise it.
        """
        _check_flag(memory=memory)
        with self._collective("timeline", of_all=False):
            timeline = self._steps.recorder.timeline(memory)
        plan = partial(planned_costs, self._plans, timeline.schedule)
        return replace(timeline, plan=plan, advice=partial(advise, self._plans, timeline.costs, timeline))

    def advise(self) -> Advice:
        """Returns the one change of ``placement=`` that would shorten a step most, at the measured costs; print it.

        Candidates are another rank, two ranks, all ranks or one rank more for one stage, and two stages exchanged. They
        are simulated at the costs of the last recorded step, averaged over replicas. If the micro-batches of that step
        have so different costs that ``microbatch_cost=`` or ``in_flight=`` of ``compile`` would save 5 % of the step,
        the advice says so. A collective call of all ranks.

        Raises:
            RunError: no step was recorded.
        """
        with self._collective("advise"):
            return advise(self._plans, self._steps.recorder.costs(None), self._steps.recorder.recorded())

    def traffic(self) -> Traffic:
        """Returns the bytes that this rank moved in the last call and since then. Not a collective call.

        A call may wait for parameters that the previous optimizer step is still gathering; this time counts with the
        call that waits. On a GPU, where timing costs the host, only calls after the first ``traffic()`` or
        ``record_timeline()`` time their waits; ``exposed`` of earlier calls is nan. Bytes are always counted.
        """
        return self._transport.traffic()

    def reschedule(
        self,
        schedule: ScheduleName | Family = "greedy",
        in_flight: InFlight | None = None,
        memory: float | Sequence[float] | None = None,
        activation_bytes: Cost | None = None,
        placement: Mapping[str, Place | Literal["all"]] | None = None,
    ) -> Schedule:
        """Rebuilds the schedule of later steps from the costs measured in the last recorded step.

        A collective call of all ranks, with the same arguments, between two steps. The costs are each stage's median
        times in seconds and the latency of a hop, averaged over replicas. The present schedule stays if it keeps within
        the limits and the new schedule would not be 1 % faster. A line on stderr says whether it was kept. It also
        says what ``microbatch_cost=`` and ``in_flight=`` of ``compile`` would save, if it is 5 % of a step or more.

        Args:
            schedule: the family, as in ``fxpipe.schedules.build``.
            in_flight: the most micro-batches per stage, as in ``build``.
            memory: the most bytes per rank, as in ``build``.
            activation_bytes: the bytes that a stage holds per micro-batch in flight, a number or a number per stage;
                None: the value of ``compile``'s family, which was given or derived from shapes.
            placement: the ranks of the stages, as in ``compile``, which must be the present ones.

        Raises:
            RunError: no step was recorded, or ``placement`` would move a stage's parameters.
            PartitionError: ``placement`` does not fit the stages.
            ScheduleError: there is no such schedule. All ranks raise either error, and nothing has changed then.
        """
        with self._collective("reschedule", extends=True):
            self._check_stays(placement)
            costs = self._steps.recorder.costs(activation_bytes)
            note = partial(saving_of, recorded=self._steps.recorder.recorded())
            plans, first = plan_together(
                self._transport,
                EVERYONE,
                lambda: self._plans.rescheduled(with_costs(schedule, costs, in_flight, memory), note),
            )
        # The bytes on the edges were measured, and do not depend on the schedule.
        self._plan = self._shown(replace(first, graph=replace(first.graph, bytes_of=self.stages.bytes_of)), costs)
        self._steps.replan(plans)
        return self.schedule

    def _check_stays(self, placement: Mapping[str, Place | Literal["all"]] | None) -> None:
        """RunError if the placement differs from the present one: parameters and optimizer state do not move."""
        graph, plans = self.stages, self._plans
        if placement is None or place_stages(graph, plans.ranks, placement) == graph.placement:
            return
        cuts = "the same boundaries=" if plans.cuts is None else "boundaries=forward_backward.cuts"
        raise RunError(
            "reschedule() leaves each stage on its rank, and placement= would move parameters and optimizer state: "
            f"save the run, compile the model with {cuts}, placement={dict(placement)}, and load"
        )

    @property
    def _plans(self) -> Plans:
        return self._steps.agreement.plans

    def _shown(self, plan: Plan, measured: Costs | None = None) -> Plan:
        """The plan whose stages, when they are printed, show the bytes and seconds that are known by then."""
        steps = self._steps
        complete = lambda graph: with_figures(steps.agreement.plans, measured, graph)  # noqa: E731
        return replace(plan, graph=replace(plan.graph, complete=complete))

    @contextlib.contextmanager
    def record_values(self, folder: str | os.PathLike[str], *, full: bool = False) -> Iterator[None]:
        """Records the numbers of the calls inside, for ``fxpipe.bisect`` to find where two runs part.

        For each micro-batch it records the inputs, the values that pass between stages, their gradients, and the loss.
        For each parameter it records the gradient after the reduction, and the value after the optimizer's step.
        A record has the type, the shape, a 64-bit hash of the bits, the norm, the largest value, the number of inf and
        nan, and 4 random projections. Each rank appends to a file of its own, and waits for its device at the end of
        each call. The keys do not depend on ranks, schedule, placement or ``zero``. ``evaluate`` is not recorded. Call
        it on every rank.

        Args:
            folder: the folder of the files, the same on every rank.
            full: write the tensors, too, so that differences are exact.

        Raises:
            RunError: the folder cannot be written.
        """
        _check_flag(full=full)
        transport = self._transport
        ranks = 1 if transport.pipe_rank is None else len(transport.ranks("all"))
        recorder = ValueRecorder(folder, transport.rank, ranks, transport.data_rank, full)
        with self._steps.recording_values(recorder):
            yield

    # gradients

    def set_requires_gradient_sync(self, on: bool) -> None:
        """Sets whether later calls sum gradients over replicas. Call with the same value on every rank.

        With False, calls only accumulate gradients, and the next call with True sums them all. Since ranks keep only
        gradient shards, ``zero=2`` still reduces over the shard group in each call, and ``zero=3`` over all replicas.
        """
        _check_flag(on=on)
        self._steps.sync = on

    # state

    def state_dict(self, full: bool = False) -> dict[str, Tensor]:
        """Returns this rank's parameters and buffers by the model's own names.

        Args:
            full: return the whole model's state dict, which a plain model loads; then a collective call of all ranks.
        """
        _check_flag(full=full)
        if not full:
            return self.module.state_dict()
        name = "state_dict(full=True)"
        with self._alone(name), announced(name, of_all=self._reducer.shards), self._failing.together():
            # With replicas or a tensor axis, a single pipe group may call; the warning is a collective of all ranks.
            transport, state = self._transport, self._rank_state
            if transport.ranks("pipe") == transport.ranks("all"):
                self._steps.watch.warn()
            return full_state_dict(plain_model(self._plans.module), self.module, state.owners, transport, state.device)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a plain model's state dict, or this rank's part of it; CheckpointError if the state does not fit."""
        self._steps.check_trained(CheckpointError)
        state = load_into(self._plans.module, self.module, state)
        originals, precision = self._rank_state.originals, self._plans.options.precision
        originals.update({name: state[name].clone() for name in originals if name in state})
        if precision is not None:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            for name, parameter in self._module.named_parameters():
                # Keeps unrounded values of low-precision parameters that no optimizer has master copies of yet.
                is_rounded = name in state and state[name].dtype.itemsize > parameter.dtype.itemsize
                is_low = parameter.dtype == precision.compute != precision.master
                if is_rounded and is_low and id(parameter) not in stepped:
                    originals[name] = state[name].clone()
        # Reload masters and shards, or the next optimizer step would overwrite the model with their old values.
        for optimizer in self._optimizers:
            optimizer.reload(state)

    def __repr__(self) -> str:
        return f"<ForwardBackward of {self.stages!r} by {self.schedule!r} over {self.topology!r}>"

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows: the stages, the picture of the schedule, and its table."""
        return preformatted(str(self.stages)) + self.schedule._repr_html_()

    if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            """AttributeError that names the replacement for an attribute of a model or a tensor."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property has raised, and raises the same error again
            hint = (
                ""
                if name[0] == "_"
                else _ELSEWHERE.get(name) or nearest(name, [other for other in dir(type(self)) if other[0] != "_"])
            )
            # Without name=, Python prints no suggestion of its own, which would contradict the hint.
            raise AttributeError(f"forward_backward has no {name!r}{hint}", obj=self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(
            "forward_backward holds stages and process groups, and is neither copied nor pickled: "
            "copy.deepcopy(forward_backward.module) copies this rank's parameters, and fxpipe.save writes all of it"
        )

    def close(self) -> None:
        """Destroys the process groups. For programs that compile many times; the process's end destroys the last."""
        self._exchange.drop()
        self._reducer.settle()
        self._reducer.close()
        self._transport.close()
        self._failing.close()


_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""Keys that learning-rate and other schedulers set in parameter groups, whether the user passed them or not."""

_FLAG = Expected(is_flag, "True or False")


def _check_flag(**flags: object) -> None:
    check(RunError, dict.fromkeys(flags, _FLAG), **flags)


_ELSEWHERE = {
    "train": "; a call trains, and evaluate() evaluates; flags of single modules are set in the model itself",
    "eval": "; evaluate() is forward only and in eval mode, whatever the model's flags are; a call always trains",
    "backward": "; a call has run it already: gradients are there when it returns",
    "to": "; each rank computes where the model's tensors are when it is compiled: move the model before that",
    "cuda": "; each rank computes where the model's tensors are when it is compiled: move the model before that",
    "forward": "; call forward_backward itself, or evaluate()",
}
"""Attribute of a model or a tensor → a hint at the replacement."""


@contextlib.contextmanager
def alone(forward_backward: ForwardBackward, called: str) -> Iterator[Steps]:
    """The ``Steps`` of ``forward_backward``, for a call outside of the class. RunError while another call runs."""
    if not isinstance(forward_backward, ForwardBackward):
        raise RunError(f"forward_backward is {shown(forward_backward)}; it is what fxpipe.compile returned")
    with forward_backward._alone(called):
        yield forward_backward._steps


def steps_of(forward_backward: ForwardBackward) -> Steps:
    """The ``Steps`` of ``forward_backward``. CheckpointError while a call runs, or the parameters are averages."""
    if not isinstance(forward_backward, ForwardBackward):
        raise CheckpointError(f"forward_backward is {shown(forward_backward)}; it is what fxpipe.compile returned")
    if forward_backward._running or any(optimizer.stepping for optimizer in forward_backward._optimizers):
        raise CheckpointError(
            "it is saved, loaded or averaged while a call of it runs, or a step of its optimizer: from a hook, a "
            "signal handler, a function that it calls or another thread; set a flag there, and save behind "
            "optimizer.step() where it is set"
        )
    forward_backward._steps.check_trained(CheckpointError)
    return forward_backward._steps
