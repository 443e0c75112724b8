"""``SCHEDULES``: the schedule families. A family is a pure function from a stage graph to rows of actions.

To add a family, write ``family(problem) -> rows`` in a file of ``families/``, and add a row to the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fxpipe.errors import ScheduleError, nearest
from fxpipe.graph.ranks import as_placement
from fxpipe.no_gc import paused
from fxpipe.schedules.costs import Costs
from fxpipe.schedules.families.gathered import cached, gpipe, group_interleaved, groups_behind, store_all
from fxpipe.schedules.families.limits import Chosen, Family, InFlight, Limited, ScheduleName
from fxpipe.schedules.families.one_f_one_b import greedy, interleaved_1f1b, one_f_one_b
from fxpipe.schedules.families.problem import Problem
from fxpipe.schedules.families.solve import in_numbers, solved
from fxpipe.schedules.families.v_min import FOLDING, v_min
from fxpipe.schedules.families.zero_bubble import NotFolded, folded, zb_h1, zb_v
from fxpipe.schedules.given import KINDS, check_given, check_length, nested
from fxpipe.schedules.microbatch_order import pyramid
from fxpipe.schedules.schedule import Schedule
from fxpipe.schedules.verify import check as check_table
from fxpipe.validation import check, shown

SCHEDULES: Mapping[ScheduleName, Family] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
        "zb_h1": zb_h1,
        "greedy": greedy,
        "store_all": store_all,
        "group_interleaved": group_interleaved,
        "cached": cached,
        "zb_v": zb_v,
        "v_min": v_min,
    }
)
"""Name → family. Each family takes any stage graph and placement, except ``store_all``, ``group_interleaved`` and
``cached``, which need a gathered stage, and ``zb_v`` and ``v_min``, which need a chain on a placement that folds."""

TORCH_NAMES: Mapping[str, ScheduleName] = MappingProxyType(
    {"interleaved1f1b": "interleaved_1f1b", "zbvzerobubble": "zb_v"}
)
"""The names in torch.distributed.pipelining, in lower case → the families that make the same tables."""
_UNLIKE = {
    "interleavedzerobubble": '; write "zb_h1", with a stage on each rank, or "zb_v", with two',
    "loopedbfs": '; write "gpipe", with several stages on each rank',
    "dualpipev": "; a table of it in a file can run: schedule=fxpipe.Schedule.from_csv(path)",
}
"""More of these names → what comes closest, for the end of a message."""


def named(family: Any) -> Any:
    """The name in ``SCHEDULES`` of a family that is named as in torch.distributed.pipelining, by its class
    ``Schedule1F1B``, or in another spelling, "Interleaved-1F1B"; anything else unchanged.

    >>> named("ZBVZeroBubble"), named("GPipe"), named("mine")
    ('zb_v', 'gpipe', 'mine')
    """
    if isinstance(family, type) and family.__module__.startswith("torch."):
        family = family.__name__.removeprefix("Schedule")
    if not isinstance(family, str):
        return family
    key = family.casefold().replace("-", "_")
    key = TORCH_NAMES.get(key, key)
    return key if key in SCHEDULES else family


def build(
    family: ScheduleName | Family,
    edges: Iterable[tuple[int, int]],
    microbatches: int,
    placement: Sequence[int | Sequence[int]] | None = None,
    stages: int | None = None,
    backward: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
    tied: Sequence[Sequence[int]] = (),
    costs: Costs | None = None,
    in_flight: InFlight | None = None,
    memory: float | Sequence[float] | None = None,
    gather: Mapping[int, int | None] | None = None,
    gather_cost: tuple[float, float] | None = None,
    recompute: Sequence[bool] | None = None,
    offload: Sequence[bool] | None = None,
) -> Schedule:
    """Returns the verified schedule of a family for a bare stage graph.

    Args:
        family: a name out of ``SCHEDULES``, or a function of the same kind.
        edges: pairs of stage numbers.
        microbatches: the number of micro-batches.
        placement: the rank of each stage; None: a rank for each. A stage on r ranks, (0, 1, 2), runs micro-batch i, or
            group i if it is gathered, on the (i mod r)-th of these ranks, in addition to their other stages.
        stages: the number of stages; None: as many as ``placement`` has, or as ``edges`` mention.
        backward: whether each stage has a backward; None: all stages have.
        names: the stages' names; None: their numbers.
        tied: groups of stages that share a parameter.
        costs: the costs for families that use them; None: F = 1 and B = 2.
        in_flight: the most micro-batches per stage, one number or a list; None: the family's own limits. "2x": twice as
            many as the family's own table holds at each stage. Below its own limits, only "greedy" can follow. Above
            them, "1f1b", "interleaved_1f1b", "zb_h1" and "greedy" may hold as many as this: micro-batches of different
            costs then wait less for each other.
        memory: the most bytes per rank, one number or a list; the costs must then have ``activation_bytes``.
        gather: stage → K: the stage runs once for K micro-batches, or, for None, once for all of them; so do all later
            stages. The other families then take the fastest in simulation, within the limits, of "store_all",
            "group_interleaved" and "cached"; the schedule's name says which.
        gather_cost: F and B of a whole group at the stages of ``gather``; None: F and B of ``costs``, once.
        recompute: whether each stage runs its forward again, as R, for its backward; None: no stage does. From F to R
            the stage holds its inputs, the costs' ``input_bytes``.
        offload: whether the activations of each stage may wait in the host's memory for their backward; None: of no
            stage. With ``memory`` as few micro-batches leave as fit it. Without, the ranks hold as few bytes as
            possible in a table that is at most 0.1 % longer. Each micro-batch that leaves has an O and a P. What W
            needs may leave between I and W.

    Raises:
        ScheduleError: the arguments do not fit each other.

    >>> schedule = build("1f1b", edges=[(0, 1), (1, 4), (2, 3), (3, 4)], microbatches=8)
    >>> schedule.simulate().makespan  # (m + D − 1)(F + B), for a depth D of 3 stages, F = 1 and B = 2
    30.0
    >>> build("1f1b", edges=[(0, 1), (1, 2), (2, 3), (3, 4)], microbatches=8).simulate().makespan  # as a chain, D = 5
    36.0
    """
    # 1. The arguments, one after the other.
    limited = with_costs(family, costs, in_flight, memory)
    edges = nested(edges)
    check_given(edges=edges, microbatches=microbatches, tied=tied, placement=placement, stages=stages)
    check_given(
        backward=backward, names=names, gather=gather, gather_cost=gather_cost, recompute=recompute, offload=offload
    )
    pairs = tuple((int(source), int(target)) for source, target in edges)
    if gather is None and gather_cost is not None:
        raise ScheduleError("gather_cost= is of the stages of gather=, and there is none; write gather={stage: None}")
    # 2. The number of stages: as many as are placed, or as the edges mention.
    mentioned = 1 + max((stage for pair in pairs for stage in pair), default=0)
    count = mentioned if placement is None else len(placement)
    count = count if stages is None else stages
    if count < mentioned:
        raise ScheduleError(f"{count} stages, and the edges need {mentioned}; write stages={mentioned}")
    check_length("placement=", placement if placement is not None else range(count), count)
    # 3. The problem: the graph is checked before the limits, whose lengths depend on it.
    problem = Problem(
        edges=pairs,
        microbatches=int(microbatches),
        placement=tuple(range(count)) if placement is None else as_placement(placement),
        backward=(True,) * count if backward is None else tuple(backward),
        costs=Costs.of(count),
        recompute=None if recompute is None else tuple(recompute),
        offload=None if offload is None else tuple(offload),
    )
    problem.check()
    if gather is not None:
        problem = replace(problem, groups=groups_behind(gather, problem))
        if gather_cost is not None:
            costs = (limited.costs or problem.costs).at_stages(gather, *gather_cost)
            limited = replace(limited, costs=costs)
    # 4. The table, proven not to deadlock.
    schedule = make_table(limited, problem, tuple(names or ()), nested(tied))
    schedule.verify()
    return schedule


@paused()
def make_table(
    limited: Limited, problem: Problem, names: tuple[str, ...] = (), tied: tuple[tuple[int, ...], ...] = ()
) -> Schedule:
    """Returns a family's table, its actions and limits checked; only ``prove`` shows that it does not deadlock.
    ScheduleError if no table results. ``names``: of the stages; none: their numbers. ``tied``: as in ``build``."""
    # The rows of every family are checked: the family may be the user's own.
    try:
        limited = in_numbers(limited, problem)
        problem = limited.within(problem)
        rows = solved(limited.family, problem)
    except ScheduleError as error:
        if names and isinstance(error, NotFolded):
            raise error.named(names) from None
        raise
    except Exception as error:
        raise ScheduleError(f"the family {limited.name} failed: {type(error).__name__}: {error}") from error
    each, what = nested(rows), f"what the family {limited.name} returns"
    check(ScheduleError, {what: KINDS["rows"]}, **{what: each})
    if len(each) != problem.ranks:
        raise ScheduleError(f"{limited.name} gives {len(each)} rows for {problem.ranks} ranks; a row for each")
    schedule = replace(
        problem.table(each),
        name=f"{limited.name} ({rows.name})" if isinstance(rows, Chosen) else limited.name,
        stage_names=names or tuple(map(str, range(len(problem.placement)))),
        tied=tied,
        costs=limited.costs,
    )
    check_table(schedule)
    wanted = tuple(map(problem.group, range(len(problem.placement))))
    if schedule.groups != wanted:
        raise ScheduleError(
            f"{schedule.name} runs stages in groups of {schedule.groups} micro-batches, and {wanted} are asked for; "
            f"write Action(stage, op, first, count) as problem.actions(stage, op) does"
        )
    excess = limited.excess(schedule)
    if excess is not None:
        raise ScheduleError(
            f'{schedule.name} {excess}; "greedy" keeps within limits, or use smaller micro-batches, or smaller groups'
        )
    return schedule


def placement_for(family: object, stages: int, ranks: int) -> tuple[int, ...] | None:
    """Returns the rank of each stage, in topological order, that a family's form needs; None for any other family, or
    number of stages. ``interleaved_1f1b`` goes round the ranks, ``zb_v`` and ``v_min`` fold a chain over them."""
    family = family.family if isinstance(family, Limited) else SCHEDULES.get(named(family))
    if family is interleaved_1f1b and stages > ranks:
        return tuple(stage % ranks for stage in range(stages))
    return folded(ranks) if family in FOLDING and stages == 2 * ranks else None


def with_costs(
    family: ScheduleName | Family,
    costs: Costs | None = None,
    in_flight: InFlight | None = None,
    memory: float | Sequence[float] | None = None,
) -> Limited:
    """Returns the family with these costs and limits, for ``compile(schedule=...)``; its name does not change.

    Args:
        family: a name out of ``SCHEDULES``, a name or class of torch.distributed.pipelining that means the same, or a
            function of the same kind.
        costs: the costs that the family uses; None: the costs of the problem.
        in_flight: the most micro-batches in flight, one number, one per stage, or "2x"; as in ``build``.
        memory: the most bytes in flight, one number or one per rank; the costs must then have ``activation_bytes``, or
            ``compile`` an example, from whose shapes it derives the bytes.

    Raises:
        ScheduleError: no family has this name, or a cost or limit is invalid.
    """
    check_given(costs=costs, in_flight=in_flight, memory=memory)
    family = named(family)
    if isinstance(family, str):
        if family not in SCHEDULES:
            hint = _UNLIKE.get(family.casefold()) or nearest(family, SCHEDULES)
            raise ScheduleError(f"unknown schedule {family!r}{hint}")
        return Limited(SCHEDULES[family], family, costs, in_flight, memory)
    if isinstance(family, Limited):
        return Limited(family.family, family.name, costs, in_flight, memory).or_else(family)
    if not callable(family):
        kind = type(family).__name__
        raise ScheduleError(f"a {kind} is no family: {shown(family)}; write a name out of SCHEDULES, or a function")
    return Limited(family, getattr(family, "__name__", "custom"), costs, in_flight, memory)


__all__ = ["SCHEDULES", "Costs", "Family", "Limited", "Problem", "ScheduleName", "build", "pyramid", "with_costs"]
