"""torch.distributed.pipelining agrees: it runs our tables, and we read, verify and rebuild its own.

torch makes and checks tables without processes, in functions of its own that it may change: this file alone names them.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute, _validate_schedule

import fxpipe
from fxpipe.errors import ScheduleError
from fxpipe.schedules import build
from fxpipe.schedules.action import Action
from fxpipe.schedules.kinds import Kind
from fxpipe.schedules.schedule import Schedule
from tests.graphs import FAMILIES, chain
from tests.models import WIDTH, Chain

Rows = Sequence[Sequence[_Action | None]]


@cache
def in_turns(name: str, ranks: int, per_rank: int, m: int) -> Schedule:
    """A family on a chain whose stages go round the ranks."""
    stages = ranks * per_rank
    return build(name, chain(stages), m, [stage % ranks for stage in range(stages)], stages)


def as_torch_reads_it(path: Path) -> dict[int, list[_Action | None]]:
    """torch's ``_load_csv``, less the schedule object."""
    with path.open(newline="") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def as_torch_writes_it(rows: Rows, path: Path) -> Schedule:
    """torch's ``_dump_csv``, less the schedule object; then read by fxpipe."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return Schedule.from_csv(path)


def torchs(name: str, ranks: int, m: int, per_rank: int, messages: bool = False) -> list[list[_Action | None]]:
    rows: list[list[_Action | None]] = get_schedule_ops(name, ranks, m, per_rank, with_comms=messages)
    return rows


def parts(action: _Action | None) -> list[str]:
    """What an action of torch's computes, as it prints; an overlap is its parts in order."""
    if action is None:
        return []
    if action.sub_actions is not None:
        return list(map(str, action.sub_actions))
    return [str(action)] if action.is_compute_op else []


def computes(rows: Rows) -> list[list[str]]:
    return [[part for action in row for part in parts(action)] for row in rows]


def cells(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


# --- torch takes our tables ---


# (ranks, stages a rank, micro-batches)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ranks", "per_rank", "m"), [(1, 1, 3), (2, 1, 4), (4, 1, 3), (3, 2, 5), (2, 3, 6)])
def test_torch_takes_our_tables_of_chains(name: str, ranks: int, per_rank: int, m: int, tmp_path: Path) -> None:
    """Its validator accepts them, it would put in the messages that are ours, and its simulator runs those to the end.

    That one lets a rank wait at each receive, so that none may stand before what it waits for.
    """
    schedule, stages = in_turns(name, ranks, per_rank, m), ranks * per_rank
    schedule.to_csv(tmp_path / "table.csv")
    rows = as_torch_reads_it(tmp_path / "table.csv")
    assert _validate_schedule(rows, ranks, stages, m) == dict(enumerate(schedule.placement))
    assert computes(list(rows.values())) == cells(schedule)
    bare_rows = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(cells(schedule))}
    theirs = _add_send_recv(bare_rows, lambda stage: schedule.placement[stage], stages)
    schedule.to_csv(tmp_path / "table.csv", communication=True)
    ours = as_torch_reads_it(tmp_path / "table.csv")
    assert all(sorted(map(str, ours[rank])) == sorted(map(str, row)) for rank, row in theirs.items())
    ran = _simulate_comms_compute(ours, lambda stage: schedule.placement[stage], stages)
    assert {rank: [action for action in row if action is not None] for rank, row in ran.items()} == ours


# --- we take torch's ---

# (schedule, ranks, stages a rank, micro-batches)
TORCHS = [
    *[("GPipe", ranks, 1, m) for ranks in (2, 4) for m in (1, 8)],
    *[("Interleaved1F1B", ranks, v, m * ranks) for ranks in (2, 4) for v in (2, 3) for m in (1, 3)],
    ("Interleaved1F1B", 4, 2, 10),
    *[("LoopedBFS", ranks, v, m) for ranks in (2, 4) for v in (2, 3) for m in (1, 7)],
    *[("InterleavedZeroBubble", ranks, v, m * ranks) for ranks in (2, 4) for v in (2, 3) for m in (1, 3)],
    *[("ZBVZeroBubble", ranks, 2, m) for ranks in (2, 3, 4) for m in (1, 4, 9)],
    *[("DualPipeV", ranks, 2, m) for ranks in (2, 3, 4) for m in (2 * ranks, 3 * ranks, 3 * ranks + 1)],
]


@pytest.mark.parametrize(("name", "ranks", "per_rank", "m"), TORCHS)
def test_torchs_tables_are_read_and_verified(name: str, ranks: int, per_rank: int, m: int, tmp_path: Path) -> None:
    """With messages they are the same: their UNSHARD, RESHARD and REDUCE_GRAD are dropped, and so are the messages."""
    rows = torchs(name, ranks, m, per_rank)
    schedule = as_torch_writes_it(rows, tmp_path / "torch.csv")
    assert cells(schedule) == computes(rows)
    stages = ranks * per_rank
    compute = {rank: [a for a in row if a is None or a.is_compute_op] for rank, row in enumerate(rows)}
    assert dict(enumerate(schedule.placement)) == _validate_schedule(compute, ranks, stages, m)
    assert schedule.microbatches == m
    assert schedule.backward == (True,) * stages
    schedule.verify()
    if name != "GPipe":  # which torch lowers only inside a process group
        assert as_torch_writes_it(torchs(name, ranks, m, per_rank, messages=True), tmp_path / "torch.csv") == schedule


def test_torchs_own_1f1b_table_is_refused_by_torch_and_by_us(tmp_path: Path) -> None:
    """torch 2.13 draws rank 1 without its first forward, for pictures alone; its 1F1B does not run from the table."""
    rows = torchs("1F1B", 2, 4, 1)
    assert computes(rows)[1] == "1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3".split()
    compute = {rank: [a for a in row if a is None or a.is_compute_op] for rank, row in enumerate(rows)}
    with pytest.raises(AssertionError, match="without first running Forward"):
        _validate_schedule(compute, 2, 2, 4)
    with pytest.raises(ScheduleError, match="stage 0 needs 0F4 0B4"):
        as_torch_writes_it(rows, tmp_path / "torch.csv").verify()


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_torchs_tables_run_a_model_as_plain_pytorch_does(name: str, tmp_path: Path) -> None:
    model, batch = Chain(), {"x": torch.randn(8, WIDTH), "y": torch.randn(8, WIDTH)}
    plain = copy.deepcopy(model)
    (loss := plain(**batch)).backward()
    schedule = as_torch_writes_it(torchs(name, 2, 4, 2), tmp_path / "torch.csv")
    compiled = fxpipe.compile(model, fxpipe.Topology([("pipe", 2)]), microbatches=4, schedule=schedule)
    torch.testing.assert_close(compiled(**batch), loss.detach())
    assert compiled.schedule.rows == schedule.rows
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# --- the same orders ---


@pytest.mark.parametrize(("ranks", "m"), [(2, 1), (5, 3)])
def test_gpipe_is_torchs(ranks: int, m: int) -> None:
    assert cells(in_turns("gpipe", ranks, 1, m)) == computes(torchs("GPipe", ranks, m, 1))


@pytest.mark.parametrize(
    ("ranks", "v", "m"), [(2, 2, 2), (2, 4, 8), (3, 2, 9), (3, 3, 6), (4, 2, 4), (4, 3, 16), (5, 4, 10)]
)
def test_interleaved_1f1b_is_torchs_and_megatrons(ranks: int, v: int, m: int) -> None:
    schedule = in_turns("interleaved_1f1b", ranks, v, m)
    assert cells(schedule) == computes(torchs("Interleaved1F1B", ranks, m, v))
    assert schedule.rows == tuple(megatron(rank, ranks, v, m) for rank in range(ranks))


def megatron(rank: int, p: int, v: int, m: int) -> tuple[Action, ...]:
    """The order of Narayanan et al. 2021, section 2.2, as Megatron-LM numbers it.

    A rank's k-th forward is of model chunk ⌊(k mod pv) / p⌋ and micro-batch p⌊k / pv⌋ + k mod p; its k-th backward of
    the same micro-batch and chunk v − 1 less that. It begins with 2(p − 1 − rank) + (v − 1)p forwards, or all it has;
    then a forward and a backward in turns; then the backwards that are left. Chunk c of a rank is stage cp + rank.
    """
    count = m * v

    def action(k: int, op: Kind) -> Action:
        chunk = k % (p * v) // p
        if op is Kind.B:
            chunk = v - 1 - chunk
        return Action(chunk * p + rank, op, k // (p * v) * p + k % p)

    warm_up = min(2 * (p - 1 - rank) + (v - 1) * p, count)
    row = [action(k, Kind.F) for k in range(warm_up)]
    for k in range(count - warm_up):
        row += [action(warm_up + k, Kind.F), action(k, Kind.B)]
    return (*row, *(action(k, Kind.B) for k in range(count - warm_up, count)))


def test_megatrons_order_is_the_one_in_the_paper() -> None:
    """Figure 4, below: 4 ranks with 2 chunks each, 8 micro-batches; how the last rank begins and ends."""
    last = [str(action) for action in megatron(3, 4, 2, 8)]
    assert last[:8] == "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1".split()
    assert last[-4:] == "3B4 3B5 3B6 3B7".split()


@pytest.mark.parametrize(("ranks", "m"), [(1, 3), (2, 1), (2, 8), (3, 5), (6, 12)])
def test_zb_v_takes_as_long_and_holds_as_much_as_torchs(ranks: int, m: int, tmp_path: Path) -> None:
    """The same order, too; so that nothing is lost where the costs are others."""
    schedule = build("zb_v", chain(2 * ranks), m, [*range(ranks), *reversed(range(ranks))])
    theirs = as_torch_writes_it(torchs("ZBVZeroBubble", ranks, m, 2), tmp_path / "torch.csv")
    ours, its = schedule.simulate(activation_bytes=1), theirs.simulate(activation_bytes=1)
    assert (ours.makespan, ours.peak_bytes) == (its.makespan, its.peak_bytes)
    assert schedule.rows == theirs.rows
