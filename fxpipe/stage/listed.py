"""Listed: a list of tensors, of any length, that an opaque region returns, as a single value of a capture.

Code after the region that concatenates the list gets a single tensor, the region's own ``torch.cat``, and is valid for
any number of entries. Code that looks at an entry, or at their number, gets the entries, and is valid for that number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dis import opname
from typing import Any

import torch
from torch import Tensor

from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree


@dataclass
class ListOfTensors:
    """The facts that a capture knows of a list. ``kind``: list or tuple. ``dims``: the dimensions of each of its
    tensors. ``opened``: whether forward looks at entries."""

    kind: type[Any]
    count: int
    dims: int
    line: Callable[[], str]
    """Returns the user's source line that runs now."""
    opened: bool = False
    opened_at: str = ""
    joined: bool = False
    """Whether forward concatenates the list."""
    unpacked: bool = False
    """Whether forward is written for that number of entries, as in ``cos, sin = rotary(x)``."""

    def open(self) -> None:
        """Records that the number of entries is a part of the capture."""
        if not self.opened:
            self.opened, self.opened_at = True, self.line()

    @property
    def uses(self) -> list[bool]:
        """Whether forward uses the concatenation, followed by whether it uses each entry."""
        return [self.joined, *[self.opened] * self.count]

    def flat(self, value: Any) -> list[Tensor | None] | None:
        """The tensors that later code uses: the concatenation, then each entry; None for another kind or number."""
        # unused entries are not passed on: the number of entries may then change
        of_kind = type(value) is self.kind and all(isinstance(entry, Tensor) for entry in value)
        if not of_kind or not value or (self.opened and len(value) != self.count):
            return None
        joined = torch.cat(list(value)) if self.joined else None
        return [joined, *(value if self.opened else [None] * self.count)]

    def stands_for(self, tensors: Sequence[Any]) -> Any:
        """Returns the value that a capture gets in place of the list."""
        return (_List if self.kind is list else _Tuple).of(self, tensors[0], tensors[1:])


def can_be_joined(value: Any) -> bool:
    """Whether a value is a list or tuple of described tensors that ``torch.cat`` can concatenate."""
    if type(value) not in (list, tuple) or not all(isinstance(entry, TensorSpec) and entry.shape for entry in value):
        return False
    return len({(entry.shape[1:], entry.dtype, entry.device) for entry in value}) == 1


def joined(entries: Sequence[TensorSpec]) -> TensorSpec:
    """Returns the description of their ``torch.cat``."""
    first = entries[0]
    shape = sum(entry.shape[0] for entry in entries), *first.shape[1:]
    stride = torch.empty(shape, device="meta").stride()
    return replace(first, shape=shape, stride=stride, requires_grad=any(entry.requires_grad for entry in entries))


class _Member:
    """The entry of a ``Listed`` that C code sees, which does not call ``__iter__``: torch functions get the tensors."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = with_tensors(function, args, kwargs or {})
        return function(*args, **kwargs)


class Listed:
    """The list, or tuple, that the code after a region gets while it is captured."""

    listing: ListOfTensors
    whole: Any
    entries: Any

    @classmethod
    def of(cls, listing: ListOfTensors, whole: Any, entries: Sequence[Any]) -> Any:
        """Returns a list or tuple. ``whole``: all entries in a single tensor, as long as forward changes no entry."""
        listed = cls([_Member() for _ in entries])  # type: ignore[call-arg]
        listed.listing, listed.whole, listed.entries = listing, whole, listing.kind(entries)
        return listed

    def opened(self) -> Any:
        """Returns the plain list of entries; the capture is then for this number of entries."""
        self.listing.open()
        return self.entries

    def __iter__(self) -> Iterator[Any]:
        # `cos, sin = rotary(x)` (transformers' Phi3RotaryEmbedding) is written for two entries in every batch, and
        # `for image in features` (SmolVLM) for as many as the batch has. Python asks both for __iter__ alone: only the
        # instruction that asks tells them apart.
        caller = sys._getframe(1)
        self.listing.unpacked |= opname[caller.f_code.co_code[caller.f_lasti]].startswith("UNPACK")
        return iter(self.opened())

    def __radd__(self, other: Any) -> Any:
        return other + self.opened()


class _List(Listed, list):  # type: ignore[type-arg]
    pass


class _Tuple(Listed, tuple):  # type: ignore[type-arg]
    pass


_LOOKS = "__len__ __getitem__ __contains__ __reversed__ __add__ __mul__ __rmul__ copy count index".split()
_CHANGES = "append extend insert pop remove clear reverse sort __setitem__ __delitem__ __iadd__ __imul__".split()


def _of_entries(name: str) -> Callable[..., Any]:
    def method(self: Listed, *args: Any, **kwargs: Any) -> Any:
        self.whole = None if name in _CHANGES else self.whole
        return getattr(self.opened(), name)(*args, **kwargs)

    return method


# every method of the plain kind counts as a look at the entries
for _kind in (_List, _Tuple):
    for _name in [name for name in _LOOKS + _CHANGES if hasattr(_kind, name)]:
        setattr(_kind, _name, _of_entries(_name))
    pytree.register_pytree_node(
        _kind, lambda value: (list(value), value.listing.kind), lambda entries, kind: kind(entries)
    )

_CATS = (torch.cat, torch.concat, torch.concatenate)


def with_tensors(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the arguments of a torch function with tensors in place of each ``Listed``: the concatenation if the
    function concatenates the entries, otherwise the entries."""
    if not any(isinstance(value, Listed) for value in (*args, *kwargs.values())):
        return args, kwargs
    # the region has already run torch.cat along the first dimension; any other function needs the entries
    first = args[0] if args else kwargs.get("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if function in _CATS and isinstance(first, Listed) and first.whole is not None and dim in (0, -first.listing.dims):
        first.listing.joined = True
        return ([first.whole], *args[1:]), {name: value for name, value in kwargs.items() if name != "tensors"}
    opened = [value.opened() if isinstance(value, Listed) else value for value in (*args, *kwargs.values())]
    return opened[: len(args)], dict(zip(kwargs, opened[len(args) :], strict=True))
