"""Recompute actions: the forward that keeps what it was given in place of its graph, and the one that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fxpipe.distributed.activity import here
from fxpipe.graph.loss import read_loss, root_weight
from fxpipe.run.actions import Outputs, Run, run_of
from fxpipe.run.executor import Executor
from fxpipe.run.recompute import Kept, without_graph
from fxpipe.schedules.action import Action

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
            outputs, saved = self._telling(lambda: self._run(*kept.inputs), kept.inputs)
        if self.stage.returns_result and saved is not None:
            part = read_loss(outputs[-1])
            saved.take_root(part.value, root_weight(part, executor.step.shares[action.microbatch]))
        held.saved = saved
        self._telling(lambda: kept.second_is_over(outputs))
        executor.stopwatch.end(action)

    def _telling(self, run: Callable[[], T], inputs: Sequence[Any] = ()) -> T:
        try:
            return run()
        except BaseException as error:
            self._executor.tell(error, self.action, inputs)
            raise
