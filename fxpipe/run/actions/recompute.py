"""Recompute: a stage's forward keeps its inputs and drops its graph, and runs again shortly before its backward.

F  runs as always, with gradients on: the same kernels run, buffers are written, random numbers are drawn. The tensors
   that autograd would save are dropped at once, and the graph after F.
R  runs the forward from F's state and with F's random numbers, and then restores all state but the new graph
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import OwnGenerator, Stage, StageGraph
from fxpipe.snapshots.snapshot import Numbers, Snapshot, State
from fxpipe.stage.activation_checkpoints import checkpoints_that_keep
from fxpipe.stage.opaque_call import opaque_calls
from fxpipe.stage.stage_calls import Saved
from fxpipe.tensors.dtensors import local
from fxpipe.tensors.rounding import is_repeated
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.modules import BATCH_STATISTICS
from fxpipe.torch_compat.tensors import tensors_in, version_of

Run = Callable[..., tuple[tuple[Any, ...], Saved | None]]
"""A stage's forward: inputs → (outputs, saved values for its backward)."""


def without_graph(value: Any) -> Any:
    """The value with its tensors detached; each keeps its ``requires_grad``."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)


class RecomputedForward:
    """A stage's forward that will run again: its inputs, and the state that it began with.

    ``proves``: whether the outputs of the two runs are compared.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[Any], effects: SideEffects, device: torch.device, proves: bool
    ) -> None:
        self._stage, self._effects, self._device, self._proves = stage, effects, device, proves
        self.inputs = [without_graph(value) for value in inputs]
        # Versions show without a copy whether a tensor was written between F and R.
        self._versions = _versions(self.inputs)
        self._parameters = [(parameter, version_of(parameter)) for parameter in stage.parameters.values()]
        self._start, self._others = effects.state(device), effects.versions()

    def first(self, run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the first run, without its graph."""
        outputs, _ = self._without_saving(run, inputs)
        self._written = [parameter for parameter, version in self._parameters if version_of(parameter) != version]
        self._parameters = [each for each in self._parameters if version_of(each[0]) == each[1]]
        self._bumped = self._start.bumped()
        if self._effects.is_known:
            self._effects.check(self._others, self._stage.name)
        else:
            self._effects.learn(self._start)
        self._made = [leaf.clone() for leaf in _plain(outputs)] if self._proves else []
        return without_graph(outputs)  # type: ignore[no-any-return]

    def _without_saving(self, run: Run, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Saved | None]:
        """Runs the forward, and drops the tensors that autograd saves. Where the stage's own code differentiates, the
        forward runs again from its first state, with a graph, which is dropped afterwards; so do later forwards."""
        if not self._effects.needs_graph:
            try:
                # Hooks drop what autograd saves: as under no_grad F never holds a graph, and yet it runs R's kernels.
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _is_gone):
                    return run(*inputs)
            except RuntimeError as error:  # from torch.func and torch.vmap, which refuse these hooks
                if _HOOKS not in str(error):
                    raise
            # Restore the tensors that forward had written before the hooks failed, and the random state.
            self._start.restore(self._start.bumped())
            self._effects.needs_graph = True
        return run(*inputs)

    def second(self, run: Run) -> tuple[tuple[Any, ...], Saved | None]:
        """Runs the forward from the first run's state, and then restores all that it wrote.

        Raises:
            RunError: the stage's inputs or parameters were written since the first run, or the outputs differ.
        """
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
        # R writes buffers and draws random numbers once more: their state of now is restored after it.
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
    """Whether it is a tensor whose numbers operators can read: not sparse, not quantized, not of a subclass."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return False
    return type(local(value)) in (Tensor, nn.Parameter) and not value.is_meta


# --- the side effects of a forward, so that running it again can restore the state ---


class SideEffects:
    """The state of a stage's modules that its forward changes, found in the first forward of each step.

    This is tensors, attributes, containers and generators of random numbers. A later forward that writes another tensor
    is an error, since no copy of that tensor was made. On a GPU, writes by ``.data`` are found in the first step alone.
    """

    def __init__(self, modules: Iterable[nn.Module], own: Mapping[str, OwnGenerator]) -> None:
        self._module, self._own = nn.ModuleList(modules), own
        self._written, self._is_new = dict[int, Tensor](), True
        self.needs_graph = False  # whether forward differentiates
        self._last: Snapshot | None = None
        self.begin()

    def begin(self) -> None:
        """Begins a step. The user may have replaced tensors or set attributes since the last one."""
        self.is_known = False
        # All tensors but parameters, until the step's first forward has shown which it writes.
        self._writes = [
            tensor
            for tensor in self._snapshot().tensors()
            if type(tensor) is Tensor and _has_numbers(tensor) and not tensor.is_inference()
        ]
        self._others: list[Tensor] = []

    def _snapshot(self) -> Snapshot:
        """A snapshot of the modules, attributes included: any forward may be the first to change them. It is the last
        snapshot, if nothing has changed since: a comparison is much cheaper than a snapshot."""
        if self._last is None or self._last.has_generators or any(self._last.changes()):
            self._last = Snapshot(self._module)
        return self._last

    def state(self, device: torch.device) -> State:
        """The present state of all that forward changes besides parameters, random numbers included."""
        own = {name: each.value for name, each in self._own.items()}
        return State([self._snapshot()], self._writes, [device], own)

    def learn(self, before: State) -> None:
        """Finds the tensors that a step's first forward has written. ``before``: the state at its beginning."""
        statistics = {
            id(buffer)
            for part in self._module.modules()
            if isinstance(part, BATCH_STATISTICS)  # forward may begin to write them when the user unfreezes the module
            for buffer in part.buffers(recurse=False)
        }
        ids = statistics | set(self._written)

        def was_written(numbers: Numbers) -> bool:
            if id(numbers.tensor) in ids or numbers.was_bumped:
                return True
            # On a GPU a comparison waits for the numbers: only the first step does so.
            return (self._is_new or numbers.tensor.is_cpu) and numbers.was_written

        before.numbers = list(filter(was_written, before.numbers))
        self._written = {id(numbers.tensor): numbers.tensor for numbers in before.numbers}
        self._others = [tensor for tensor in self._writes if id(tensor) not in self._written]
        self._writes, self.is_known, self._is_new = list(self._written.values()), True, False

    def versions(self) -> list[int]:
        """The versions of the tensors that the step's first forward did not write."""
        return list(map(version_of, self._others))

    def check(self, versions: Sequence[int], stage: str) -> None:
        """RunError if a forward, which began at these ``versions``, has written a tensor that the first did not."""
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
        self._known: dict[int, tuple[object, SideEffects]] = {}  # by identity, with the object, so that it lives

    def begin(self) -> None:
        for _, effects in self._known.values():
            effects.begin()

    def keep(self, graphs: Iterable[StageGraph]) -> None:
        """Forgets all stages but these graphs'."""
        wanted = {id(stage.module) for graph in graphs for stage in graph}
        self._known = {key: effects for key, effects in self._known.items() if key in wanted}

    def of(self, stage: Stage, graph: StageGraph) -> SideEffects:
        call = stage.module
        if id(call) not in self._known:
            module = getattr(call, "__self__", call)  # the owner of a method, such as ``model.encode``
            # Modules that opaque methods call are parts of the stage's module; the methods' owners are not.
            owners = [_Shallow(part.owner) for part in opaque_calls(call) if part.is_method]
            modules = [*([module] if isinstance(module, nn.Module) else []), *owners]
            self._known[id(call)] = call, SideEffects(modules, graph.generators)
        return self._known[id(call)][1]


class _Shallow(nn.Module):
    """A module without its submodules, for a walk over a module's parts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # in a tuple, so that it is not a submodule

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self._module[0]
