"""Traffic: what a rank moved in a step, between which ranks, and how long it stood still for it."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from fxpipe.distributed.collective import Scope
from fxpipe.notebook import Tabular

DATA_AXIS = ("shard", "replica", "gather")
"""The scopes on which gradients and parameters travel over the data axis."""

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Moved:
    """One row: what a rank moved by one operation on one group."""

    operation: str
    """Of a collective, or "send" or "receive"."""
    scope: Scope
    """The group as the rank sees it; of a send and a receive, the pipe ranks of the two ends."""
    group: tuple[int, ...]
    """Its ranks, counted over the whole topology."""
    between_nodes: bool
    count: int
    bytes: float
    """What this rank sends, by the formulas of a ring; a receive is counted where it is sent, and objects are not."""
    exposed: float
    """For how many seconds this rank stood still, waiting for it."""
    leaving: float
    """What leaves this rank's node, of all groups of this kind in its data group together."""


@dataclass(frozen=True)
class Traffic(Tabular):
    """What one rank moved from the start of a call until now, largest first; prints as a table."""

    rank: int
    rows: tuple[Moved, ...]

    def select(self, operation: str | None = None, scope: Scope | None = None) -> tuple[Moved, ...]:
        """The rows of an operation, of a scope, or of both."""
        return tuple(
            row for row in self.rows if operation in (None, row.operation) and (scope is None or scope == row.scope)
        )

    @property
    def between(self) -> float:
        """The bytes of gradients and parameters that leave this node for others, over the data group of this rank."""
        return sum(row.leaving for row in self._data_axis)

    @property
    def inside(self) -> float:
        """The bytes of gradients and parameters that this rank sends on groups that stay in its node."""
        return sum(row.bytes for row in self._data_axis if not row.between_nodes)

    @property
    def exposed(self) -> float:
        """For how many seconds this rank stood still for any of it."""
        return sum(row.exposed for row in self.rows)

    @property
    def _data_axis(self) -> tuple[Moved, ...]:
        return tuple(row for row in self.rows if row.scope in DATA_AXIS)

    def __str__(self) -> str:
        if not self.rows:
            return f"rank {self.rank} moved nothing"
        rows = [
            (
                row.operation,
                _label(row),
                "between" if row.between_nodes else "inside",
                row.count,
                _size(row.bytes),
                f"{row.exposed * 1e3:.2f}",
            )
            for row in self.rows
        ]
        table = tabulate(
            rows,
            headers=("operation", "group", "nodes", "count", "bytes", "ms exposed"),
            colalign=("left", "left", "left", "right", "right", "right"),
            disable_numparse=True,
        )
        return (
            f"{table}\nrank {self.rank}, gradients and parameters: {_size(self.between)} leave the node for others, "
            f"{_size(self.inside)} stay in it; {self.exposed * 1e3:.2f} ms exposed in all"
        )

    def __repr__(self) -> str:
        return f"<Traffic of rank {self.rank}: {_size(sum(row.bytes for row in self.rows))} in {len(self.rows)} rows>"


def _label(row: Moved) -> str:
    if row.operation in ("send", "receive"):
        return f"{row.group[0]} → {row.group[1]}"
    scope = row.scope if isinstance(row.scope, str) else "owners"
    shown = [str(rank) for rank in row.group]
    if len(shown) > _SHOWN_RANKS:
        shown = [*shown[: _SHOWN_RANKS // 2], "…", shown[-1]]
    return f"{scope} [{', '.join(shown)}]"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:  # what rounds to 1000 is one of the next
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
