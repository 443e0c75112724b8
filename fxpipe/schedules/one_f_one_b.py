"""1F1B (PipeDream-Flush, Narayanan et al. 2021) on a graph of stages.

Depth d(s) counts the stages on the longest path from s to the sink, and not all stages: a branch that runs beside
another needs no warm-up for it. On a chain this is the 1F1B everybody knows.

    d=3   F0 F1 F2 B0 F3 B1 ...
    d=2      F0 F1 B0 F2 B1 ...
    d=1         F0 B0 F1 B1 ...
"""

from __future__ import annotations

import heapq

from fxpipe.action import Action, Op
from fxpipe.errors import ScheduleError
from fxpipe.lower import needs
from fxpipe.schedule import Link, Row
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
    """Each rank, when free, takes the best action that is ready, with F = 1 and B = 2."""
    links = [Link(*edge) for edge in problem.edges]
    done: dict[Action, int] = {}
    free = [0] * problem.ranks
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    next_of = {(stage, op): 0 for stage in problem.order for op in (Op.F, Op.B) if _has(problem, stage, op)}
    times = [0]
    while any(count < problem.microbatches for count in next_of.values()):
        if not times:
            raise ScheduleError("list scheduling came to a halt; the stage graph has a dependency it cannot meet")
        now = heapq.heappop(times)
        for rank in range(problem.ranks):
            if free[rank] > now:
                continue
            ready = [
                action
                for (stage, op), batch in next_of.items()
                if problem.placement[stage] == rank and batch < problem.microbatches
                for action in [Action(stage, op, batch)]
                if _below_cap(problem, next_of, action)
                and all(done.get(n, now + 1) <= now for n in needs(action, links, problem.backward))
            ]
            if ready:
                action = min(ready, key=lambda a: (a.op is Op.F, problem.depth[a.stage], a.microbatch))
                free[rank] = done[action] = now + (1 if action.op is Op.F else 2)
                rows[rank].append(action)
                next_of[action.stage, action.op] += 1
                heapq.heappush(times, free[rank])
        while times and times[0] == now:
            heapq.heappop(times)
    return tuple(map(tuple, rows))


def _has(problem: Problem, stage: int, op: Op) -> bool:
    return op is Op.F or problem.backward[stage]


def _below_cap(problem: Problem, next_of: dict[tuple[int, Op], int], action: Action) -> bool:
    """Whether one more forward keeps a stage within d(s) in flight."""
    stage = action.stage
    if action.op is not Op.F or not problem.backward[stage]:
        return True
    return next_of[stage, Op.F] - next_of[stage, Op.B] < problem.depth[stage]
