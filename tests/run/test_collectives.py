"""Collectives: the collective calls that a steady step and a steady evaluation make, on each rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import StageGraph, Topology
from tests.device import DEVICE
from tests.pool import Pool

Calls = dict[str, int]  # operation and scope → how many


def calls_of(axes: list[tuple[str, int]], zero: int) -> tuple[Calls, Calls]:
    """Of a third step and a second evaluation. Each rank has a stage with parameters, and so a bucket."""
    topology = Topology(axes)
    ranks = topology.size("pipe")
    layers = {f"layer{rank}": nn.Linear(4, 4) for rank in range(ranks)} | {"loss": lambda x: x.square().mean()}
    edges = list(zip(layers, [*layers][1:], strict=False))
    graph = StageGraph.from_callables(layers, edges, {"layer0": ["x"]})
    placement = {f"layer{rank}": rank for rank in range(ranks)} | {"loss": ranks - 1}
    options = {"microbatches": 1, "zero": zero, "checks": fxpipe.Checks(batches=False), "placement": placement}
    step, found = fxpipe.compile(graph, topology, **options), []
    for number in range(5):
        x = torch.randn(4, 4)
        step(x) if number < 3 else step.evaluate(x, outputs="loss")
        rows = [row for row in step.traffic().rows if row.operation not in ("send", "receive")]
        found.append({f"{row.operation} {row.scope}": row.count for row in rows})
    return found[2], found[4]


SUMS = {0: {"all_reduce shard": 1}, 1: {"reduce_scatter shard": 1}, 2: {"reduce_scatter shard": 1}}
SUMS[3] = SUMS[2] | {"all_gather gather": 1}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("pipe", "data"), [(1, 2), (2, 1), (2, 2)])
def test_replicas_meet_before_the_forward_in_each_bucket_and_for_the_loss(
    pipe: int, data: int, zero: int, pool: Pool
) -> None:
    """On CPUs the losses' sum also says which parameters were used; a rank without the loss asks for that alone. On
    GPUs the hosts ask, beside the step."""
    both = {"gather_int pipe": 1, "broadcast pipe": 1} if pipe > 1 else {}
    both |= {"gather_int data": 1} if data > 1 else {}
    every = pool.run(calls_of, [("pipe", pipe), ("data", data)], zero, ranks=pipe * data)
    for rank, (step, evaluation) in enumerate(every):
        has_loss = rank // data == pipe - 1
        losses = {"all_reduce data": 1} if has_loss and data > 1 else {}
        flags = {"maximum flags": 1} if data > 1 and (not has_loss or DEVICE == "cuda") else {}
        assert step == both | losses | flags | (SUMS[zero] if data > 1 else {})
        gathers = {"all_gather gather": 1} if zero == 3 and data > 1 else {}
        assert evaluation == both | losses | gathers | ({"gather pipe": 1} if pipe > 1 else {})
