"""Recompute: a stage's forward keeps what it was given and not its graph, and runs again when its backward is near.

F  runs as ever, gradients on: the same kernels, buffers written, random numbers drawn. What autograd would save is let
   go of at once, and its graph behind it
R  begins where F began, with F's random numbers, and leaves everything but its graph as it was before R
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.graph.stage_graph import Stage
from fxpipe.parameters.dtensors import local
from fxpipe.run.actions.side_effects import EffectsOf, has_numbers
from fxpipe.run.step.batch_digest import Digest
from fxpipe.torch_compat import pytree, version_of
from fxpipe.trace.state.closeness import is_repeated
from fxpipe.trace.state.replay import checkpoints_that_keep
from fxpipe.trace.state.snapshot import State

T = TypeVar("T")


def without_graph(value: Any) -> Any:
    """The same with its tensors cut from what they were computed with; those that need a gradient still say so."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad), value)


class Kept:
    """What of a stage's forward is kept until it runs again: made before it, and notified when it has run.

    ``proves``: whether it is looked at that the second run makes what the first one made.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[Any], effects: EffectsOf, device: torch.device, proves: bool
    ) -> None:
        self._stage, self._device, self._proves = stage, device, proves
        self.inputs = [without_graph(value) for value in inputs]
        self._versions = [_versions(value) for value in self.inputs]
        self._parameters = [(one, version_of(one)) for one in stage.parameters.values()]
        self._written: list[nn.Parameter] = []
        self._effects_of, self._effects = effects, effects.of(stage)
        self._start = self._state()
        self._others = [] if self._effects is None else self._effects.versions()
        self._bumped = frozenset[int]()
        self._made: list[Tensor] = []

    def _state(self) -> State:
        """Of what forward changes beside parameters. A stage that is no module is known to draw random numbers only."""
        if self._effects is None:
            return State([], [], [self._device])
        return State([self._effects.snapshot()], self._effects.writes, [self._device])

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
        self._written = [one for one, version in self._parameters if version_of(one) != version]
        self._parameters = [(one, version) for one, version in self._parameters if version_of(one) == version]
        self._bumped = self._start.bumped()
        if self._effects is not None and not self._effects.is_known:
            self._effects.learn(self._start)
        elif self._effects is not None:
            self._effects.check(self._others, self._stage.name)
        if self._proves:
            self._made = [leaf.clone() for leaf in _plain(outputs)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the second run, which begins where the first one did; afterwards all is as it is now. RunError where
        what the stage was given has been written since."""
        if [_versions(value) for value in self.inputs] != self._versions:
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: what it was given was written in place since; write "
                "it out of place (x = x + 1 for x += 1), or leave the stage out of recompute="
            )
        if any(version_of(one) != version for one, version in self._parameters):
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: its parameters were written since its forward, as a "
                "hook does that makes an optimizer's step in backward; make it behind forward_backward(...), or leave "
                "the stage out of recompute="
            )
        copies = [(one, one.detach().clone()) for one in self._written]
        now, before = self._state(), self._unseen()
        self._start.restore(self._bumped)
        try:
            with checkpoints_that_keep():
                yield
        finally:
            now.restore(now.bumped())
            for parameter, copy in copies:
                parameter.data.copy_(copy)
        twice = next((name for name, number in self._unseen().items() if number != before[name]), None)
        if twice is not None:
            raise RunError(
                f"stage {self._stage.name!r} cannot be recomputed: its forward writes its parameter {twice!r} by "
                ".data, and would do so twice; write it behind forward_backward(...), or under torch.no_grad() without "
                ".data, or leave the stage out of recompute="
            )

    def _unseen(self) -> dict[str, int]:
        """A number for each parameter, which shows a write that autograd does not see."""
        named = self._stage.parameters.items() if self._proves else ()
        return Digest([{name: one for name, one in named if has_numbers(one)}]).numbers()

    def second_is_over(self, outputs: Sequence[Any]) -> None:
        """RunError where it has made something else than the first one."""
        if not self._proves:
            return
        again = _plain(outputs)
        if len(again) != len(self._made) or not all(map(is_repeated, again, self._made)):
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
    return [version_of(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _plain(outputs: Sequence[Any]) -> list[Tensor]:
    return [local(leaf.detach()) for leaf in pytree.tree_leaves(list(outputs)) if has_numbers(leaf)]
