"""Plain data: values as bytes and back, without pickle. Messages from other ranks are data: no code in them runs.

The bytes are JSON; types that JSON lacks are lists that begin with a word: ``["tuple", 1, 2]``. A message names classes
and defines none: the receiver's own are used, admitted dataclasses of fxpipe, containers that pytree knows, and
imported enums and named tuples. Making such a value calls only code of registered containers.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch

from fxpipe.device import by_shared_name, shared_name
from fxpipe.errors import RunError
from fxpipe.torch_compat import pytree

T = TypeVar("T")

MOST_BYTES = 64 * 2**20
"""The most bytes of a message. The decoded value takes at most about ten times as many bytes of memory."""

_AS_THEY_ARE = (type(None), bool, int, float, str)
_NAMED_BY_TORCH = torch.dtype | torch.layout | torch.memory_format
_CONSTANTS: dict[str, Any] = {str(value): value for value in vars(torch).values() if isinstance(value, _NAMED_BY_TORCH)}
_CONSTANTS |= {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)}
_CONSTANTS["..."] = ...
_NAMES = {id(value): name for name, value in _CONSTANTS.items()}
_REFUSED = "refused"
_admitted: dict[str, type] = {}


def admitted(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass of fxpipe that messages may contain; messages name the class by its name alone."""
    _admitted[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    """Returns ``value`` as bytes; RunError, with an alternative, if a part of the value is no plain data."""
    try:
        message = json.dumps(_told(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise RunError(
            "containers that are nested so deeply, or hold themselves, cannot be sent to other ranks"
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise RunError(f"a value cannot be sent to other ranks: {error}") from None
    if len(message) > MOST_BYTES:
        raise RunError(
            f"what is to be sent to other ranks beside tensors takes {len(message):,} bytes, and at most "
            f"{MOST_BYTES:,} are sent; put it into tensors"
        )
    return message


def decode(message: bytes, sender: str) -> Any:
    """Returns the value; RunError if ``sender``, "rank 3", has sent no such message, or a refusal in its place."""
    try:
        parts = json.loads(message.decode("utf-8", "surrogatepass"))
        if not isinstance(parts, list) or parts[0] != _REFUSED:
            return _made(parts)
        refusal = str(parts[1])
    except Exception as error:  # any error that a constructor raises for invalid parts
        raise RunError(
            f"{sender} has sent what is no description of a value ({type(error).__name__}: {error}); run the same "
            "program on every rank, with the same versions of Python, torch and fxpipe"
        ) from None
    raise RunError(f"{sender}: {refusal}")


def encode_for_all(value: Any) -> bytes:
    """``value`` as bytes; if it is no plain data, a message that raises at all ranks that decode it, as they wait."""
    try:
        return encode(value)
    except RunError as error:
        return json.dumps([_REFUSED, str(error)]).encode()


def check_length(length: int, sender: str) -> int:
    """Returns the message length that the sender announces, before memory is allocated; RunError if it is invalid."""
    if not 0 <= length <= MOST_BYTES:
        raise RunError(
            f"{sender} announces a description of {length:,} bytes, and none has more than {MOST_BYTES:,}; run the "
            "same program on every rank, and nothing else on the ports of this job"
        )
    return length


def digest_of(words: Iterable[str]) -> int:
    """Returns a number for a text, the same in every process."""
    return number_of(" ".join(words).encode())


def number_of(data: bytes) -> int:
    """Returns a number that fits an int64, which ranks exchange in place of the data."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


# --- a value → JSON


def _told(value: Any) -> Any:
    # by the exact class: a subclass may hold more than its base, and that would be lost
    cls = type(value)
    if cls in _AS_THEY_ARE:
        return value
    if cls in _PLAIN:
        parts_of, _ = _PLAIN[cls]
        return [cls.__name__, *map(_told, parts_of(value))]
    if id(value) in _NAMES:
        return ["constant", _NAMES[id(value)]]
    if _admitted.get(cls.__name__) is cls:
        return ["value", cls.__name__, *(_told(getattr(value, field)) for field in _fields(cls))]
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _registered(name) == [cls]:
        children, context = pytree.SUPPORTED_NODES[cls].flatten_fn(value)
        return ["container", name, _told(context), *map(_told, children)]
    member = next((key for key, each in _members(cls).items() if each is value), None)
    if member is not None and _imported(name) is cls:
        return ["enum", name, member]
    if isinstance(value, tuple) and hasattr(cls, "_fields") and _imported(name) is cls:
        return ["named", name, *map(_told, value)]
    raise RunError(
        f"an object of class {cls.__module__}.{cls.__qualname__}, which is neither a tensor nor plain data, cannot be "
        "sent to other ranks; write tensors (torch.as_tensor(...) of an array), None, numbers, text, bytes, lists, "
        "tuples, dicts, sets, slices, enums and named tuples from the top of a module, torch's dtypes and devices, or "
        "a dataclass registered on every rank by torch.export.register_dataclass"
    )


# --- JSON → a value


def _made(parts: Any) -> Any:
    if isinstance(parts, dict):
        raise ValueError("a JSON object")
    if not isinstance(parts, list):
        return parts
    word, *rest = parts
    if word in _MAKERS:
        return _MAKERS[word]([_made(part) for part in rest])
    # names are looked up among this process's classes; nothing is imported for a message
    name, values = rest[0], [_made(part) for part in rest[1:]]
    if word == "constant":
        return _CONSTANTS[name]
    if word == "value":
        own = _admitted[name]
        return own(**dict(zip(_fields(own), values, strict=True)))
    if word == "container":
        (container,) = _registered(name)
        context, *children = values
        return pytree.SUPPORTED_NODES[container].unflatten_fn(children, context)
    cls: Any = _imported(name)
    if word == "enum":
        return _members(cls)[values[0]]
    if word == "named" and cls is not None and issubclass(cls, tuple) and len(cls._fields) == len(values):
        return tuple.__new__(cls, values)  # without the class's own __new__
    raise ValueError(f"{word} {name} of {len(values)} parts")


def _members(cls: Any) -> Mapping[Any, Any]:
    """The values of a class that has a fixed set of named ones, as an enum has."""
    members = getattr(cls, "__members__", None)
    return members if isinstance(members, Mapping) else {}


_PLAIN: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[list[Any]], Any]]] = {
    **{cls: (list, cls) for cls in (list, tuple, set, frozenset, torch.Size)},
    dict: (
        lambda value: [each for pair in value.items() for each in pair],
        lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
    complex: (attrgetter("real", "imag"), lambda parts: complex(*parts)),
    slice: (attrgetter("start", "stop", "step"), lambda parts: slice(*parts)),
    range: (attrgetter("start", "stop", "step"), lambda parts: range(*parts)),
    bytes: (
        lambda value: [base64.b64encode(value).decode()],
        lambda parts: base64.b64decode(parts[0], validate=True),
    ),
    torch.device: (lambda value: [shared_name(value)], lambda parts: by_shared_name(*parts)),
}
"""Class → a function from a value to its parts, and a function from the parts to the value."""
_MAKERS = {cls.__name__: make for cls, (_, make) in _PLAIN.items()}


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _registered(name: str) -> list[type]:
    """Returns the containers of that name that pytree knows."""
    classes = (cls for cls in pytree.SUPPORTED_NODES if isinstance(cls, type))
    return [cls for cls in classes if f"{cls.__module__}:{cls.__qualname__}" == name]


def _imported(name: str) -> type | None:
    """Returns the class of that name in an imported module, found without running code of the module; else None."""
    module, _, path = name.partition(":")
    # through __dict__: getattr could call a module's __getattr__, or a descriptor
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    return value if isinstance(value, type) else None
