"""Observer: watches the actions of a step, and changes nothing. All that measures or records a step is an observer.

A new observer is a subclass of ``StepObserver`` that defines the methods it needs. ``Steps`` makes the observers of a
step, and an action calls the methods that they define, no others.

  1. on_step   a part of the step has ended, such as the agreement on the batch
  2. on_wait   the process is ready for an action, and waits for its inputs
  3. on_start  the inputs are there, and the action starts
  4. on_copy   a copy of activations that the action began starts, or ends
  5. on_end    the action has ended

The first observer of a step is the first to see a start, and the last to see an end: it sees the others' work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fxpipe.distributed.transport import Transport
from fxpipe.graph.stage_graph import Edge, Stage, bytes_in
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import FORWARD

ACTIONS, REST = "actions", "rest"
"""Two parts of a step: the process's rows run; and the last part, at whose end all gradients are summed."""


class StepObserver:
    """The base of all observers; its methods do nothing. A single process's observer sees the actions of all ranks.

    ``stage``: the action's stage, in the graph of its micro-batch.
    """

    def on_wait(self, action: Action) -> None:
        """The process waits for the inputs of ``action``. For an action that the schedule delays, it may wait earlier,
        until another rank has received what ``action`` made; then this call is repeated before the next action."""

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        """An action starts. ``arrived``: the values for a forward; for B and I, the gradients of ``stage.outputs``."""

    def on_copy(self, action: Action) -> None:
        """Activations are copied, and the copies' stream is the current stream. The call is made twice: before the
        copies and after them. ``action``: the F whose activations leave, or the P that brings them back."""

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        """An action has ended. ``made``: a forward's ``stage.outputs``, and then the model's result if the stage
        returns it; for B and I, the gradients of ``stage.inputs``; empty for other actions."""

    def on_step(self, part: str) -> None:
        """A part of the step has ended: all work since the part before."""


class Watched(NamedTuple):
    """The methods that the observers of a step define, in the order of their calls: no others are called."""

    on_wait: Sequence[Callable[[Action], None]] = ()
    on_start: Sequence[Callable[[Action, Stage, Sequence[Any]], None]] = ()
    on_copy: Sequence[Callable[[Action], None]] = ()
    on_end: Sequence[Callable[[Action, Stage, Sequence[Any]], None]] = ()

    @staticmethod
    def by(observers: Sequence[StepObserver]) -> Watched:
        waits, starts, copies, ends = (_defined(observers, name) for name in Watched._fields)
        return Watched(waits, starts, copies, ends[::-1])


def _defined(observers: Sequence[StepObserver], name: str) -> list[Callable[..., None]]:
    return [getattr(each, name) for each in observers if getattr(type(each), name) is not getattr(StepObserver, name)]


class EdgeSizes(StepObserver):
    """Measures the bytes of each edge's value."""

    def __init__(self) -> None:
        self._bytes_of: dict[Edge, int] = {}

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        if action.kind.messages is FORWARD:
            self._bytes_of.update(zip(stage.outputs, map(bytes_in, made), strict=False))

    def gather(self, transport: Transport) -> dict[Edge, int]:
        """The bytes of all edges. A collective call of a pipe group, of which each rank has its own stages' outputs."""
        return {edge: size for part in transport.gather("pipe", self._bytes_of) for edge, size in part.items()}
