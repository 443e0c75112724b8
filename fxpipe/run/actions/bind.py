"""Bind: a rank's instructions → prepared calls, once for each plan. A step runs them one after another.

Whatever a plan fixes is looked at here: functions, slots, messages, and which actions are run at all. What goes by the
sizes of a batch, how messages look, the exchange looks up.

lower → bind → run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.graph.gathering import added
from fxpipe.graph.modes import Autocast, within
from fxpipe.graph.stage_graph import Edge
from fxpipe.labels import label
from fxpipe.plan.plan import Plan
from fxpipe.run.actions.actions import BackwardAction, ForwardAction, LeftOut, Recomputation, WeightsAction
from fxpipe.run.actions.executor import BoundFor, Executor, Fetch, StepInput, StepResult, take_out
from fxpipe.run.actions.group_inputs import Joined
from fxpipe.run.exchange import Port
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.lower import Compute, Instruction, Receive, Release, Send, is_forward
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
                for call in self._labelled() if profiler_runs() else (call for _, call in self.calls):
                    call()
        except BaseException:
            for executor in self.executors:
                executor.drop()
            raise
        return [executor.end() for executor in self.executors]

    def _labelled(self) -> Iterator[Call]:
        """For a step that is profiled: to post a receive, and to free a buffer, takes no time worth a name."""
        graph = self.kind.plan.graph
        for instruction, call in self.calls:
            name = ""
            match instruction:
                case Compute(action) if not isinstance(call, LeftOut):
                    name = f"{action} {graph.names[action.stage]}"
                case Send(message):
                    edge = graph.edges[message.edge]
                    stage = edge.source if message.op is Op.F else edge.target
                    name = f"send {Action(stage, message.op, message.microbatch)} {graph.names[stage]}"
            with label(name) if name else nullcontext():
                yield call


def bind(
    plan: Plan,
    rank: int | None,
    executor_of: Callable[[BoundFor, int], Executor],
    runs: tuple[bool, ...],
    training: bool,
    autocast: tuple[Autocast, ...],
) -> Bound:
    """The calls of a rank; None: of all."""
    kind = BoundFor(plan, runs, training, autocast)
    ranks = range(len(plan.instructions)) if rank is None else [rank]
    binders = {one: _Binder(executor_of(kind, one)) for one in ranks}
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
        self._is_left_out = False  # whether the last action is, and so takes no message

    def bound(self, instruction: Instruction) -> Call | None:
        """None for what has no part in this kind of batch: a message about a micro-batch without weight, or a
        reduction, for which all must be over."""
        executor = self.executor
        if isinstance(instruction, Compute):
            action = instruction.action
            self._is_left_out = not executor.runs(action.op, action.microbatch)
            return self._action(action)
        if not isinstance(instruction, Receive | Send | Release):
            return None
        message = instruction.message
        if not executor.runs(message.op, message.microbatch):
            return None
        port, edge = executor.port(message), executor.graph.edges[message.edge]
        if isinstance(instruction, Receive):
            return port.post
        if isinstance(instruction, Send):
            send, slots, slot = port.send, executor.slots, executor.slot(edge, message.op, message.microbatch)
            return lambda: send(take_out(slots, slot))
        # A release stands behind the action whose message shows that this one was received. Where that action is left
        # out, a later one's message may show it, or the step's end waits for it.
        if self._is_left_out:
            return None
        if message.op is not Op.F or edge.source not in executor.table.ahead:
            return port.release

        def wait_and_release() -> None:  # of a stage that is held back
            executor.stopwatch.wait()
            port.release()

        return wait_and_release

    def _action(self, action: Action) -> Call:
        executor, is_gathered = self.executor, self.executor.stage(action).gathered is not None
        if self._is_left_out:
            return LeftOut(executor, action)
        if action.op is Op.F:
            return GroupForward(executor, action) if is_gathered else ForwardAction(executor, action)
        if action.op is Op.R:
            return Recomputation(executor, action)
        if action.op is Op.W:
            return WeightsAction(executor, action)
        return GroupBackward(executor, action) if is_gathered else BackwardAction(executor, action)


class GroupForward(ForwardAction):
    """F of a gathered stage: each input is put together of what has come from the group's micro-batches."""

    def bound_inputs(self) -> list[Fetch]:
        # an input may come in two ways, "batch" and "global"
        takes = {entry: self._each(entry) for entry in dict.fromkeys(self.stage.inputs)}
        self._entries = list(takes)
        return list(takes.values())

    def _each(self, entry: str | Edge) -> Fetch:
        """Takes an input from each micro-batch, or, where a group made it, as one."""
        executor, action = self.executor, self.action
        if isinstance(entry, str):
            takes = [executor.take_input(entry, place) for place in action.microbatches]
        else:
            takes = [executor.take(entry, Op.F, place) for place in executor.places(action, entry)]
        return lambda: [take() for take in takes]

    def inputs_of(self, arrived: list[Any]) -> list[Any]:
        executor, action, names = self.executor, self.action, self.executor.graph.names
        groups, found = executor.step.groups, dict(zip(self._entries, arrived, strict=True))
        inputs, joined = list[Any](), list[Joined | None]()
        try:
            for entry, mode in zip(self.stage.inputs, self.stage.ways, strict=True):
                value, how = found[entry], None
                if isinstance(entry, str):
                    value = groups.of_batch(entry, value, action.microbatches, mode)
                elif mode is None:
                    (value,) = value
                else:
                    value, how = groups.of_stage(entry.value, names[entry.source], value, action.microbatches, mode)
                inputs.append(value)
                joined.append(how)
        except BaseException as error:
            executor.report(error, action, [found[entry][0] for entry in self.stage.inputs])
            raise
        if self.keeps:
            self.held.joined = joined
        return inputs


class GroupBackward(BackwardAction):
    """B or I of a gathered stage: each input's gradient is cut into those of the group's micro-batches."""

    def bound_outputs(self) -> list[int]:
        executor, action = self.executor, self.action
        edges = dict.fromkeys(edge for _, edge in self.fed)
        return [executor.slot(edge, Op.B, place) for edge in edges for place in executor.places(action, edge)]

    def give(self, returned: Sequence[Any]) -> None:
        joined, self.held.joined = self.held.joined, None
        sent: dict[Edge, list[Any]] = {}
        for place, edge in self.fed:
            how = joined[place] if joined is not None else None
            parts = [returned[place]] if how is None else self.executor.step.groups.cut(how, returned[place])
            sent[edge] = parts if edge not in sent else list(map(added, sent[edge], parts))
        parts = [part for each in sent.values() for part in each]
        for slot, part in zip(self.slots, parts, strict=True):
            self.executor.slots[slot] = part
