"""Others: what is known of the other ranks, by what they tell and by what the system says, and in which words."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fxpipe.distributed.post import Ending, Heard, Post
from fxpipe.distributed.process_state import ProcessId, state_of
from fxpipe.distributed.topology import Topology
from fxpipe.distributed.whereabouts import Call, Waiting, first_difference, here

_SILENT = 5.0  # seconds without a sign after which a rank is called silent
_LEFT = 5.0  # seconds after which one whose program has ended is not waited for any more
_SHOWN = 3  # ranks that a message tells of at once


class Others:
    """What ``rank``, which is this ``process``, knows of the others through its ``post``."""

    def __init__(self, rank: int, process: ProcessId, post: Post) -> None:
        self.rank, self._process, self._post = rank, process, post
        self.topology: Topology | None = None
        self._suspects: dict[int, float] = {}  # rank → when it was first seen to be gone

    def named(self, rank: int) -> str:
        """A rank with its coordinates: "rank 3 (pipe 1, data 1)"."""
        if self.topology is None:
            return f"rank {rank}"
        place = self.topology.coordinate(rank)
        told = ", ".join(f"{axis} {place[axis]}" for axis, size in self.topology.axes if size > 1)
        return f"rank {rank} ({told})" if told else f"rank {rank}"

    def heard(self, rank: int) -> Heard | None:
        """The last that was heard of a rank."""
        return self._post.heard.get(rank)

    def system(self, rank: int) -> str:
        """What the system says of its process, as ``state_of``."""
        heard = self.heard(rank)
        return "" if heard is None else state_of(heard.state.process, self._process)

    def gone(self) -> Ending | None:
        """Ranks whose processes have ended, where the system says so, and no cause was told before they did."""
        now = time.monotonic()
        for rank, heard in list(self._post.heard.items()):
            if not heard.state.left and self.system(rank) in ("ended", "gone"):
                self._suspects.setdefault(rank, now)
        sure = [rank for rank, seen in self._suspects.items() if self._post.began > seen or now - seen > _SILENT]
        sure = [rank for rank in sure if not self._post.heard[rank].state.left]
        return self.found(sure) if sure else None

    def found(self, ranks: Sequence[int]) -> Ending:
        """Why the run ends, where it is for these ranks."""
        return Ending(self.rank, False, "; ".join(map(self.described, ranks[:_SHOWN])), tuple(ranks))

    def left_behind(self, waiting: Waiting) -> Ending | None:
        """Ranks that are waited for, and whose programs have ended."""
        now = time.monotonic()
        heard = {rank: self.heard(rank) for rank in waiting.ranks}
        left = [rank for rank, one in heard.items() if one and one.state.left and now - one.at > _LEFT]
        return self.found(left[:_SHOWN]) if left else None

    def elsewhere(self) -> Ending | None:
        """Ranks that have made another call than this one has, where both should have made the same."""
        heard = list(self._post.heard.items())
        made = {rank: one.state.calls for rank, one in heard if one.state.epoch == here.epoch}
        for rank, calls in made.items():
            differing = first_difference(here.calls, calls, self.rank, rank)
            if differing is not None:
                mine, theirs = differing
                alike = {other: _call_like(mine, calls, self.rank) for other, calls in made.items()}
                names = {other: call.name for other, call in alike.items() if call is not None}
                told = {**names, self.rank: mine.name, rank: theirs.name}
                notes = {other: "; ".join(self._notes(other)) for other in told} | {self.rank: here.handling}
                return Ending(self.rank, False, self.apart(told, notes), ())
        return None

    def apart(self, calls: Mapping[int, str], notes: Mapping[int, str]) -> str:
        """Ranks that are in different calls, in words. ``notes``: what else is known of them."""
        ranks: dict[str, list[int]] = {}
        for rank, name in sorted(calls.items()):
            ranks.setdefault(name, []).append(rank)
        told = [f"{_listed([self.named(rank) for rank in some])} in {name}" for name, some in ranks.items()]
        told[0] = told[0].replace(" in ", " is in " if len(ranks[next(iter(ranks))]) == 1 else " are in ", 1)
        noted = [f"; on {self.named(rank)} {note}" for rank, note in sorted(notes.items()) if note]
        return (
            f"{', '.join(told)}{''.join(noted)}; all ranks must make the same calls of fxpipe, in one order: none "
            "under `if rank == 0`, and as many on each, as with topo.sampler(dataset), which gives all as many rows"
        )

    def late(self, waiting: Waiting) -> list[int]:
        """The ranks that are waited for; of a group those that have not come."""
        words = waiting.words()
        heard = {rank: self.heard(rank) for rank in waiting.ranks}
        late = [rank for rank, one in heard.items() if one is None or one.state.waits_for != words]
        return late or list(waiting.ranks)

    def waits(self, rank: int) -> bool:
        """Whether a rank waits itself, so that another one is to blame."""
        heard = self.heard(rank)
        return heard is not None and bool(heard.state.waits_for) and not self.is_silent(rank)

    def story(self, waiting: Waiting, age: float) -> str:
        """Who waits for whom, from this rank on to one that does not wait."""
        parts, seen = [f"{self.named(self.rank)} waits for {waiting.words()}, {age:.0f} s"], {self.rank}
        late = self.late(waiting)
        while late := [rank for rank in late if rank not in seen]:
            slow = [rank for rank in late if not self.waits(rank)]
            shown = slow[:_SHOWN] or late[:1]
            parts += map(self.described, shown)
            seen |= set(late)
            late = [] if slow else list(self._post.heard[shown[0]].state.ranks)
        noted = [f"on {self.named(rank)} {note}" for rank in seen - {self.rank} for note in self._notes(rank)]
        return "; ".join([*parts, *noted])

    def _notes(self, rank: int) -> Sequence[str]:
        heard = self.heard(rank)
        return heard.state.noted if heard is not None else ()

    def is_silent(self, rank: int) -> bool:
        """Whether nothing new was heard of it for some seconds."""
        heard = self.heard(rank)
        return heard is None or time.monotonic() - heard.at > _SILENT

    def is_stopped(self, rank: int) -> bool:
        """Whether the system says so."""
        return self.system(rank) == "stopped"

    def extends(self, rank: int) -> bool:
        """Whether a rank is known to work on what may take long."""
        heard = self.heard(rank)
        return heard is not None and heard.state.extends and not self.is_silent(rank) and not self.is_stopped(rank)

    def described(self, rank: int) -> str:
        """What became of a rank, or what it does."""
        name, heard = self.named(rank), self.heard(rank)
        if heard is None:
            return f"{name} was not heard of"
        system = self.system(rank)
        if heard.state.left:
            return f"{name} has left: its program has ended"
        if system in ("ended", "gone"):
            return f"{name} is gone: its process has ended"
        where = f"{heard.state.where}, {heard.state.age:.0f} s"
        if system == "stopped":
            return f"{name} is stopped, as by SIGSTOP; when it was last heard of it {_past(where)}"
        if self.is_silent(rank):
            return f"{name} is silent, {time.monotonic() - heard.at:.0f} s; when it was last heard of it {_past(where)}"
        return f"{name} {where}"


def _call_like(mine: Call, calls: Sequence[Call], rank: int) -> Call | None:
    """What another rank has made in place of this rank's call, if it has come to it."""
    shared = [call for call in calls if call.members is None or rank in call.members]
    return next((call for call in shared if call[:2] == mine[:2] and call.members == mine.members), None)


def _past(where: str) -> str:
    for now, then in (("is ", "was "), ("waits ", "waited ")):
        if where.startswith(now):
            return then + where.removeprefix(now)
    return where


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
