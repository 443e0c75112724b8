"""Dependencies: what must have run before an action, and an order in which a table's cells can run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fxpipe.action import Action, Op


class EdgeLike(Protocol):
    """What is asked of a value that passes between stages: a stage pair, or one of many values between a pair."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


@dataclass(frozen=True)
class Dependencies:
    """``sources``: the stages whose forward a stage's forward needs. ``targets``: the same for backward."""

    sources: Mapping[int, tuple[int, ...]]
    targets: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(edges: Sequence[EdgeLike], backward: Sequence[bool]) -> Dependencies:
        """The dependencies along ``edges``; ``backward``: whether each stage has one."""
        sources: dict[int, dict[int, None]] = {}
        targets: dict[int, dict[int, None]] = {}
        for edge in edges:
            sources.setdefault(edge.target, {})[edge.source] = None
            if backward[edge.target]:
                targets.setdefault(edge.source, {})[edge.target] = None
        return Dependencies(
            {stage: tuple(others) for stage, others in sources.items()},
            {stage: tuple(others) for stage, others in targets.items()},
        )

    def before(self, action: Action) -> list[Action]:
        """The actions that must have run before this one."""
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.F:
            return [Action(source, Op.F, microbatch) for source in self.sources.get(stage, ())]
        if action.op is Op.W:
            return [Action(stage, Op.I, microbatch)]
        after = [Action(target, action.op, microbatch) for target in self.targets.get(stage, ())]
        return [Action(stage, Op.F, microbatch), *after]


class Cell(NamedTuple):
    """A place in a table, the action in it, and the actions that must have run before."""

    rank: int
    place: int
    action: Action
    before: list[Action]


def in_order(rows: Sequence[Sequence[Action]], dependencies: Dependencies) -> Iterator[Cell]:
    """The cells of a table in an order in which they can run; it ends early where the table comes to a halt."""
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
            yield Cell(rank, place[rank], action, before)
            done.add(action)
            place[rank] += 1
            able.extend(waiting.pop(action, ()))
