"""Varying: which sizes of micro-batches were seen to vary, and how many captures that took."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from fxpipe.graph.program import SizeGuard
from fxpipe.plan.capture.sizes import differences, holds, outline, size_at, varying
from fxpipe.plan.inputs.batch import Description
from fxpipe.plan.inputs.pattern import Pattern
from fxpipe.progress import log
from fxpipe.trace.request import Place

FAMILIES = 256
"""So many are remembered."""
_REMEMBERED = 20
"""With so many captured shapes a new one is compared; of earlier ones it is known what varied."""


@dataclass
class Family:
    """Micro-batches that differ in sizes alone: those captured so far, and the captures with symbolic sizes."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    varying: frozenset[Place] = frozenset()
    """Dimensions that were seen to vary, by shapes that are no longer remembered, too."""
    general: list[tuple[Pattern, SizeGuard]] = field(default_factory=list)

    def copy(self) -> Family:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), general=list(self.general))

    def holding(self, shape: Description | None) -> Pattern | None:
        """The pattern of the latest capture that holds for this shape, too."""
        if shape is None:
            return None
        return next((pattern for pattern, guard in reversed(self.general) if holds(guard, shape)), None)

    def free(self, shape: Description | None) -> frozenset[Place]:
        """The dimensions of a new shape to be kept symbolic: those that vary, and are not of size 1 in it."""
        if shape is None:
            return frozenset()
        return varying(shape, self.shapes) | frozenset(place for place in self.varying if size_at(shape, place) > 1)

    def note(self, shape: Description, pattern: Pattern, guard: SizeGuard | None) -> None:
        """A shape was captured."""
        self.varying |= varying(shape, self.shapes)
        self.shapes.append(shape)
        self.general += [] if guard is None else [(pattern, guard)]


@dataclass
class Count:
    """Of captures, for a word where they are many."""

    shapes: deque[Description] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    number: int = 0
    fixed: dict[str, None] = field(default_factory=dict)
    """What was reported of sizes that captures have as numbers."""

    def copy(self) -> Count:
        """One that changes by itself."""
        return dataclasses.replace(self, shapes=self.shapes.copy(), fixed=dict(self.fixed))

    def note(self, shape: Description, fixed_sizes: str, tracer: str) -> None:
        """Tells of sizes that a capture has as numbers, and of the tenth capture."""
        self.shapes.append(shape)
        self.number += 1
        if fixed_sizes and fixed_sizes not in self.fixed:
            self.fixed[fixed_sizes] = None
            log(f"fxpipe: {fixed_sizes}")
        if self.number == MANY:
            what = f"{MANY} captures by now, since batches differ in {differences(self.shapes)}"
            log("\n".join([f"fxpipe: {what}{_REMEDY.get(tracer, '')}", *self.fixed]))


MANY = 10
"""So many captures are worth a word."""
_REMEDY = {
    "record": "; what record captures has each size and number as it was: pad batches to a few sizes, or, where it "
    'captures the model, write tracer="export", which keeps sizes that vary symbolic'
}


def family_of(pattern: Pattern, shape: Description) -> Hashable:
    return dataclasses.replace(pattern, shapes=()), outline(shape)
