"""ZB-H1 and ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): backwards in halves, whose W's fill bubbles.

I makes the gradients that earlier stages wait for; W makes the weight gradients, which no stage waits for.

ZB-H1 runs on a graph of stages. Stages near the sink defer W until they hold as many micro-batches as the deepest
trained stage, D; a stage of depth d is D − d weight gradients behind.

    d=3   F0 F1 F2       I0 W0 F3 I1 W1 ...
    d=2      F0 F1    I0 F2 I1 W0 F3 I2 W1 ...
    d=1         F0 I0 F1 I1 F2 I2 W0 F3 ...

ZB-V (section 6; 2024, "Pipeline Parallelism with Controllable Memory") folds a chain of 2p stages over p ranks.

    rank 0   0F0 0F1 0F2 3F0 3I0 3W0 ...     stages 0 and 3
    rank 1       1F0 2F0 1F1 2F1 2I0 ...     stages 1 and 2

A micro-batch returns to the rank where it started, so that its last stage's backward runs while other micro-batches
still go down. Each rank holds as much as the first with 1F1B, and at F = I = W idles only at the beginning and the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from fxpipe.errors import ScheduleError
from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import interleaved_groups
from fxpipe.schedules.families.laps import laps
from fxpipe.schedules.families.limits import Caps, raised, shortest, shortest_of
from fxpipe.schedules.families.list_scheduling import backward_first, by_each_priority, list_schedule
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.kinds import FORWARD, Kind


def zb_h1(problem: Problem) -> tuple[Row, ...]:
    """Rows with d(s) warm-up forwards, then I_j, W_{j − (D − d(s))} and the next F; peak D at every stage, or D
    for each stage of a rank (1 more where ranks would deadlock).

    On a balanced chain of p stages with W ≤ min(F, I) the makespan is m(F + I + W) + (p − 1)(F + I − W). If a rank has
    several stages, these are the rows of the shortest of ``laps`` and list scheduling with the same caps. For
    F = I = W = 1 on a chain that goes v times round p ≤ m ranks, the makespan is 3mv + p − 1. At other costs, list
    schedules that hold no more are compared, too. With a gathered stage, it is ``group_interleaved`` with split
    backwards. A larger ``in_flight`` n(s) takes the place of D: there are d(s)·n(s) / D warm-up forwards.
    """
    if problem.is_grouped:
        return interleaved_groups(problem, split=True)
    if problem.costs.are_alike:
        return in_halves(problem)
    limits = _most(problem)
    makers = [in_halves, *by_each_priority(problem.costs, limits, weight_caps=limits)]
    return shortest(problem, makers, problem.costs).rows


def in_halves(problem: Problem) -> tuple[Row, ...]:
    """Returns the order above, for any costs."""
    most, costs = _most(problem), Costs.of(len(problem.placement))
    pairs = zip(problem.depth, most, strict=True)
    warm_up = tuple(depth * cap // _deepest(problem) for depth, cap in pairs)
    if problem.one_stage_a_rank:
        return tuple(_h1_row(problem, stage, warm_up[stage], most[stage]) for (stage,) in problem.stages_of)
    listed = partial(list_schedule, costs=costs, caps=warm_up, priority=backward_first, weight_caps=most)
    return shortest_of(problem, [*laps(problem, split=True), listed]).rows


def _deepest(problem: Problem) -> int:
    pairs = zip(problem.depth, problem.backward, strict=True)
    return max((depth for depth, has_backward in pairs if has_backward), default=1)


def _most(problem: Problem) -> Caps:
    """The most micro-batches that ZB-H1 holds at each stage: D, or as many as ``in_flight`` and ``memory`` allow."""
    return raised(problem, (_deepest(problem),) * len(problem.placement))


def _h1_row(problem: Problem, stage: int, warm_up: int, most: int) -> Row:
    m = problem.microbatches
    if not problem.backward[stage]:
        return tuple(problem.actions(stage, Kind.F))
    row = [Action(stage, Kind.F, j) for j in range(min(warm_up, m))]
    # I_j comes at once, as others wait for it; then the W of an earlier micro-batch, to even out the stages' memory.
    behind = most - warm_up
    for j in range(m):
        row.append(Action(stage, Kind.I, j))
        if j >= behind:
            row.append(Action(stage, Kind.W, j - behind))
        if j + warm_up < m:
            row.append(Action(stage, Kind.F, j + warm_up))
    row += [Action(stage, Kind.W, j) for j in range(max(m - behind, 0), m)]
    return tuple(row)


# --- ZB-V ---

DOWN, UP = 0, 1  # the two halves of the V


def zb_v(problem: Problem) -> tuple[Row, ...]:
    """Rows of the makespan 6m + p − 1 for m ≥ 2p − 1 micro-batches and F = I = W = 1.

    The two stages of a rank together hold 2p micro-batches.

    Raises:
        ScheduleError: the stages are no chain, with or without skips, or its placement does not fold.
    """
    check_folds(problem, "zb_v")
    return tuple(tuple(_v_row(problem, rank, stages)) for rank, stages in enumerate(problem.stages_of))


def folded(ranks: int) -> tuple[int, ...]:
    """Returns the rank of each stage of a chain that goes down the ranks and back up."""
    return (*range(ranks), *reversed(range(ranks)))


def _v_row(problem: Problem, rank: int, stages: Sequence[int]) -> Iterator[Action]:
    """With fewer than 2p − 1 micro-batches, the order of 2p − 1 without the micro-batches that do not exist."""
    begun: Counter[tuple[int, Kind]] = Counter()
    for half, kind in _v_order(rank, problem.ranks, max(problem.microbatches, 2 * problem.ranks - 1)):
        microbatch = begun[half, kind]
        begun[half, kind] += 1
        if microbatch < problem.microbatches and (kind.part_of is FORWARD or problem.backward[stages[half]]):
            yield Action(stages[half], kind, microbatch)


def _v_order(rank: int, ranks: int, m: int) -> Iterator[tuple[int, Kind]]:
    """Yields a rank's operations, each with its half of the V."""
    down = (DOWN, Kind.I), (DOWN, Kind.W)
    up = (UP, Kind.F), (UP, Kind.I), (UP, Kind.W)
    left = ranks - rank
    # 1. Warm-up: forwards down until the first micro-batch has returned, then alternately forwards up and down.
    yield from [(DOWN, Kind.F)] * (2 * left - 1)
    yield from [(UP, Kind.F), (DOWN, Kind.F)] * rank
    yield from up * left
    # 2. Steady: six actions, F, I and W of both halves. So far the rank has run 2(p − r) − 1 + r forwards down, and p
    # up.
    ahead = 2 * left - 1 + rank
    yield from ((DOWN, Kind.F), *down, *up) * (m - ahead)
    # 3. Cool-down: no forwards down remain; the I's that other ranks wait for come first, the W's last.
    yield from (*down, *up) * (ahead - ranks)
    yield from [(DOWN, Kind.I), (UP, Kind.I)] * rank
    yield from down * left
    yield from [(UP, Kind.W)] * rank
    yield from [(DOWN, Kind.W)] * rank


class NotFolded(ScheduleError):
    """The stages are on other ranks than ``ranks``: stage → rank. ``most``: the number of ranks that there are."""

    def __init__(self, fact: str, ranks: Mapping[int, int], most: int) -> None:
        super().__init__(f"{fact}write placement={[ranks[stage] for stage in sorted(ranks)]}")
        self.fact, self.ranks, self.most = fact, ranks, most

    def named(self, names: Sequence[str]) -> ScheduleError:
        """The error with a placement that ``compile`` takes, or a number of stages that has one."""
        if len(names) != 2 * self.most:
            return ScheduleError(f"{self.fact}make it {2 * self.most} stages")
        ranks = {names[stage]: rank for stage, rank in sorted(self.ranks.items())}
        return ScheduleError(f"{self.fact}write placement={ranks}")


def check_folds(problem: Problem, family: str) -> None:
    """ScheduleError, in the name of a family, if the stages are no chain, or its placement does not fold."""
    if problem.is_grouped:
        raise ScheduleError(f'"{family}" runs micro-batch by micro-batch, and a stage here is gathered; write "zb_h1"')
    order, count = problem.order, len(problem.order)
    for stage, following in pairwise(order):
        if following not in problem.targets[stage]:
            raise ScheduleError(
                f'"{family}" is for a chain of stages, and stage {following} is not fed by stage {stage}; write "zb_h1"'
            )
    ranks = tuple(problem.homes[stage] for stage in order)
    wanted = folded(max(count // 2, 1))
    if ranks != wanted:
        there = "two stages a rank, there and back"
        fact = f'"{family}" is for {there}, and the {count} stages are on ranks {list(ranks)}; '
        if count % 2:
            raise ScheduleError(fact + "make it an even number of stages")
        raise NotFolded(fact, dict(zip(order, wanted, strict=True)), problem.ranks)
