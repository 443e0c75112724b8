"""Actions: binds a rank's instructions to prepared calls, once for each plan. A step runs the calls one by one.

Binding looks up all that a plan fixes: functions, slots, messages, and which actions run at all. The layouts of
messages depend on the sizes of a batch, and the exchange looks them up.

lower → bind → run
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.group_inputs import Joined
from fxpipe.distributed.activity import here
from fxpipe.errors import RunError
from fxpipe.graph.gathering import added
from fxpipe.graph.ranks import named
from fxpipe.graph.stage_graph import Edge
from fxpipe.labels import label
from fxpipe.plan.placement import writes
from fxpipe.plan.plan import Plan
from fxpipe.run.actions.executor import BoundFor, Executor, Fetch, Residuals, StepInput, StepResult, take_out
from fxpipe.run.actions.offload import Offloaded, storages
from fxpipe.run.actions.recompute import RecomputedForward, Run
from fxpipe.run.exchange import Port
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind
from fxpipe.schedules.lower import Compute, Instruction, Receive, Release, Send, is_forward
from fxpipe.seeds import seeded
from fxpipe.stage.awaiting import awaiting
from fxpipe.stage.loss import read_loss, root_weight
from fxpipe.stage.modes import Autocast, within
from fxpipe.stage.stage_calls import Saved, keep_finite
from fxpipe.tensors.dtensors import local
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.autograd import profiler_runs
from fxpipe.torch_compat.tensors import storage_id, version_of

Call = Callable[[], object]


@dataclass(frozen=True)
class Bound:
    """The calls of this process in each step of a plan: one rank's row of the table, or all rows in an order without
    deadlock."""

    kind: BoundFor
    executors: Sequence[Executor]
    calls: Sequence[tuple[Instruction, Call]]
    receives: Sequence[Port]
    """The ports whose receives the calls post, in order."""

    def run(self, step: StepInput) -> StepResult:
        grad = torch.enable_grad if self.kind.training else torch.no_grad
        # Autograd runs a backward under the caller's autocast, and in plain PyTorch the backward is outside of it. So
        # autocast is off here, and each forward turns its own regions on.
        off = [region._replace(enabled=False) for region in self.kind.autocast]
        result = StepResult()
        for executor in self.executors:
            executor.step, executor.result = step, result
        try:
            with grad(), within(off):
                for call in self._labelled() if profiler_runs() else self._plain:
                    call()
        except BaseException:
            for executor in self.executors:
                executor.drop()
            raise
        for executor in self.executors:
            executor.end()
        return result

    @cached_property
    def _plain(self) -> list[Call]:
        return [call for _, call in self.calls]

    def _labelled(self) -> Iterator[Call]:
        """The calls of a profiled step, with labels; posting a receive and freeing a buffer take too little time."""
        graph = self.kind.plan.graph
        for instruction, call in self.calls:
            name = ""
            match instruction:
                case Compute(action) if not isinstance(call, LeftOut):
                    name = f"{action} {graph.names[action.stage]}"
                case Send(message):
                    edge = graph.edges[message.edge]
                    stage = edge.source if message.direction is FORWARD else edge.target
                    name = f"send {stage}{message.direction.value}{message.microbatch} {graph.names[stage]}"
            with label(name) if name else contextlib.nullcontext():
                yield call


def bind(
    plan: Plan,
    rank: int | None,
    executor_of: Callable[[BoundFor, int], Executor],
    runs: tuple[bool, ...],
    training: bool,
    autocast: tuple[Autocast, ...],
) -> Bound:
    """The bound calls of a rank; of all ranks if it is None."""
    kind = BoundFor(plan, runs, training, autocast)
    ranks = range(len(plan.instructions)) if rank is None else [rank]
    binders = {pipe_rank: _Binder(executor_of(kind, pipe_rank)) for pipe_rank in ranks}
    # One process runs the rows of all ranks in an order in which each message is sent before it is taken.
    order = plan.order if rank is None else [(rank, instruction) for instruction in plan.instructions[rank]]
    calls, receives = list[tuple[Instruction, Call]](), list[Port]()
    for owner, instruction in order:
        call = binders[owner].bound(instruction) if training or is_forward(instruction) else None
        if call is not None:
            calls.append((instruction, call))
            if isinstance(instruction, Receive):
                receives.append(binders[owner].executor.port(instruction.message))
    return Bound(kind, [binder.executor for binder in binders.values()], calls, receives)


class _Binder:
    """Binds one rank's instructions, in their order."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._is_left_out = False  # whether the last action is left out, and so takes no message

    def bound(self, instruction: Instruction) -> Call | None:
        """The call of an instruction. None for a message of a micro-batch without weight, which is not sent, and for a
        reduction, which runs after all calls."""
        executor = self.executor
        if isinstance(instruction, Compute):
            action = instruction.action
            self._is_left_out = not executor.runs(action.kind.part_of, action.microbatch)
            return self._action(action)
        if not isinstance(instruction, Receive | Send | Release):
            return None
        message = instruction.message
        if not executor.runs(message.direction, message.microbatch):
            return None
        port, edge = executor.port(message), executor.graph.edges[message.edge]
        if isinstance(instruction, Receive):
            return port.post
        if isinstance(instruction, Send):
            send, slots, slot = port.send, executor.slots, executor.slot(edge, message.direction, message.microbatch)
            return lambda: send(take_out(slots, slot))
        # A release follows the action whose message shows that the sent message was received. Where that action is left
        # out, a later message may show it, or the step's end waits for it.
        if self._is_left_out:
            return None
        if message.direction is BACKWARD or edge.source not in executor.table.ahead:
            return port.release
        sent = executor.maker(edge, message.direction, message.microbatch)

        def wait_and_release() -> None:  # after a forward that the schedule delays
            for on_wait in executor.step.watched.on_wait:
                on_wait(sent)
            port.release()

        return wait_and_release

    def _action(self, action: Action) -> Call:
        runners = {} if self.executor.stage(action).gathered is None else GROUP_RUNNERS
        runner = LeftOut if self._is_left_out else runners.get(action.kind) or RUNNERS[action.kind]
        return runner(self.executor, action)


# --- Actions: each is bound to its function and to the slots of its values ---


class BoundAction:
    """The base of all actions of a row: the order of waiting, running and timing."""

    awaits_copies = False
    """Whether the action needs activations that are copied to the host, or back."""
    names_inputs = False
    """Whether an error in the stage's code is reported with the stage's inputs, which ``run`` leaves in ``arrived``."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.executor, self.stage = action, executor, executor.stage(action)
        self.residuals = executor.residuals.setdefault((action.stage, action.microbatch), Residuals())
        self.takes: Sequence[Fetch] = ()
        self._sums = action.kind.completes_gradients
        self._parameters = list(self.stage.parameters.values())

    def __call__(self) -> None:
        executor, action, stage = self.executor, self.action, self.stage
        parameters, watched = executor.parameters, executor.step.watched
        here.at(action)
        waits = parameters.awaited(action.stage) if action.kind.part_of is FORWARD else None
        if self._sums:
            parameters.before(action)
        for on_wait in watched.on_wait:
            on_wait(action)
        arrived = [take() for take in self.takes]
        if self.awaits_copies:
            self.await_copies()
        for on_start in watched.on_start:
            on_start(action, stage, arrived)
        try:
            made = awaiting(waits, self.run, arrived) if waits else self.run(arrived)
        except BaseException as error:
            executor.report(error, action, arrived if self.names_inputs else ())
            raise
        for on_end in watched.on_end:
            on_end(action, stage, made)
        if self._sums:
            parameters.after(action)

    def await_copies(self) -> None:
        """The rank's stream waits for the copies of activations that the action needs."""
        assert self.residuals.offloaded is not None
        self.residuals.offloaded.wait()

    def leaves_after(self, kind: Kind) -> bool:
        """Whether the micro-batch's activations leave for the host after its action of this kind, F or I."""
        return (self.action.stage, self.action.microbatch) in self.executor.table.leaving(kind)

    def mark_of_copies(self) -> Callable[[], None] | None:
        """The function that tells observers that copies start, or have ended; None if no observer asks."""
        if not (watching := self.executor.step.watched.on_copy):
            return None

        def mark() -> None:
            for on_copy in watching:
                on_copy(self.action)

        return mark

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        """Runs the stage. ``arrived``: the values that ``takes`` returned. Returns the values for other stages, or the
        gradients."""
        return ()

    def bound_run(self) -> Run:
        """The stage's forward, under its own seed and autocast regions, if it has any."""
        executor, action, stage = self.executor, self.action, self.stage
        halved = executor.kind.training and (action.stage, action.microbatch) in executor.table.halves
        forward: Run = stage.forward_in_halves if halved else stage.forward
        autocast, generators = executor.kind.autocast, executor.graph.generators
        seeded_here = {name: each for name, each in generators.items() if each.stage != stage.index}
        if not (stage.draws_random or autocast):
            return forward

        def run(*inputs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if autocast:
                    stack.enter_context(within(autocast))
                if stage.draws_random:
                    seed = executor.step.seed(action.stage, action.microbatch)
                    own = {name: each.value for name, each in seeded_here.items()}
                    stack.enter_context(seeded(seed, executor.device, stage.runs_python, own))
                return forward(*inputs)

        return run


class ForwardAction(BoundAction):
    """F: inputs → the stage's function → slots."""

    names_inputs = True

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        training = executor.kind.training
        self.keeps = training and self.stage.has_backward and executor.runs(BACKWARD, action.microbatch)
        tensors = list(self.stage.tensors.items())
        self._buffers = [tensor for _, tensor in tensors if not isinstance(tensor, nn.Parameter)]
        # Where other ranks run this stage, too, they would lack what it writes into its tensors.
        self._unwritten = tensors if training and len(executor.graph.ranks(action.stage)) > 1 else []
        self.takes = self.bound_inputs()
        self._slots = [executor.slot(edge, FORWARD, action.microbatch) for edge in self.stage.outputs]
        self._run = self.bound_run()
        if self.keeps and (action.stage, action.microbatch) in executor.table.recomputed:
            self._run = self._keeping(self._run)
        if self.keeps and (action.stage, action.microbatch) in executor.table.offloaded:
            self._run = self._offloading(self._run)

    def bound_inputs(self) -> list[Fetch]:
        take, take_input, microbatch = self.executor.take, self.executor.take_input, self.action.microbatch
        return [
            take_input(entry, microbatch) if isinstance(entry, str) else take(entry, FORWARD, microbatch)
            for entry in self.stage.inputs
        ]

    def _keeping(self, run: Run) -> Run:
        """A forward that drops its graph, and that R runs again."""
        executor, stage, residuals = self.executor, self.stage, self.residuals

        def run_and_keep(*inputs: Any) -> Any:
            recomputed = RecomputedForward(
                stage, inputs, executor.effects.of(stage, executor.graph), executor.device, executor.step.proves
            )
            # The graph of this run is dropped at once. R makes it anew shortly before the backward.
            outputs = recomputed.first(run, inputs)
            residuals.recomputed = recomputed
            return outputs, None

        return run_and_keep

    def _offloading(self, run: Run) -> Run:
        """A forward whose activations leave for the host, or the part that W needs after I: O frees their memory, and P
        begins to bring them back."""
        executor, stage, residuals = self.executor, self.stage, self.residuals
        leaves, for_weights = self.leaves_after(Kind.F), self.leaves_after(Kind.I)
        of_batch = [index for index, entry in enumerate(stage.inputs) if isinstance(entry, str)]

        def run_and_offload(*inputs: Any) -> Any:
            # The caller holds the batch, and the model its tensors: a copy of these would free nothing.
            stays = storages([*stage.tensors.values(), *pytree.tree_leaves([inputs[index] for index in of_batch])])
            residuals.offloaded = Offloaded(executor.copies, stays, stage.name)
            with residuals.offloaded.saving():
                results = run(*inputs)
            if for_weights:
                residuals.offloaded.note_for_weights()
            if leaves:
                residuals.offloaded.leave(self.mark_of_copies())
            else:
                residuals.offloaded.stay()
            return results

        return run_and_offload

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        arrived[:] = self.inputs_of(arrived)
        before = [(name, tensor, version_of(tensor)) for name, tensor in self._unwritten] if self._unwritten else ()
        outputs, saved = self._run(*arrived)
        for name, tensor, version in before:
            if version_of(tensor) != version:
                ranks = named(self.executor.graph.placement[self.action.stage])
                raise RunError(f"stage {self.stage.name!r} is on {ranks}, and {writes(name)}")
        if self.stage.returns_result:
            self._take_result(outputs[-1], saved)
        if self.keeps:
            self.residuals.saved = saved
        slots = self.executor.slots
        for slot, value in zip(self._slots, outputs, strict=False):  # the model's result has no slot
            slots[slot] = value if not self._buffers else apart_from(self._buffers, value)
        return outputs

    def inputs_of(self, arrived: list[Any]) -> list[Any]:
        return arrived

    def _take_result(self, result: Any, saved: Saved | None) -> None:
        """Takes the model's result: the loss that backward begins at, or the output of an evaluation. ``saved``: None
        where a recomputation makes the graph."""
        executor, microbatch = self.executor, self.action.microbatch
        if not executor.kind.training:
            executor.result.results[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, result)
            return
        part = read_loss(result)
        if self.keeps and not part.value.requires_grad:
            raise RunError(
                "the loss needs no gradient: nothing that it is computed from is trainable; where that is so for some "
                "micro-batches alone, which plain PyTorch's loss.backward() refuses, too, add what is: "
                "loss + 0 * self.head.weight.sum()"
            )
        share = executor.step.shares[microbatch]
        executor.result.loss.add(part, share, microbatch)
        if saved is not None:
            saved.take_root(part.value, root_weight(part, share, executor.step.per_item))


class Recomputation(BoundAction):
    """R: the forward again, for its graph alone. It sends, counts and writes nothing."""

    names_inputs = True

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self._run = self.bound_run()

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        recomputed, self.residuals.recomputed = self.residuals.recomputed, None
        assert recomputed is not None
        arrived += recomputed.inputs
        outputs, saved = recomputed.second(self._run)
        if self.stage.returns_result and saved is not None:
            part = read_loss(outputs[-1])
            step = self.executor.step
            saved.take_root(part.value, root_weight(part, step.shares[self.action.microbatch], step.per_item))
        self.residuals.saved = saved
        return ()


class Offload(BoundAction):
    """O: the activations have left for the host's memory."""

    awaits_copies = True

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        assert self.residuals.offloaded is not None
        self.residuals.offloaded.release()
        return ()


class Prefetch(BoundAction):
    """P: the activations begin to come back."""

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        assert self.residuals.offloaded is not None
        self.residuals.offloaded.fetch(self.mark_of_copies())
        return ()


class BackwardAction(BoundAction):
    """B or I: gradients of outputs → the stage's backward → slots."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self.takes = [executor.take(edge, BACKWARD, action.microbatch) for edge in self.stage.outputs]
        self.awaits_copies = self.leaves_after(Kind.F)
        self._leaves = self.leaves_after(Kind.I)
        stages = executor.graph.stages
        self.fed = [
            (index, edge)
            for index, edge in enumerate(self.stage.inputs)
            if isinstance(edge, Edge) and stages[edge.source].has_backward
        ]
        self.slots = self.bound_outputs()

    def bound_outputs(self) -> list[int]:
        return [self.executor.slot(edge, BACKWARD, self.action.microbatch) for _, edge in self.fed]

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        executor, residuals = self.executor, self.residuals
        returned: Sequence[Any] = [None] * len(self.stage.inputs)
        saved, residuals.saved = residuals.saved, None
        assert saved is not None
        offloaded, residuals.offloaded = residuals.offloaded, None
        if offloaded is not None and self.awaits_copies:
            offloaded.arrive()
        if self.stage.returns_result:
            arrived.append(True)
        # A loss without weight here still has a backward in stages that other replicas' losses need.
        has_weight = bool(executor.step.shares[self.action.microbatch])
        if self.stage.returns_result and not has_weight and executor.parameters.meets:
            keep_finite(saved.roots[-1])
        if not self.stage.returns_result or has_weight or executor.parameters.meets:
            new = without_gradient(executor.parameters.in_call(self._parameters))
            returned = self.stage.backward(saved, arrived)
            if new:
                give_own_memory(new, (arrived, returned))
            residuals.later = saved.deferred
        if offloaded is not None and self._leaves:
            del saved  # the graph that W does not need
            offloaded.leave_for_weights(residuals.later, self.mark_of_copies())
            residuals.offloaded = offloaded
        self.give(returned)
        return returned

    def give(self, returned: Sequence[Any]) -> None:
        slots = self.executor.slots
        for (index, _), slot in zip(self.fed, self.slots, strict=True):
            slots[slot] = returned[index]


class WeightsAction(BoundAction):
    """W: the gradients of parameters. It does nothing for a stage whose backward cannot be split."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self.awaits_copies = self.leaves_after(Kind.I)

    def run(self, arrived: list[Any]) -> Sequence[Any]:
        later, self.residuals.later = self.residuals.later, None
        offloaded, self.residuals.offloaded = self.residuals.offloaded, None
        if offloaded is not None:
            offloaded.arrive_for_weights(later)
        if later is not None:
            parameters = self.executor.parameters.in_call(self._parameters)
            new, passing = without_gradient(parameters), later.pending
            self.stage.backward.weights(later)
            give_own_memory(new, passing)
        return ()


class LeftOut(BoundAction):
    """An action after F of a micro-batch without weight: it does not run, but the sums of gradients count it."""

    def __call__(self) -> None:
        parameters, action = self.executor.parameters, self.action
        here.at(action)
        if self._sums:
            parameters.before(action)
            parameters.after(action)


class GroupForward(ForwardAction):
    """F of a gathered stage: joins the inputs of the group's micro-batches."""

    def bound_inputs(self) -> list[Fetch]:
        # An input may come in two modes, "batch" and "global", and is taken once: taking it empties its slot.
        takes = {entry: self._each(entry) for entry in dict.fromkeys(self.stage.inputs)}
        self._entries = list(takes)
        return list(takes.values())

    def _each(self, entry: str | Edge) -> Fetch:
        """Takes an input from each micro-batch of the group, or once where a gathered stage made it."""
        executor, action = self.executor, self.action
        if isinstance(entry, str):
            takes = [executor.take_input(entry, microbatch) for microbatch in action.microbatches]
        else:
            takes = [executor.take(entry, FORWARD, microbatch) for microbatch in executor.places(action, entry)]
        return lambda: [take() for take in takes]

    def inputs_of(self, arrived: list[Any]) -> list[Any]:
        action, names = self.action, self.executor.graph.names
        groups, values = self.executor.step.groups, dict(zip(self._entries, arrived, strict=True))
        inputs, joined = list[Any](), list[Joined | None]()
        for entry, mode in zip(self.stage.inputs, self.stage.ways, strict=True):
            value, how = values[entry], None
            if isinstance(entry, str):
                value = groups.of_batch(entry, value, action.microbatches, mode)
            elif mode is None:
                (value,) = value
            else:
                value, how = groups.of_stage(entry.value, names[entry.source], value, action.microbatches, mode)
            inputs.append(value)
            joined.append(how)
        if self.keeps:
            self.residuals.joined = joined
        return inputs


class GroupBackward(BackwardAction):
    """B or I of a gathered stage: cuts each input's gradient into one part for each micro-batch of the group."""

    def bound_outputs(self) -> list[int]:
        executor, action = self.executor, self.action
        edges = dict.fromkeys(edge for _, edge in self.fed)
        return [
            executor.slot(edge, BACKWARD, microbatch) for edge in edges for microbatch in executor.places(action, edge)
        ]

    def give(self, returned: Sequence[Any]) -> None:
        joined, self.residuals.joined = self.residuals.joined, None
        sent: dict[Edge, list[Any]] = {}
        for index, edge in self.fed:
            how = joined[index] if joined is not None else None
            # An input that came in two modes has two gradients, which are summed micro-batch by micro-batch.
            parts = [returned[index]] if how is None else self.executor.step.groups.cut(how, returned[index])
            sent[edge] = parts if edge not in sent else list(map(added, sent[edge], parts))
        parts = [part for each in sent.values() for part in each]
        for slot, part in zip(self.slots, parts, strict=True):
            self.executor.slots[slot] = part


Runner = Callable[[Executor, Action], Call]

RUNNERS: dict[Kind, Runner] = {
    Kind.F: ForwardAction,
    Kind.R: Recomputation,
    Kind.B: BackwardAction,
    Kind.I: BackwardAction,
    Kind.W: WeightsAction,
    Kind.O: Offload,
    Kind.P: Prefetch,
    Kind.OW: Offload,
    Kind.PW: Prefetch,
}
"""Kind → makes the call that runs an action of this kind: a subclass of ``BoundAction``."""

GROUP_RUNNERS: dict[Kind, Runner] = {Kind.F: GroupForward, Kind.B: GroupBackward, Kind.I: GroupBackward}
"""Kind → its runner at gathered stages, where it differs."""


# --- The next micro-batch must not write values on their way to other stages. Autograd makes the first gradient of a
# parameter its ``.grad`` without a copy, if no other reference to that tensor exists. But that gradient may be a view
# of the gradient that goes to an earlier stage, as for a position embedding of one row. Plain PyTorch has used that
# gradient by then. Here the next micro-batch's gradient may be added to ``.grad``, in place, before it is sent.


def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters whose ``.grad`` the next backward may set."""
    return [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]


def give_own_memory(parameters: Iterable[nn.Parameter], passing: Any) -> None:
    """Copies each ``.grad`` that a backward has set and that shares memory with ``passing``, the gradients that the
    backward was given and has returned, in any container."""
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    taken = {storage_id(local(leaf)) for leaf in pytree.tree_leaves(passing) if _has_memory(leaf)}
    for parameter, gradient in gradients:
        if _has_memory(gradient) and storage_id(local(gradient)) in taken:
            parameter.grad = gradient.clone()


def apart_from(buffers: Iterable[Tensor], value: Any) -> Any:
    """A value that leaves a stage, with copies of tensors that share memory with ``buffers``, which somebody may write
    or free: the next forward writes buffers."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value
    leaves = [leaf for leaf in pytree.tree_leaves(value) if _has_memory(leaf) and not leaf.requires_grad]
    if not leaves:
        return value
    taken = {storage_id(local(buffer)) for buffer in buffers if _has_memory(buffer)}
    shared = {id(leaf) for leaf in leaves if storage_id(local(leaf)) in taken}
    return pytree.tree_map(lambda leaf: leaf.clone() if id(leaf) in shared else leaf, value) if shared else value


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
