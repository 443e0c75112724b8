"""Placement: as wanted, or balanced as well as any contiguous cut can be."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from fxpipe.errors import PartitionError
from fxpipe.graph.stage_graph import StageGraph
from fxpipe.plan.placement import place_stages

NAMES = ["image", "text", "fuse", "loss"]


def parameters(count: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(count))
    return module


def graph_of(sizes: list[int], names: list[str] | None = None) -> StageGraph:
    """A chain of stages with that many parameters each."""
    names = names or [f"stage{number}" for number in range(len(sizes))]
    stages = {name: parameters(size) for name, size in zip(names, sizes, strict=True)}
    return StageGraph.from_callables(stages, list(itertools.pairwise(names)), {names[0]: ["x"]})


def greatest(sizes: list[int], placement: tuple[int, ...], ranks: int) -> int:
    """The most parameters that any rank holds; one more for each stage, so that empty ones spread, too."""
    return max(sum(1 + size for size, rank in zip(sizes, placement, strict=True) if rank == r) for r in range(ranks))


def contiguous(stages: int, ranks: int) -> list[tuple[int, ...]]:
    """Every way to give consecutive stages to consecutive ranks, none of them empty."""
    cuts = itertools.combinations(range(1, stages), ranks - 1)
    return [tuple(sum(stage >= cut for cut in chosen) for stage in range(stages)) for chosen in cuts]


def test_the_greatest_rank_is_as_small_as_in_any_contiguous_cut() -> None:
    draw = random.Random(0)
    for _ in range(60):
        sizes = [draw.choice([0, 0, 1, 3, 10, 50, 200]) for _ in range(draw.randint(1, 9))]
        ranks = draw.randint(1, len(sizes))
        placement = place_stages(graph_of(sizes), ranks, None)
        every = contiguous(len(sizes), ranks)
        assert placement in every
        assert greatest(sizes, placement, ranks) == min(greatest(sizes, other, ranks) for other in every)


def test_what_is_wanted_is_done_whatever_the_balance() -> None:
    graph = graph_of([1, 1, 1, 100], NAMES)
    wanted = {"loss": 0, "fuse": 0, "text": 1, "image": 0}
    assert place_stages(graph, 2, wanted) == tuple(wanted[name] for name in graph.names)


def test_more_ranks_than_stages_is_told_with_both_numbers_and_a_remedy() -> None:
    with pytest.raises(PartitionError, match=r"6 pipe ranks, but the model has 4 stages \(image, .*mark 2 more with"):
        place_stages(graph_of([1] * 4, NAMES), 6, None)


@pytest.mark.parametrize(
    ("wanted", "fact"),
    [
        (
            {"imge": 0, "text": 0, "fuse": 1, "loss": 1},
            "placement names stage 'imge', which does not exist; did you mean \"image\"?",
        ),
        ({"zzz": 0}, 'placement names stage \'zzz\', which does not exist; known: "image", "text", "fuse", "loss"'),
        ({"image": 0, "fuse": 1}, "placement does not say where ['text', 'loss'] run; name all stages: "),
        (
            {"image": 0, "text": 0, "fuse": 0, "loss": 0},
            "placement uses ranks [0]; with 2 pipe ranks each needs",
        ),
        ({"image": -1, "text": 1, "fuse": 0, "loss": 1}, "placement uses ranks [-1, 0, 1]; with 2 pipe ranks"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(wanted: dict[str, int], fact: str) -> None:
    with pytest.raises(PartitionError) as error:
        place_stages(graph_of([1] * 4, NAMES), 2, wanted)
    assert fact in str(error.value)
