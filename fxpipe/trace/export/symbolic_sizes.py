"""Symbolic sizes: what a capture knows of tensors whose dimension has no number of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_compat import FakeTensor, hint_of, size_decisions
from fxpipe.trace.patching import patched
from fxpipe.trace.user_line import current_line

_NOT_USERS = sys.stdlib_module_names - {"__main__"} | {"torch", "fxpipe", "functorch", "sympy", "mpmath"}


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """While it is open, ``len()`` of a tensor is symbolic in users' modules, as ``shape[0]`` is. Python's makes a
    number of it: CLIP's loss asks for ``torch.arange(len(logits))``.

    It stands in the modules and not in ``builtins``: torch._dynamo keeps what it finds there in tables, for good.
    """
    modules = {name: vars(module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)}
    users = [home for name, home in modules.items() if name.partition(".")[0] not in _NOT_USERS]
    homes = [home for home in users if "len" not in home]
    try:
        for home in homes:
            home["len"] = _length
        yield
    finally:
        for home in homes:
            home.pop("len", None)


def _length(value: Any, /) -> Any:
    is_symbolic = isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    return value.shape[0] if is_symbolic else len(value)


@contextlib.contextmanager
def fixing_lines() -> Iterator[list[tuple[str, bool]]]:
    """The lines of the user's source, in traceback form, that make a number of a symbolic size while it is open; with
    whether of the size itself, and not of what is computed from it."""
    env, name = size_decisions()
    decide, lines = getattr(env, name), list[tuple[str, bool]]()

    def fixed(self: Any) -> int:  # how many symbols have become numbers
        return sum(bool(expression.is_number) for expression in self.replacements.values())

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards), fixed(self)
        answer = decide(self, *args, **kwargs)
        is_truth = isinstance(answer, bool) or getattr(answer, "is_Boolean", False)
        of_size = fixed(self) > before[1]
        if of_size or (len(self.guards) > before[0] and not is_truth):
            lines.append((current_line(), of_size))
        return answer

    with patched(env, name, noting):
        yield lines


def is_symbolic(tensor: Tensor) -> bool:
    """Whether a dimension of it has no number of its own."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def sizes_of(value: Any) -> tuple[str, ...]:
    """Of a tensor, each dimension's size as an expression, "" where it is a number; of a number, its own expression.

    Equal expressions of one capture are equal numbers in every run.
    """
    if isinstance(value, torch.SymInt):
        return (str(value.node.expr),)
    if not isinstance(value, Tensor) or not is_symbolic(value):
        return ()
    return tuple(str(size.node.expr) if isinstance(size, torch.SymInt) else "" for size in value.shape)


def as_captured(tensor: Any) -> Any:
    """A fake tensor with the sizes that it had when it was captured."""
    if not is_symbolic(tensor):
        return tensor
    shape, stride = (list(map(hint_of, sizes)) for sizes in (tensor.shape, tensor.stride()))
    memory = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")
    return FakeTensor(tensor.fake_mode, memory, tensor.device).requires_grad_(tensor.requires_grad)
