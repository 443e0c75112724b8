"""``ForwardBackward``: what ``fxpipe.compile`` returns, in place of the forward and backward of a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch import BatchDim, Description, bind, describe, join, merge, row_count, split, split_rows
from fxpipe.checkpoint import full_state_dict, load_into
from fxpipe.errors import FxpipeError, RunError
from fxpipe.exchange import Exchange, Mailbox, WireExchange
from fxpipe.ir import StageGraph
from fxpipe.lower import forward_only
from fxpipe.outcome import Outcome, conclude
from fxpipe.ownership import Ownership, RankModule
from fxpipe.plan import Pattern, Plan, Planner
from fxpipe.reduce import sum_gradients
from fxpipe.run import Executor, Step
from fxpipe.schedule import Schedule
from fxpipe.seeds import seed_of
from fxpipe.topology import Topology
from fxpipe.transport import PeerLost, Transport


@dataclass(frozen=True)
class Options:
    """What a call needs to know of compile's options."""

    microbatches: int
    batch_dim: BatchDim
    loss_weight: Callable[..., Any] | None
    loss_fn: Callable[..., Any] | None


@dataclass(frozen=True)
class _Agreed:
    """What the ranks of a pipe group agreed on for one kind of batch: all the same."""

    kind: int
    plan: Plan
    description: Description
    sizes: tuple[int, ...]


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
    ) -> None:
        self.topology, self.module = topology, module
        self.metrics: dict[str, Tensor] = {}
        """The other scalars of a loss that came in a dict, averaged as the loss was, after each step."""
        self._planner, self._plan, self._transport = planner, plan, transport
        self._owners, self._options, self._base_seed = owners, options, base_seed
        self._signature = _signature(planner, options.loss_fn)
        self._step = 0
        self._agreed: dict[tuple[int, ...], _Agreed] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._failure: str | None = None
        self._device = _device_of(module)
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
        return self._required(self._plan, self._transport.pipe_rank)

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

    def step_microbatches(self, microbatches: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> Tensor:
        """The same for micro-batches already split: ``[(args, kwargs), ...]``, each of its own shape."""
        return self._train(list(microbatches), split_evenly=False)

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
                executors = self._run(agreed, batches, self._shares(agreed.sizes), training=False)
                return self._collect(agreed, executors, everywhere=outputs == "all")

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

    def _collect(self, agreed: _Agreed, executors: list[Executor], everywhere: bool) -> Any:
        results = {place: result for executor in executors for place, result in executor.results.items()}
        output = None
        if results:
            ordered = [results[place] for place in range(len(results))]
            output = join(ordered, self._shares(agreed.sizes), self._options.batch_dim)
        if not everywhere or self._transport.pipe_rank is None:
            return output
        cpu = torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, output)
        last = agreed.plan.graph.placement[agreed.plan.graph.output_stage]
        output = self._transport.gather("pipe", cpu)[last]
        return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self._device), output)

    def _train(self, calls: list[tuple[Sequence[Any], Mapping[str, Any]]], split_evenly: bool) -> Tensor:
        agreed, batches = self._agree(calls, split_evenly, training=True)
        with self._failing_together():
            weights = self._weights(agreed, batches)
            known = self._outcomes.get(agreed.kind)
            scaled = known is None or known.is_sum or self._transport.data_size > 1
            with self._set_aside(scaled or bool(self._owners.tied)):
                executors = self._run(agreed, batches, self._shares(weights), training=True)
                graph = agreed.plan.graph
                at_output = next((e for e in executors if e.rank == graph.placement[graph.output_stage]), None)
                outcome = conclude(
                    self._transport,
                    at_output.loss if at_output else None,
                    graph.placement[graph.output_stage],
                    sum(weights),
                    self._device,
                    known,
                )
                self._outcomes[agreed.kind] = outcome
                self._reduce(outcome.factor)
            if known is None:
                self._learn_bytes(executors)
            self._step += 1
            self.metrics = dict(outcome.metrics)
            return outcome.loss

    def _run(
        self, agreed: _Agreed, batches: list[dict[str, Any]], shares: Sequence[float], training: bool
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
                if training or forward_only([instruction]):
                    executors[owner].execute(instruction)
        else:
            executors = [self._executor(plan, rank, step)]
            instructions = plan.instructions[rank]
            for instruction in instructions if training else forward_only(instructions):
                executors[0].execute(instruction)
        self._exchange.finish()
        return executors

    def _executor(self, plan: Plan, rank: int, step: Step) -> Executor:
        return Executor(plan.graph, rank, self._exchange, self._device, step)

    # agreeing on a batch

    def _agree(
        self, calls: list[tuple[Sequence[Any], Mapping[str, Any]]], split_evenly: bool, training: bool
    ) -> tuple[_Agreed, list[dict[str, Any]]]:
        """The plan for this batch, and this rank's inputs per micro-batch. Bad input fails on all ranks alike."""
        if self._failure is not None:
            raise RunError(f"an earlier step failed ({self._failure}); compile again")
        try:
            given: Any = [bind(self._signature_for(training), args, kwargs) for args, kwargs in calls]
            mine: Any = (training, split_evenly, *self._modes(), tuple(describe(values) for values in given))
        except TypeError as error:
            given, mine = [], str(error)
        with self._failing_together():
            hashes = self._transport.gather_int("pipe", hash(mine))
            if hashes not in self._agreed:
                items = self._transport.gather("pipe", mine)
        if hashes not in self._agreed:
            self._agreed[hashes] = self._settle(items)
        agreed = self._agreed[hashes]
        if not split_evenly:
            return agreed, given
        return agreed, split(given[0], self._options.batch_dim, agreed.sizes)

    def _modes(self) -> tuple[bytes, bytes]:
        model = self._planner.module
        return (
            bytes(module.training for module in model.modules()),
            bytes(parameter.requires_grad for parameter in model.parameters()),
        )

    def _settle(self, items: Sequence[Any]) -> _Agreed:
        """The same decision on every rank, from what all of them were given."""
        for rank, item in enumerate(items):
            if isinstance(item, str):
                raise RunError(item if len(items) == 1 else f"pipe rank {rank}: {item}")
        training, split_evenly, modes, trainable, _ = items[0]
        for rank, item in enumerate(items):
            if item[:4] != items[0][:4] or len(item[4]) != len(items[0][4]):
                raise RunError(
                    f"pipe ranks 0 and {rank} differ in the call itself, in a module's training flag or in a "
                    "parameter's requires_grad; all ranks of a pipe group make the same call"
                )
        merged = [merge([item[4][place] for item in items]) for place in range(len(items[0][4]))]
        counts = [row_count(description, self._options.batch_dim) for description in merged]
        if split_evenly:
            wanted = self._options.microbatches
            sizes = split_rows(counts[0], wanted if training else min(wanted, counts[0] or wanted))
        else:
            sizes = tuple(1 if count is None else count for count in counts)
        pattern = pattern_of(merged[0], len(sizes), training, self._options.loss_fn, (modes, trainable))
        if any(
            pattern_of(m, len(sizes), training, self._options.loss_fn, (modes, trainable)) != pattern for m in merged
        ):
            raise RunError("the micro-batches of one step must have the same inputs")
        plan = self._planner.plan(pattern)
        self._check_required(plan, items)
        return _Agreed(len(self._agreed), plan, merged[0], sizes)

    def _check_required(self, plan: Plan, items: Sequence[Any]) -> None:
        for rank, item in enumerate(items):
            kinds = {name: given.kind for name, given in item[4][0]}
            for name in self._required(plan, rank if self._transport.pipe_rank is not None else None):
                if kinds.get(name, "none") == "none":
                    raise RunError(f"pipe rank {rank} needs input {name!r}, but was given None")

    def _required(self, plan: Plan, rank: int | None) -> tuple[str, ...]:
        graph = plan.graph
        weighs = self._options.loss_weight is not None and rank == graph.placement[graph.output_stage]
        used = {
            name
            for stage in graph
            if rank is None or graph.placement[stage.index] == rank
            for name in (graph.inputs if weighs else stage.batch_inputs)
        }
        return tuple(name for name in graph.inputs if name in used)

    def _signature_for(self, training: bool) -> inspect.Signature:
        """In evaluation the target of a loss function may be left out."""
        if training or self._options.loss_fn is None:
            return self._signature
        parameters = [p.replace(default=None) if p.name == "target" else p for p in self._signature.parameters.values()]
        return self._signature.replace(parameters=parameters)

    # weights

    def _weights(self, agreed: _Agreed, batches: list[dict[str, Any]]) -> tuple[float, ...]:
        """The weight of each micro-batch, the same on every rank of the pipe group."""
        weigh = self._options.loss_weight
        if weigh is None:
            return tuple(map(float, agreed.sizes))
        graph, rank = agreed.plan.graph, self._transport.pipe_rank
        mine: Any = None
        if rank is None or rank == graph.placement[graph.output_stage]:
            try:
                mine = tuple(float(weigh(*batch.values())) for batch in batches)
                if not all(0 <= weight < float("inf") for weight in mine):
                    mine = f"loss_weight returned {mine}; weights are finite and not negative"
            except Exception as error:
                mine = f"loss_weight failed: {type(error).__name__}: {error}"
        decided = next(item for item in self._transport.gather("pipe", mine) if item is not None)
        if isinstance(decided, str):
            raise RunError(decided)
        return tuple(decided)

    @staticmethod
    def _shares(weights: Sequence[float]) -> tuple[float, ...]:
        total = sum(weights)
        return tuple(weight / total if total else 0.0 for weight in weights)

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

    def _reduce(self, factor: Tensor | None) -> None:
        """Scales this step's gradients and sums them over the data axis, and over the owners of tied parameters."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if factor is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self._transport.data_size > 1:
            sum_gradients(parameters, self._transport, "data")
        if self._transport.pipe_rank is not None:
            by_name = dict(self.module.named_parameters(remove_duplicate=False))
            for owners, names in self._owners.tied.items():
                if self._transport.pipe_rank in owners:
                    tied = [by_name[name] for name in names if name in by_name and by_name[name].requires_grad]
                    sum_gradients(tied, self._transport, owners)

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
        load_into(self.module, state)

    # failing

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Whatever fails here fails on every rank: connections are closed, so that nobody waits for this one."""
        lost: PeerLost | None = None
        try:
            yield
        except PeerLost as error:
            lost = error.with_traceback(None)
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise
        if lost is not None:  # outside of the handler, whose traceback would keep the connections open
            reason = self._transport.explain(lost)
            self._give_up(reason)
            raise RunError(f"another rank failed: {reason}")

    def _give_up(self, reason: str) -> None:
        self._failure = reason.splitlines()[0] if reason else "unknown"
        self._exchange.drop()
        self._transport.abort(reason)


def pattern_of(
    description: Description,
    microbatches: int,
    training: bool,
    loss_fn: Callable[..., Any] | None,
    modes: tuple[bytes, bytes],
) -> Pattern:
    """The capture that a batch like this needs."""
    with_loss = loss_fn is not None and (training or dict(description)["target"].kind != "none")
    relevant = [(name, given) for name, given in description if with_loss or loss_fn is None or name != "target"]
    return Pattern(
        inputs=tuple(name for name, given in relevant if given.kind == "input"),
        fixed=tuple((name, given.detail) for name, given in relevant if given.kind != "input"),
        microbatches=microbatches,
        with_loss=with_loss,
        training=modes[0],
        trainable=modes[1],
    )


def _signature(planner: Planner, loss_fn: Callable[..., Any] | None) -> inspect.Signature:
    from fxpipe.trace import Request

    if isinstance(planner.model, StageGraph):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in planner.model.inputs])
    return Request.signature(planner.model, loss_fn)


def _device_of(module: nn.Module) -> torch.device:
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if _uses_nccl() else torch.device("cpu")


def _uses_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "gloo"


__all__ = ["ForwardBackward", "FxpipeError", "Options", "pattern_of"]
