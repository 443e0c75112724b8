"""One cell of a schedule: a stage, what it does, and for which micro-batch."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.kinds import shown


class Op(enum.Enum):
    """F: forward. B: full backward. I and W: its two halves, gradients of inputs and of weights."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code, and tables hash it a lot


class Action(NamedTuple):
    """What a stage does with a micro-batch, one cell of a table.

    >>> str(Action(2, Op.F, 0))
    '2F0'
    """

    stage: int
    """Its number; it may be on any rank."""
    op: Op
    """Forward, backward, or one half of a backward."""
    microbatch: int
    """Its number, from 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``; ScheduleError where none does.

        >>> Action.parse("2B1") == Action(2, Op.B, 1)
        True
        """
        match = re.fullmatch(r"([0-9]{1,18})([FBIW])([0-9]{1,18})", text.strip() if isinstance(text, str) else "")
        if match is None:
            raise ScheduleError(f"{shown(text)} is no action; write <stage><F, B, I or W><micro-batch>, as in 2F0")
        return Action(int(match[1]), Op(match[2]), int(match[3]))
