"""Spells: what each process did from the beginning of a measured step to its end: it computed, it waited, or neither.

    before        compute  waiting  compute  between  compute  after
    ├─ settling ─┤├─ 0F0 ─┤├ 1B0 ──┤├─ 0B0 ─┤├──────┤├─ 0F1 ─┤├─ loss ─┤

The spells of a process follow one another without a gap, so they sum to its step.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import NamedTuple

from tabulate import tabulate

COMPUTE, WAITING, BETWEEN, BEFORE, AFTER = "compute", "waiting", "between", "before", "after"
CATEGORIES = COMPUTE, WAITING, BETWEEN, BEFORE, AFTER
_LONGEST = 3  # messages waited for that are named, of a rank


class Spell(NamedTuple):
    """Some time of a process. ``ranks``: the pipe ranks that it played. ``what``: the action that was computed, the
    message that was waited for ("1B0 from rank 1"), or what a step does around its actions; of "between", nothing.

    Times are those of the timeline: "before" lies below 0 on the rank that began first.
    """

    ranks: tuple[int, ...]
    category: str
    what: str
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Spent:
    """How a process's step divides, in seconds."""

    ranks: tuple[int, ...]
    seconds: Mapping[str, float]
    """Category → its part: "compute"; "waiting" for messages of other ranks; "between" actions, where Python runs:
    sends, posted receives, reductions that are started, waits for gathered parameters; "before" the first action and
    "after" the last one. They sum to ``wall``."""
    waits: Mapping[str, float]
    """Message → how long it was waited for, the longest first."""
    outside: Mapping[str, float]
    """What was done before the first action and after the last one → how long it took, in order."""
    wall: float
    """From the call's beginning to its end."""

    @property
    def label(self) -> str:
        """The ranks: "2", or "0-3"."""
        return str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}-{self.ranks[-1]}"


def spent(spells: Sequence[Spell]) -> tuple[Spent, ...]:
    """Each process's sums."""
    # One pass for each process; messages by name, the parts around actions in their order.
    found = []
    for ranks in sorted({spell.ranks for spell in spells}):
        mine = [spell for spell in spells if spell.ranks == ranks]
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        waits: dict[str, float] = {}
        outside: dict[str, float] = {}
        for spell in mine:
            seconds[spell.category] += spell.duration
            totals = waits if spell.category == WAITING else outside if spell.category in (BEFORE, AFTER) else {}
            totals[spell.what] = totals.get(spell.what, 0.0) + spell.duration
        longest = dict(sorted(waits.items(), key=lambda item: -item[1]))
        found.append(Spent(ranks, seconds, longest, outside, mine[-1].end - mine[0].start))
    return tuple(found)


def tabulated(spells: Sequence[Spell]) -> str:
    """A row for each process, in ms; below it what stands outside of actions, in the mean over processes."""
    each = spent(spells)
    rows = []
    for part in each:
        times = map(milliseconds, [part.wall, *map(part.seconds.__getitem__, CATEGORIES)])
        longest = [f"{what} {milliseconds(seconds)}" for what, seconds in part.waits.items()][:_LONGEST]
        rows.append([part.label, *times, ", ".join(longest)])
    headers = ["rank", "step ms", *CATEGORIES, "longest waits"]
    drawn = tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * 6, "left"])
    names = dict.fromkeys(name for part in each for name in part.outside)
    means = (f"{name} {milliseconds(sum(one.outside.get(name, 0.0) for one in each) / len(each))}" for name in names)
    return f"{drawn}\noutside of actions, mean over {'ranks' if len(each) > 1 else 'the process'}: {', '.join(means)}"


def in_csv(spells: Sequence[Spell]) -> str:
    """A line for each spell: ``0,waiting,1B0 from rank 1,0.0125,0.0131``, in seconds."""
    file = StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["rank", "category", "what", "start", "end"])
    for spell in spells:
        times = f"{spell.start:.9f}", f"{spell.end:.9f}"
        lines.writerow([" ".join(map(str, spell.ranks)), spell.category, spell.what, *times])
    return file.getvalue()


def milliseconds(seconds: float, sign: str = "") -> str:
    """To a hundredth. ``sign``: "+" where a positive number has one."""
    return f"{round(seconds * 1e3, 2) + 0.0:{sign}.2f}"  # and not -0.00
