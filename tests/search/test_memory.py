"""What a rank holds of its parameters: the formulas against the bytes of real runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import Precision, Topology, stage_boundary
from fxpipe.dealing import dealt
from fxpipe.options import Options
from fxpipe.search.memory import Account, StaticBytes
from tests.activations import counted as activations_counted
from tests.counted_bytes import Counted, alive, counted
from tests.pool import Pool
from tests.thinned import every, in_turn

WIDTH, ROWS = 64, 64
HALF = Precision()
TOPOLOGY = Topology([("pipe", 2), ("data", 2)])


@pytest.mark.parametrize(
    ("zero", "held"),
    [
        (0, StaticBytes(2, 4, 12)),
        (1, StaticBytes(2, 4 + 4 / 8, 12 / 8)),
        (2, StaticBytes(2, 4 / 8, 12 / 8, 12)),
        (3, StaticBytes(4 / 8, 4 / 8, 8 / 8, 2 + 4)),
    ],
)
def test_bytes_of_a_parameter_in_bfloat16_sharded_over_eight(zero: int, held: StaticBytes) -> None:
    expected = StaticBytes(*(1000 * size for size in vars(held).values()))
    assert Account(zero, 8, HALF).bytes_of(1000, 2, trained=True) == expected


def test_without_precision_all_is_of_the_parameters_own_type() -> None:
    assert [Account().bytes_of(10, element, trained=True).sum for element in (2, 4, 8)] == [80, 160, 320]
    assert Account().bytes_of(10, 4, trained=False) == StaticBytes(40)


def test_what_is_frozen_has_a_master_and_no_more() -> None:
    assert Account(1, 2, HALF).bytes_of(10, 2, trained=False) == StaticBytes(20, 0, 20)
    assert Account(1, 2, HALF).bytes_of(10, 8, trained=False, floating=False) == StaticBytes(80)


@pytest.mark.parametrize(
    ("axes", "per_node", "scope", "shards"),
    [
        ([("pipe", 2), ("data", 8)], 4, "node", 4),
        ([("pipe", 2), ("data", 8)], 4, "data", 8),
        ([("pipe", 2), ("data", 8)], None, "node", 8),
        ([("data", 8), ("pipe", 2)], 2, "node", 1),
    ],
)
def test_who_shards_is_as_the_scope_of_zero_says(axes: Any, per_node: int | None, scope: Any, shards: int) -> None:
    assert Account.from_options(Options(zero=fxpipe.Zero(1, scope=scope)), Topology(axes, per_node)) == Account(
        1, shards
    )


def test_one_replica_shards_nothing() -> None:
    assert Account.from_options(Options(zero=3), Topology([("pipe", 4)])) == Account(0, 1)


@pytest.mark.parametrize(("rows", "part"), [(1, 30), (3, 10), (15, 4), (0, 30)])
def test_a_shard_has_whole_rows(rows: int, part: int) -> None:
    """Over 8 ranks: what has fewer is not shared by all, and 15 rows are two for each, one of them padding."""
    assert Account(3, 8).part_of(30, rows) == part
    assert Account(1, 8).part_of(30, rows) == 30 / 8


def test_what_is_stepped_whole_goes_to_whoever_has_least() -> None:
    assert dealt([3, 9, 4, 2, 2], 2) == [1, 0, 1, 1, 0]


class Block(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, factor * WIDTH),
            nn.Linear(factor * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two stages of different sizes; a part is frozen, one is a single row, one nobody uses, and there is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first = Block(2).requires_grad_(False), Block(4)
        self.second, self.third = Block(8), Block(2)
        self.register_buffer("scale", torch.ones(4 * WIDTH, WIDTH))
        self.row, self.unused = nn.Parameter(torch.zeros(1, 4 * WIDTH, WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = stage_boundary(self.first(self.frozen(x) * self.scale.mean() + self.row.mean((0, 1))), name="last")
        return self.third(self.second(h)).square().mean()


def options_of(zero: Any, precision: Precision | None) -> dict[str, Any]:
    return {"zero": zero, "precision": precision, "microbatches": 4, "example_args": (torch.randn(ROWS, WIDTH),)}


def run(zero: Any, precision: Precision | None) -> tuple[Counted, int]:
    """What this rank holds behind its second step, and of activations at most in a third one; with zero=3 what was
    gathered would be among them."""
    fxpipe.init()
    torch.manual_seed(TOPOLOGY.data_rank)
    batch, before = torch.randn(ROWS, WIDTH), alive()
    torch.manual_seed(0)
    forward_backward = fxpipe.compile(Model(), TOPOLOGY, **options_of(zero, precision) | {"example_args": (batch,)})
    optimizer = forward_backward.optimizer(torch.optim.AdamW)
    for _ in range(2):
        forward_backward(batch)
        optimizer.step()
    found = counted(forward_backward, optimizer, before)
    if zero == 3:
        return found, 0
    with activations_counted(forward_backward, {"x": batch}) as held:
        forward_backward(batch)
    return found, sum(held.peak.values())


@pytest.mark.parametrize(("zero", "precision"), every(2, in_turn([0, 1, 2, 3], [HALF, None])))
def test_a_preview_tells_what_four_processes_hold(zero: Any, precision: Precision | None, pool: Pool) -> None:
    told = fxpipe.preview(Model(), TOPOLOGY, **options_of(zero, precision))
    ran = pool.run(run, zero, precision)
    for pipe, wanted in enumerate(told.ranks):
        replicas = [ran[rank] for rank in range(TOPOLOGY.world_size) if TOPOLOGY.coordinate(rank)["pipe"] == pipe]
        most = {
            name: max(getattr(found, name) for found, _ in replicas) for name in ("parameters", "optimizer", "rest")
        }
        held = {"parameters": wanted.parameters, "optimizer": wanted.optimizer, "rest": wanted.gradients}
        assert most == pytest.approx(held, rel=0.05)
        if zero < 3:
            assert max(activations for _, activations in replicas) == pytest.approx(wanted.activations, rel=0.15)
