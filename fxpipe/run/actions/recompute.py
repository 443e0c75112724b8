"""Recompute: a stage's forward keeps what it was given and not its graph, and runs again when its backward is near.

F  runs as ever, gradients on: the same kernels, buffers written, random numbers drawn. What autograd would save is let
   go of at once, and its graph behind it
R  begins where F began, with F's random numbers, and leaves everything but its graph as it was before R
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fxpipe.device import to_host
from fxpipe.errors import RunError
from fxpipe.graph.opaque_call import opaque_calls
from fxpipe.graph.stage_calls import Saved
from fxpipe.graph.stage_graph import Stage, StageGraph
from fxpipe.parameters.dtensors import local
from fxpipe.torch_compat import BATCH_STATISTICS, pytree, tensors_in, version_of
from fxpipe.trace.state.replay import checkpoints_that_keep, is_repeated
from fxpipe.trace.state.snapshot import Snapshot, State

Run = Callable[..., tuple[tuple[Any, ...], Saved | None]]
"""A stage's forward: inputs → (outputs, what it leaves for its backward)."""


def without_graph(value: Any) -> Any:
    """The same with its tensors cut from what they were computed with; those that need a gradient still say so."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)


class Kept:
    """What a stage keeps of its forward until it runs again.

    ``proves``: whether the second run's outputs are compared with the first one's.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[Any], effects: SideEffects, device: torch.device, proves: bool
    ) -> None:
        self._stage, self._effects, self._device, self._proves = stage, effects, device, proves
        self.inputs = [without_graph(value) for value in inputs]
        # Versions tell without a copy whether a tensor was written between F and R.
        self._versions = _versions(self.inputs)
        self._parameters = [(parameter, version_of(parameter)) for parameter in stage.parameters.values()]
        self._start, self._others = effects.state(device), effects.versions()

    def first(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the first run, without its graph."""
        outputs, _ = self._without_saving(run, inputs)
        written = [version_of(parameter) != version for parameter, version in self._parameters]
        self._written = [parameter for (parameter, _), was in zip(self._parameters, written, strict=True) if was]
        self._parameters = [each for each, was in zip(self._parameters, written, strict=True) if not was]
        self._bumped = self._start.bumped()
        if self._effects.is_known:
            self._effects.check(self._others, self._stage.name)
        else:
            self._effects.learn(self._start, self._stage.name)
        self._made = [leaf.clone() for leaf in _plain(outputs)] if self._proves else []
        return without_graph(outputs)  # type: ignore[no-any-return]

    def _without_saving(self, run: Run, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Saved | None]:
        """Runs it. What autograd saves is dropped, unless the stage's own code differentiates: then it runs anew from
        where it began, as do all later ones, and its graph is dropped behind it."""
        if not self._effects.needs_graph:
            try:
                # Hooks drop what autograd saves: as under no_grad F never holds a graph, and yet it runs R's kernels.
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _is_gone):
                    return run(*inputs)
            except RuntimeError as error:  # torch.func and torch.vmap say so where they meet them
                if _HOOKS not in str(error):
                    raise
            # What forward had written before the hooks failed is put back, and random numbers, too.
            self._start.restore(self._start.bumped())
            self._effects.needs_graph = True
        return run(*inputs)

    def second(self, run: Run) -> tuple[tuple[Any, ...], Saved | None]:
        """The second run: it begins where the first one did, and all that it writes is put back behind it. RunError
        where the stage's inputs or parameters were written since the first run, or it makes something else."""
        if _versions(self.inputs) != self._versions:
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: what it was given was written in place since; write "
                "it out of place (x = x + 1 for x += 1), or leave the stage out of recompute="
            )
        if any(version_of(parameter) != version for parameter, version in self._parameters):
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: its parameters were written since its forward, as a "
                "hook does that makes an optimizer's step in backward; make it behind forward_backward(...), or leave "
                "the stage out of recompute="
            )
        # nn.Embedding(max_norm=) writes its parameter, in the second run, too
        copies = [(parameter, parameter.detach().clone()) for parameter in self._written]
        # R writes buffers and draws random numbers once more: what they are now is put back behind it.
        now = self._effects.state(self._device)
        self._start.restore(self._bumped)
        try:
            with checkpoints_that_keep():
                outputs, saved = run(*self.inputs)
        finally:
            now.restore(now.bumped())
            for parameter, copy in copies:
                parameter.data.copy_(copy)

        again = _plain(outputs) if self._proves else []
        if len(again) != len(self._made) or not all(map(is_repeated, again, self._made)):
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: run again from the same inputs, random numbers and "
                "buffers, it makes something else. It writes an input or a parameter by .data, or depends on what is "
                "kept outside of its modules or inside of their Python objects: a global, an iterator, an array, a "
                "file; keep that in attributes or buffers of a submodule, or leave the stage out of recompute="
            )
        return outputs, saved


_HOOKS = "saved tensor hooks"


def _is_gone(nothing: None) -> Tensor:
    raise RuntimeError(f"{_HOOKS} have dropped it")


def _versions(values: Sequence[Any]) -> list[int]:
    return list(map(version_of, tensors_in(values)))


def _plain(outputs: Sequence[Any]) -> list[Tensor]:
    return [local(leaf.detach()) for leaf in pytree.tree_leaves(list(outputs)) if _has_numbers(leaf)]


def _has_numbers(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose numbers operators can look at: not sparse, quantized, or of a class of its own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return False
    return type(local(value)) in (Tensor, nn.Parameter) and not value.is_meta


# --- what a forward changes beside its result, so that running it again can leave all as it was ---


class SideEffects:
    """What the forward of a stage changes of what its modules hold, found out in the first one of each step.

    Tensors that it writes, attributes, containers and generators of random numbers. A later forward that writes a
    tensor which the first one did not is an error: its numbers were not kept. So is, on a GPU, a tensor that is written
    by ``.data`` in a later step and was not in the first: that is seen when the step after it begins.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._module = nn.ModuleList(modules)
        self._written, self._is_new = dict[int, Tensor](), True
        self.needs_graph = False  # whether forward differentiates
        self._last: Snapshot | None = None
        self._unseen: tuple[str, Callable[[], list[Tensor]]] | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins: in between the user may have put other tensors in place, or set what forward goes by."""
        (stage, arriving), self._unseen = self._unseen or ("", list), None
        if any(map(bool, arriving())):
            raise RunError(
                f"stage {stage!r} has written a tensor that its module holds by .data in the step before this one, and "
                "did not in its first step, so that its recomputation took other numbers; leave it out of recompute="
            )
        self.is_known = False
        held = (tensor for tensor in self._snapshot().tensors() if not isinstance(tensor, nn.Parameter))
        # all of them until the step's first forward has shown which it writes
        self._writes = [
            tensor for tensor in held if type(tensor) is Tensor and _has_numbers(tensor) and not tensor.is_inference()
        ]
        self._others: list[Tensor] = []

    def _snapshot(self) -> Snapshot:
        """Of what is no tensor, too: any forward may be the first to change it. The last one, where nothing is another
        since: to look is much cheaper than to take one."""
        if self._last is None or self._last.has_generators or any(self._last.changes()):
            self._last = Snapshot(self._module)
        return self._last

    def state(self, device: torch.device) -> State:
        """What forward changes beside parameters, as it is now; random numbers, too."""
        return State([self._snapshot()], self._writes, [device])

    def learn(self, before: State, stage: str) -> None:
        """The first forward is over, which began at ``before``."""
        statistics = {
            id(buffer)
            for part in self._module.modules()
            if isinstance(part, BATCH_STATISTICS)  # which it may begin to write when the user unfreezes them
            for buffer in part.buffers(recurse=False)
        }
        known = statistics | set(self._written)
        now, before.numbers = before.numbers, []
        unseen = list[Tensor]()
        for numbers in now:
            if id(numbers.tensor) in known or numbers.was_bumped:
                before.numbers.append(numbers)
            # On a GPU comparing numbers waits for them: only the first step does so.
            elif self._is_new or numbers.tensor.is_cpu:
                before.numbers += [numbers] if numbers.was_written else []
            else:
                unseen.append(numbers.differs())
        self._unseen = (stage, to_host([torch.stack(unseen).any()])) if unseen else None
        self._written = {id(numbers.tensor): numbers.tensor for numbers in before.numbers}
        self._others = [tensor for tensor in self._writes if id(tensor) not in self._written]
        self._writes, self.is_known, self._is_new = list(self._written.values()), True, False

    def versions(self) -> list[int]:
        """Of the tensors that the step's first forward did not write."""
        return list(map(version_of, self._others))

    def check(self, versions: Sequence[int], stage: str) -> None:
        """RunError where a forward, which began at these ``versions``, has written what the first one did not."""
        for tensor, version in zip(self._others, versions, strict=True):
            if version_of(tensor) != version:
                raise RunError(
                    f"stage {stage!r} has written a tensor of shape {list(tensor.shape)} that its module holds, and "
                    "did not in its first forward, so that it cannot be recomputed from where it began; leave it out "
                    "of recompute="
                )


class EffectsOf:
    """The side effects of the stages that this process runs, from step to step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, SideEffects]] = {}  # by identity, with what must live as long

    def begin(self) -> None:
        """A step begins."""
        for _, effects in self._known.values():
            effects.begin()

    def keep(self, graphs: Iterable[StageGraph]) -> None:
        """Lets go of all stages but these."""
        wanted = {id(stage.module) for graph in graphs for stage in graph}
        self._known = {key: known for key, known in self._known.items() if key in wanted}

    def of(self, stage: Stage) -> SideEffects:
        call = stage.module
        if id(call) not in self._known:
            module = getattr(call, "__self__", call)  # of a function what it is a method of, as ``model.encode``
            # what opaque methods call is a part of the stage's module, and what they hold is not
            owners = [_Shallow(part.owner) for part in opaque_calls(call) if part.is_method]
            self._known[id(call)] = call, SideEffects([*([module] if isinstance(module, nn.Module) else []), *owners])
        return self._known[id(call)][1]


class _Shallow(nn.Module):
    """A module without its submodules, for whoever goes through a module's parts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple: it is not a part of this one

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self._module[0]
