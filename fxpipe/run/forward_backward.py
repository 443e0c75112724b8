"""``ForwardBackward``: what ``fxpipe.compile`` returns, in place of the forward and backward of a training loop."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from fxpipe.distributed.activity import NOTHING, Alike, announced
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.traffic import Metered, Traffic
from fxpipe.errors import CheckpointError, FxpipeError, RunError, nearest
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.graph.with_loss import plain_model
from fxpipe.notebook import preformatted
from fxpipe.parameters.ownership import RankModule, full_state_dict, load_into, tensors_of
from fxpipe.plan.agreement import Call
from fxpipe.plan.together import planner_together
from fxpipe.progress import log
from fxpipe.run.exchange import Exchange, Mailbox, WireExchange
from fxpipe.run.rank_state import RankState
from fxpipe.run.step.step import Failing, Steps
from fxpipe.run.step.step_outcome import detached
from fxpipe.schedules import Family, ScheduleName, with_costs
from fxpipe.schedules.costs import Cost
from fxpipe.schedules.schedule import Schedule, Timeline
from fxpipe.seeds import seed_of
from fxpipe.sharding.clip import clip_grad_norm_, grad_norms
from fxpipe.sharding.distributed_optimizer import DistributedOptimizer
from fxpipe.sharding.gradients import Piece
from fxpipe.sharding.parameter_groups import first_names, names_of
from fxpipe.validation import Expected, check, is_flag, is_number, is_whole, list_of, shown


class ForwardBackward:
    """One function in place of forward and backward: ``loss = forward_backward(*args, **kwargs)``.

    Every rank of a pipe group passes the same batch, or None for inputs that are not in its ``required_inputs``. The
    loss comes back detached, 0-dimensional, on every rank, on the device and without waiting for it; gradients are
    complete, averaged over the data axis, in ``.grad`` of this rank's ``parameters()``. The first loss that is inf or
    nan is reported in one warning, by the call after it or ``evaluate``, and by ``state_dict(full=True)`` where
    all ranks are one pipe group: by then it is known without having waited for it.
    """

    def __init__(self, topology: Topology, transport: Metered, state: RankState) -> None:
        self.topology = topology
        self.metrics: dict[str, Tensor] = {}
        """The other scalars of a loss that came in a dict, averaged as the loss was, after each step."""
        self._transport, self._state = transport, state
        self._planner, self._plan = state.planner, state.planner.first
        self._module, self._reducer = state.module, state.reducer
        self._made: list[ref[DistributedOptimizer]] = []
        self._clipped: Any = None
        self._steppers: WeakValueDictionary[str, DistributedOptimizer] = WeakValueDictionary()
        self._exchange: Exchange = Mailbox() if transport.pipe_rank is None else WireExchange(transport, state.device)
        self._failing = Failing(transport, self._exchange)
        self._running = self._logged_drift = self._has_stepped = False
        self._steps = Steps(topology, transport, state, self._exchange, self._failing)

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
        return self._steps.agreement.required(self._plan.graph, self._transport.pipe_rank)

    @property
    def module(self) -> RankModule:
        """This rank's parameters and buffers under the model's own names, as the last optimizer step has left them."""
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
        """``cls(params, **kw)``; each rank steps its part. A collective call of all ranks.

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
        _check_flag(offload=offload)
        if elementwise is not None:
            _check_flag(elementwise=elementwise)
        # Tied parameters have several names: a group may use any of them.
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
            precision=self._planner.options.precision,
            offload=offload,
            originals=self._state.originals,
            elementwise=elementwise,
            cause=self._steps.watch.cause,
            steppers=self._steppers,
            alone=self._stepping,
        )
        self._made.append(ref(optimizer))
        return optimizer

    @property
    def _optimizers(self) -> list[DistributedOptimizer]:
        """Those that are still in use."""
        return [optimizer for made in self._made if (optimizer := made()) is not None]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, parameters: Any = None
    ) -> Tensor:
        """Scales the gradients so that the norm of the whole model's is at most ``max_norm``; returns that norm.

        As ``torch.nn.utils.clip_grad_norm_`` does on the plain model: a tied parameter counts once. ``parameters``: a
        part of the model, by names, patterns or predicates as ``optimizer`` takes them, or each rank's own of them. A
        collective call of all ranks.
        """
        with self._collective("clip_grad_norm_"):
            pieces = self._reducer.pieces()
            if parameters is not None:
                pieces = list(itertools.chain(*self._part(parameters, "parameters=").values()))
            sharded = self._reducer.shards
            norm = clip_grad_norm_(pieces, self._transport, sharded, max_norm, norm_type, error_if_nonfinite)
            self._clipped = float(max_norm), float(norm_type)
            return norm

    def grad_norms(self, patterns: Any = None, norm_type: float = 2.0) -> dict[str, Tensor]:
        """The norm of each parameter's gradient, by its name in the model: 0-dimensional, float64, on the device, the
        same bits on every rank.

        For every ``zero``, and of what lies over a tensor group; 0 where there is no gradient. A tied parameter is
        there once. A collective call of all ranks.

        Args:
            patterns: of which parameters, by names, patterns ("*.bias") or predicates ``(name, parameter) -> bool``;
                None: of all.
            norm_type: the order, or inf for the largest gradient.

        Raises:
            RunError: one of ``patterns`` fits no parameter of the model, or is a parameter, which one rank has.
        """
        with self._collective("grad_norms"):
            part = self._part(patterns, "patterns=", tensors=False)
            return grad_norms(part, self._transport, self._reducer.shards, norm_type)

    def _part(self, asked: Any, asker: str, tensors: bool = True) -> dict[str, list[Piece]]:
        """The names of some parameters, or of all, and this rank's pieces of each."""
        whole = dict(self._planner.module.named_parameters(remove_duplicate=False))
        part: dict[str, list[Piece]] = {name: [] for name in names_of(asked, whole, asker, tensors)}
        first = first_names(whole)
        for piece in self._reducer.pieces():
            part.get(first[piece.name], []).append(piece)
        return part

    def seed(self, stage: int | str, microbatch: int, step: int, replica: int = 0) -> int:
        """The seed under which a stage's forward of a micro-batch draws, in the step with that number from 0."""
        for number in (microbatch, step, replica):
            if not is_whole(number) or not 0 <= number < 2**63:
                raise RunError(f"seed() is given {shown(number)}; micro-batch, step and replica count from 0")
        return seed_of(self._steps.seed, step, self.stages[stage].index, microbatch, replica)

    # running

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward, backward and gradient reduction of one batch, done when it returns; the loss, detached."""
        return self._train([(args, kwargs)], split_evenly=True)

    def step_microbatches(self, microbatches: Sequence[Call]) -> Tensor:
        """A call for micro-batches already split: ``[(args, kwargs), ...]``, each of its own shape."""
        return self._train(microbatches, split_evenly=False)

    def evaluate(self, *args: Any, outputs: Literal["last", "all", "loss"] = "last", **kwargs: Any) -> Any:
        """Forward only, in eval mode and without gradients: the model's output. A collective call of all ranks.

        Rows of the micro-batches are concatenated, and are those of this replica's batch. A 0-dimensional tensor is the
        whole batch's, over the data axis, too: a fraction is the mean, weighted as the loss of a step is (by rows or
        ``loss_weight``), an integer the sum; a ``fxpipe.Sum`` comes back with the sums of totals and counts. With a
        ``loss_fn`` and ``target=`` given, the output is the loss; with one that needs no target, for
        ``outputs="loss"`` alone. A tensor without its micro-batch's rows in dimension 0, or in the inputs', comes as a
        list, one for each micro-batch.

        Args:
            *args: a batch, as in a call.
            **kwargs: its inputs that are given by name.
            outputs: "last": the output comes back on the ranks of the last stage, and None elsewhere; "all": on all;
                "loss": the loss alone, a number on all ranks, of a ``Sum`` total / count.

        Raises:
            RunError: the replicas' outputs have different numbers.
        """
        if outputs not in ("last", "all", "loss"):
            raise RunError(f'outputs is {outputs!r}; it is "last", "all" or "loss"')
        with self._alone():
            return self._steps.evaluate((args, kwargs), outputs)

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
        """What was set between two steps that must be the same on all ranks, beside the batch of the next one.

        Compared by ranks that have and step all optimizers: one without parameters may have dropped its own.
        """
        # A rank that has lost an optimizer cannot say what the others of it were given, and compares nothing.
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
            facts[f"the class of optimizer {number}"] = optimizer.made
        groups = [(optimizer, *entry) for optimizer in own for entry in enumerate(optimizer.param_groups)]
        for place, (optimizer, number, group) in enumerate(groups):
            # An optimizer that looks across parameters finds other numbers on other ranks.
            is_everywhere = optimizer.everywhere >> number & 1
            found = [key for key, value in group.items() if is_everywhere and isinstance(value, float)]
            for key in sorted(optimizer.given.union(_SCHEDULED, found)):
                value = group.get(key)
                # a device would be waited for a tensor's
                is_plain = isinstance(value, (str, int, float)) or is_number(value) or list_of(is_number)(value)
                facts[f"{key} of parameter group {place}"] = value if is_plain else None
        # A digest has 31 bits of a mark; 0 would say that nothing is compared.
        digest = zlib.crc32(repr(facts).encode()) >> 1 or 1
        return Alike(digest, lambda: {name: repr(value) for name, value in facts.items()})

    @contextlib.contextmanager
    def _alone(self, called: str = "forward_backward") -> Iterator[None]:
        """RunError for a call from inside of a call, whose values and messages it would take."""
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
        """A collective call between two steps, after whose errors one can go on."""
        with self._alone(name), announced(name, of_all, extends), self._failing.together(FxpipeError):
            self._failing.check_open()
            yield

    def _stepping(self, called: str) -> contextlib.AbstractContextManager[None]:
        """As ``_alone``, of an optimizer. RunError, or a word, where replicas would step by gradients of their own."""
        if not self._has_stepped:
            self._has_stepped = True
            # a group names its parameters, and means no others: those that no optimizer has would stay as they are
            named = self._planner.module.named_parameters()
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

    # what ran

    def record_timeline(self, on: bool = True) -> None:
        """Whether the steps from now on are timed, for ``timeline()``; off by default. The same on every rank."""
        _check_flag(on=on)
        self._steps.recorder.on = on
        self._transport.timed |= on

    def timeline(self) -> Timeline:
        """When each action of the last recorded step ran, in seconds. A collective call of a pipe group.

        The same kind of object as ``schedule.simulate()`` gives: print it, draw it, or ``fxpipe.compare`` it with a
        plan. ``spent`` shows how each rank's step divides: compute, waiting for which message, Python between actions,
        and what lies before the first and after the last; its optimizer's step does not belong to it. A GPU's work is
        timed with events, and this call waits for them.

        Raises:
            RunError: no step was recorded.
        """
        with self._collective("timeline", of_all=False):
            return self._steps.recorder.timeline()

    def traffic(self) -> Traffic:
        """What this rank moved in the last call and since then: print it. Only of this rank, so no collective call.

        The time for which a call waits for the parameters that an optimizer's step before it has sent counts with that
        call. On a GPU, where timing costs the host, waits are timed in the calls behind the first ``traffic()`` or
        ``record_timeline()``; in those before it ``exposed`` is nan. Bytes are always counted.
        """
        return self._transport.traffic()

    def reschedule(
        self,
        schedule: ScheduleName | Family = "greedy",
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
            activation_bytes: what a stage holds per micro-batch in flight, one number or one per stage; None: as the
                family of ``compile`` has it, given or derived from shapes.

        Raises:
            RunError: no step was recorded.
            ScheduleError: there is no such table. Either is raised on all ranks, and nothing has changed then.
        """
        with self._collective("reschedule", extends=True):
            costs = self._steps.recorder.costs(activation_bytes)
            self._planner = planner_together(
                self._transport,
                lambda: self._planner.rescheduled(with_costs(schedule, costs, in_flight, memory)),
            )
        # The bytes on the edges were measured, and do not depend on the table.
        first = self._planner.first
        self._plan = replace(first, graph=replace(first.graph, bytes_of=self.stages.bytes_of))
        self._steps.replan(self._planner)
        return self.schedule

    # gradients

    def set_requires_gradient_sync(self, on: bool) -> None:
        """Whether the calls from now on sum gradients over replicas; the same on every rank.

        Without it gradients are only accumulated, until a call that sums them all. So that no more than shards is kept,
        each call reduces all the same: with ``zero=2`` over the shard group, with ``zero=3`` over all replicas.
        """
        _check_flag(on=on)
        self._steps.sync = on

    # state

    def state_dict(self, full: bool = False) -> dict[str, Tensor]:
        """This rank's parameters and buffers by the model's own names.

        Args:
            full: the whole model's on every rank, which a plain model loads; a collective call of all ranks.
        """
        _check_flag(full=full)
        if not full:
            tensors_of(self._planner.module)
            return self.module.state_dict()
        name = "state_dict(full=True)"
        with self._alone(name), announced(name, of_all=self._reducer.shards), self._failing.together():
            # beside other replicas, or on a tensor axis, one pipe group may ask alone, and would wait for all ranks
            transport, state = self._transport, self._state
            if transport.ranks("pipe") == transport.ranks("all"):
                self._steps.watch.warn()
            return full_state_dict(
                plain_model(self._planner.module), self.module, state.owners, transport, state.device
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads a plain model's state dict, or this rank's part of one; CheckpointError where it does not fit."""
        load_into(self._planner.module, self.module, state)
        originals, precision = self._state.originals, self._planner.options.precision
        originals.update({name: state[name].clone() for name in originals if name in state})
        if precision is not None:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            for name, parameter in self._module.named_parameters():
                # what parameters have only rounded, where no optimizer has masters of them yet
                is_rounded = name in state and state[name].dtype.itemsize > parameter.dtype.itemsize
                is_low = parameter.dtype == precision.compute != precision.master
                if is_rounded and is_low and id(parameter) not in stepped:
                    originals[name] = state[name].clone()
        # Masters and shards follow the model, or the next step would write their old values over it.
        for optimizer in self._optimizers:
            optimizer.reload(state)

    def __repr__(self) -> str:
        return f"<ForwardBackward of {self.stages!r} by {self.schedule!r} over {self.topology!r}>"

    def _repr_html_(self) -> str:
        """Behind a cell of a notebook: its stages, the picture of the plan, and the table."""
        return preformatted(str(self.stages)) + self.schedule._repr_html_()

    if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            """Says what stands in its place, of what a model or a tensor would have."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property has failed, and fails again as it did
            hint = (
                ""
                if name[0] == "_"
                else _ELSEWHERE.get(name) or nearest(name, [known for known in dir(type(self)) if known[0] != "_"])
            )
            raise AttributeError(f"forward_backward has no {name!r}{hint}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(
            "forward_backward holds stages and process groups, and is neither copied nor pickled: "
            "copy.deepcopy(forward_backward.module) copies this rank's parameters, and fxpipe.save writes all of it"
        )

    def close(self) -> None:
        """Gives back the process groups. For programs that compile many times; the last ones end with the process."""
        self._exchange.drop()
        self._reducer.settle()
        self._reducer.close()
        self._transport.close()
        self._failing.close()


_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""What schedulers set in parameter groups, whether it was given or not."""

_FLAG = Expected(is_flag, "True or False")


def _check_flag(**given: object) -> None:
    check(RunError, dict.fromkeys(given, _FLAG), **given)


_ELSEWHERE = {
    "train": "; a call trains, and evaluate() evaluates; flags of single modules are set in the model itself",
    "eval": "; evaluate() is forward only and in eval mode, whatever the model's flags are; a call always trains",
    "backward": "; a call has run it already: gradients are there when it returns",
    "to": "; each rank computes where the model's tensors are when it is compiled: move the model before that",
    "cuda": "; each rank computes where the model's tensors are when it is compiled: move the model before that",
    "forward": "; call forward_backward itself, or evaluate()",
}
"""What stands in place of what a model or a tensor has."""


def steps_of(forward_backward: ForwardBackward) -> Steps:
    """What makes its steps, for ``fxpipe.save`` and ``load`` between two of them. CheckpointError where a call runs."""
    if not isinstance(forward_backward, ForwardBackward):
        raise CheckpointError(f"forward_backward is {shown(forward_backward)}; it is what fxpipe.compile returned")
    if forward_backward._running or any(optimizer.stepping for optimizer in forward_backward._optimizers):
        raise CheckpointError(
            "it is saved or loaded while a call of it runs, or a step of its optimizer: from a hook, a signal handler, "
            "a function that it calls or another thread; set a flag there, and save behind optimizer.step() where it "
            "is set"
        )
    tensors_of(forward_backward._planner.module)  # which refuses what would be lost
    return forward_backward._steps
