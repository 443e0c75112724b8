"""Executor: what one pipe rank holds while it runs its row of a table, bound for one plan: see ``actions``.

What a step leaves in it is let go of at the step's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxpipe.batch.group_inputs import GroupInputs, Joined
from fxpipe.distributed.activity import here
from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.graph.deferred import Deferred
from fxpipe.graph.loss import StepLoss
from fxpipe.graph.modes import Autocast
from fxpipe.graph.stage_calls import Saved
from fxpipe.graph.stage_graph import Edge, Stage
from fxpipe.plan.plan import Plan, values_of
from fxpipe.run.actions.recompute import EffectsOf, Kept
from fxpipe.run.exchange import Exchange, Port
from fxpipe.run.step.finite import Extremes
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import Half
from fxpipe.schedules.lower import Message, sharing
from fxpipe.sharding.gradients import Gradients
from fxpipe.torch_compat import pytree
from fxpipe.validation import shown

Fetch = Callable[[], Any]
"""Gives what an action needs of others, once; waits for it where it is on its way."""


@dataclass(frozen=True)
class StepInput:
    """What a step is given. ``batches``: a dict of this rank's inputs per micro-batch. ``shares``: each
    micro-batch's part of the step's weight, or that of its group, where the loss is of a group.
    ``groups``: what makes the inputs of gathered stages. ``seed``: (stage, micro-batch, or a group's first) → seed.
    ``number``: its own, from 0. ``per_item``: 1 / the items of the step that a ``Sum`` is over, on the ranks that make
    the loss, where inputs alone decide them. ``extremes``: records whether the stages' outputs are finite.
    ``proves``: whether the step compares a recomputation with its forward, and measures how large values are."""

    batches: Sequence[Mapping[str, Any]]
    shares: Sequence[float]
    groups: GroupInputs
    seed: Callable[[int, int], int]
    number: int
    per_item: torch.Tensor | None
    extremes: Extremes | None
    proves: bool


@dataclass
class StepResult:
    """What one rank makes in a step."""

    rank: int
    stopwatch: Stopwatch
    loss: StepLoss = field(default_factory=StepLoss)
    results: dict[int, Any] = field(default_factory=dict)
    """Micro-batch → the model's output, when not training."""
    bytes_of: dict[Edge, int] = field(default_factory=dict)
    """What its edges carry, where the step measures that."""


@dataclass(frozen=True)
class BoundFor:
    """What rows are bound for: all that steps of one plan have in common, whatever the sizes of their batches.

    ``runs``: which micro-batches get a backward: those with weight here or, where a stage sees their rows, on another
    replica. ``autocast``: what is on around the call: each forward has a region of its own, and no backward is in one.
    """

    plan: Plan
    runs: tuple[bool, ...]
    training: bool
    autocast: tuple[Autocast, ...]


@dataclass(slots=True)
class LeftBehind:
    """What a stage's actions of one micro-batch, or of a group, leave for those behind them.

    ``saved``: what a forward leaves for its backward. ``joined``: how a group's inputs were put together. ``kept``:
    what is still to be recomputed. ``later``: what I has left for W.
    """

    saved: Saved | None = None
    joined: list[Joined | None] | None = None
    kept: Kept | None = None
    later: Deferred | None = None


@dataclass(eq=False)
class Executor:
    """One rank's part of the steps of a plan."""

    kind: BoundFor
    rank: int
    exchange: Exchange
    device: torch.device
    parameters: Gradients
    """What has to know when this rank uses its parameters."""
    effects: EffectsOf
    step: StepInput = field(init=False)
    """While one runs; ``made`` and ``stopwatch``, too."""
    made: StepResult = field(init=False)
    stopwatch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.graph, self.table = self.kind.plan.graph, self.kind.plan.schedule.dependencies
        self._index = {edge: place for place, edge in enumerate(self.graph.edges)}
        self._rank_of = self.kind.plan.schedule.rank_of
        self._sharing = sharing(self.graph.edges, self._rank_of, values_of(self.kind.plan.graphs))
        self.slots: list[Any] = []
        """What was made here and not used yet."""
        self._slot_of: dict[tuple[Edge, Op, int], int] = {}
        self.held: dict[Half, LeftBehind] = {}

    def begin(self, step: StepInput, stopwatch: Stopwatch) -> None:
        self.step, self.stopwatch, self.made = step, stopwatch, StepResult(self.rank, stopwatch)

    def end(self) -> StepResult:
        """A step has run; what it was given and has made is the caller's alone."""
        made = self.made
        del self.step, self.stopwatch, self.made
        return made

    def drop(self) -> None:
        """A step has failed: lets go of all that it was given and had made."""
        self.end()
        self.exchange.drop()
        # In place: bound actions hold this very list.
        self.slots[:] = [NOT_MADE] * len(self.slots)
        for held in self.held.values():
            held.saved = held.joined = held.kept = held.later = None

    # what actions are bound to

    def stage(self, action: Action) -> Stage:
        return self.kind.plan.graphs[action.microbatch].stages[action.stage]

    def runs(self, op: Op, microbatch: int) -> bool:
        return op is Op.F or self.kind.runs[microbatch]

    def places(self, action: Action, edge: Edge) -> Sequence[int]:
        """The micro-batches that an edge's values and gradients are numbered by, of those of an action."""
        return action.microbatches[:1] if self.graph.stages[edge.source].gathered else action.microbatches

    def slot(self, edge: Edge, op: Op, microbatch: int) -> int:
        """Where a value, or where ``op`` is B its gradient, lies from when it is made until it is used or sent."""
        if op is Op.F and self._rank_of(edge.source, microbatch) == self.rank:
            edge = self._shared(edge, microbatch)[0]  # it is sent once
        # Slots are numbered as they are bound, so that a step addresses a list by numbers and hashes nothing.
        slot = self._slot_of.setdefault((edge, op, microbatch), len(self.slots))
        if slot == len(self.slots):
            self.slots.append(NOT_MADE)
        return slot

    def _shared(self, edge: Edge, microbatch: int) -> Sequence[Edge]:
        """The edges whose value comes in an edge's message, itself included."""
        return [self.graph.edges[other] for other in self._sharing(self._index[edge], microbatch)]

    def port(self, message: Message) -> Port:
        varies = self.graph.stages[self.graph.edges[message.edge].source].varies
        return self.exchange.port(message, varies)

    def take_input(self, name: str, microbatch: int) -> Fetch:
        return lambda: self.step.batches[microbatch][name]

    def take(self, edge: Edge, op: Op, microbatch: int) -> Fetch:
        """Takes a value or gradient, from this rank or another."""
        maker = self._rank_of(edge.source if op is Op.F else edge.target, microbatch)
        shared = self._shared(edge, microbatch) if op is Op.F and maker != self.rank else (edge,)
        # of those that share a message the first one that is bound is the first that runs, and takes it for all
        if maker == self.rank or (edge, op, microbatch) in self._slot_of:
            return partial(take_out, self.slots, self.slot(edge, op, microbatch))
        # Only the name of the action in a diagnosis depends on this: gradients of inputs come from I where B is split.
        maker_op = Op.I if op is Op.B and (edge.target, microbatch) in self.table.halves else op
        made = Action(edge.source if op is Op.F else edge.target, maker_op, microbatch)
        port = self.port(Message(self._index[edge], op, microbatch, maker, self.rank))
        others = [self.slot(other, op, microbatch) for other in shared if other != edge]
        return partial(self._receive, port, made, others)

    def _receive(self, port: Port, made: Action, others: Sequence[int]) -> Any:
        """Takes what another rank's action has made, for others on this rank, too."""
        here.awaited = lambda: f"{made} of stage `{self.graph.names[made.stage]}`"
        try:
            value = port.take()
        finally:
            here.awaited = None
        for slot in others:
            self.slots[slot] = value
        return value

    def report(self, error: BaseException, action: Action, inputs: Sequence[Any] = ()) -> None:
        """What fails in the user's code says where in the step it was, all counted from 0, and what it was given."""
        stage, what = self.stage(action), _WORDS.get(action.op, "backward")
        first, last = action.microbatch, action.microbatches[-1]
        which = f"micro-batch {first}" if first == last else f"micro-batches {first}-{last}"
        with contextlib.suppress(Exception):  # some let nothing be added; the error itself is what counts
            given = zip(stage.input_names, inputs, strict=False)
            error.add_note(
                f"in the {what} of stage {stage.index} `{stage.name}`, {which}, "
                + (f"step {self.step.number}" if self.kind.training else "in evaluate")
                + "".join(f"\n  {name}: {_described(value)}" for name, value in given)
            )


NOT_MADE: Any = object()
"""Lies in a slot before a value does, and after it; None is a gradient that did not come."""


def take_out(slots: list[Any], slot: int) -> Any:
    """The value in a slot, which is empty then."""
    value, slots[slot] = slots[slot], NOT_MADE
    if value is NOT_MADE:
        raise LookupError(f"slot {slot} is used before it is made")
    return value


_WORDS = {Op.F: "forward", Op.R: "recomputation", Op.W: "weight gradients"}


def _described(value: Any) -> str:
    """What a stage was given, without its numbers."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return shown(pytree.tree_map_only(torch.Tensor, lambda tensor: list(tensor.shape), value))
