"""Executor: the instructions of one pipe rank. The only state of a step, thrown away at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fxpipe.distributed.stopwatch import Stopwatch
from fxpipe.distributed.whereabouts import here
from fxpipe.errors import RunError, noted
from fxpipe.graph.deferred import Deferred
from fxpipe.graph.gathering import added
from fxpipe.graph.loss import StepLoss, read_loss, root_of
from fxpipe.graph.modes import Autocast, within
from fxpipe.graph.stage_calls import Forward, Saved
from fxpipe.graph.stage_graph import Edge, Stage, StageGraph, bytes_in
from fxpipe.kinds import shown
from fxpipe.run.exchange import Exchange
from fxpipe.run.finite import Extremes
from fxpipe.run.group_inputs import GroupInputs, Joined
from fxpipe.run.recompute import Kept, without_graph
from fxpipe.run.side_effects import EffectsOf
from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import Half
from fxpipe.schedules.lower import Compute, Instruction, Message, Receive, Release, Send
from fxpipe.seeds import seeded
from fxpipe.sharding.gradients import Gradients
from fxpipe.torch_compat import pytree


@dataclass(frozen=True)
class StepInput:
    """What a step is given. ``batches``: a dict of this rank's inputs per micro-batch. ``shares``: each
    micro-batch's part of the step's weight, or that of its group, where the loss is of a group. ``runs``: which of them
    get a backward: those whose share is not 0, here or, where a stage sees their rows, on another replica.
    ``groups``: what makes the inputs of gathered stages. ``seed``: (stage, micro-batch, or a group's first) → seed.
    ``autocast``: what is on around the call; each stage's forward has a region of its own, no backward is inside.
    ``number``: its own, from 0. ``extremes``: what looks at whether the stages' outputs are finite. ``proves``: whether
    it is looked at that what is recomputed is what was computed."""

    batches: Sequence[Mapping[str, Any]]
    shares: Sequence[float]
    runs: Sequence[bool]
    groups: GroupInputs
    seed: Callable[[int, int], int]
    training: bool
    autocast: tuple[Autocast, ...] = ()
    number: int = 0
    extremes: Extremes | None = None
    proves: bool = False


@dataclass
class Executor:
    """Executes one rank's instructions for one step."""

    graphs: Sequence[StageGraph]
    """The stages, as they run each micro-batch."""
    rank: int
    exchange: Exchange
    device: torch.device
    step: StepInput
    parameters: Gradients
    """What has to know when this rank uses its parameters."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    halves: Collection[Half] = ()
    """The backwards that the table has as I and W."""
    recomputed: Collection[Half] = ()
    """(stage, micro-batch) whose forward keeps no graph, for an R to make it."""
    effects: EffectsOf = field(default_factory=EffectsOf)
    loss: StepLoss = field(default_factory=StepLoss)
    results: dict[int, Any] = field(default_factory=dict)
    """Micro-batch → the model's output, when not training."""
    bytes_of: dict[Edge, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.graphs[0]
        self._index = {edge: place for place, edge in enumerate(self.graph.edges)}
        self._values: dict[tuple[int, Op, int], Any] = {}  # (edge, F or B, micro-batch): made here, not used yet
        self._saved: dict[Half, Saved] = {}
        self._joined: dict[Half, list[Joined | None]] = {}  # how a group's inputs were put together
        self._kept: dict[Half, Kept] = {}  # what is still to be recomputed
        self._later: dict[Half, Deferred] = {}  # what I has left for W
        self._skipped = False  # whether the last action was not run, and so took no message
        self._grad = torch.enable_grad if self.step.training else torch.no_grad

    def execute(self, instruction: Instruction) -> None:
        """Runs one instruction; waits only where a compute lacks its input."""
        match instruction:
            case Compute(action):
                self._skipped = not self._runs(action.op, action.microbatch)
                here.at(action)
                self._compute(action)
            case Release(message):  # it stands behind the action whose message tells that this one was received
                if not self._skipped:  # otherwise a later action's message may tell, or the step's end waits for it
                    self.exchange.release(message)
            case Receive(message) if self._runs(message.op, message.microbatch):
                self.exchange.post(message)
            case Send(message) if self._runs(message.op, message.microbatch):
                self.exchange.send(message, self._values.pop((message.edge, message.op, message.microbatch)))
            case _:
                pass  # a message about a micro-batch without weight, or a reduction, for which the step must be over

    def _compute(self, action: Action) -> None:
        if action.op is Op.F:
            self.parameters.settle(action.stage)
            self._forward(action)
        elif action.op is Op.R:
            self.parameters.settle(action.stage)
            if not self._skipped:
                self._recompute(action)
        elif action.op is Op.I:
            if not self._skipped:
                self._backward(action)
        else:
            self.parameters.before(action)
            if not self._skipped:
                self._weights(action) if action.op is Op.W else self._backward(action)
            self.parameters.after(action)

    def _runs(self, op: Op, microbatch: int) -> bool:
        return op is Op.F or self.step.runs[microbatch]

    def _stage(self, action: Action) -> Stage:
        return self.graphs[action.microbatch].stages[action.stage]

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stage(action), action.microbatch
        self.stopwatch.mark()
        arrived = self._arrived(action, stage)
        self.stopwatch.mark()
        inputs = [parts[0] for parts in arrived]
        if stage.gathered is not None:
            with self._telling(action, stage, inputs):
                inputs = self._joined_inputs(action, stage, arrived)
        kept = self._to_keep(stage, microbatch, inputs)
        run = partial(self._run, action, stage, inputs)
        outputs, saved = run() if kept is None else kept.first(run)
        if (extremes := self._extremes(microbatch)) is not None:
            extremes.add_outputs(stage.index, microbatch, outputs[: len(stage.outputs)])
        if kept is not None:
            with self._telling(action, stage):
                kept.first_is_over(outputs)
            self._kept[stage.index, microbatch] = kept
            outputs = without_graph(outputs)
        elif self.step.training and stage.has_backward and self._runs(Op.B, microbatch):
            self._saved[stage.index, microbatch] = saved
        self.stopwatch.end(action)
        for edge, value in zip(stage.outputs, outputs, strict=False):  # the result is no edge's
            self._values[self._index[edge], Op.F, microbatch] = value
            if edge not in self.bytes_of:
                self.bytes_of[edge] = bytes_in(value)

    def _arrived(self, action: Action, stage: Stage) -> list[list[Any]]:
        """Each input as it came: from each micro-batch, or, where a group made it, as one."""
        found: dict[str | Edge, list[Any]] = {}
        for entry in stage.inputs:
            if isinstance(entry, str):
                found[entry] = [self.step.batches[place][entry] for place in action.microbatches]
            elif entry not in found:  # it may come in two ways, "batch" and "global"
                maker = self.graph.placement[entry.source]
                found[entry] = [self._take(entry, Op.F, place, maker) for place in self._places(action, entry)]
        return [found[entry] for entry in stage.inputs]

    def _places(self, action: Action, edge: Edge) -> Sequence[int]:
        """The micro-batches that an edge's values and gradients are numbered by, of those of an action."""
        return action.microbatches[:1] if self.graph.stages[edge.source].gathered else action.microbatches

    def _joined_inputs(self, action: Action, stage: Stage, arrived: Sequence[list[Any]]) -> list[Any]:
        """The inputs of a group."""
        inputs, joined = list[Any](), list[Joined | None]()
        for entry, mode, parts in zip(stage.inputs, stage.ways, arrived, strict=True):
            how = None
            if isinstance(entry, str):
                value = self.step.groups.of_batch(entry, parts, action.microbatches, mode)
            elif mode is None:
                (value,) = parts
            else:
                maker = self.graph.names[entry.source]
                value, how = self.step.groups.of_stage(entry.value, maker, parts, action.microbatches, mode)
            inputs.append(value)
            joined.append(how)
        if self.step.training and stage.has_backward and self._runs(Op.B, action.microbatch):
            self._joined[stage.index, action.microbatch] = joined
        return inputs

    def _to_keep(self, stage: Stage, microbatch: int, inputs: Sequence[Any]) -> Kept | None:
        """What is kept of a forward that will be recomputed; None for one that keeps its graph, or has no backward."""
        is_recomputed = (stage.index, microbatch) in self.recomputed and self._runs(Op.B, microbatch)
        if not (self.step.training and is_recomputed):
            return None
        return Kept(stage, inputs, self.effects, self.device, self.step.proves)

    def _run(self, action: Action, stage: Stage, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Saved]:
        """A stage's forward, its loss counted."""
        with self._running(action, stage, inputs):
            outputs, saved = self._call(action, stage)(*inputs)
            if stage.returns_result:
                self._keep_result(stage, action.microbatch, outputs[-1], saved)
        return outputs, saved

    def _call(self, action: Action, stage: Stage) -> Forward:
        """The forward whose backward is whole, or in two halves."""
        halved = self.step.training and (action.stage, action.microbatch) in self.halves
        return stage.forward_in_halves if halved else stage.forward

    @contextlib.contextmanager
    def _running(self, action: Action, stage: Stage, inputs: Sequence[Any]) -> Iterator[None]:
        """Around a stage's forward: its random numbers, its own region of autocast, gradients where they are wanted."""
        random = (
            seeded(self.step.seed(stage.index, action.microbatch), self.device)
            if stage.draws_random
            else contextlib.nullcontext()
        )
        with self._telling(action, stage, inputs), self._grad(), within(self.step.autocast), random:
            yield

    def _recompute(self, action: Action) -> None:
        """The forward again, for its graph alone: nothing is sent, counted or written."""
        stage, microbatch = self._stage(action), action.microbatch
        self.stopwatch.mark()
        self.stopwatch.mark()
        kept = self._kept.pop((stage.index, microbatch))
        with kept.again(), self._running(action, stage, kept.inputs):
            outputs, saved = self._call(action, stage)(*kept.inputs)
            if stage.returns_result:
                saved.take_root(root_of(read_loss(outputs[-1]), self.step.shares[microbatch]))
        with self._telling(action, stage):
            kept.second_is_over(outputs)
        self._saved[stage.index, microbatch] = saved
        self.stopwatch.end(action)

    def _telling(
        self, action: Action, stage: Stage, inputs: Sequence[Any] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """What fails in the user's code says where in the step it was, all counted from 0, and what it was given."""
        what = _WORDS.get(action.op, "backward")
        step = f"step {self.step.number}" if self.step.training else "in evaluate"
        return noted(
            lambda: (
                f"in the {what} of stage {stage.index} `{stage.name}`, {_named(action)}, {step}"
                + "".join(f"\n  {name}: {_told(value)}" for name, value in zip(stage.input_names, inputs, strict=False))
            )
        )

    def _extremes(self, microbatch: int) -> Extremes | None:
        """What looks at a micro-batch; of one without weight nothing counts."""
        return self.step.extremes if self.step.shares[microbatch] else None

    def _keep_result(self, stage: Stage, microbatch: int, result: Any, saved: Saved) -> None:
        if not self.step.training:
            self.results[microbatch] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            return
        part = read_loss(result)
        if stage.has_backward and self._runs(Op.B, microbatch) and not part.value.requires_grad:
            raise RunError("the loss needs no gradient: nothing that it is computed from is trainable")
        if (extremes := self._extremes(microbatch)) is not None:
            extremes.add_loss(stage.index, microbatch, part.value)
        saved.take_root(self.loss.add(part, self.step.shares[microbatch]))

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stage(action), action.microbatch
        self.stopwatch.mark()
        gradients = [
            self._take(edge, Op.B, microbatch, self.graph.placement[edge.target]) for edge in stage.outputs
        ] + [True] * stage.returns_result
        self.stopwatch.mark()
        saved = self._saved.pop((stage.index, microbatch))
        returned = [None] * len(stage.inputs)
        if not stage.returns_result or self.step.shares[microbatch]:  # else only other replicas' losses need it
            with self._telling(action, stage):
                returned = stage.backward(saved, gradients)
            if saved.deferred is not None:
                self._later[stage.index, microbatch] = saved.deferred
        joined = self._joined.pop((stage.index, microbatch), [None] * len(returned))
        sent: dict[Edge, list[Any]] = {}
        for entry, gradient, how in zip(stage.inputs, returned, joined, strict=True):
            if isinstance(entry, Edge) and self.graph.stages[entry.source].has_backward:
                parts = [gradient] if how is None else self.step.groups.cut(how, gradient)
                sent[entry] = parts if entry not in sent else list(map(added, sent[entry], parts))
        self.stopwatch.end(action)
        for edge, parts in sent.items():
            for place, part in zip(self._places(action, edge), parts, strict=True):
                self._values[self._index[edge], Op.B, place] = part

    def _weights(self, action: Action) -> None:
        """W; of a stage that cannot leave anything to it, nothing."""
        stage, later = self._stage(action), self._later.pop((action.stage, action.microbatch), None)
        self.stopwatch.mark()
        self.stopwatch.mark()
        with self._telling(action, stage):
            if later is not None:
                stage.backward.weights(later)
        self.stopwatch.end(action)

    def _take(self, edge: Edge, op: Op, microbatch: int, maker: int) -> Any:
        """A value or gradient, from this rank or another."""
        index = self._index[edge]
        if maker == self.rank:
            return self._values.pop((index, op, microbatch))
        maker_op = Op.I if op is Op.B and (edge.target, microbatch) in self.halves else op
        here.awaited = partial(_in_words, self.graph, edge, maker_op, microbatch)
        try:
            return self.exchange.take(Message(index, op, microbatch, maker, self.rank))
        finally:
            here.awaited = None


def _named(action: Action) -> str:
    """An action's micro-batches, in words."""
    first, last = action.microbatch, action.microbatches[-1]
    return f"micro-batch {first}" if first == last else f"micro-batches {first}-{last}"


_WORDS = {Op.F: "forward", Op.R: "recomputation", Op.W: "weight gradients"}


def _in_words(graph: StageGraph, edge: Edge, op: Op, microbatch: int) -> str:
    """What makes a message, as the table has it: "2F5 of stage `text`"."""
    stage = edge.source if op is Op.F else edge.target
    return f"{Action(stage, op, microbatch)} of stage `{graph.names[stage]}`"


def _told(value: Any) -> str:
    """What a stage was given, without its numbers."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    return shown(pytree.tree_map_only(torch.Tensor, lambda tensor: list(tensor.shape), value))
