"""Mark copies: what each stage computes for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxpipe import stage_boundary
from fxpipe.passes import alias_groups, mark_copies, order_writes
from tests.capturing import Model, captured

COPIED: list[tuple[str, Callable[..., Any], set[str]]] = [
    ("on inputs", lambda m, x, y: (x > 0, m.linear(x)), {"gt"}),
    ("on two inputs", lambda m, x, y: (x + y) * 2, {"add", "mul"}),
    ("on a parameter alone", lambda m, x, y: m.scale.exp(), {"exp"}),
    ("on a parameter and an input", lambda m, x, y: m.scale * x, set()),
    ("on a buffer and an input", lambda m, x, y: m.buffer * x, {"mul"}),
    ("on a frozen parameter and an input", lambda m, x, y: m.frozen(x), set()),
    ("on what is not copied", lambda m, x, y: m.linear(x) + 1, set()),
    ("on a constant", lambda m, x, y: x * torch.arange(4), {"mul"}),
    ("module without parameters", lambda m, x, y: m.part(x), {"part"}),
    ("random", lambda m, x, y: torch.rand_like(x) + 1, set()),
    ("writing", lambda m, x, y: x.clone().add_(1) + 1, set()),
    ("sizes", lambda m, x, y: torch.zeros(x.shape[0], 2), {"getattr_1", "getitem", "zeros"}),
    ("on a buffer that is written", lambda m, x, y: (m.buffer.add_(1), m.buffer * 2), set()),
    ("on running statistics", lambda m, x, y: (m.norm(x), m.norm.running_mean * 2), set()),
    ("a mask behind a boundary", lambda m, x, y: stage_boundary((x > 0, m.linear(x)))[0].float(), {"gt", "float_1"}),
]


@pytest.mark.parametrize(("body", "copied"), [c[1:] for c in COPIED], ids=[c[0] for c in COPIED])
def test_what_each_stage_computes_for_itself(body: Callable[..., Any], copied: set[str]) -> None:
    program = captured(Model(body, part=nn.GELU(), norm=nn.BatchNorm1d(4)))
    assert mark_copies(alias_groups(order_writes(program))).copied == copied
