"""One cell of a schedule: a stage, what it does, and for which micro-batch, or group of them."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.validation import shown


class Op(enum.Enum):
    """F: forward. R: the forward again, for the backward (recomputation). B: full backward. I and W: its two halves,
    gradients of inputs and of weights."""

    F = "F"
    R = "R"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code, and tables hash it a lot


class Action(NamedTuple):
    """What a stage does with a micro-batch, or with a group of them at once, one cell of a table.

    >>> str(Action(2, Op.F, 0)), str(Action(4, Op.F, 0, count=4))
    ('2F0', '4F0-3')
    """

    stage: int
    """Its number; it may be on any rank."""
    op: Op
    """Forward, the forward again, backward, or one half of a backward."""
    microbatch: int
    """Its number, from 0; a group's first."""
    count: int = 1  # type: ignore[assignment]  # a tuple has a method of this name, which nobody misses here
    """How many micro-batches it covers: 1, or as many as a gathered stage's group has."""

    @property
    def microbatches(self) -> range:
        """The numbers of those that it covers."""
        return range(self.microbatch, self.microbatch + self.count)

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{self.microbatch}"
        return text if self.count == 1 else f"{text}-{self.microbatch + self.count - 1}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``; ScheduleError where none does.

        >>> Action.parse("2B1") == Action(2, Op.B, 1)
        True
        """
        match = _CELL.fullmatch(text.strip() if isinstance(text, str) else "")
        first, last = (int(match[3]), int(match[4] or match[3])) if match else (0, 0)
        if match is None or (match[4] and last <= first):
            raise ScheduleError(
                f"{shown(text)} is no action; write <stage><{OPS}><micro-batch>, as in 2F0, or of a group's first and "
                "last micro-batch, as in 4F0-3"
            )
        return Action(int(match[1]), Op(match[2]), first, last - first + 1)


OPS = ", ".join(op.value for op in Op).replace(", W", " or W")
"""In words."""

_CELL = re.compile(f"([0-9]{{1,18}})([{''.join(op.value for op in Op)}])([0-9]{{1,18}})(?:-([0-9]{{1,18}}))?")
