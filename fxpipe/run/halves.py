"""Halves: W, the second half of a backward, whose first one, I, has left it the gradients of parameters."""

from __future__ import annotations

from fxpipe.distributed.activity import here
from fxpipe.run.executor import Executor
from fxpipe.run.own_memory import give_own_memory, without_gradient
from fxpipe.schedules.action import Action


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
            executor.tell(error, action)
            raise
        executor.stopwatch.end(action)
        executor.parameters.after(action)
