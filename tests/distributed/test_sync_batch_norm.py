"""Synchronised batch norms wait for replicas of their stage alone, or compile says what to write."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import fxpipe
from fxpipe import Topology
from tests.models import WIDTH
from tests.pool import Pool


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = fxpipe.stage_boundary(self.norm(self.first(x)))
        return self.last(h).square().mean()


def compiled(axes: list[tuple[str, int]], own_group: bool) -> str:
    topology = Topology(axes)
    fxpipe.init()
    group = topology.group("data") if own_group else None
    try:
        fxpipe.compile(Normed(nn.SyncBatchNorm(WIDTH, process_group=group)), topology, microbatches=2)
    except fxpipe.TopologyError as error:
        return str(error)
    return ""


def test_one_over_all_ranks_is_refused_where_some_of_them_run_other_stages(pool: Pool) -> None:
    for told in pool.run(compiled, [("pipe", 2)], False, ranks=2):
        assert "norm is a SyncBatchNorm over ranks [0, 1]" in told
        assert 'process_group=topo.group("data")' in told


@pytest.mark.parametrize(("axes", "own_group"), [([("data", 2)], False), ([("pipe", 2)], True)])
def test_one_over_replicas_is_welcome(axes: list[tuple[str, int]], own_group: bool, pool: Pool) -> None:
    assert pool.run(compiled, axes, own_group, ranks=2) == ["", ""]


def test_in_one_process_it_is_a_batch_norm() -> None:
    fxpipe.compile(Normed(nn.SyncBatchNorm(WIDTH)), Topology([("pipe", 2)]), microbatches=2)
