"""Branches that go one way whatever is drawn: ``torch.rand([]) < layerdrop``, where ``layerdrop`` is 0.

No input of the model reaches such a number, and of what ``torch.rand`` draws the range is known: [0, 1).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpipe.trace.record.tape import Obstacle, Operation, TapeValue
from fxpipe.trace.snapshot import storage_of

_DRAWN = (torch.rand, torch.rand_like)
"""Functions whose numbers are in [0, 1)."""
_ALWAYS: dict[Any, Callable[[float], bool]] = {
    operator.lt: lambda bound: bound >= 1,
    operator.le: lambda bound: bound >= 1,
    operator.gt: lambda bound: bound < 0,
    operator.ge: lambda bound: bound <= 0,
}
"""Comparison → whether it is true of every number in [0, 1) and that bound."""
_NEVER: dict[Any, Callable[[float], bool]] = {
    operator.lt: lambda bound: bound <= 0,
    operator.le: lambda bound: bound < 0,
    operator.gt: lambda bound: bound >= 1,
    operator.ge: lambda bound: bound >= 1,
}
_NAMES = {"lt": operator.lt, "less": operator.lt, "le": operator.le, "less_equal": operator.le}
_NAMES |= {"gt": operator.gt, "greater": operator.gt, "ge": operator.ge, "greater_equal": operator.ge}


def outcome(value: TapeValue | None, tape: Sequence[Operation | Obstacle]) -> bool | None:
    """The truth of a comparison that comes out the same whatever is drawn; None where it may be either."""
    compared = value.maker if value is not None else None
    if not isinstance(compared, Operation) or len(compared.args) != 2 or compared.kwargs:
        return None
    drawn, bound = compared.args
    name = getattr(compared.target, "__name__", compared.target)
    comparison = compared.target if compared.target in _ALWAYS else _NAMES.get(str(name))
    if comparison is None or not _is_drawn(drawn, tape) or type(bound) not in (int, float):
        return None
    return True if _ALWAYS[comparison](bound) else False if _NEVER[comparison](bound) else None


def _is_drawn(value: Any, tape: Sequence[Operation | Obstacle]) -> bool:
    """Whether a value is what ``torch.rand`` returned, and nothing has been written into it since."""
    maker = value.maker if isinstance(value, TapeValue) else None
    if not isinstance(maker, Operation) or maker.target not in _DRAWN or value.path:
        return False
    memory = storage_of(maker.result)
    return not any(isinstance(entry, Operation) and memory in entry.touched.writes for entry in tape)
