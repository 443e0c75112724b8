"""Hooked: checks that hooks on parameters do in a step what they do in a plain loop over the micro-batches.

A plain loop runs micro-batch 2's forward after micro-batch 1's backward. A schedule may run it before. So a hook that
writes its parameter, as an optimizer step in the backward does, would give micro-batch 2 the old values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fxpipe.distributed.observer import StepObserver
from fxpipe.distributed.transport import Transport
from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.plan.placement import check_hooks
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import BACKWARD, FORWARD
from fxpipe.torch_compat.tensors import version_of


class HookedParameters(StepObserver):
    """Raises RunError where a hook's write comes between the forward and the backward of another micro-batch, or is
    made by a part of the gradient alone.

    Args:
        names: the identity and name of each parameter of this rank that has a hook.
        graph: the stages.
        transport: the ranks that hold the parameters.
        has_late_count: whether gradients are divided by a count only after the backward.

    Raises:
        PartitionError, RunError: a hook would get a part of a gradient, or a gradient that is not divided yet.
    """

    def __init__(self, names: Mapping[int, str], graph: StageGraph, transport: Transport, has_late_count: bool) -> None:
        check_hooks(graph)
        if has_late_count:
            raise RunError(
                f"parameter {next(iter(names.values()))!r} has a hook, which would be given gradients of the sum "
                "alone: the count of this fxpipe.Sum is not decided by the inputs, and is known when the backward is "
                "over. Compute the count from the inputs (labels, masks) or return the mean; or remove the hook, and "
                "do what it does behind forward_backward(...)"
            )
        self._names, self._graph, self._transport = names, graph, transport
        self._writes = Counter[int]()  # stage → how many of its backwards have written
        self._behind: dict[tuple[int, int], int] = {}  # (stage, micro-batch) → the writes before its forward

    def on_start(self, action: Action, stage: Stage, arrived: Sequence[Any]) -> None:
        if action.kind.part_of is not BACKWARD:
            return
        hooked = [parameter for parameter in stage.parameters.values() if id(parameter) in self._names]
        self._versions = [(parameter, version_of(parameter)) for parameter in hooked]
        written = self._writes[action.stage]
        if self._behind.get((action.stage, action.microbatch), written) != written:
            raise RunError(
                f"a hook has written parameter {self._names[id(hooked[0])]!r} in the backward of a micro-batch, and "
                f"the schedule had run the forward of micro-batch {action.microbatch} before it, with the old values. "
                "A plain loop runs it with the new ones. Write microbatches=1; or leave the hook out, and step "
                "forward_backward.optimizer(...) behind forward_backward(...)"
            )

    def on_end(self, action: Action, stage: Stage, made: Sequence[Any]) -> None:
        key, direction = (action.stage, action.microbatch), action.kind.part_of
        if direction is FORWARD:
            self._behind[key] = self._writes[action.stage]
        if direction is not BACKWARD:
            return
        written = [parameter for parameter, version in self._versions if version_of(parameter) != version]
        # whether other ranks hold the stage's parameters, too
        copies = len(self._graph.ranks(action.stage)) * self._transport.data_size
        if written and self._transport.pipe_rank is not None and copies > 1:
            raise RunError(
                f"a hook has written parameter {self._names[id(written[0])]!r} in the backward, by this rank's part of "
                "the gradient alone: the ranks that hold it drift apart; step behind forward_backward(...), which sums "
                "the gradients of all of them"
            )
        if written:
            self._writes[action.stage] += 1
            self._behind.pop(key, None)  # its own W may follow its own write
