"""SizeOf: a size of an input as an input of a stage: a number that every rank knows, whatever it was given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

Step = tuple[Callable[[Any, Any], Any], Any]
"""``getitem`` or ``getattr``, and its second argument: a step into a container."""


class SizeOf(str):
    """The name of such a number, as ``images[0].shape[2]``: which input, the steps to its tensor, the dimension."""

    input: str
    steps: tuple[Step, ...]
    dim: int

    @staticmethod
    def make(name: str, steps: Sequence[Step], dim: int) -> SizeOf:
        """Of the input ``name``."""
        words = "".join(f"[{key!r}]" if step is operator.getitem else f".{key}" for step, key in steps)
        made = SizeOf(f"{name}{words}.shape[{dim}]")
        made.input, made.steps, made.dim = name, tuple(steps), dim
        return made

    @staticmethod
    def asked(node: fx.Node) -> SizeOf | None:
        """What a node that asks for a size asks for; None where that is no input's."""
        source, dim = node.args
        steps: list[Step] = []
        while isinstance(source, fx.Node) and source.target in (operator.getitem, getattr):
            steps.insert(0, (source.target, source.args[1]))
            source = source.args[0]
        if not isinstance(source, fx.Node) or source.op != "placeholder" or not isinstance(dim, int):
            return None
        return SizeOf.make(str(source.target), steps, dim)

    def of(self, inputs: Mapping[str, Any]) -> int:
        """The number. ``inputs``: by name, with tensors or what is like them."""
        value = inputs[self.input]
        for step, key in self.steps:
            value = step(value, key)
        return int(value.shape[self.dim])
