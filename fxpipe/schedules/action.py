"""An action is one cell of a schedule: a stage, a kind, and a micro-batch or a group of micro-batches."""

from __future__ import annotations

import re
from typing import NamedTuple

from fxpipe.errors import ScheduleError
from fxpipe.schedules.kinds import KINDS, Kind
from fxpipe.validation import shown


class Action(NamedTuple):
    """A stage's work on a micro-batch, or on a group of micro-batches at once: a cell of a table.

    >>> str(Action(2, Kind.F, 0)), str(Action(4, Kind.F, 0, count=4))
    ('2F0', '4F0-3')
    """

    stage: int
    """The stage's number. The stage may be on any rank."""
    kind: Kind
    """Forward, the forward again, backward, half of a backward, or another row of ``KINDS``."""
    microbatch: int
    """The micro-batch's number, from 0; for a group, the number of its first micro-batch."""
    count: int = 1  # type: ignore[assignment]  # tuple has a method of this name, which no caller needs here
    """How many micro-batches the action covers: 1, or the group size at a gathered stage."""

    @property
    def microbatches(self) -> range:
        """The numbers of the micro-batches that the action covers."""
        return range(self.microbatch, self.microbatch + self.count)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.letter}{self.microbatch}"
        return text if self.count == 1 else f"{text}-{self.microbatch + self.count - 1}"

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that prints as ``text``; raises ScheduleError if no action prints so.

        An O or a P is of the kind ``Kind.O`` or ``Kind.P``. If it is after its micro-batch's I, a table makes it
        ``Kind.OW`` or ``Kind.PW``.

        >>> Action.parse("2B1") == Action(2, Kind.B, 1)
        True
        """
        match = _CELL.fullmatch(text.strip() if isinstance(text, str) else "")
        first, last = (int(match[3]), int(match[4] or match[3])) if match else (0, 0)
        if match is None or match[2] not in KINDS or (match[4] and last <= first):
            *others, final = dict.fromkeys(kind.letter for kind in KINDS.values())
            raise ScheduleError(
                f"{shown(text)} is no action; write <stage><{', '.join(others)} or {final}><micro-batch>, as in 2F0, "
                "or of a group's first and last micro-batch, as in 4F0-3"
            )
        return Action(int(match[1]), KINDS[match[2]], first, last - first + 1)


_CELL = re.compile(r"([0-9]{1,18})([A-Z])([0-9]{1,18})(?:-([0-9]{1,18}))?")
