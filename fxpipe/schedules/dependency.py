"""Dependencies: what must have run before an action, and an order in which a table's cells can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fxpipe.schedules.action import Action, Op


class EdgeLike(Protocol):
    """What is asked of a value that passes between stages: a stage pair, or one of many values between a pair."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


Half = tuple[int, int]
"""(stage, micro-batch, or a group's first) whose backward is split into I and W, or that has an R."""

Groups = Mapping[int, int]
"""Stage → how many micro-batches an action of it covers; of a stage that is not gathered there is none."""


def groups_of(rows: Iterable[Iterable[Action]]) -> Groups:
    """The groups of a table. What has groups of several sizes is for ``verify`` to name."""
    return {action.stage: action.count for row in rows for action in row if action.count != 1}


def group_of(groups: Groups, stage: int, microbatch: int) -> int:
    """The first micro-batch of the group that a micro-batch belongs to at a stage; itself where that has none."""
    return microbatch - microbatch % groups.get(stage, 1) if groups else microbatch


class Link(NamedTuple):
    """An edge of a bare stage graph."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


@dataclass(frozen=True)
class Dependencies:
    """``sources``: the stages whose forward a stage's forward needs. ``targets``: the same for backward.
    ``halves``: the backwards that a table has as I and W; a gradient comes from the I there, else from the B.
    ``recomputed``: the forwards that a table has again, as R; a backward needs the R there, else the F.
    ``ahead``: of stages without backward, by how many micro-batches each may be ahead of ``readers``: ``held_back``.

    A group needs what each of its micro-batches needs; a micro-batch needs the gradient of the group it is in.
    """

    sources: Mapping[int, tuple[int, ...]]
    targets: Mapping[int, tuple[int, ...]]
    halves: Collection[Half] = ()
    recomputed: Collection[Half] = ()
    groups: Groups = field(default_factory=dict)
    ahead: Mapping[int, int] = field(default_factory=dict)
    readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(edges: Sequence[EdgeLike], backward: Sequence[bool], rows: Sequence[Sequence[Action]] = ()) -> Dependencies:
        """The dependencies along ``edges``; ``backward``: whether each stage has one. ``rows``: the table."""
        sources: dict[int, dict[int, None]] = {}
        targets: dict[int, dict[int, None]] = {}
        for edge in edges:
            sources.setdefault(edge.target, {})[edge.source] = None
            if backward[edge.target]:
                targets.setdefault(edge.source, {})[edge.target] = None
        return Dependencies(
            {stage: tuple(others) for stage, others in sources.items()},
            {stage: tuple(others) for stage, others in targets.items()},
            frozenset((action.stage, action.microbatch) for row in rows for action in row if action.op is Op.I),
            frozenset((action.stage, action.microbatch) for row in rows for action in row if action.op is Op.R),
            groups_of(rows),
        )

    def before(self, action: Action) -> list[Action]:
        """The actions that must have run before this one."""
        if action.op is Op.F and action.stage in self.ahead:
            return [*self._taken(action), *self.needs(action)]
        return self.needs(action)

    def needs(self, action: Action) -> list[Action]:
        """Those of them whose results it is made from."""
        stage, op, microbatch, count = action
        if op is Op.F:
            sources = self.sources.get(stage, ())
            if count == 1:
                return [Action(source, Op.F, microbatch) for source in sources]
            return [made for source in sources for made in self._forwards(source, action.microbatches)]
        if op is Op.W:
            return [Action(stage, Op.I, microbatch, count)]
        if op is Op.R:
            return [Action(stage, Op.F, microbatch, count)]
        own = Action(stage, Op.R if (stage, microbatch) in self.recomputed else Op.F, microbatch, count)
        return [own, *[self.gradient(target, microbatch) for target in self.targets.get(stage, ())]]

    def gradient(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradients of a stage's inputs, for this micro-batch or the group that it is in."""
        first = group_of(self.groups, stage, microbatch)
        return Action(stage, Op.I if (stage, first) in self.halves else Op.B, first, self.groups.get(stage, 1))

    def _taken(self, action: Action) -> Iterator[Action]:
        """The forwards that take what a stage made so long ago that it may make more."""
        last = action.microbatch - self.ahead[action.stage]
        for reader in self.readers[action.stage] if last >= 0 else ():
            yield Action(reader, Op.F, group_of(self.groups, reader, last), self.groups.get(reader, 1))

    def _forwards(self, stage: int, microbatches: range) -> list[Action]:
        """The forwards of a stage that make its values of these micro-batches."""
        size = self.groups.get(stage, 1)
        first = group_of(self.groups, stage, microbatches.start)
        return [Action(stage, Op.F, microbatch, size) for microbatch in range(first, microbatches.stop, size)]


class Turn(NamedTuple):
    """A place in a table, the action in it, and the actions that must have run before."""

    rank: int
    place: int
    action: Action
    before: list[Action]


def in_order(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> Iterator[Turn]:
    """The cells of a table in an order in which they can run; it ends early where the table deadlocks."""
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # action → the ranks that can go on once it has run
    place = [0] * len(rows)
    able = deque(range(len(rows)))
    while able:
        rank = able.popleft()
        while place[rank] < len(rows[rank]):
            action = rows[rank][place[rank]]
            before = dependencies.before(action)
            missing = next((other for other in before if other not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield Turn(rank, place[rank], action, before)
            done.add(action)
            place[rank] += 1
            able.extend(waiting.pop(action, ()))


def steps_of(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> list[dict[int, Action]]:
    """Of each row, step → action: each as early as its row and its dependencies allow.

    A table that deadlocks has steps too: what cannot run stands at the end of its row.
    """
    stepped: list[dict[int, Action]] = [{} for _ in rows]
    free = [0] * len(rows)  # the first step behind what a row has so far
    after: dict[Action, int] = {}
    for rank, _, action, before in in_order(rows, dependencies):
        step = max((after[other] for other in before), default=0)  # behind what it needs,
        step = max(step, free[rank])  # and behind its row's last
        stepped[rank][step] = action
        after[action] = free[rank] = step + 1
    for actions, row, first in zip(rows, stepped, free, strict=True):
        row.update(enumerate(actions[len(row) :], start=first))
    return stepped


def in_steps(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> list[list[Action | None]]:
    """The rows with a cell for each step of ``steps_of``; None where a rank idles."""
    stepped = steps_of(rows, dependencies)
    width = 1 + max((step for row in stepped for step in row), default=-1)
    return [[row.get(step) for step in range(width)] for row in stepped]
