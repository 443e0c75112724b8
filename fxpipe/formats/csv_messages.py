"""The messages of a CSV file: the cells of sends and receives, compared with those of the lowered table.

    0F0,0SEND_F0                   rank 0 sends what stage 0 has made of micro-batch 0,
    1RECV_F0,1F0                   and rank 1 receives it

A cell names the stage at its own end. What runs is always lowered from the actions; so a file's messages, whose places
may be others, are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpipe.schedules.action import Action, Op
from fxpipe.schedules.dependency import EdgeLike
from fxpipe.schedules.lower import Receive, Send
from fxpipe.schedules.schedule import Schedule

COMPUTE = frozenset(op.value for op in Op)
MESSAGES = frozenset(["SEND_F", "RECV_F", "SEND_B", "RECV_B"])


class Token(NamedTuple):
    """``1RECV_F3``: a stage, an op, and a micro-batch where the op has one; a group's first, and how many it has."""

    stage: int
    op: str
    microbatch: int | None
    size: int = 1

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


class Cell(NamedTuple):
    """A cell that is not empty, and where it stands: line and cell count from 1. An overlap has several tokens."""

    file: str
    line: int
    column: int
    text: str
    tokens: tuple[Token, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, cell {self.column}: {self.text!r}"

    @property
    def actions(self) -> Iterator[Action]:
        """The actions among its tokens, in order."""
        return (Action(t.stage, Op(t.op), t.microbatch or 0, t.size) for t in self.tokens if t.op in COMPUTE)

    @property
    def message(self) -> Token | None:
        """The send or receive that it is; none stands in an overlap."""
        return self.tokens[0] if self.tokens[0].op in MESSAGES else None


def difference(lines: Sequence[Sequence[Cell]], schedule: Schedule) -> str | None:
    """The first line whose messages are not its rank's in the lowered table, in words; None where there is none.

    A file without messages is one of actions alone.
    """
    if not any(cell.message for line in lines for cell in line):
        return None
    graph = f"with edges {', '.join(map(str, schedule.edges))}" if schedule.edges else "without edges"
    for rank, (line, row) in enumerate(zip(lines, schedule.instructions, strict=True)):
        steps = (step for step in row if isinstance(step, Send | Receive))
        left = Counter(token_of(step, schedule.links[step.message.edge]) for step in steps)
        for cell in line:
            if cell.message and not left[cell.message]:
                return f"{cell}, but {graph} rank {rank} has no {cell.message}, or fewer; take it out, or mend edges="
            if cell.message:
                left[cell.message] -= 1
        for token in +left:
            at = f"{line[0].file}, line {line[0].line}"
            return f"{at} lacks {token}, which {graph} rank {rank} has; put it in, or mend edges="
    return None


def token_of(step: Send | Receive, edge: EdgeLike) -> Token:
    """Along edge 0-1: ``0SEND_F3``, ``1RECV_F3`` of the value, ``1SEND_B3``, ``0RECV_B3`` of its gradient."""
    message = step.message
    sends, is_value = isinstance(step, Send), message.op is Op.F
    stage = edge.source if sends == is_value else edge.target
    return Token(stage, f"{'SEND' if sends else 'RECV'}_{message.op.value}", message.microbatch)
