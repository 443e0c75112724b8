"""Recompute: a stage's forward keeps what it was given and not its graph, and runs again when its backward is near.

F  runs as ever, gradients on: the same kernels, buffers written, random numbers drawn. What autograd would save is let
   go of at once, and its graph behind it
R  begins where F began, with F's random numbers, and leaves everything but its graph as it was before R
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage
from fxpipe.parameters.dtensors import local
from fxpipe.plan.replay import checkpoints_that_keep
from fxpipe.run.side_effects import EffectsOf, StageState
from fxpipe.run.written_parameters import WrittenParameters, is_plain
from fxpipe.torch_compat import pytree, version_of

T = TypeVar("T")


def without_graph(value: Any) -> Any:
    """The same with its tensors cut from what they were computed with; those that need a gradient still say so."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)


class Kept:
    """What of a stage's forward is kept until it runs again: made before it, and told when it has run.

    ``proves``: whether it is looked at that the second run makes what the first one made.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[Any], effects: EffectsOf, device: torch.device, proves: bool
    ) -> None:
        self._stage, self._device, self._proves = stage, device, proves
        self.inputs = [without_graph(value) for value in inputs]
        self._versions = [_versions(value) for value in self.inputs]
        self._parameters = WrittenParameters(stage, proves)
        self._effects_of, self._effects = effects, effects.of(stage)
        self._start = StageState(self._effects, device)
        self._bumped = frozenset[int]()
        self._made: list[Tensor] = []

    def first(self, run: Callable[[], T]) -> T:
        """The first run. What autograd saves is dropped, unless the stage's own code wants it: then it runs anew from
        where it began, as do all later ones, and its graph is dropped behind it."""
        if id(self._stage.module) in self._effects_of.needing_graphs:
            return run()
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _is_gone):
                return run()
        except RuntimeError as error:
            if _HOOKS not in str(error):
                raise
        self._start.restore(self._start.bumped())
        self._effects_of.needing_graphs[id(self._stage.module)] = self._stage.module
        return run()

    def first_is_over(self, outputs: Sequence[Any]) -> None:
        """The forward has run."""
        self._parameters.first_is_over()
        self._bumped = self._start.bumped()
        if self._effects is not None and not self._effects.is_known:
            self._effects.learn(self._start)
        elif self._effects is not None:
            self._effects.check(self._start, self._stage.name)
        if self._proves:
            self._made = _summed_up(outputs)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run, which begins where the first one did; afterwards all is as it is now. RunError where
        what the stage was given has been written since."""
        if [_versions(value) for value in self.inputs] != self._versions:
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: what it was given was written in place since; write "
                "it out of place (x = x + 1 for x += 1), or leave the stage out of recompute="
            )
        with self._parameters.again():
            now = StageState(self._effects, self._device)
            self._start.restore(self._bumped)
            try:
                with checkpoints_that_keep():
                    yield
            finally:
                now.restore(now.bumped())

    def second_is_over(self, outputs: Sequence[Any]) -> None:
        """RunError where it has made something else than the first one."""
        if not self._proves:
            return
        again = _summed_up(outputs)
        alike = len(again) == len(self._made) and all(map(_alike, self._made, again))
        if not alike:
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: run again from the same inputs, random numbers and "
                "buffers, it makes something else. It writes what it is given by .data, or depends on what is kept "
                "outside of its modules or inside of their Python objects: a global, an iterator, an array, a file; "
                "keep that in attributes or buffers of a submodule, or leave the stage out of recompute="
            )


_HOOKS = "saved tensor hooks"
"""What torch says where ``torch.func`` and ``torch.vmap`` meet them."""


def _is_gone(nothing: None) -> Tensor:
    raise RuntimeError(f"{_HOOKS} have dropped it")


def _versions(value: Any) -> list[int]:
    return [
        version_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def _summed_up(outputs: Sequence[Any]) -> list[Tensor]:
    """Of each plain tensor the sum, the norm, a sum in which places differ, and the unit in the last place of its type,
    on its device."""
    return [_figures(leaf.detach()) for leaf in pytree.tree_leaves(list(outputs)) if is_plain(leaf)]


def _figures(tensor: Tensor) -> Tensor:
    numbers = local(tensor)
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    eps = torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else 0.0
    if numbers.dtype.itemsize == 1 and numbers.is_floating_point():
        numbers = numbers.float()
    numbers = numbers if numbers.is_floating_point() else numbers.double()
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    places = torch.arange(numbers.numel(), device=numbers.device, dtype=torch.float64).view(numbers.shape).cos_()
    by_place = torch.linalg.vecdot(numbers.double().flatten(), places.flatten())
    return torch.stack([numbers.sum(dtype=torch.float64), by_place, norm, norm.new_full((), eps)])


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, which on a GPU may differ from run to run; what is not finite is told elsewhere."""
    *first, eps = one.tolist()
    *second, _ = other.tolist()
    norm = first[-1]
    if not all(map(math.isfinite, first + second)):
        return math.isfinite(norm) == math.isfinite(second[-1])
    return all(abs(mine - others) <= math.sqrt(eps) * norm for mine, others in zip(first, second, strict=True))
