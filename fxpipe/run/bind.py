"""Bind: a rank's instructions → prepared calls, once for each plan. A step runs them one after another.

Whatever a plan fixes is looked at here: functions, slots, messages, and which actions are run at all. What goes by the
sizes of a batch, how messages look, the exchange looks up.

lower → bind → run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.graph.modes import within
from fxpipe.run.actions import BackwardAction, ForwardAction, LeftOut
from fxpipe.run.exchange import Port
from fxpipe.run.executor import BoundFor, Executor, Made, StepInput, take_out
from fxpipe.run.group_actions import GroupBackward, GroupForward
from fxpipe.run.halves import WeightsAction
from fxpipe.run.labelled import labelled
from fxpipe.run.recompute_actions import Keeping, Recomputation
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

    def run(self, step: StepInput, stopwatch: Callable[[], Stopwatch]) -> list[Made]:
        """Runs a step, of which each rank has a stopwatch of its own."""
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
            # It stands behind the action whose message tells that this one was received. Where that action is left out,
            # a later one's message may tell, or the step's end waits for it.
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
