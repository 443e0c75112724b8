"""An action is one cell of a schedule: a stage, an operation, and a micro-batch or a group of micro-batches."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.validation import shown


class Op(enum.Enum):
    """F: forward. R: the forward again, for the backward (recomputation). B: full backward. I and W: the two halves of
    a backward, the gradients of inputs (I) and of weights (W)."""

    F = "F"
    R = "R"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"

    __hash__ = object.__hash__  # a member is one object; tables hash members often, and Enum's own hash is slow


class Action(NamedTuple):
    """A stage's operation on a micro-batch, or on a group of micro-batches at once: a cell of a table.

    >>> str(Action(2, Op.F, 0)), str(Action(4, Op.F, 0, count=4))
    ('2F0', '4F0-3')
    """

    stage: int
    """The stage's number. The stage may be on any rank."""
    op: Op
    """Forward, the forward again, backward, or half of a backward."""
    microbatch: int
    """The micro-batch's number, from 0; for a group, the number of its first micro-batch."""
    count: int = 1  # type: ignore[assignment]  # tuple has a method of this name, which no caller needs here
    """How many micro-batches the action covers: 1, or the group size at a gathered stage."""

    @property
    def microbatches(self) -> range:
        """The numbers of the micro-batches that the action covers."""
        return range(self.microbatch, self.microbatch + self.count)

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{self.microbatch}"
        return text if self.count == 1 else f"{text}-{self.microbatch + self.count - 1}"

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that prints as ``text``; raises ScheduleError if no action prints so.

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
"""The letters of all operations, as an English list for error messages."""

_CELL = re.compile(f"([0-9]{{1,18}})([{''.join(op.value for op in Op)}])([0-9]{{1,18}})(?:-([0-9]{{1,18}}))?")
