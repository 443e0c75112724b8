"""Actions: a stage's forward and backward of one micro-batch, each bound to its function and to where its values lie.

A bound action is called once in each step of its kind of batch. ``group_actions``, ``recompute_actions`` and ``halves``
have those of stages that run in other ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.distributed.activity import here
from fxpipe.errors import RunError
from fxpipe.graph.loss import read_loss, root_weight
from fxpipe.graph.modes import within
from fxpipe.graph.ranks import named
from fxpipe.graph.stage_calls import Saved
from fxpipe.graph.stage_graph import Edge, bytes_in
from fxpipe.plan.placement import writes
from fxpipe.run.actions.executor import Executor, Fetch
from fxpipe.run.actions.own_memory import apart_from, give_own_memory, without_gradient
from fxpipe.schedules.action import Action, Op
from fxpipe.seeds import seeded
from fxpipe.torch_compat import pytree, version_of

Outputs = tuple[tuple[Any, ...], Saved | None]
"""A forward's, and what it leaves for its backward."""
Run = Callable[..., Outputs]
"""A stage's forward, given its inputs."""


def run_of(executor: Executor, action: Action) -> Run:
    """The forward of a stage, as an action runs it: with its own random numbers and region of autocast, if it has
    any."""
    stage = executor.stage(action)
    halved = executor.kind.training and (action.stage, action.microbatch) in executor.table.halves
    run: Run = stage.forward_in_halves if halved else stage.forward
    run = _seeded(executor, action, run, stage.runs_python) if stage.draws_random else run
    return run if not executor.kind.autocast else _within_autocast(executor, run)


def _seeded(executor: Executor, action: Action, run: Run, python: bool) -> Run:
    def seeded_run(*inputs: Any) -> Outputs:
        with seeded(executor.step.seed(action.stage, action.microbatch), executor.device, python):
            return run(*inputs)

    return seeded_run


def _within_autocast(executor: Executor, run: Run) -> Run:
    def run_within(*inputs: Any) -> Outputs:
        with within(executor.kind.autocast):
            return run(*inputs)

    return run_within


class ForwardAction:
    """F: inputs → the stage's function → slots."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.stage, self._executor = action, executor.stage(action), executor
        self._held = executor.held_by(action)
        self._keeps = executor.has_backward(action)
        self._buffers = [one for one in self.stage.tensors.values() if not isinstance(one, nn.Parameter)]
        self._unwritten = list(self.stage.tensors.values()) if self._is_one_of_several() else []
        self._takes = self._bound_inputs()
        self._slots = [executor.slot(edge, Op.F, action.microbatch) for edge in self.stage.outputs]
        self.run: Run = run_of(executor, action)

    def _is_one_of_several(self) -> bool:
        """Whether other ranks run this stage, too, and would not have what it writes into its tensors."""
        return self._executor.kind.training and len(self._executor.graph.ranks(self.action.stage)) > 1

    def _bound_inputs(self) -> list[Fetch]:
        take, take_input, place = self._executor.take, self._executor.take_input, self.action.microbatch
        return [
            take_input(entry, place) if isinstance(entry, str) else take(entry, Op.F, place)
            for entry in self.stage.inputs
        ]

    def __call__(self) -> None:
        executor, action = self._executor, self.action
        here.at(action)
        executor.parameters.settle(action.stage)
        executor.stopwatch.mark()
        arrived = [take() for take in self._takes]
        executor.stopwatch.mark()
        inputs = self._inputs(arrived)
        versions = list(map(version_of, self._unwritten))
        try:
            outputs, saved = self.run(*inputs)
            self._check_unwritten(versions)
            if self.stage.returns_result:
                self._finish(outputs[-1], saved)
        except BaseException as error:
            executor.report(error, action, inputs)
            raise
        if self._keeps:
            self._held.saved = saved
        self._give(outputs)
        executor.stopwatch.end(action)

    def _inputs(self, arrived: list[Any]) -> list[Any]:
        return arrived

    def _check_unwritten(self, versions: Sequence[int]) -> None:
        """RunError where a stage on several ranks has written a parameter or buffer."""
        for buffer, version in zip(self._unwritten, versions, strict=True):
            if version_of(buffer) != version:
                name = next(name for name, tensor in self.stage.tensors.items() if tensor is buffer)
                ranks = named(self._executor.graph.placement[self.action.stage])
                raise RunError(f"stage {self.stage.name!r} is on {ranks}, and {writes(name)}")

    def _give(self, outputs: tuple[Any, ...]) -> None:
        step, slots = self._executor.step, self._executor.slots
        if self._slots and (extremes := step.extremes_of(self.action.microbatch)) is not None:
            extremes.add_outputs(self.action.stage, self.action.microbatch, outputs[: len(self._slots)])
        for slot, value in zip(self._slots, outputs, strict=False):  # the result is no edge's
            slots[slot] = value if not self._buffers else apart_from(self._buffers, value)
        if step.proves:
            sizes = {edge: bytes_in(value) for edge, value in zip(self.stage.outputs, outputs, strict=False)}
            self._executor.made.bytes_of.update(sizes)

    def _finish(self, result: Any, saved: Saved | None) -> None:
        """The model's result: a loss to begin backward at, or what evaluation returns. ``saved``: None where its graph
        is made anew for that."""
        executor, microbatch = self._executor, self.action.microbatch
        if not executor.kind.training:
            executor.made.results[microbatch] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            return
        part = read_loss(result)
        if self._keeps and not part.value.requires_grad:
            raise RunError(
                "the loss needs no gradient: nothing that it is computed from is trainable; where that is so for some "
                "micro-batches alone, which plain PyTorch's loss.backward() refuses, too, add what is: "
                "loss + 0 * self.head.weight.sum()"
            )
        share = executor.step.shares[microbatch]
        added = executor.made.loss.add(part, share, microbatch)
        if added is not None and executor.step.extremes is not None:
            executor.step.extremes.add_loss(self.action.stage, microbatch, added)
        if saved is not None:
            saved.take_root(part.value, root_weight(part, share))


class BackwardAction:
    """B or I: gradients of outputs → the stage's backward → slots."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.stage, self._executor = action, executor.stage(action), executor
        self._held = executor.held_by(action)
        self._ends_stage = action.op is not Op.I
        self._parameters = list(self.stage.parameters.values())
        self._takes = [executor.take(edge, Op.B, action.microbatch) for edge in self.stage.outputs]
        graph = executor.graph
        self._fed = [
            (place, edge)
            for place, edge in enumerate(self.stage.inputs)
            if isinstance(edge, Edge) and graph.stages[edge.source].has_backward
        ]
        self._slots = self._bound_outputs()

    def _bound_outputs(self) -> list[int]:
        return [self._executor.slot(edge, Op.B, self.action.microbatch) for _, edge in self._fed]

    def __call__(self) -> None:
        executor, action, held = self._executor, self.action, self._held
        here.at(action)
        if self._ends_stage:
            executor.parameters.before(action)
        executor.stopwatch.mark()
        gradients: list[Any] = [take() for take in self._takes]
        executor.stopwatch.mark()
        returned: Sequence[Any] = [None] * len(self.stage.inputs)
        saved, held.saved = held.saved, None
        assert saved is not None
        if self.stage.returns_result:
            gradients.append(True)
        # a loss without weight here has a backward where other replicas' losses need it
        if not self.stage.returns_result or executor.step.shares[action.microbatch]:
            new = without_gradient(executor.parameters.in_call(self._parameters))
            try:
                returned = self.stage.backward(saved, gradients)
            except BaseException as error:
                executor.report(error, action)
                raise
            if new:
                give_own_memory(new, (gradients, returned))
            held.later = saved.deferred
        self._give(returned)
        executor.stopwatch.end(action)
        if self._ends_stage:
            executor.parameters.after(action)

    def _give(self, returned: Sequence[Any]) -> None:
        slots = self._executor.slots
        for (place, _), slot in zip(self._fed, self._slots, strict=True):
            slots[slot] = returned[place]


class LeftOut:
    """An action after F of a micro-batch without weight, which is not run: the others that sum its gradients hear."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self._executor = action, executor

    def __call__(self) -> None:
        parameters, action = self._executor.parameters, self.action
        here.at(action)
        if action.op is Op.R:
            parameters.settle(action.stage)
        elif action.op is not Op.I:
            parameters.before(action)
            parameters.after(action)
