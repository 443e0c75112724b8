"""Branches that go one way in every step.

``torch.rand([]) < layerdrop``, where ``layerdrop`` is 0: no input of the model reaches such a number, and of what
``torch.rand`` draws the range is known: [0, 1). ``assert h.isfinite().all()``: the other way raises.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.trace.fake import is_fake
from fxpipe.trace.record.tape import NamedSource, Obstacle, Operation, TapeValue, mapped, tensors
from fxpipe.trace.record.targets import name_of
from fxpipe.trace.state.snapshot import storage_of

_DRAWN = (torch.rand, torch.rand_like)
"""Functions whose numbers are in [0, 1)."""
_LEAST, _GREATEST = 0.0, 1 - 2**-53
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
_COMPARISONS |= {"less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge}


def outcome(value: TapeValue | None, tape: Sequence[Operation | Obstacle]) -> bool | None:
    """The truth of a comparison that comes out the same whatever is drawn; None where it may be either."""
    compared = value.maker if value is not None else None
    if not isinstance(compared, Operation) or len(compared.args) != 2 or compared.kwargs:
        return None
    drawn, bound = compared.args
    comparison = _COMPARISONS.get(str(getattr(compared.target, "__name__", compared.target)))
    if comparison is None or not _is_drawn(drawn, tape) or type(bound) not in (int, float):
        return None
    truth = bool(comparison(_LEAST, bound))
    return truth if comparison(_GREATEST, bound) == truth else None


def passing() -> bool | None:
    """The truth of a tensor with which the code that asks for it goes on; None where the other one does not raise.

    So for ``assert``, for ``if not valid.all(): raise ValueError`` in ``torch.distributions``, and for
    ``assert all(h.isfinite().all() for h in hidden)``. torch's own assertions are no part of a program either.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fxpipe."):
        frame = frame.f_back
    if frame is None:
        return None
    code = [one for one in dis.get_instructions(frame.f_code) if one.opname not in _BETWEEN]
    places = [place for place, one in enumerate(code) if one.offset >= frame.f_lasti]
    jump = next((place for place in places[:2] if "_IF_" in code[place].opname), None)
    if jump is None:
        return None
    if_true = "_IF_TRUE" in code[jump].opname
    if _raises(code, _target(code, jump)):
        return not if_true
    return if_true if _raises(code, jump + 1) else None


def _raises(code: Sequence[dis.Instruction], start: int) -> bool:
    """Whether all ways from there lead to a ``raise``."""
    waiting, seen = [start], set[int]()
    while waiting:
        place = waiting.pop()
        name = code[place].opname
        if place in seen or name in ("RAISE_VARARGS", "RERAISE"):
            continue
        if name.startswith(("RETURN", "YIELD")):
            return False
        seen.add(place)
        if code[place].opcode in (*dis.hasjrel, *dis.hasjabs):
            waiting.append(_target(code, place))
        if not name.startswith("JUMP_") or "_IF_" in name:
            waiting.append(place + 1)
    return True


_BETWEEN = ("PRECALL", "TO_BOOL", "NOT_TAKEN")
"""Instructions of some versions of Python between the one that asks and the jump."""


def _target(code: Sequence[dis.Instruction], jump: int) -> int:
    return next(place for place, one in enumerate(code) if one.offset >= code[jump].argval)


def _is_drawn(value: Any, tape: Sequence[Operation | Obstacle]) -> bool:
    """Whether a value is what ``torch.rand`` returned, and nothing has been written into it since."""
    maker = value.maker if isinstance(value, TapeValue) else None
    if not isinstance(maker, Operation) or maker.target not in _DRAWN or value.path:
        return False
    memory = storage_of(maker.result)
    return not any(isinstance(entry, Operation) and memory in entry.touched.writes for entry in tape)


# --- Constants ---

_SELECT = frozenset({"__getitem__", "masked_select"})
"""Functions of which the first tensor's numbers do not decide how many the result has."""


class NotConstant(Exception):
    """A tensor's numbers are known only when the model runs."""


class Constants:
    """The numbers of constants. ``real``: the model's tensors by name; ``tape``: what has been recorded."""

    def __init__(self, real: Mapping[str, Tensor], tape: Sequence[Operation | Obstacle]) -> None:
        self._real, self._tape = real, tape

    def result(self, function: Any, args: Any, kwargs: Any, value_of: Callable[[Tensor], TapeValue]) -> Any:
        """What a function returns, where constants alone decide its sizes; NotConstant where they do not.

        To be called outside of the capture's modes. Other numbers than those of constants are zeros.
        """
        free = id(args[0]) if name_of(function) in _SELECT and isinstance(args[0], Tensor) else None

        def numbers(leaf: Any) -> Any:
            if id(leaf) == free:
                return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            return self._numbers(value_of(leaf)) if isinstance(leaf, Tensor) else leaf

        return function(*mapped(args, numbers), **mapped(kwargs, numbers))

    def _numbers(self, value: TapeValue) -> Any:
        maker = value.maker
        if self._is_written(maker):
            raise NotConstant
        if isinstance(maker, NamedSource):
            tensor = self._real.get(maker.name, maker.result)
            if maker.kind != "get_attr" or isinstance(tensor, nn.Parameter) or is_fake(tensor) or tensor.is_meta:
                raise NotConstant
            return tensor.detach()
        if maker.kind == "call_module" or maker.touched.draws_random:
            raise NotConstant
        args, kwargs = mapped(maker.args, self._leaf), mapped(maker.kwargs, self._leaf)
        function = getattr(torch.Tensor, maker.target) if maker.kind == "call_method" else maker.target
        found: Any = function(*args, **kwargs)
        for key in value.path:
            found = found[key]
        return found

    def _leaf(self, leaf: Any) -> Any:
        return self._numbers(leaf) if isinstance(leaf, TapeValue) else leaf

    def _is_written(self, maker: NamedSource | Operation) -> bool:
        memory = {storage_of(tensor) for tensor in tensors(maker.result)}
        return any(isinstance(entry, Operation) and entry.touched.writes & memory for entry in self._tape)
