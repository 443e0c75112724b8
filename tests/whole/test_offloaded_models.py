"""Offload changes no bit: models train with it as plain PyTorch does, or as without it, whatever else is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxpipe
from tests.device import DEVICE
from tests.graphs import FAMILIES
from tests.harness import Engines, Run, assert_same, assert_trains, replica_of, trained
from tests.models import CASES, RANDOM, Case
from tests.offloading import Offloading
from tests.pool import Pool
from tests.thinned import in_turn, pairwise

LONG = pytest.mark.long
Params = list[Any]


def few(cases: list[tuple[Any, ...]], step: int) -> Params:
    """Each ``step``-th case, and the others for ``-m long``."""
    return [pytest.param(*case, marks=[LONG] * (number % step > 0)) for number, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("name", "engine", "family"),
    few(in_turn(list(CASES), ["local", "strict 0", "strict 1", "distributed"], FAMILIES), 9),
)
def test_three_steps_equal_plain_pytorch(name: str, engine: str, family: str, engines: Engines) -> None:
    assert_trains(CASES[name], engines(engine), schedule=Offloading(family))


def run(case: Case, offload: bool, autocast: bool, family: str, options: dict[str, Any]) -> Run:
    """Two steps on the topology of the options; each replica takes its rows."""
    batches = case.batches(2)
    if "topology" in options and options["topology"].size("data") > 1:
        half = replica_of(options["topology"])
        batches = [{name: value.chunk(2)[half] for name, value in batch.items()} for batch in batches]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        return trained(case, batches, schedule=Offloading(family) if offload else family, **options)


def assert_equal(got: Any, wanted: Any, what: str) -> None:
    for one, other in zip(pytree.tree_leaves(vars(got)), pytree.tree_leaves(vars(wanted)), strict=True):
        if isinstance(other, Tensor):
            assert_same(one, other, what)
        else:
            assert one == other, what


SMALL = {
    "transformer layers": CASES["transformer layers"],
    "dropout": RANDOM["dropout"],
    "tied": CASES["tied"],
    "views": CASES["views"],
}


@pytest.mark.parametrize(
    ("name", "tracer", "autocast", "family"),
    few(pairwise(list(SMALL), ["symbolic", "export", "record"], [False, True], ["1f1b", "zb_h1", "gpipe"]), 5),
)
def test_tracers_and_autocast_change_no_bit(name: str, tracer: str, autocast: bool, family: str) -> None:
    case = replace(SMALL[name], ranks=1, placement=None)
    options = {"tracer": tracer, "example_kwargs": case.batch()}
    got, wanted = (run(case, offload, autocast, family, options) for offload in (True, False))
    assert_equal(got, wanted, name)


@pytest.mark.parametrize(
    ("name", "zero", "axes", "family"),
    few(
        pairwise(
            ["transformer layers", "tied", "chain"],
            [0, 1, 2, 3],
            [[("pipe", 1), ("data", 2)], [("pipe", 2)], [("pipe", 2), ("data", 2)]],
            ["1f1b", "zb_h1", "gpipe"],
        ),
        6,
    ),
)
def test_zero_and_replicas_change_no_bit(name: str, zero: int, axes: Any, family: str, pool: Pool) -> None:
    topology = fxpipe.Topology(axes)
    if topology.size("data") == 1:
        zero = 0
    case = replace(CASES[name], ranks=topology.size("pipe"), placement=None, rows=8)
    ran = [
        pool.run(
            run,
            case,
            offload,
            False,
            family,
            {"topology": topology, "zero": zero, "microbatches": 2},
            ranks=topology.world_size,
        )
        for offload in (True, False)
    ]
    for got, wanted in zip(*ran, strict=True):
        assert_equal(got, wanted, name)


def test_recomputed_stages_and_offloaded_stages_of_one_table() -> None:
    assert_trains(CASES["chain"], schedule=Offloading("1f1b"), recompute=["layer1", "layer3"])
