"""Executor: the state of one pipe rank while it runs its row of a table, bound for one plan: see ``actions``.

A step's values are dropped at the step's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxpipe.batch.group_inputs import GroupInputs, Joined
from fxpipe.device import HostCopies
from fxpipe.distributed.activity import here
from fxpipe.distributed.observer import Watched
from fxpipe.graph.stage_graph import Edge, Stage
from fxpipe.plan.plan import Plan, values_of
from fxpipe.run.actions.offload import Offloaded
from fxpipe.run.actions.recompute import EffectsOf, RecomputedForward
from fxpipe.run.exchange import Exchange, Port
from fxpipe.schedules.action import Action
from fxpipe.schedules.dependency import Half
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Direction, Kind
from fxpipe.schedules.lower import Message, sharing
from fxpipe.sharding.gradients import Gradients
from fxpipe.stage.deferred import Deferred
from fxpipe.stage.loss import StepLoss
from fxpipe.stage.modes import Autocast
from fxpipe.stage.stage_calls import Saved
from fxpipe.torch_compat import pytree
from fxpipe.validation import shown

Fetch = Callable[[], Any]
"""Returns a value that another action has made, once; waits for the message that brings it."""


@dataclass(frozen=True)
class StepInput:
    """The arguments of a step. ``batches``: a dict of this rank's inputs for each micro-batch. ``shares``: each
    micro-batch's part of the step's weight; where the loss is of a group, the group's part. ``groups``: makes the
    inputs of gathered stages. ``seed``: (stage, micro-batch, or a group's first micro-batch) → seed. ``order``: the
    number in the batch of each micro-batch of the table, by which errors name it. ``number``: the step's number, from
    0. ``per_item``: 1 / the items that the step's ``Sum`` counts, on the ranks that make the loss, where inputs alone
    decide the count. ``proves``: whether the step compares a recomputation with its forward. ``watched``: the calls of
    the step's observers."""

    batches: Sequence[Mapping[str, Any]]
    shares: Sequence[float]
    groups: GroupInputs
    seed: Callable[[int, int], int]
    order: Sequence[int]
    number: int
    per_item: torch.Tensor | None
    proves: bool
    watched: Watched


@dataclass
class StepResult:
    """The results of a step on the ranks that this process plays."""

    loss: StepLoss = field(default_factory=StepLoss)
    results: dict[int, Any] = field(default_factory=dict)
    """Micro-batch → the model's output, when not training."""


@dataclass(frozen=True)
class BoundFor:
    """What the steps of a bound row have in common, whatever the sizes of their batches.

    ``runs``: whether each micro-batch gets a backward: it has weight here or, where a stage sees its rows, on another
    replica. ``autocast``: the autocast regions around the call: each forward enters them anew, and no backward does.
    """

    plan: Plan
    runs: tuple[bool, ...]
    training: bool
    autocast: tuple[Autocast, ...]


@dataclass(slots=True)
class Residuals:
    """The values that a stage's actions of one micro-batch, or of a group, save for later actions.

    ``saved``: a forward's, for its backward. ``joined``: how a group's inputs were put together. ``recomputed``: a
    forward that will be recomputed. ``later``: I's, for W. ``offloaded``: the activations of a forward on the host.
    """

    saved: Saved | None = None
    joined: list[Joined | None] | None = None
    recomputed: RecomputedForward | None = None
    later: Deferred | None = None
    offloaded: Offloaded | None = None


@dataclass(eq=False)
class Executor:
    """One rank's part of the steps of a plan."""

    kind: BoundFor
    rank: int
    exchange: Exchange
    device: torch.device
    parameters: Gradients
    """Told before and after each use of this rank's parameters."""
    effects: EffectsOf
    copies: HostCopies
    step: StepInput = field(init=False)
    """Set while a step runs, as ``result`` is."""
    result: StepResult = field(init=False)

    def __post_init__(self) -> None:
        self.graph, self.table = self.kind.plan.graph, self.kind.plan.schedule.dependencies
        self._index = {edge: index for index, edge in enumerate(self.graph.edges)}
        self._rank_of = self.kind.plan.schedule.rank_of
        self._sharing = sharing(self.graph.edges, self._rank_of, values_of(self.kind.plan.graphs))
        self.slots: list[Any] = []
        """The values that were made here and not used yet."""
        self._slot_of: dict[tuple[Edge, Direction, int], int] = {}
        self.residuals: dict[Half, Residuals] = {}

    def end(self) -> None:
        """Ends a step, and drops its inputs; the caller has its results."""
        del self.step, self.result

    def drop(self) -> None:
        """Drops the inputs and all values of a step that failed."""
        self.end()
        self.exchange.drop()
        # In place: bound actions have this very list.
        self.slots[:] = [NOT_MADE] * len(self.slots)
        self.copies.wait_for_all()
        for residuals in self.residuals.values():
            residuals.saved = residuals.joined = residuals.recomputed = residuals.later = residuals.offloaded = None

    # for actions to bind to

    def stage(self, action: Action) -> Stage:
        return self.kind.plan.graphs[action.microbatch].stages[action.stage]

    def runs(self, direction: Direction | None, microbatch: int) -> bool:
        return direction is not BACKWARD or self.kind.runs[microbatch]

    def places(self, action: Action, edge: Edge) -> Sequence[int]:
        """The micro-batches, out of an action's, that number the values and gradients of an edge."""
        return action.microbatches[:1] if self.graph.stages[edge.source].gathered else action.microbatches

    def slot(self, edge: Edge, direction: Direction, microbatch: int) -> int:
        """The slot that an edge's value, or, BACKWARD, its gradient, is in until it is used or sent."""
        if direction is FORWARD and self._rank_of(edge.source, microbatch) == self.rank:
            edge = self._shared(edge, microbatch)[0]  # the value is sent once for all these edges
        # Slots are numbered as they are bound, so that a step addresses a list by numbers and hashes nothing.
        slot = self._slot_of.setdefault((edge, direction, microbatch), len(self.slots))
        if slot == len(self.slots):
            self.slots.append(NOT_MADE)
        return slot

    def _shared(self, edge: Edge, microbatch: int) -> Sequence[Edge]:
        """The edges whose values come in the message of ``edge``, which is among them."""
        return [self.graph.edges[other] for other in self._sharing(self._index[edge], microbatch)]

    def port(self, message: Message) -> Port:
        varies = self.graph.stages[self.graph.edges[message.edge].source].varies
        return self.exchange.port(message, varies)

    def take_input(self, name: str, microbatch: int) -> Fetch:
        return lambda: self.step.batches[microbatch][name]

    def take(self, edge: Edge, direction: Direction, microbatch: int) -> Fetch:
        """Takes a value or gradient, from this rank or another."""
        maker = self._rank_of(edge.source if direction is FORWARD else edge.target, microbatch)
        shared = self._shared(edge, microbatch) if direction is FORWARD and maker != self.rank else (edge,)
        # The first edge to be bound, of those that share a message, runs first, and takes the message for all.
        if maker == self.rank or (edge, direction, microbatch) in self._slot_of:
            return partial(take_out, self.slots, self.slot(edge, direction, microbatch))
        # Only the action's name in a diagnosis depends on this.
        source = self.maker(edge, direction, microbatch)
        port = self.port(Message(self._index[edge], direction, microbatch, maker, self.rank))
        others = [self.slot(other, direction, microbatch) for other in shared if other != edge]
        return partial(self._receive, port, source, others)

    def maker(self, edge: Edge, direction: Direction, microbatch: int) -> Action:
        """The action that makes an edge's value or gradient, by a micro-batch of its own."""
        if direction is FORWARD:
            return Action(edge.source, Kind.F, microbatch)
        return self.table.gradient(edge.target, microbatch)

    def _receive(self, port: Port, source: Action, others: Sequence[int]) -> Any:
        """Takes the message of another rank's action, and puts its value into the slots of ``others``, too."""
        here.awaited = lambda: f"{source} of stage `{self.graph.names[source.stage]}`"
        try:
            value = port.take()
        finally:
            here.awaited = None
        for slot in others:
            self.slots[slot] = value
        return value

    def report(self, error: BaseException, action: Action, inputs: Sequence[Any] = ()) -> None:
        """Adds a note to an error in the user's code: the place in the step, counted from 0, and the stage's inputs."""
        stage, what = self.stage(action), action.kind.words
        first, last = (self.step.order[number] for number in (action.microbatch, action.microbatches[-1]))
        which = f"micro-batch {first}" if first == last else f"micro-batches {first}-{last}"
        with contextlib.suppress(Exception):  # some errors take no notes, and the error itself must come through
            named = zip(stage.input_names, inputs, strict=False)
            error.add_note(
                f"in the {what} of stage {stage.index} `{stage.name}`, {which}, "
                + (f"step {self.step.number}" if self.kind.training else "in evaluate")
                + "".join(f"\n  {name}: {_described(value)}" for name, value in named)
            )


NOT_MADE: Any = object()
"""The content of an empty slot. None in a slot is a gradient that did not come."""


def take_out(slots: list[Any], slot: int) -> Any:
    """Takes the value out of a slot, which is empty afterwards."""
    value, slots[slot] = slots[slot], NOT_MADE
    if value is NOT_MADE:
        raise LookupError(f"slot {slot} is used before it is made")
    return value


def _described(value: Any) -> str:
    """An input of a stage in words: type, shape and device, no numbers."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return shown(pytree.tree_map_only(torch.Tensor, lambda tensor: list(tensor.shape), value))
