"""Differentiated: gradients that forward itself takes inside of a submodule that is kept whole.

They are right where the submodule makes all of what they go through. What leads around it, from one of its arguments to
another, may run in another stage, and autograd would not know of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fxpipe.trace.record.tape import NamedSource, Obstacle, Operation, TapeValue
from fxpipe.trace.snapshot import storage_of


def leads_around(tape: Sequence[Operation | Obstacle], by: Iterable[TapeValue], given: Iterable[TapeValue]) -> bool:
    """Whether any of the ``given`` arguments of a call depends, on the tape before that call, on a value ``by`` which
    a gradient is taken inside of it: through another argument, or a parameter that is used outside, too."""
    starts = list(by)
    reached = {value.key for value in starts}
    weights = {storage_of(value.maker.result) for value in starts if _is_weight(value)}
    makers: set[int] = set()
    for operation in tape:
        if isinstance(operation, Operation) and (
            operation.touched.reads & weights or any(_is_reached(v, reached, makers) for v in operation.values)
        ):
            makers.add(id(operation))
    return any(id(value.maker) in makers for value in given if value.key not in reached)


def _is_reached(value: TapeValue, keys: set[tuple[int, tuple[object, ...]]], makers: set[int]) -> bool:
    return value.key in keys or id(value.maker) in makers


def _is_weight(value: TapeValue) -> bool:
    return (
        isinstance(value.maker, NamedSource)
        and value.maker.kind == "get_attr"
        and isinstance(value.maker.result, Tensor)
    )
