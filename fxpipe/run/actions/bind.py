"""Bind: a rank's instructions → prepared calls, once for each plan. A step runs them one after another.

Whatever a plan fixes is looked at here: functions, slots, messages, and which actions are run at all. What goes by the
sizes of a batch, how messages look, the exchange looks up.

lower → bind → run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from fxpipe.distributed.activity import here
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.graph.gathering import added
from fxpipe.graph.loss import read_loss, root_weight
from fxpipe.graph.modes import within
from fxpipe.graph.stage_graph import Edge, StageGraph
from fxpipe.labels import label
from fxpipe.run.actions.actions import BackwardAction, ForwardAction, LeftOut, Outputs, Run, run_of
from fxpipe.run.actions.executor import BoundFor, Executor, Fetch, StepInput, StepResult, take_out
from fxpipe.run.actions.group_inputs import Joined
from fxpipe.run.actions.own_memory import give_own_memory, without_gradient
from fxpipe.run.actions.recompute import Kept, without_graph
from fxpipe.run.wire.exchange import Port
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Release, Send, is_forward
from fxpipe.torch_compat import profiler_runs

Call = Callable[[], object]


@dataclass(frozen=True)
class Bound:
    """What this process runs of a table in each step of a plan: one rank's row, or all of them in an order
    that works."""

    kind: BoundFor
    executors: Sequence[Executor]
    calls: Sequence[tuple[Instruction, Call]]
    receives: Sequence[Port]
    """What they post, in order."""

    def run(self, step: StepInput, stopwatch: Callable[[], Stopwatch]) -> list[StepResult]:
        """Runs a step. Each rank has a stopwatch of its own."""
        grad = torch.enable_grad if self.kind.training else torch.no_grad
        off = [region._replace(enabled=False) for region in self.kind.autocast]
        for executor in self.executors:
            executor.begin(step, stopwatch())
        try:
            with grad(), within(off):
                for _, call in labelled(self.calls, self.kind.plan.graph) if profiler_runs() else self.calls:
                    call()
        except BaseException:
            for executor in self.executors:
                executor.drop()
            raise
        return [executor.end() for executor in self.executors]


def bind(kind: BoundFor, rank: int | None, executor_of: Callable[[int], Executor]) -> Bound:
    """The calls of a rank; None: of all."""
    plan = kind.plan
    ranks = range(len(plan.instructions)) if rank is None else [rank]
    executors = {one: executor_of(one) for one in ranks}
    binders = {one: _Binder(executor) for one, executor in executors.items()}
    order = plan.order if rank is None else [(rank, instruction) for instruction in plan.instructions[rank]]
    calls = []
    for owner, instruction in order:
        call = binders[owner].bound(instruction) if kind.training or is_forward(instruction) else None
        if call is not None:
            calls.append((instruction, call))
    receives = [executors[step.message.receiver].port(step.message) for step, _ in calls if isinstance(step, Receive)]
    return Bound(kind, list(executors.values()), calls, receives)


class _Binder:
    """Binds one rank's instructions, in their order."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._is_left_out = False  # whether the last action is, and so takes no message

    def bound(self, instruction: Instruction) -> Call | None:
        """None for what has no part in this kind of batch."""
        executor = self._executor
        match instruction:
            case Compute(action):
                self._is_left_out = not executor.runs(action.op, action.microbatch)
                return self._action(action)
            case Receive(message) if executor.runs(message.op, message.microbatch):
                return executor.port(message).post
            case Send(message) if executor.runs(message.op, message.microbatch):
                return self._send(message)
            # It stands behind the action whose message shows that this one was received. Where that action is left out,
            # a later one's message may show it, or the step's end waits for it.
            case Release(message) if executor.runs(message.op, message.microbatch) and not self._is_left_out:
                return self._release(message)
            case _:
                return None  # a message about a micro-batch without weight, or a reduction, for which all must be over

    def _send(self, message: Message) -> Call:
        executor, send = self._executor, self._executor.port(message).send
        slots, slot = executor.slots, executor.slot(executor.graph.edges[message.edge], message.op, message.microbatch)
        return lambda: send(take_out(slots, slot))

    def _release(self, message: Message) -> Call:
        """Of a stage that is held back it is waited for."""
        executor, release = self._executor, self._executor.port(message).release
        source = executor.graph.edges[message.edge].source
        if message.op is not Op.F or source not in executor.table.ahead:
            return release

        def wait() -> None:
            executor.stopwatch.wait()
            release()

        return wait

    def _action(self, action: Action) -> Call:
        executor = self._executor
        stage = executor.stage(action)
        if self._is_left_out:
            return LeftOut(executor, action)
        if action.op is Op.F:
            forward = ForwardAction(executor, action) if stage.gathered is None else GroupForward(executor, action)
            if (action.stage, action.microbatch) in executor.table.recomputed and executor.has_backward(action):
                forward.run = Keeping(executor, action, forward.run)
            return forward
        if action.op is Op.R:
            return Recomputation(executor, action)
        if action.op is Op.W:
            return WeightsAction(executor, action)
        return BackwardAction(executor, action) if stage.gathered is None else GroupBackward(executor, action)


class GroupForward(ForwardAction):
    """F of a gathered stage: each input is put together of what has come from the group's micro-batches."""

    def _bound_inputs(self) -> list[Fetch]:
        takes: dict[str | Edge, Fetch] = {}
        for entry in self.stage.inputs:
            if entry not in takes:  # it may come in two ways, "batch" and "global"
                takes[entry] = self._each(entry)
        self._ways = list(takes)
        return list(takes.values())

    def _each(self, entry: str | Edge) -> Fetch:
        """Takes an input from each micro-batch, or, where a group made it, as one."""
        executor, action = self._executor, self.action
        if isinstance(entry, str):
            takes = [executor.take_input(entry, place) for place in action.microbatches]
        else:
            takes = [executor.take(entry, Op.F, place) for place in executor.places(action, entry)]
        return lambda: [take() for take in takes]

    def _inputs(self, arrived: list[Any]) -> list[Any]:
        found = dict(zip(self._ways, arrived, strict=True))
        parts_of = [found[entry] for entry in self.stage.inputs]
        try:
            inputs, joined = self._joined(parts_of)
        except BaseException as error:
            self._executor.report(error, self.action, [parts[0] for parts in parts_of])
            raise
        if self._keeps:
            self._held.joined = joined
        return inputs

    def _joined(self, parts_of: Sequence[list[Any]]) -> tuple[list[Any], list[Joined | None]]:
        groups, microbatches, names = self._executor.step.groups, self.action.microbatches, self._executor.graph.names
        inputs, joined = list[Any](), list[Joined | None]()
        for entry, mode, parts in zip(self.stage.inputs, self.stage.ways, parts_of, strict=True):
            how = None
            if isinstance(entry, str):
                value = groups.of_batch(entry, parts, microbatches, mode)
            elif mode is None:
                (value,) = parts
            else:
                value, how = groups.of_stage(entry.value, names[entry.source], parts, microbatches, mode)
            inputs.append(value)
            joined.append(how)
        return inputs, joined


class GroupBackward(BackwardAction):
    """B or I of a gathered stage: each input's gradient is cut into those of the group's micro-batches."""

    def _bound_outputs(self) -> list[int]:
        executor, action = self._executor, self.action
        edges = dict.fromkeys(edge for _, edge in self._fed)
        return [executor.slot(edge, Op.B, place) for edge in edges for place in executor.places(action, edge)]

    def _give(self, returned: Sequence[Any]) -> None:
        joined, self._held.joined = self._held.joined, None
        sent: dict[Edge, list[Any]] = {}
        for place, edge in self._fed:
            how = joined[place] if joined is not None else None
            parts = [returned[place]] if how is None else self._executor.step.groups.cut(how, returned[place])
            sent[edge] = parts if edge not in sent else list(map(added, sent[edge], parts))
        parts = [part for each in sent.values() for part in each]
        for slot, part in zip(self._slots, parts, strict=True):
            self._executor.slots[slot] = part


class WeightsAction:
    """W; of a stage that cannot leave anything to it, nothing."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.stage, self._executor = action, executor.stage(action), executor
        self._held = executor.held_by(action)
        self._parameters = list(self.stage.parameters.values())

    def __call__(self) -> None:
        executor, action = self._executor, self.action
        here.at(action)
        executor.parameters.before(action)
        later, self._held.later = self._held.later, None
        executor.stopwatch.mark()
        executor.stopwatch.mark()
        try:
            if later is not None:
                new, kept = without_gradient(executor.parameters.in_call(self._parameters)), later.kept
                self.stage.backward.weights(later)
                give_own_memory(new, kept)
        except BaseException as error:
            executor.report(error, action)
            raise
        executor.stopwatch.end(action)
        executor.parameters.after(action)


def labelled(calls: Sequence[tuple[Instruction, Call]], graph: StageGraph) -> list[tuple[Instruction, Call]]:
    """For a step that is profiled; a receive that is posted, and a buffer that is freed, take no time to speak of."""
    return [(instruction, _within(call, _name(instruction, call, graph))) for instruction, call in calls]


def _within(call: Call, name: str) -> Call:
    def call_within() -> object:
        with label(name):
            return call()

    return call_within if name else call


def _name(instruction: Instruction, call: Call, graph: StageGraph) -> str:
    match instruction:
        case Compute(action) if not isinstance(call, LeftOut):
            return f"{action} {graph.names[action.stage]}"
        case Send(message):
            edge = graph.edges[message.edge]
            stage = edge.source if message.op is Op.F else edge.target
            return f"send {Action(stage, message.op, message.microbatch)} {graph.names[stage]}"
    return ""


T = TypeVar("T")


class Keeping:
    """The run of a forward that will be recomputed."""

    def __init__(self, executor: Executor, action: Action, run: Run) -> None:
        self._executor, self._action, self._run = executor, action, run
        self._stage, self._held = executor.stage(action), executor.held_by(action)

    def __call__(self, *inputs: Any) -> Outputs:
        executor = self._executor
        kept = Kept(self._stage, inputs, executor.effects, executor.device, executor.step.proves)
        outputs, _ = kept.first(partial(self._run, *inputs))
        kept.first_is_over(outputs)
        self._held.kept = kept
        return without_graph(outputs), None


class Recomputation:
    """R: the forward again, for its graph alone: nothing is sent, counted or written."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.stage, self._executor = action, executor.stage(action), executor
        self._held = executor.held_by(action)
        self._run = run_of(executor, action)

    def __call__(self) -> None:
        executor, action, held = self._executor, self.action, self._held
        here.at(action)
        executor.parameters.settle(action.stage)
        executor.stopwatch.mark()
        executor.stopwatch.mark()
        kept, held.kept = held.kept, None
        assert kept is not None
        with kept.again():
            outputs, saved = self._reporting(lambda: self._run(*kept.inputs), kept.inputs)
        if self.stage.returns_result and saved is not None:
            part = read_loss(outputs[-1])
            saved.take_root(part.value, root_weight(part, executor.step.shares[action.microbatch]))
        held.saved = saved
        self._reporting(lambda: kept.second_is_over(outputs))
        executor.stopwatch.end(action)

    def _reporting(self, run: Callable[[], T], inputs: Sequence[Any] = ()) -> T:
        try:
            return run()
        except BaseException as error:
            self._executor.report(error, self.action, inputs)
            raise
