"""Side effects: what a stage's forward changes beside its result, so that running it again can leave all as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CellType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.parameters.dtensors import local
from fxpipe.torch_compat import BATCH_STATISTICS, version_of
from fxpipe.trace.state.snapshot import Numbers, Snapshot, State


class SideEffects:
    """What the forward of a module changes of what the module holds, found out in the first one of each step.

    Tensors that it writes, attributes, containers and generators of random numbers. A later forward that writes a
    tensor which the first one did not is an error: its numbers were not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._written, self._is_new = module, dict[int, Tensor](), True
        self._last: Snapshot | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins: in between the user may have put other tensors in place, or set what forward goes by."""
        self.is_known = False
        held = (tensor for tensor in self.snapshot().tensors() if not isinstance(tensor, nn.Parameter))
        self.writes = [one for one in held if type(one) is Tensor and has_numbers(one) and not one.is_inference()]
        """All of them until the step's first forward has shown it."""
        self.others: list[Tensor] = []

    def snapshot(self) -> Snapshot:
        """Of what is no tensor, too: any forward may be the first to change it. The last one, where nothing is another
        since: to look is much cheaper than to take one."""
        if self._last is None or self._last.has_generators or any(self._last.changes()):
            self._last = Snapshot(self.module)
        return self._last

    def learn(self, before: State) -> None:
        """The first forward is over, which began at ``before``."""
        statistics = {
            id(buffer)
            for part in self.module.modules()
            if isinstance(part, BATCH_STATISTICS)  # which it may begin to write when the user unfreezes them
            for buffer in part.buffers(recurse=False)
        }
        known = statistics | set(self._written)
        before.numbers = [one for one in before.numbers if id(one.tensor) in known or self._shows(one)]
        written = {id(one.tensor): one.tensor for one in before.numbers}
        self.others = [tensor for tensor in self.writes if id(tensor) not in written]
        self._written, self.writes, self.is_known = written, list(written.values()), True
        self._is_new = False

    def _shows(self, one: Numbers) -> bool:
        """Whether a tensor was written: on a GPU the numbers are looked at, which waits for them, in the first step."""
        return one.was_bumped or ((self._is_new or one.tensor.is_cpu) and one.was_written)

    def versions(self) -> list[int]:
        """Of the tensors that the step's first forward did not write."""
        return [version_of(tensor) for tensor in self.others]

    def check(self, versions: Sequence[int], stage: str) -> None:
        """RunError where a forward, which began at these ``versions``, has written what the first one did not."""
        for tensor, version in zip(self.others, versions, strict=True):
            if version_of(tensor) != version:
                raise RunError(
                    f"stage {stage!r} has written a tensor of shape {list(tensor.shape)} that its module holds, and "
                    "did not in its first forward, so that it cannot be recomputed from where it began; leave it out "
                    "of recompute="
                )


def has_numbers(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose numbers operators can look at: not sparse, quantized, or of a class of its own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return False
    return type(local(value)) in (Tensor, nn.Parameter) and not value.is_meta


class EffectsOf:
    """The side effects of the stages that this process runs, from step to step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, SideEffects | None]] = {}  # by identity, with what must live as long
        self.needing_graphs: dict[int, object] = {}
        """By identity, those whose code differentiates in forward."""

    def begin(self) -> None:
        """A step begins."""
        for _, effects in self._known.values():
            if effects is not None:
                effects.begin()

    def keep(self, graphs: Iterable[StageGraph]) -> None:
        """Lets go of all stages but these."""
        wanted = {id(stage.module) for graph in graphs for stage in graph}
        self._known = {key: known for key, known in self._known.items() if key in wanted}
        self.needing_graphs = {key: module for key, module in self.needing_graphs.items() if key in wanted}

    def of(self, stage: Stage) -> SideEffects | None:
        """None for a stage that is a function and has no module at hand."""
        if id(stage.module) not in self._known:
            found = [*_modules_of(stage.module), *_owners(stage.module)]
            module = found[0] if len(found) == 1 else nn.ModuleList(found) if found else None
            self._known[id(stage.module)] = stage.module, SideEffects(module) if module is not None else None
        return self._known[id(stage.module)][1]


class _Shallow(nn.Module):
    """A module as it is without its submodules, for whoever goes through a module's parts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple: it is not a part of this one

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self._module[0]


def _owners(call: object) -> list[nn.Module]:
    """Those of opaque methods: what they hold. What they call is a part of the stage's module."""
    return [_Shallow(part.owner) for part in opaque_calls(call) if part.is_method]


def _modules_of(call: object) -> Iterator[nn.Module]:
    """A module; of a function those that it is bound to, closes over or is given, as ``model.encode`` and partials."""
    waiting, seen = [call], set[int]()
    while waiting:
        held = waiting.pop()
        if id(held) in seen or not callable(held):
            continue
        seen.add(id(held))
        if isinstance(held, nn.Module):
            yield held
            continue
        cells = (cell for cell in getattr(held, "__closure__", None) or () if cell != CellType())  # an empty one
        waiting += [getattr(held, "__self__", None), *(cell.cell_contents for cell in cells)]
        if isinstance(held, partial):
            waiting += [held.func, *held.args, *held.keywords.values()]
