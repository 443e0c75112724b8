"""Dependencies: which actions must run before an action, and an order in which a table's cells can run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from fxpipe.graph.topological import topological_order
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import FORWARD, KINDS, OFFLOADS, Kind


class EdgeLike(Protocol):
    """The interface of a value that passes between stages: a stage pair, or one of many values between a pair."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


Half = tuple[int, int]
"""A stage, and a micro-batch or the first of a group, whose backward is split into I and W, or that has an R."""

Groups = Mapping[int, int]
"""Stage → how many micro-batches an action of the stage covers; only gathered stages have an entry."""


def groups_of(rows: Iterable[Iterable[Action]]) -> Groups:
    """Returns the groups of a table. ``verify`` reports a stage that has groups of several sizes."""
    return {action.stage: action.count for row in rows for action in row if action.count != 1}


def group_of(groups: Groups, stage: int, microbatch: int) -> int:
    """The first micro-batch of a micro-batch's group at a stage; itself if the stage is not gathered."""
    return microbatch - microbatch % groups.get(stage, 1) if groups else microbatch


class Link(NamedTuple):
    """An edge of a bare stage graph."""

    source: int
    target: int


@dataclass(frozen=True)
class Dependencies:
    """The actions that each action waits for. A group needs what each of its micro-batches needs; a micro-batch needs
    the gradient of its group."""

    sources: Mapping[int, tuple[int, ...]]
    """The stages whose forward a stage's forward needs."""
    readers: Mapping[int, tuple[int, ...]]
    """The stages whose forward needs a stage's forward."""
    targets: Mapping[int, tuple[int, ...]]
    """The stages whose backward a stage's backward needs."""
    replacing: Mapping[Kind, Collection[Half]] = field(default_factory=dict)
    """Kind that replaces another one → where the table has it. The I makes the gradient of inputs where there is one,
    else the B. A backward needs the R or the P where there is one, else the F; a W needs the P after its I, else the
    I."""
    groups: Groups = field(default_factory=dict)
    ahead: Mapping[int, int] = field(default_factory=dict)
    """Stage without backward → how many values the stage may have made that its readers have not received:
    ``held_back``."""

    @staticmethod
    def from_edges(
        edges: Sequence[EdgeLike], backward: Sequence[bool], rows: Sequence[Sequence[Action]] = ()
    ) -> Dependencies:
        """Returns the dependencies along ``edges``. ``backward``: if each stage has a backward. ``rows``: the table."""
        replacing: dict[Kind, set[Half]] = {}
        for row in rows:
            for stage, kind, microbatch, _ in row:
                if kind.replaces:
                    replacing.setdefault(kind, set()).add((stage, microbatch))
        return Dependencies(
            sources=_grouped((edge.target, edge.source) for edge in edges),
            readers=_grouped((edge.source, edge.target) for edge in edges),
            targets=_grouped((edge.source, edge.target) for edge in edges if backward[edge.target]),
            replacing=replacing,
            groups=groups_of(rows),
        )

    def before(self, action: Action) -> list[Action]:
        """Returns the actions that must have run before this action."""
        needed = self.needs(action)
        if action.stage in self.ahead and action.kind.messages is FORWARD:
            last = action.microbatch - self.ahead[action.stage]
            # The forwards that use an earlier value of the stage: after them the stage may make another.
            for reader in self.readers[action.stage] if last >= 0 else ():
                needed.append(
                    Action(reader, action.kind, group_of(self.groups, reader, last), self.groups.get(reader, 1))
                )
        return needed

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions whose results this action reads."""
        stage, kind, microbatch, count = action
        if kind.messages is FORWARD:
            sources = self.sources.get(stage, ())
            # The usual case by itself: tables of 10,000 actions ask this for each of them, several times.
            if count == 1:
                return [Action(source, kind, microbatch) for source in sources]
            # The forwards of a source that make its values of these micro-batches.
            sizes = [(source, self.groups.get(source, 1)) for source in sources]
            return [
                Action(source, kind, first, size)
                for source, size in sizes
                for first in range(microbatch - microbatch % size, microbatch + count, size)
            ]
        if kind.after is None:
            return []
        own = Action(stage, self._in_table(KINDS[kind.after], stage, microbatch, kind), microbatch, count)
        if kind.messages is None:
            return [own]
        return [own, *[self.gradient(target, microbatch) for target in self.targets.get(stage, ())]]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradients of a stage's inputs, for a micro-batch or the micro-batch's group."""
        first = group_of(self.groups, stage, microbatch)
        return Action(stage, self._in_table(Kind.B, stage, first), first, self.groups.get(stage, 1))

    @property
    def halves(self) -> Collection[Half]:
        """The backwards that the table splits into I and W."""
        return self.replacing.get(Kind.I, ())

    @property
    def offloaded(self) -> Collection[Half]:
        """The micro-batches of stages of which the table copies something to the host and back."""
        return {half for kind in OFFLOADS for half in self.leaving(kind)}

    def leaving(self, kind: Kind) -> Collection[Half]:
        """The micro-batches of stages whose activations leave for the host after an action of this kind."""
        return self.replacing.get(OFFLOADS[kind][1], ()) if kind in OFFLOADS else ()

    @property
    def recomputed(self) -> Collection[Half]:
        """The forwards that the table repeats as R."""
        return self.replacing.get(Kind.R, ())

    def _in_table(self, kind: Kind, stage: int, microbatch: int, reader: Kind | None = None) -> Kind:
        """Returns the kind that replaces ``kind`` there, if the table has it; ``kind`` for a reader that the replacing
        kind waits for, or that is the replacing kind."""
        for other, there in self.replacing.items():
            if other.replaces == kind.name and (stage, microbatch) in there:
                return kind if reader is not None and reader.name in (other.name, other.after) else other
        return kind


def longest_paths(neighbours: Mapping[int, Sequence[int]], stages: int) -> tuple[int, ...]:
    """Returns, per stage, the number of stages on the longest path that begins there and goes on to a neighbour: d(s)
    for ``readers``, and for ``sources`` the height of s."""
    after = {stage: neighbours.get(stage, ()) for stage in range(stages)}
    longest = [1] * stages
    # Goes from the ends of the paths back, so that the numbers of all neighbours are known.
    for stage in reversed(list(topological_order({stage: stage for stage in after}, after))):
        longest[stage] = 1 + max((longest[neighbour] for neighbour in after[stage]), default=0)
    return tuple(longest)


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Returns a dict: first element → the second elements of its pairs, each once."""
    grouped: dict[int, dict[int, None]] = {}
    for first, second in pairs:
        grouped.setdefault(first, {})[second] = None
    return {first: tuple(seconds) for first, seconds in grouped.items()}


def in_order(
    rows: Sequence[Sequence[Action]], dependencies: Dependencies
) -> Iterator[tuple[int, Action, list[Action]]]:
    """Yields (rank, action, actions that had to run before) for each cell of a table, in an order that can run; ends
    early if the table deadlocks."""
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # action → the ranks that can continue after it
    cell = [0] * len(rows)
    able = deque(range(len(rows)))
    # Each rank runs until a needed action is missing, and continues when that action has run: each action is examined
    # once per action that it needs.
    while able:
        rank = able.popleft()
        while cell[rank] < len(rows[rank]):
            action = rows[rank][cell[rank]]
            before = dependencies.before(action)
            missing = next((other for other in before if other not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action, before
            done.add(action)
            cell[rank] += 1
            able.extend(waiting.pop(action, ()))


def in_steps(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> list[list[Action | None]]:
    """Returns the rows with a cell for each step: each action runs as early as its row and its dependencies allow, and
    None marks an idle step. If a table deadlocks, the actions that cannot run are at the end of their rows."""
    stepped: list[list[Action | None]] = [[] for _ in rows]
    after: dict[Action, int] = {}  # action → the step after it
    # An action runs one step after the last action that it needs; empty cells fill the rank's idle steps until then.
    for rank, action, before in in_order(rows, dependencies):
        cells = stepped[rank]
        cells += [None] * (max((after[other] for other in before), default=0) - len(cells))
        cells.append(action)
        after[action] = len(cells)
    for row, cells in zip(rows, stepped, strict=True):
        cells += row[len(cells) - cells.count(None) :]
    width = max(map(len, stepped), default=0)
    return [cells + [None] * (width - len(cells)) for cells in stepped]


# --- how far a stage without backward, which no gradient holds back, may run ahead of the stages that read it ---


def held_back(
    free: Dependencies,
    backward: Sequence[bool],
    microbatches: int,
    makespan: Callable[[Dependencies], float],
    turns: Sequence[int],
) -> Dependencies:
    """Returns ``free``, the table's dependencies, with the smallest caps that do not make a step longer.

    A rank holds the values of a stage without backward until the readers receive them. So the stage's F of micro-batch
    k waits until its readers' ranks have received k − cap. ``before`` has the readers' F of k − cap, which orders the
    table; ``simulate`` waits for the messages, which are posted before that F, so that no cap causes a deadlock.

    ``makespan``: of a step under these dependencies, infinite if it deadlocks. ``turns``: the number of ranks of each
    stage: a cap is a whole number of rounds.
    """
    caps = _least_caps(free, backward, turns)
    unheld = makespan(free) if caps else math.inf
    # Caps that cost time are doubled. At all micro-batches a cap delays no stage, so the loop ends after log2(m) tries.
    while unheld < math.inf and any(cap < microbatches for cap in caps.values()):
        capped = replace(free, ahead=caps)
        if makespan(capped) <= unheld * (1 + 1e-9):
            return capped
        caps = {stage: 2 * cap for stage, cap in caps.items()}
    return free


def _least_caps(free: Dependencies, backward: Sequence[bool], turns: Sequence[int]) -> dict[int, int]:
    """Returns the smallest caps that keep a stage, and the stages between it and its readers, busy: 1 + d(s) − d(t)
    micro-batches, or groups, for a reader t."""
    depth, caps = longest_paths(free.readers, len(turns)), {}
    for stage, readers in free.readers.items():
        if not backward[stage]:
            wanted = ((1 + depth[stage] - depth[reader]) * free.groups.get(reader, 1) for reader in readers)
            # A whole number of rounds over the stage's ranks: then the waiting rank has itself sent the value.
            one_round = turns[stage] * free.groups.get(stage, 1)
            caps[stage] = math.ceil(max(wanted) / one_round) * one_round
    return caps
