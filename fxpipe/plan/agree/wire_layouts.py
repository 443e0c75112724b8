"""Wire layouts: which micro-batches make messages of the same layouts. All ranks number them in the same way."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence

from fxpipe.plan.plan import Plan


class WireLayouts:
    """Numbers micro-batches: those of one number make messages of the same shapes, strides and types.

    They do where the stages come from one capture, the table has their backwards in the same form, and their inputs
    layout the same on each rank. A gathered stage sees other micro-batches: with one, each has a number of its own.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()

    def of(self, plan: Plan, fixed: Hashable, inputs: Sequence[Hashable]) -> tuple[int, ...]:
        """The number of each micro-batch. ``fixed``: what else all depend on alike. ``inputs``: of each, what each rank
        was given."""
        if plan.graph.gathers:
            return tuple(next(self._count) for _ in inputs)
        captures = plan.captures or (None,) * len(inputs)
        alike = plan.graph.edges, fixed
        each = zip(captures, plan.halved, inputs, strict=True)
        return tuple(self._number((alike, *one)) for one in each)

    def _number(self, key: Hashable) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = next(self._count)
        return number

    def keep(self, used: Collection[int]) -> None:
        """Forgets all numbers but these; a forgotten one never comes back."""
        self._numbers = {key: number for key, number in self._numbers.items() if number in used}
