"""Actions: a stage's forward and backward of one micro-batch, each bound to its function and to where its values lie.

A bound action is called once in each step of its kind of batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.distributed.activity import here
from fxpipe.errors import RunError
from fxpipe.graph.loss import read_loss, root_weight
from fxpipe.graph.modes import within
from fxpipe.graph.ranks import named
from fxpipe.graph.stage_calls import Saved
from fxpipe.graph.stage_graph import Edge, bytes_in
from fxpipe.parameters.dtensors import local
from fxpipe.plan.placement import writes
from fxpipe.run.actions.executor import Executor, Fetch, LeftBehind
from fxpipe.run.actions.recompute import Kept, without_graph
from fxpipe.schedules.action import Action, Op
from fxpipe.seeds import seeded
from fxpipe.torch_compat import pytree, storage_id, version_of

Run = Callable[..., tuple[tuple[Any, ...], Saved | None]]
"""A stage's forward: inputs → (outputs, what it leaves for its backward)."""


class _BoundAction:
    """What every action of a row has at hand."""

    def __init__(self, executor: Executor, action: Action) -> None:
        self.action, self.executor, self.stage = action, executor, executor.stage(action)
        self.held = executor.held.setdefault((action.stage, action.microbatch), LeftBehind())

    def bound_run(self) -> Run:
        """The stage's forward, with its own random numbers and region of autocast, if it has any."""
        executor, action, stage = self.executor, self.action, self.stage
        halved = executor.kind.training and (action.stage, action.microbatch) in executor.table.halves
        forward: Run = stage.forward_in_halves if halved else stage.forward
        autocast = executor.kind.autocast
        if not (stage.draws_random or autocast):
            return forward

        def run(*inputs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if autocast:
                    stack.enter_context(within(autocast))
                if stage.draws_random:
                    seed = executor.step.seed(action.stage, action.microbatch)
                    stack.enter_context(seeded(seed, executor.device, stage.runs_python))
                return forward(*inputs)

        return run


class ForwardAction(_BoundAction):
    """F: inputs → the stage's function → slots."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        training = executor.kind.training
        self.keeps = training and self.stage.has_backward and executor.runs(Op.B, action.microbatch)
        tensors = list(self.stage.tensors.items())
        self._buffers = [one for _, one in tensors if not isinstance(one, nn.Parameter)]
        # other ranks run this stage, too, and would not have what it writes into its tensors
        self._unwritten = tensors if training and len(executor.graph.ranks(action.stage)) > 1 else []
        self._takes = self.bound_inputs()
        self._slots = [executor.slot(edge, Op.F, action.microbatch) for edge in self.stage.outputs]
        self._run = self.bound_run()
        if self.keeps and (action.stage, action.microbatch) in executor.table.recomputed:
            self._run = self._keeping(self._run)

    def bound_inputs(self) -> list[Fetch]:
        take, take_input, place = self.executor.take, self.executor.take_input, self.action.microbatch
        return [
            take_input(entry, place) if isinstance(entry, str) else take(entry, Op.F, place)
            for entry in self.stage.inputs
        ]

    def _keeping(self, run: Run) -> Run:
        """The run of a forward that will be recomputed."""
        executor, stage, held = self.executor, self.stage, self.held

        def run_and_keep(*inputs: Any) -> Any:
            kept = Kept(stage, inputs, executor.effects.of(stage), executor.device, executor.step.proves)
            outputs, _ = kept.first(run, inputs)
            kept.first_is_over(outputs)
            held.kept = kept
            return without_graph(outputs), None

        return run_and_keep

    def __call__(self) -> None:
        executor, action = self.executor, self.action
        here.at(action)
        executor.parameters.settle(action.stage)
        executor.stopwatch.mark()
        arrived = [take() for take in self._takes]
        executor.stopwatch.mark()
        inputs = self.inputs_of(arrived)
        versions = [version_of(tensor) for _, tensor in self._unwritten]
        try:
            outputs, saved = self._run(*inputs)
            for (name, tensor), version in zip(self._unwritten, versions, strict=True):
                if version_of(tensor) != version:
                    ranks = named(executor.graph.placement[action.stage])
                    raise RunError(f"stage {self.stage.name!r} is on {ranks}, and {writes(name)}")
            if self.stage.returns_result:
                self._finish(outputs[-1], saved)
        except BaseException as error:
            executor.report(error, action, inputs)
            raise
        if self.keeps:
            self.held.saved = saved
        self._give(outputs)
        executor.stopwatch.end(action)

    def inputs_of(self, arrived: list[Any]) -> list[Any]:
        return arrived

    def _give(self, outputs: tuple[Any, ...]) -> None:
        executor, step, slots = self.executor, self.executor.step, self.executor.slots
        stage, microbatch = self.action.stage, self.action.microbatch
        if self._slots and step.extremes is not None and step.shares[microbatch]:  # without weight nothing counts
            step.extremes.add_outputs(stage, microbatch, outputs[: len(self._slots)])
        for slot, value in zip(self._slots, outputs, strict=False):  # the result is no edge's
            slots[slot] = value if not self._buffers else apart_from(self._buffers, value)
        if step.proves:
            sizes = {edge: bytes_in(value) for edge, value in zip(self.stage.outputs, outputs, strict=False)}
            executor.made.bytes_of.update(sizes)

    def _finish(self, result: Any, saved: Saved | None) -> None:
        """The model's result: a loss to begin backward at, or what evaluation returns. ``saved``: None where its graph
        is made anew for that."""
        executor, microbatch = self.executor, self.action.microbatch
        if not executor.kind.training:
            executor.made.results[microbatch] = pytree.tree_map_only(Tensor, Tensor.detach, result)
            return
        part = read_loss(result)
        if self.keeps and not part.value.requires_grad:
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


class Recomputation(_BoundAction):
    """R: the forward again, for its graph alone: nothing is sent, counted or written."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self._run = self.bound_run()

    def __call__(self) -> None:
        executor, action, held = self.executor, self.action, self.held
        here.at(action)
        executor.parameters.settle(action.stage)
        executor.stopwatch.mark()
        executor.stopwatch.mark()
        kept, held.kept = held.kept, None
        assert kept is not None
        try:
            with kept.again():
                outputs, saved = self._run(*kept.inputs)
            kept.second_is_over(outputs)
        except BaseException as error:
            executor.report(error, action, kept.inputs)
            raise
        if self.stage.returns_result and saved is not None:
            part = read_loss(outputs[-1])
            saved.take_root(part.value, root_weight(part, executor.step.shares[action.microbatch]))
        held.saved = saved
        executor.stopwatch.end(action)


class BackwardAction(_BoundAction):
    """B or I: gradients of outputs → the stage's backward → slots."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self._ends_stage = action.op is not Op.I
        self._parameters = list(self.stage.parameters.values())
        self._takes = [executor.take(edge, Op.B, action.microbatch) for edge in self.stage.outputs]
        stages = executor.graph.stages
        self.fed = [
            (place, edge)
            for place, edge in enumerate(self.stage.inputs)
            if isinstance(edge, Edge) and stages[edge.source].has_backward
        ]
        self.slots = self.bound_outputs()

    def bound_outputs(self) -> list[int]:
        return [self.executor.slot(edge, Op.B, self.action.microbatch) for _, edge in self.fed]

    def __call__(self) -> None:
        executor, action, held = self.executor, self.action, self.held
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
        self.give(returned)
        executor.stopwatch.end(action)
        if self._ends_stage:
            executor.parameters.after(action)

    def give(self, returned: Sequence[Any]) -> None:
        slots = self.executor.slots
        for (place, _), slot in zip(self.fed, self.slots, strict=True):
            slots[slot] = returned[place]


class WeightsAction(_BoundAction):
    """W; of a stage that cannot leave anything to it, nothing."""

    def __init__(self, executor: Executor, action: Action) -> None:
        super().__init__(executor, action)
        self._parameters = list(self.stage.parameters.values())

    def __call__(self) -> None:
        executor, action = self.executor, self.action
        here.at(action)
        executor.parameters.before(action)
        later, self.held.later = self.held.later, None
        executor.stopwatch.mark()
        executor.stopwatch.mark()
        if later is not None:
            new, kept = without_gradient(executor.parameters.in_call(self._parameters)), later.kept
            try:
                self.stage.backward.weights(later)
            except BaseException as error:
                executor.report(error, action)
                raise
            give_own_memory(new, kept)
        executor.stopwatch.end(action)
        executor.parameters.after(action)


class LeftOut(_BoundAction):
    """An action after F of a micro-batch without weight, which is not run: the others that sum its gradients hear."""

    def __call__(self) -> None:
        parameters, action = self.executor.parameters, self.action
        here.at(action)
        if action.op is Op.R:
            parameters.settle(action.stage)
        elif action.op is not Op.I:
            parameters.before(action)
            parameters.after(action)


# --- What is on its way to other stages is not written by the next micro-batch. Autograd makes the first gradient of a
# parameter its ``.grad`` without copying it, where nobody else holds that very tensor; but it may be a view of what
# goes to a stage before this one, as that of a position embedding of one row is. In plain PyTorch that one is used by
# then. Here the next micro-batch's gradient is added to ``.grad``, in place, first.


def without_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those whose ``.grad`` the next backward may make."""
    return [parameter for parameter in parameters if parameter.grad is None and parameter.requires_grad]


def give_own_memory(parameters: Iterable[nn.Parameter], passing: Any) -> None:
    """A backward has run, which may have made these parameters' ``.grad``. ``passing``: the gradients that it was given
    and has returned, in any container."""
    made = [(one, one.grad) for one in parameters if one.grad is not None]
    if not made:
        return
    taken = {storage_id(local(leaf)) for leaf in pytree.tree_leaves(passing) if _has_memory(leaf)}
    for parameter, gradient in made:
        if _has_memory(gradient) and storage_id(local(gradient)) in taken:
            parameter.grad = gradient.clone()


def apart_from(buffers: Sequence[Tensor], value: Any) -> Any:
    """A value that leaves a stage, with copies of what shares memory with these: the next forward may write them."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value
    leaves = [leaf for leaf in pytree.tree_leaves(value) if _has_memory(leaf) and not leaf.requires_grad]
    if not leaves:
        return value
    taken = {storage_id(local(buffer)) for buffer in buffers if _has_memory(buffer)}
    shared = {id(leaf) for leaf in leaves if storage_id(local(leaf)) in taken}
    return pytree.tree_map(lambda leaf: leaf.clone() if id(leaf) in shared else leaf, value) if shared else value


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
