"""In words: what an option's value is, the same words on every rank that was given the same."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import CodeType
from typing import Any

from fxpipe.hardware import Hardware
from fxpipe.packed import Offsets, Packed
from fxpipe.precision import Precision

_PLAIN = (str, int, float, type(None), Precision, Hardware)


def in_words(value: Any) -> str:
    """Without addresses, and of a function its name and a digest of its code: what it closes over may be a rank's."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{in_words(key)}: {in_words(one)}' for key, one in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Packed | Offsets):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{type(value).__name__} {in_words(given)}"
    return _function(value) if callable(value) else f"a {type(value).__name__}"


def _function(value: Callable[..., Any]) -> str:
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition("<locals>.")[2]
    runs = value if isinstance(value, type) else getattr(value, "forward", value)
    called = (vars(cls).get("__call__") for cls in type(runs).__mro__)
    code: CodeType | None = next(filter(None, (getattr(one, "__code__", None) for one in (runs, *called))), None)
    return f"{name}, code {_digest(code)}," if code is not None else name


def _digest(code: CodeType) -> str:
    told = repr((code.co_code, code.co_names, [_constant(one) for one in code.co_consts]))
    return hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _digest(value)
    if isinstance(value, tuple | frozenset):
        parts = list(map(_constant, value))
        return str(parts if isinstance(value, tuple) else sorted(parts))
    return repr(value)
