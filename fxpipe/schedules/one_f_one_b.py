"""1F1B (PipeDream-Flush, Narayanan et al. 2021) on a graph of stages.

Depth d(s) counts the stages on the longest path from s to the sink, and not all stages: a branch that runs beside
another needs no warm-up for it. On a chain this is the 1F1B everybody knows.

    d=3   F0 F1 F2 B0 F3 B1 ...
    d=2      F0 F1 B0 F2 B1 ...
    d=1         F0 B0 F1 B1 ...
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from fxpipe.action import Action, Op
from fxpipe.schedule import Row
from fxpipe.schedules.problem import Problem


def one_f_one_b(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) − 1 warm-up forwards, then one forward, one backward; peak in flight min(m, d(s)).

    On a balanced graph with F and B per stage and D = max d the makespan is (m + D − 1)(F + B), the lower bound.
    Where a rank has several stages, list scheduling with the same limit in flight: a backward first, then the forward
    of the stage nearest to the sink.
    """
    rows = [problem.stages_of(rank) for rank in range(problem.ranks)]
    if all(len(stages) == 1 for stages in rows):
        return tuple(_alternating(problem, stage) for (stage,) in rows)
    return _list_schedule(problem)


def _alternating(problem: Problem, stage: int) -> Row:
    m, warm_up = problem.microbatches, problem.depth[stage] - 1
    if not problem.backward[stage]:
        return tuple(Action(stage, Op.F, j) for j in range(m))
    row = [Action(stage, Op.F, j) for j in range(min(warm_up, m))]
    for j in range(m):
        if j + warm_up < m:
            row.append(Action(stage, Op.F, j + warm_up))
        row.append(Action(stage, Op.B, j))
    return tuple(row)


def _list_schedule(problem: Problem) -> tuple[Row, ...]:
    """Each rank, when free, takes the best action that is ready, with F = 1 and B = 2.

    It comes to no halt: of the first micro-batch that is not done, the first stage's forward is ready, for nothing
    before it is in flight; and so is the last stage's backward, once all forwards have run.
    """
    stages = [problem.stages_of(rank) for rank in range(problem.ranks)]
    rows: list[list[Action]] = [[] for _ in stages]
    free = [0] * problem.ranks
    progress = _Progress(problem)
    times = [0]
    while times:
        now = heapq.heappop(times)
        for rank, row in enumerate(rows):
            action = progress.best(stages[rank], now) if free[rank] <= now else None
            if action is not None:
                free[rank] = now + (1 if action.op is Op.F else 2)
                progress.run(action, free[rank])
                row.append(action)
                if free[rank] not in times:
                    heapq.heappush(times, free[rank])
    return tuple(map(tuple, rows))


@dataclass
class _Progress:
    """How far list scheduling has come: when each action was over, and how many of each stage have been begun."""

    problem: Problem
    over: dict[Action, int] = field(default_factory=dict)
    begun: dict[tuple[int, Op], int] = field(default_factory=dict)

    def best(self, stages: list[int], now: int) -> Action | None:
        """A backward first, then the forward of the stage nearest to the sink; None where nothing is ready."""
        ready = [action for stage in stages for action in self._next(stage) if self._is_ready(action, now)]
        depth = self.problem.depth
        return min(ready, key=lambda a: (a.op is Op.F, depth[a.stage], a.microbatch), default=None)

    def run(self, action: Action, end: int) -> None:
        self.over[action] = end
        self.begun[action.stage, action.op] = action.microbatch + 1

    def _next(self, stage: int) -> list[Action]:
        """The stage's next forward, unless d(s) are in flight, and its next backward."""
        forwards, backwards = self.begun.get((stage, Op.F), 0), self.begun.get((stage, Op.B), 0)
        has_backward = self.problem.backward[stage]
        below_cap = not has_backward or forwards - backwards < self.problem.depth[stage]
        actions = [Action(stage, Op.F, forwards)] if below_cap and forwards < self.problem.microbatches else []
        return actions + [Action(stage, Op.B, backwards)] * (has_backward and backwards < forwards)

    def _is_ready(self, action: Action, now: int) -> bool:
        return all(self.over.get(other, now + 1) <= now for other in self.problem.dependencies.before(action))
