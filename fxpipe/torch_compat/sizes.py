"""Symbolic sizes: their values, the guards on them, and how torch decides conditions; the same in 2.13 to 2.15."""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # forward branches on a value in export

from fxpipe.patches import replaced

SIZE_DECISIONS = symbolic_shapes.ShapeEnv, "evaluate_expr"
"""The class and the name of the method that evaluates a condition on a symbolic size and records a guard. Instances
have ``guards`` and ``replacements``, symbol → expression."""


def hint_of(size: Any) -> Any:
    """The value of a symbolic number at capture; None if only a run determines it. Returns other values unchanged."""
    node = getattr(size, "node", None)
    if node is None:
        return size
    if node.has_hint():
        return node.hint
    return int(node.expr) if node.expr.is_Integer else None  # the expression may have become a constant


def is_unbacked(number: Any) -> bool:
    """Whether a symbolic number is a tensor's value, or computed from such values, and so is not known at capture."""
    return hint_of(number) is None and bool(number.node.expr.free_symbols)


def known_truth(truth: Any) -> bool | None:
    """A symbolic truth value as the ranges of its symbols decide: no size is negative. None if only values decide."""
    if symbolic_shapes.statically_known_true(truth):
        return True
    return False if symbolic_shapes.statically_known_true(torch.sym_not(truth)) else None  # type: ignore[no-untyped-call]


def fix_size(size: Any, number: int) -> None:
    """Makes export take a size that depends on a value for ``number``."""
    size.node.shape_env.size_like.discard(size.node.expr)  # export assumes that a size_like symbol is not 0 or 1
    torch._check(size == number)  # type: ignore[no-untyped-call]


def size_guards(values: Sequence[Tensor]) -> list[str]:
    """The guards of a capture on the symbolic sizes of its inputs, ``values``, as Python expressions.

    The expressions call ``size()``, ``stride()`` and ``storage_offset()`` of ``L['t0']`` and so on: see ``holds_for``.
    """
    from torch._dynamo.source import LocalSource

    sizes: Iterator[Any] = (size for value in values for size in value.shape if isinstance(size, torch.SymInt))
    shape_env = next(sizes).node.shape_env
    sources = [LocalSource(f"t{index}") for index in range(len(values))]
    # produce_guards_expression would join the guards by "and", without parentheses around a guard with "or"
    guards: list[str] = shape_env.produce_guards(list(values), sources, ignore_static=False)
    return guards


def holds_for(expression: str | types.CodeType, tensors: Mapping[str, Any]) -> bool:
    """Whether a guard, or a part of a guard, holds for ``tensors``; False for a guard that divides by a size of 0."""
    try:
        return bool(eval(expression, symbolic_shapes.SYMPY_INTERP, {"L": tensors}))
    except ZeroDivisionError:
        return False


@contextlib.contextmanager
def sizes_like_any() -> Iterator[None]:
    """While the context is open, symbolic sizes may be 0 or 1 like any other number, unless a guard distinguishes them.
    Otherwise torch assumes positive sizes, and simplifies ``max(size, 1)`` to the size without a guard."""
    home: Any = symbolic_shapes
    make = home.make_symbol

    def symbol(prefix: Any, number: int, **assumptions: Any) -> Any:
        is_size = prefix is home.SymT.SIZE and assumptions.pop("positive", None)
        return make(prefix, number, **assumptions, **({"nonnegative": True} if is_size else {}))

    # torch looks up this function by its name in the module, at each call.
    with replaced([(home, "make_symbol", symbol)]), fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield
