"""Objects among the inputs: objects that hold tensors are data, and other objects are values, as strings are.

Takes: an input's leaf that is neither a tensor nor a plain value. Gives: an ``ObjectValue``, a text that is equal for
equal objects on all ranks; or an ``ObjectSpec``, for an object whose parts cannot all be compared.

1. The object is walked: its attributes, its entries, what a function closes over, and their parts.
2. If every part has a text (numbers, enums, classes, functions by a hash of their code), the text of the whole is its
   value. Long texts are hashed.
3. Otherwise it is an ``ObjectSpec``: data if it holds tensors, modules or arrays, and unknown if not.

A capture is valid for one value of an object. Data is an input of stages, as tensors are.
"""

from __future__ import annotations

import enum
import hashlib
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.batch.block_masks import block_mask_rows
from fxpipe.device import shared_name
from fxpipe.snapshots.contents import captured_by, open_reading_of, reading_of, walk
from fxpipe.specs import ObjectSpec, ObjectValue
from fxpipe.torch_compat.operators import OpOverload, OpOverloadPacket

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""The types of plain values in a container, besides tensors; a capture may be valid for a single such value."""
_BY_REPR = (*PLAIN, range, slice, torch.layout, torch.memory_format, OpOverload, OpOverloadPacket)
_LONG = 200


def spec_of(value: Any) -> ObjectValue | ObjectSpec:
    """The stand-in of an object that is no tensor and no plain value."""
    # 1. and 2. walk the object, and write its text
    try:
        if any(part.parts and not part.is_entered for part in walk(value)):  # more parts than ``walk`` reads
            raise _Unknown
        text = _text_of(value, ())
    except (_Unknown, ValueError):  # ValueError: a closure's variable without a value
        # 3. not all parts can be compared
        parts = (part.value for part in walk(value, open_reading_of))
        is_data = any(isinstance(p, (Tensor, nn.Module)) or is_array(p) for p in parts)
        attributes = getattr(value, "__dict__", {})
        return ObjectSpec(type(value).__name__, is_data, tuple(sorted(n for n, v in attributes.items() if v is None)))
    if len(text) > _LONG:
        text = f"{text[:_LONG]}... {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
    return ObjectValue(text)


class _Unknown(Exception):
    """An object has a part that cannot be distinguished from other objects of its class."""


def _text_of(value: Any, around: tuple[int, ...]) -> str:
    """A text that is equal for equal values on all ranks, and differs for others. ``_Unknown`` also for tensors."""
    cls = type(value)
    name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
    if cls in _BY_REPR:
        return shared_name(value) if cls is torch.device else repr(value)
    if isinstance(value, enum.Enum) and value.name is not None:
        return f"{name}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if cls in (BuiltinFunctionType, MethodDescriptorType):
        owner = getattr(value, "__objclass__", None) or value.__self__
        if owner is None or isinstance(owner, (type, ModuleType)):
            return f"{getattr(owner, '__name__', 'torch')}.{value.__qualname__}"
    reading = reading_of(cls)
    parts = reading.parts(value)
    if isinstance(value, FunctionType):
        name, parts = f"{value.__module__}.{value.__qualname__} {_code_text(value.__code__)}", captured_by(value)
    elif reading.is_leaf or is_array(value) or id(value) in around:
        raise _Unknown
    texts = [_text_of(part, (*around, id(value))) for part in parts]
    # the number itself, for a subclass of int, for example
    texts += [kind.__repr__(value) for kind in (int, float, complex, str, bytes) if isinstance(value, kind)]
    return f"{name}({', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)})"


def _code_text(code: CodeType) -> str:
    """A hash of a function's code, which changes if the function is redefined under its name, as in a notebook."""
    inside = [
        _code_text(c) if isinstance(c, CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else c
        for c in code.co_consts
    ]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, inside))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array with at least one dimension."""
    # The type is asked, since some objects make up attributes.
    return hasattr(type(leaf), "__array__") and getattr(leaf, "ndim", 0) > 0


def has_numbers(leaf: Any) -> bool:
    """Whether a leaf is an array of NumPy or pandas, or an object or a function that holds tensors. A ``BlockMask`` is
    cut into its rows: it counts if it has a single row and its ``mask_mod`` holds tensors."""
    if (block_rows := block_mask_rows(leaf)) is not None:
        return block_rows == 1 and has_numbers(leaf.mask_mod)
    if hasattr(type(leaf), "__array__"):
        return is_array(leaf) and getattr(getattr(leaf, "dtype", None), "kind", "f") in "biufc"
    return any(isinstance(part.value, Tensor) for part in walk(leaf, open_reading_of))
