"""Operators of a stage's graph that are fxpipe's own."""

from __future__ import annotations

import torch

from fxpipe.graph.operators import handoff, private


def test_handoff_is_a_node_of_its_own_and_private_a_copy() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    handed = handoff({"y": y, "n": 3, "i": torch.arange(2)})
    assert handed["n"] == 3
    assert handed["y"].grad_fn is not y.grad_fn
    assert handed["y"].data_ptr() == y.data_ptr()
    copy = private([y])[0]
    assert torch.equal(copy, y)
    assert copy.data_ptr() != y.data_ptr()
