"""What nothing reads is no work, no stage and no parameter of one, unless it does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe import passes, stage_boundary
from tests.capturing import captured, label


class Head(nn.Module):
    """``x + 1``, and beside it what ``body`` does, whose result nothing reads."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.relu = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(inplace=True)
        self.hooked = nn.Linear(2, 2)
        self.hooked.register_forward_hook(lambda *_: None)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        self.body(self, x)
        return x + 1


def written_in_place(m: Any, x: Tensor) -> None:
    h = m.linear(x)
    h[0] = 1
    m.relu(h).add_(2)


KEPT: dict[str, tuple[Callable[[Any, Tensor], Any], bool, str]] = {
    "behind a boundary": (lambda m, x: m.linear(stage_boundary(m.linear(x))), True, ""),
    "written in place": (written_in_place, True, ""),
    "a batch norm in evaluation": (lambda m, x: m.norm(m.linear(x)), False, ""),
    "a batch norm": (lambda m, x: m.norm(m.linear(x)), True, "linear norm"),
    "a buffer": (lambda m, x: m.seen.add_(m.linear(x).sum(0)), False, "linear sum_1 add_"),
    "an input": (lambda m, x: m.relu(x.view(-1)), False, "view relu"),
    "a hook": (lambda m, x: m.hooked(x), False, "hooked"),
    "a check": (lambda m, x: torch._assert((m.linear(x) > 0).all(), "no"), False, "linear gt all_1 _assert"),
}


@pytest.mark.parametrize(("body", "training", "kept"), KEPT.values(), ids=KEPT.keys())
def test_what_nothing_reads_goes_unless_it_does_something(body: Any, training: bool, kept: str) -> None:
    program = passes.drop_unused(captured(Head(body).train(training)))
    assert [label(n) for n in program.graph.nodes if n.op.startswith("call_")] == [*kept.split(), "add"]
