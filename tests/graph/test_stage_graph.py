"""The stage graph: its table, its names, and what makes none."""

from __future__ import annotations

import pytest
from torch import nn

import fxpipe

STAGES = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "end": lambda x, y: (x * y).sum()}


@pytest.mark.parametrize(
    ("edges", "inputs", "text"),
    [
        ([("a", "end"), ("b", "edn")], {"a": ["x"], "b": ["x"]}, r"names 'edn'.*did you mean \"end\""),
        ([("a", "end")], {"a": ["x"], "b": ["x"]}, r"exactly one stage returns the loss.*\['b', 'end'\]"),
        ([("a", "end"), ("b", "end"), ("end", "a")], {"b": ["x"]}, r"cycle through \['a', 'end'\]"),
        ([("a", "end"), ("a", "end"), ("b", "end")], {"a": ["x"]}, r"given twice"),
        ([("a", "end"), ("b", "end")], {"c": ["x"]}, r"inputs= names 'c'"),
    ],
)
def test_callables_that_make_no_stage_graph_are_refused(
    edges: list[tuple[str, str]], inputs: dict[str, list[str]], text: str
) -> None:
    with pytest.raises(fxpipe.PartitionError, match=text):
        fxpipe.StageGraph.from_callables(STAGES, edges, inputs)
