"""The stage graph: its table, its names, and what makes none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe

STAGES = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "end": lambda x, y: (x * y).sum()}


@pytest.mark.parametrize(
    ("edges", "inputs", "text"),
    [
        ([("a", "end"), ("b", "edn")], {"a": ["x"], "b": ["x"]}, r"names 'edn'.*did you mean \"end\""),
        ([("a", "end")], {"a": ["x"], "b": ["x"]}, r"exactly one stage returns the loss.*\['b', 'end'\]"),
        ([("a", "end"), ("a", "end"), ("b", "end")], {"a": ["x"]}, r"given twice"),
        ([("a", "end"), ("b", "end")], {"c": ["x"]}, r"inputs= names 'c'"),
        ([("a", "end"), ("b", "end")], {"a": ["my image"]}, "my image"),
    ],
)
def test_callables_that_make_no_stage_graph_are_refused(
    edges: list[tuple[str, str]], inputs: dict[str, list[str]], text: str
) -> None:
    with pytest.raises(fxpipe.PartitionError, match=text):
        fxpipe.StageGraph.from_callables(STAGES, edges, inputs)


def test_a_stage_is_in_its_graph_by_its_name() -> None:
    graph = fxpipe.StageGraph.from_callables(STAGES, [("a", "end"), ("b", "end")], {"a": ["x"], "b": ["x"]})
    assert ["end" in graph, "edn" in graph, graph[0] in graph, 0 in graph] == [True, False, True, False]


def test_a_callable_that_writes_what_another_stage_has_made_is_refused() -> None:
    """In one process the other users would see it, on several ranks not."""

    def masked(mask: Tensor) -> Tensor:
        return mask.mul_(2)

    end = lambda front, mask, twice: (front * mask * twice).sum()  # noqa: E731
    stages = {"front": nn.Linear(2, 2), "mask": torch.relu, "b": masked, "end": end}
    edges = [("mask", "b"), ("front", "end"), ("mask", "end"), ("b", "end")]
    graph = fxpipe.StageGraph.from_callables(stages, edges, {"front": ["x"], "mask": ["x"]})
    forward_backward = fxpipe.compile(graph, fxpipe.Topology([("pipe", 1)]), microbatches=2)
    with pytest.raises(fxpipe.RunError, match=r"stage 'b' writes into a tensor of shape \[2, 2\]"):
        forward_backward(torch.ones(4, 2))
