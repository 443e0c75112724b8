"""How many bytes of activations each stage holds: what autograd saves, what recomputed stages keep, and the gradients
that an I leaves for its W, counted.

A tensor's memory counts once for a stage, whole; parameters, buffers and the batch itself do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.run.actions.actions import Bound, Call
from fxpipe.run.actions.executor import Executor
from fxpipe.run.actions.recompute import RecomputedForward
from fxpipe.schedules.action import Action
from fxpipe.schedules.lower import Compute, Instruction
from fxpipe.stage.deferred import Deferred


class _Saved:
    """What a graph holds in a saved tensor's place; when it goes, the tensor is let go of."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class Held:
    """Per stage: the bytes that it holds now, and the most that it has held."""

    left_out: set[int] = field(default_factory=set)
    behind: dict[Action, int] = field(default_factory=dict)
    """What an action's stage held when it had run, in the last step."""
    now: Counter[int] = field(default_factory=Counter)
    peak: Counter[int] = field(default_factory=Counter)
    _stage: int = -1
    _counts: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _seen: weakref.WeakSet[RecomputedForward] = field(default_factory=weakref.WeakSet)

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._take(self._stage, tensor, saved)
        return saved

    def _take(self, stage: int, tensor: Tensor, holder: object) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.left_out or not size:
            return
        counts = self._counts[stage]
        self.now[stage] += size * (not counts[key])
        counts[key] += 1
        self.peak[stage] = max(self.peak[stage], self.now[stage])
        weakref.finalize(holder, self._let_go, stage, key, size)

    def _let_go(self, stage: int, key: int, size: int) -> None:
        counts = self._counts[stage]
        counts[key] -= 1
        self.now[stage] -= size * (not counts[key])

    def left(self, seeds: Sequence[Tensor], deferred: Deferred) -> None:
        """An I has left these gradients for its W."""
        for seed in seeds:
            self._take(self._stage, seed, deferred)

    def ran(self, executor: Executor) -> None:
        """An action is over: what its stage keeps for a recomputation counts from now on."""
        for (stage, _), left in executor.residuals.items():
            forward = left.recomputed
            if forward is not None and forward not in self._seen:
                for leaf in pytree.tree_leaves(forward.inputs):
                    if isinstance(leaf, Tensor):
                        self._take(stage, leaf, forward)
                self._seen.add(forward)


@contextlib.contextmanager
def counted(forward_backward: fxpipe.ForwardBackward, batch: Mapping[str, Any]) -> Iterator[Held]:
    """Counts, for the steps inside, on the local engine."""
    held = Held()
    tensors = [*forward_backward.module.parameters(), *forward_backward.module.buffers()]
    tensors += [leaf for leaf in pytree.tree_leaves(dict(batch)) if isinstance(leaf, Tensor)]
    held.left_out = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    run, keep = Bound.run, Deferred.keep

    def watched(bound: Bound, *args: Any) -> Any:
        calls = [(one, partial(called, bound, one, call)) for one, call in bound.calls]
        return run(dataclasses.replace(bound, calls=calls), *args)

    def called(bound: Bound, instruction: Instruction, call: Call) -> None:
        if isinstance(instruction, Compute):
            held._stage = instruction.action.stage
        call()
        for executor in bound.executors:
            held.ran(executor)
        if isinstance(instruction, Compute):
            held.behind[instruction.action] = held.now[held._stage]

    def left(deferred: Deferred, roots: Any, seeds: Sequence[Tensor], parameters: Any) -> None:
        keep(deferred, roots, seeds, parameters)
        held.left(seeds, deferred)

    with (
        mock.patch.object(Bound, "run", watched),
        mock.patch.object(Deferred, "keep", left),
        torch.autograd.graph.saved_tensors_hooks(held.pack, lambda saved: saved.tensor),
    ):
        yield held
