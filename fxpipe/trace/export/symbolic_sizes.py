"""Symbolic sizes: what a capture knows of tensors whose dimension has no number of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import TraceError
from fxpipe.torch_compat import FakeTensor, flags_as_numbers, hint_of, size_decisions
from fxpipe.trace.patching import patched, refuse
from fxpipe.trace.user_line import current_line, only_tells


@contextlib.contextmanager
def sizes_as_numbers() -> Iterator[None]:
    """While it is open a symbolic size is to users' Python what a number is, which it otherwise is to torch alone.

    Its class is ``int``, to ``isinstance``, ``match`` and ``singledispatch``, too; a comparison is True or False; what
    users write into text ("s27" to torch) is the number, which it then is for this capture, where the text is not only
    for its reader, as an error's is. What a hash is made for is refused: a table would keep what holds for one length.
    In the modules of users ``len()`` of a tensor is symbolic as ``shape[0]`` is, where Python's makes a number of it,
    and ``type`` of a size is ``int``; not in ``builtins``: torch._dynamo keeps what it finds there in tables, for good.
    """
    homes = [(home, name) for home in _users_modules() for name in _STAND_INS if name not in home]
    refused = list[TraceError]()
    try:
        for home, name in homes:
            home[name] = _STAND_INS[name]
        with contextlib.ExitStack() as stack:
            stack.enter_context(flags_as_numbers())
            for owner, name, value in _as_numbers(refused):
                stack.enter_context(patched(owner, name, value))
            yield
        if refused:  # and forward has caught it
            raise refused[0]
    finally:
        for home, name in homes:
            home.pop(name, None)


_PLAIN: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_LOOKED_THROUGH = sys.stdlib_module_names - {"__main__", "copy", "copyreg", "pickle"}
_NOT_USERS = frozenset({"torch", "fxpipe", "functorch", "sympy", "mpmath", "copy", "copyreg", "pickle"})


def _users_modules() -> list[dict[str, Any]]:
    modules = {name: vars(module) for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)}
    return [home for name, home in modules.items() if name.partition(".")[0] not in _NOT_USERS | _LOOKED_THROUGH]


def _who_asks() -> FrameType | None:
    """The user's code that asks what the caller answers, be it through Python's own library; None where it is not a
    user's."""
    frame: FrameType | None = sys._getframe(2)
    home = ""
    while frame is not None:
        home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if home not in _LOOKED_THROUGH:
            break
        frame = frame.f_back
    return None if home in _NOT_USERS else frame


def _as_numbers(refused: list[TraceError]) -> Iterator[tuple[type, str, Any]]:
    """What of torch's symbolic numbers is another to users: the class, a name, what stands there."""
    symbolic: Any
    for symbolic, plain in _PLAIN.items():
        yield symbolic, "__getattribute__", _with_class(symbolic.__getattribute__, plain)
        yield symbolic, "__hash__", _refusing(symbolic.__hash__, refused)
        for name in ("__repr__", "__str__"):
            yield symbolic, name, _written(getattr(symbolic, name), plain)
        for name in _COMPARISONS if plain is not bool else ():
            yield symbolic, name, _decided(getattr(symbolic, name))


def _with_class(original: Callable[[Any, str], Any], plain: type) -> Callable[[Any, str], Any]:
    def get(value: Any, name: str) -> Any:
        return plain if name == "__class__" and _who_asks() is not None else original(value, name)

    return get


def _written(original: Callable[[Any], str], plain: type) -> Callable[[Any], str]:
    def written(value: Any) -> str:
        asking = _who_asks()
        if asking is None:
            return original(value)
        hint = hint_of(value)
        return str(plain(value) if hint is None or not only_tells(asking) else plain(hint))

    return written


def _refusing(original: Callable[[Any], int], refused: list[TraceError]) -> Callable[[Any], int]:
    def hashed(value: Any) -> int:
        if _who_asks() is not None:
            refused.append(refuse("forward looks up a size in a table, or keeps something by it", "compare it with =="))
            raise refused[-1]
        return original(value)

    return hashed


def _decided(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(value: Any, other: Any) -> Any:
        answer = original(value, other)
        return bool(answer) if isinstance(answer, torch.SymBool) and _who_asks() is not None else answer

    return compare


def _length(value: Any, /) -> Any:
    is_symbolic = isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
    return value.shape[0] if is_symbolic else len(value)


class _IsType(type):
    """Of what stands in for ``type``: a class is an instance of it, too, a metaclass a subclass, and it is ``type``."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()


class _Type(type, metaclass=_IsType):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass that calls type.__new__ makes a class
            return type.__new__(cls, *args, **kwargs)
        made = type(*args, **kwargs)
        return _PLAIN.get(made, _Type if made in (type, _IsType) else made) if len(args) == 1 else made


_STAND_INS = {"len": _length, "type": _Type}


@contextlib.contextmanager
def fixing_lines() -> Iterator[list[tuple[str, bool]]]:
    """The lines of the user's source, in traceback form, that make a number of a symbolic size while it is open; with
    whether of the size itself, and not of what is computed from it."""
    env, name = size_decisions()
    decide, lines = getattr(env, name), list[tuple[str, bool]]()

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        guards, fixed = len(self.guards), _fixed(self)
        answer = decide(self, *args, **kwargs)
        of_size = _fixed(self) > fixed
        if of_size or (len(self.guards) > guards and not _is_bool(answer)):
            lines.append((current_line(), of_size))
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
