"""One cell of a schedule: a stage, what it does, and for which micro-batch."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from fxpipe.errors import ScheduleError


class Op(enum.Enum):
    """F: forward. B: full backward. I and W: its two halves, gradients of inputs and of weights."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code, and tables hash it a lot


class Action(NamedTuple):
    """``Action(2, Op.F, 0)`` prints as ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as ``text``; ScheduleError where none does."""
        match = re.fullmatch(r"([0-9]{1,18})([FBIW])([0-9]{1,18})", text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is no action; write <stage><F, B, I or W><micro-batch>, as in 2F0")
        return Action(int(match[1]), Op(match[2]), int(match[3]))
