"""Stage work: the seconds of each stage, and the shares of stages and ranks in the work of a table."""

from __future__ import annotations

from dataclasses import dataclass

NEARLY_IDLE = 0.25
"""A rank with less than this fraction of an even share of the work is named as nearly idle."""


@dataclass(frozen=True)
class StageWork:
    """The seconds of each stage's F and B (None for no B), and shares of the work: all actions of the table.

    ``shares``: each stage's fraction of its ranks' work. ``ranks``: each rank's fraction of all work.
    """

    forward: tuple[float, ...]
    backward: tuple[float | None, ...]
    shares: tuple[float, ...]
    ranks: tuple[float, ...]
    source: str

    @property
    def idle(self) -> tuple[str, ...]:
        """A line for each rank that is nearly idle."""
        least = NEARLY_IDLE / len(self.ranks)
        return tuple(f"rank {n} has {part:.0%} of the work" for n, part in enumerate(self.ranks) if part < least)


def in_ms(seconds: float | None) -> str:
    """Seconds as milliseconds, to three digits; "-" for None."""
    return "-" if seconds is None else f"{float(f'{seconds * 1e3:.3g}'):,g}"
