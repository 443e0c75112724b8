"""1F1B (PipeDream-Flush, Narayanan et al. 2021) on a graph of stages, and its variants: interleaved 1F1B, and greedy.

Depth d(s) counts the stages on the longest path from s to the sink, and not all stages: parallel branches need no
warm-up for each other. On a chain this is the usual 1F1B.

    d=3   F0 F1 F2 B0 F3 B1 ...
    d=2      F0 F1 B0 F2 B1 ...
    d=1         F0 B0 F1 B1 ...

Interleaved 1F1B, on ranks with several stages, has the order of ``laps``.

Greedy is list scheduling at the stages' real costs, the generalization of 1F1B to uneven stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import fastest
from fxpipe.schedules.families.laps import laps
from fxpipe.schedules.families.limits import (
    Caps,
    Chosen,
    Maker,
    Shortest,
    caps,
    raised,
    round_trip_caps,
    shortest,
    shortest_of,
    shortest_within_limits,
    with_fewer_microbatches,
)
from fxpipe.schedules.families.list_scheduling import backward_first, by_each_priority, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import Kind

MANY = 10_000
"""Above so many actions, greedy chooses with a smaller problem, and makes only few tables of full size."""


def one_f_one_b(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) − 1 warm-up forwards, then one forward, one backward; peak in flight min(m, d(s)).

    On a balanced graph with F and B per stage and D = max d the makespan is (m + D − 1)(F + B), the lower bound. If a
    rank has several stages, list scheduling with the same caps, for F = 1 and B = 2. With a gathered stage, the fastest
    of the tables for gathered stages. A larger ``in_flight`` takes the place of d(s), also if nothing is gained at
    these costs.
    """
    return fastest(problem) if problem.is_grouped else with_caps(problem, raised(problem, problem.depth))


def with_caps(problem: Problem, caps: Caps) -> tuple[Row, ...]:
    """Returns 1F1B that holds up to ``caps`` micro-batches per stage; caps must not grow along an edge."""
    if problem.one_stage_a_rank:
        return tuple(_alternating(problem, stage, caps[stage]) for (stage,) in problem.stages_of)
    return list_schedule(problem, Costs.of(len(problem.placement)), caps, backward_first)


def _alternating(problem: Problem, stage: int, cap: int) -> Row:
    m, warm_up = problem.microbatches, cap - 1
    if not problem.backward[stage]:
        return tuple(problem.actions(stage, Kind.F))
    row = [Action(stage, Kind.F, j) for j in range(min(warm_up, m))]
    for j in range(m):
        if j + warm_up < m:
            row.append(Action(stage, Kind.F, j + warm_up))
        row.append(Action(stage, Kind.B, j))
    return tuple(row)


# --- interleaved ---


def interleaved_1f1b(problem: Problem) -> tuple[Row, ...]:
    """The order of ``laps`` on a chain whose p·v stages go round p ranks, for m ≥ p: idle (p − 1)(F + B) a rank.

    On other graphs and placements that order can be far from optimal: the result is the shortest of its tables and 1F1B
    at F = 1 and B = 2, within the limits. Where that is 1F1B, the schedule's name says "1f1b". A larger ``in_flight``
    lets ranks warm up with more forwards, where the table is no longer than without.
    """
    if problem.is_grouped:
        return one_f_one_b(problem)
    best = shortest_of(problem, [*(() if problem.one_stage_a_rank else laps(problem)), one_f_one_b])
    return Chosen.named(best.rows, "1f1b") if best.maker is one_f_one_b else best.rows


# --- greedy ---


def greedy(problem: Problem) -> tuple[Row, ...]:
    """Returns the shortest of several tables at ``problem.costs``.

    A stage holds at most the larger of d(s) and ⌈round trip / bottleneck period⌉ micro-batches, or as many as
    ``in_flight`` and ``memory`` allow. One of the tables is 1F1B, so greedy is never slower within the same limits. For
    very many micro-batches, a smaller problem decides which of the other tables to make: the steady state repeats. If
    ``memory`` is set, and the costs give ``deferred_bytes``, the bytes held for a deferred W, backwards may be split,
    and each W runs anywhere that memory allows.
    """
    if problem.is_grouped:
        return fastest(problem)
    # Three sets of caps, from the least that keep the busiest rank busy to the most that are allowed.
    limits = caps(problem)
    lean, usual = (tuple(map(min, wanted, limits)) for wanted in (round_trip_caps(problem), problem.depth))
    tried = tuple(dict.fromkeys([lean, usual, limits]))
    # 1F1B comes first: if it reaches the lower bound, no other table is made.
    costs = problem.costs
    makers: list[Maker] = []
    for stage_caps in tried:
        makers += [partial(with_caps, caps=stage_caps), *by_each_priority(costs, stage_caps)]
    few = with_fewer_microbatches(problem, MANY, 2 * max(problem.depth))
    if few is not problem:
        makers = [partial(with_caps, caps=usual), shortest(few, makers, few.costs).maker]
    whole = shortest(problem, makers, costs)
    halves = None if problem.memory is None or costs.deferred_bytes is None else _in_halves(problem, few, tried)
    return halves.rows if halves is not None and halves.makespan < whole.makespan else whole.rows


def _in_halves(problem: Problem, few: Problem, tried: Sequence[Caps]) -> Shortest | None:
    """The shortest table with split backwards; None if all hold too much: a W may need more bytes than its I."""
    makers = [make for stage_caps in tried for make in by_each_priority(problem.costs, stage_caps, room=problem.memory)]
    if few is problem:
        return shortest_within_limits(problem, makers)
    best = shortest_within_limits(few, makers)
    return best and shortest_within_limits(problem, [best.maker])
