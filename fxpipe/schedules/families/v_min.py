"""V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): ZB-V's fold at about a third of its memory.

A chain of 2p stages goes down the p ranks and back up. A micro-batch is in flight as briefly as the chain allows: its
forwards and then its I's pass from stage to stage without a pause. Each next micro-batch does the same six slots later,
F = I = W = 1 slot, and the W's take the two slots of the six that are left. On 4 ranks:

    slot     0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0   0F0                     0F1 7F0 7I0     7W0     0F2 7F1 7I1 0I0 7W1 0W0 ...
    rank 1       1F0                 6F0 1F1     6I0 6W0     6F1 1F2 1I0 6I1 6W1 1W0 ...
    rank 2           2F0         5F0         2F1     5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2 ...
    rank 3               3F0 4F0                 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.schedules.action import Action
from fxpipe.schedules.action_table import Row
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.families.zero_bubble import check_folds, zb_v
from fxpipe.schedules.kinds import BACKWARD, FORWARD, Kind

PERIOD = 6
"""The slots from a micro-batch to the next: F, I and W of a rank's two stages."""


def v_min(problem: Problem) -> tuple[Row, ...]:
    """Rows that hold at most 2⌊(p + 4) / 3⌋ micro-batches at the two stages of a rank together, until their W. The
    makespan is 6m + 4p − 5 for F = I = W = 1 and p ≥ 2 ranks; 1 more if 3 divides p, and 6m for a single rank.

    Raises:
        ScheduleError: the stages are no chain, with or without skips, or its placement does not fold.
    """
    check_folds(problem, "v_min")
    return tuple(_row(problem, rank, down, up) for rank, (down, up) in enumerate(problem.stages_of))


def _row(problem: Problem, rank: int, down: int, up: int) -> Row:
    """The actions of a rank in the order of their slots."""
    by_slot = {
        slot + PERIOD * microbatch: Action(stage, kind, microbatch)
        for slot, stage, kind in _slots(problem.ranks, rank, down, up)
        for microbatch in range(problem.microbatches)
        if kind.part_of is FORWARD or problem.backward[stage]
    }
    return tuple(by_slot[slot] for slot in sorted(by_slot))


def _slots(ranks: int, rank: int, down: int, up: int) -> Iterator[tuple[int, int, Kind]]:
    """Yields the slots, stages and ops of micro-batch 0 on a rank."""
    # If 3 divides p, F of the first stage and I of the last would meet in one of the six slots, 2p ≡ 0 mod 6: forwards
    # and I's then wait for two slots at the last rank.
    pause = 0 if ranks % 3 else 2
    begins = {
        rank: (down, Kind.F),
        2 * ranks - 1 - rank + pause: (up, Kind.F),
        2 * ranks + rank + pause: (up, Kind.I),
        4 * ranks - 1 - rank + 2 * pause: (down, Kind.I),
    }
    taken = {slot % PERIOD for slot in begins}
    for slot, (stage, kind) in begins.items():
        yield slot, stage, kind
        if kind.messages is BACKWARD:  # the first slot after it that is free in every period
            weight = next(later for later in range(slot + 1, slot + PERIOD) if later % PERIOD not in taken)
            taken.add(weight % PERIOD)
            yield weight, stage, Kind.W


FOLDING = zb_v, v_min
"""The families of chains that go down the ranks and back up."""
