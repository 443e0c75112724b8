"""Symbolic sizes: what a capture tells of tensors of which a dimension has no number of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_compat import FakeTensor, flags_as_numbers, hint_of, size_decisions
from fxpipe.trace.patching import patched
from fxpipe.trace.user_line import current_line, is_users


@contextlib.contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """While it is open a symbolic size is to Python's own what a number is, which it would else be only to torch.

    ``len()`` of a tensor is symbolic as ``shape[0]`` is, where Python's makes a number of it; a size is an ``int`` to
    ``isinstance`` and ``type``. In the modules of users, not in ``builtins``: torch._dynamo keeps what it finds there
    in tables, for good. A size that users write into text ("s27" to torch) becomes the number that is written.
    """
    modules = {name: vars(module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)}
    modules = {name: home for name, home in modules.items() if name.partition(".")[0] not in _NOT_USERS}
    users = [home for name, home in modules.items() if name == "__main__" or is_users(home.get("__file__") or "<")]
    homes = [(home, name) for home in users for name in _STAND_INS if name not in home]
    try:
        for home, name in homes:
            home[name] = _STAND_INS[name]
        with contextlib.ExitStack() as stack:
            stack.enter_context(flags_as_numbers())
            for symbolic, plain in _PLAIN.items():
                for name in ("__repr__", "__str__"):
                    stack.enter_context(patched(symbolic, name, _written(getattr(symbolic, name), plain)))
            yield
    finally:
        for home, name in homes:
            home.pop(name, None)


_NOT_USERS = (sys.stdlib_module_names | {"sympy", "mpmath"}) - {"__main__"}  # torch reckons with these
_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _written(original: Callable[[Any], str], plain: type) -> Callable[[Any], str]:
    def written(value: Any) -> str:
        return str(plain(value)) if is_users(sys._getframe(1).f_code.co_filename) else original(value)

    return written


def _length(value: Any, /) -> Any:
    is_symbolic = isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    return value.shape[0] if is_symbolic else len(value)


def _isinstance(value: Any, kinds: Any, /) -> bool:
    plain = _PLAIN.get(type(value))
    return isinstance(value, kinds) or (plain is not None and isinstance(plain(), kinds))


class _IsType(type):
    """Of what stands in for ``type``: a class is an instance of it, too, and a metaclass a subclass."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)


class _Type(type, metaclass=_IsType):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass that calls type.__new__ makes a class
            return type.__new__(cls, *args, **kwargs)
        made = type(*args, **kwargs)
        return _KINDS.get(made, made) if len(args) == 1 else made


_KINDS = {**_PLAIN, type: _Type}
_STAND_INS = {"len": _length, "isinstance": _isinstance, "type": _Type}


@contextlib.contextmanager
def fixing_lines() -> Iterator[list[str]]:
    """The lines of the user's source, in traceback form, that make a number of a symbolic size while it is open."""
    env, name = size_decisions()
    decide, lines = getattr(env, name), list[str]()

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        guards, fixed = len(self.guards), _fixed(self)
        answer = decide(self, *args, **kwargs)
        if _fixed(self) > fixed or (len(self.guards) > guards and not _is_bool(answer)):
            lines.append(current_line())
        return answer

    with patched(env, name, noting):
        yield lines


def _fixed(env: Any) -> int:
    """How many symbols have become numbers."""
    return sum(bool(expression.is_number) for expression in env.replacements.values())


def _is_bool(answer: Any) -> bool:
    return isinstance(answer, bool) or bool(getattr(answer, "is_Boolean", False))


def is_fixed(size: Any) -> bool:
    """Whether a size is a number, be it one that a symbol has become."""
    return not isinstance(size, torch.SymInt) or bool(size.node.expr.is_number)


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
