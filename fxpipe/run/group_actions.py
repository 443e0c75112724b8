"""Group actions: those of a stage that runs once for a group of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpipe.graph.gathering import added
from fxpipe.graph.stage_graph import Edge
from fxpipe.run.actions import BackwardAction, ForwardAction
from fxpipe.run.executor import Take
from fxpipe.run.group_inputs import Joined
from fxpipe.schedules.action import Op


class GroupForward(ForwardAction):
    """F of a gathered stage: each input is put together of what has come from the group's micro-batches."""

    def _bound_inputs(self) -> list[Take]:
        takes: dict[str | Edge, Take] = {}
        for entry in self.stage.inputs:
            if entry not in takes:  # it may come in two ways, "batch" and "global"
                takes[entry] = self._each(entry)
        self._ways = list(takes)
        return list(takes.values())

    def _each(self, entry: str | Edge) -> Take:
        """Takes an input from each micro-batch, or, where a group made it, as one."""
        executor, action = self._executor, self.action
        if isinstance(entry, str):
            takes = [executor.take_input(entry, place) for place in action.microbatches]
        else:
            takes = [executor.take(entry, Op.F, place) for place in executor.places(action, entry)]
        return lambda: [take() for take in takes]

    def _inputs(self, arrived: list[Any]) -> list[Any]:
        found = dict(zip(self._ways, arrived, strict=True))
        parts_of = [found[entry] for entry in self.stage.inputs]
        try:
            inputs, joined = self._joined(parts_of)
        except BaseException as error:
            self._executor.tell(error, self.action, [parts[0] for parts in parts_of])
            raise
        if self._keeps:
            self._held.joined = joined
        return inputs

    def _joined(self, parts_of: Sequence[list[Any]]) -> tuple[list[Any], list[Joined | None]]:
        groups, microbatches, names = self._executor.step.groups, self.action.microbatches, self._executor.graph.names
        inputs, joined = list[Any](), list[Joined | None]()
        for entry, mode, parts in zip(self.stage.inputs, self.stage.ways, parts_of, strict=True):
            how = None
            if isinstance(entry, str):
                value = groups.of_batch(entry, parts, microbatches, mode)
            elif mode is None:
                (value,) = parts
            else:
                value, how = groups.of_stage(entry.value, names[entry.source], parts, microbatches, mode)
            inputs.append(value)
            joined.append(how)
        return inputs, joined


class GroupBackward(BackwardAction):
    """B or I of a gathered stage: each input's gradient is cut into those of the group's micro-batches."""

    def _bound_outputs(self) -> list[int]:
        executor, action = self._executor, self.action
        edges = dict.fromkeys(edge for _, edge in self._fed)
        return [executor.slot(edge, Op.B, place) for edge in edges for place in executor.places(action, edge)]

    def _give(self, returned: Sequence[Any]) -> None:
        joined, self._held.joined = self._held.joined, None
        sent: dict[Edge, list[Any]] = {}
        for place, edge in self._fed:
            how = joined[place] if joined is not None else None
            parts = [returned[place]] if how is None else self._executor.step.groups.cut(how, returned[place])
            sent[edge] = parts if edge not in sent else list(map(added, sent[edge], parts))
        parts = [part for each in sent.values() for part in each]
        for slot, part in zip(self._slots, parts, strict=True):
            self._executor.slots[slot] = part
