"""Memory recorder: an observer that notes a rank's bytes at the start and end of each action of a step.

On an accelerator this is the device's counter. The CPU has none: there it is what autograd and fxpipe hold for later
actions. An action changes only what its own stage holds of its own micro-batches, so only this part is counted anew:

    F  what the graph has saved; the inputs, if an R follows      I      what the graphs of W have saved, and gradients
    O  what has not left                                          B, W   nothing

The count reads the graph, and runs none of its hooks: it brings nothing back from the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from fxpipe.device import allocated, is_accelerator
from fxpipe.distributed.observer import StepObserver
from fxpipe.graph.stage_graph import Stage
from fxpipe.run.actions.executor import Executor, Residuals
from fxpipe.run.actions.offload import storages
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_times import ActionBytes
from fxpipe.schedules.dependency import Half
from fxpipe.stage.deferred import nodes_within
from fxpipe.stage.saved_tensors import SavedTensor
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.autograd import saved_in
from fxpipe.torch_compat.tensors import base_of


class MemoryRecorder(StepObserver):
    """Notes the bytes of the ranks that a process plays; on an accelerator its ranks share one counter.

    On the CPU each memory counts once for a rank, whole. Parameters, buffers and the batch do not count: they are in
    memory anyway.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = {executor.rank: executor for executor in executors}
        self._first, self._rank_of = executors[0], executors[0].kind.plan.schedule.rank
        self._has_counter = is_accelerator(executors[0].device)
        self._sizes: dict[int, dict[Half, Mapping[int, int]]] = {rank: {} for rank in self._executors}
        self.notes: dict[int, list[ActionBytes]] = {rank: [] for rank in self._executors}
        """Rank → the bytes around its actions, in order."""

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        self._start = self._bytes(self._rank_of(action))

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        rank, half = self._rank_of(action), (action.stage, action.microbatch)
        if not self._has_counter:
            sizes = storages(_waiting_tensors(self._executors[rank].residuals[half]))
            self._sizes[rank][half] = {key: size for key, size in sizes.items() if key not in self._left_out}
        self.notes[rank].append(ActionBytes(action, self._start, self._bytes(rank)))

    def _bytes(self, rank: int) -> int:
        if self._has_counter:
            return allocated(self._first.device)
        # Stages of a rank may save the same memory.
        return sum({key: size for each in self._sizes[rank].values() for key, size in each.items()}.values())

    @cached_property
    def _left_out(self) -> Mapping[int, int]:
        known = [tensor for stage in self._first.graph for tensor in stage.tensors.values()]
        return storages([*known, *pytree.tree_leaves(list(self._first.step.batches))])


def _waiting_tensors(residuals: Residuals) -> Iterator[Tensor]:
    """Yields the tensors that a stage holds of a micro-batch: in its graph, for R, and for W."""
    nodes = list[Node]()
    if residuals.saved is not None:
        roots = (root if isinstance(root, list) else [root] for root in residuals.saved.roots)
        nodes += [edge.node for each in roots for edge in each if edge is not None]
    if residuals.recomputed is not None:
        yield from _tensors(residuals.recomputed.inputs)
    if residuals.later is not None:
        nodes += residuals.later.nodes
        yield from _tensors(residuals.later.pending)
    seen = set[Node]()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield from _tensors(list(saved_in(node)))
            nodes += [following for following, _ in node.next_functions if following is not None]
            nodes += nodes_within(node)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a value that hooks may have packed, without whole parameters of FSDP2."""
    for leaf in pytree.tree_leaves(value):
        for tensor in leaf.on_device() if isinstance(leaf, SavedTensor) else [leaf] if isinstance(leaf, Tensor) else []:
            if not isinstance(tensor, nn.Parameter) and not isinstance(base_of(tensor), nn.Parameter):
                yield tensor
