"""Alias groups: what shares memory that is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fxpipe import stage_boundary
from fxpipe.passes import alias_groups, order_writes
from tests.capturing import Model, captured


def groups(body: Callable[..., Any], **parts: nn.Module) -> set[frozenset[str]]:
    return set(alias_groups(order_writes(captured(Model(body, **parts)))).written)


def test_a_group_holds_all_that_shares_the_memory_of_a_write_and_nothing_else() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        h = m.linear(x)
        left, right = h.chunk(2, -1)
        left.add_(1)
        other = y.view(-1)
        return h, right * 2, other

    assert groups(body) == {frozenset({"linear", "chunk", "getitem", "getitem_1", "add_"})}


def test_memory_ends_at_a_boundary() -> None:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        v = stage_boundary(m.linear(x))
        v.add_(1)
        return v

    (group,) = groups(body)
    assert "linear" not in group
    assert "add_" in group
