"""Placeholders: for values of another rank, such as a parameter of its stage, and for values of an earlier call."""

from __future__ import annotations

import sys
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from fxpipe.errors import RunError
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import plain_results, wrapper

_NOT_USED = frozenset({"detach", "alias", "_to_copy"})
"""Operators that pass values on, perhaps in another type or on another device."""
_MEMORY = "data_ptr numpy tolist storage share_memory_ __array__ __dlpack__ __format__ __reduce_ex__".split()
"""Methods of a tensor that read its values without any dispatcher."""


class ElsewhereError(RunError):
    """Raised by a use of values that another rank has."""


class Elsewhere(Tensor):
    """A tensor without values. Code may read its shape, type, device and ``requires_grad``, and make new tensors like
    it; any use of its values raises a RunError that says ``why``: in ``no_grad``, and through ``.data``, too.

    torch's own meta tensors would mix with real tensors, and leave those unchanged. An ``Elsewhere`` has ``is_meta`` as
    they do, and names the device that the values would be on. ``copy.deepcopy`` of an ``Elsewhere`` is another.
    """

    __torch_function__ = plain_results
    is_meta = property(lambda self: True)
    why: str
    memory: Tensor
    """A meta tensor, whose storage represents the storage on the other rank."""

    @staticmethod
    def __new__(cls, memory: Tensor, why: str, device: torch.device) -> Self:
        stub: Self = wrapper(cls, memory.shape, memory.dtype, device, memory.stride())
        stub.memory, stub.why = memory, why
        return stub

    @classmethod
    def in_place_of(cls, tensor: Tensor, why: str, device: torch.device) -> Tensor:
        """Returns the placeholder of a tensor: of the tensor's kind, with its attributes."""
        # a tensor keeps the attributes that a user has set, such as a tag for weight decay
        stub: Tensor = cls(torch.empty_like(tensor.detach(), device="meta"), why, device)
        is_parameter = isinstance(tensor, nn.Parameter)
        stub = nn.Parameter(stub, tensor.requires_grad) if is_parameter else stub.requires_grad_(tensor.requires_grad)
        stub.__dict__.update({**vars(tensor), **vars(stub)})
        return stub

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, first = func.overloadpacket.__name__, args[0]
        # new tensors made like this one are real: they use none of its values
        options = {key: value for key, value in (kwargs or {}).items() if value is not None}
        if isinstance(first, Elsewhere):
            options = {"device": first.device, "dtype": first.dtype} | options
            if name in _NOT_USED:
                return cls(first.memory.to(options["dtype"]), first.why, options["device"])
            if name.endswith("_like") or name.startswith("new_"):
                return func(first.memory, *args[1:], **options)
        return next(leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Elsewhere)).refuse()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ElsewhereError(self.why)

    @property
    def grad(self) -> Tensor | None:
        """None for ``nn.Module.zero_grad`` and optimizers, which skip it; HeldElsewhere for all other code."""
        # A property gets only the tensor, and both callers look the same: nanoGPT's optimizer of model.parameters()
        # must skip the parameter, and its clip_grad_norm_(model.parameters()) must not silently omit it from the norm.
        frame = sys._getframe(1)
        passes_over = isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
        return None if passes_over or frame.f_globals["__name__"] == nn.Module.__module__ else self.refuse()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self.refuse()

    def _set_data(self, value: Tensor) -> None:
        if not isinstance(value, Elsewhere):
            self.refuse()
        plain: Any = Tensor.data
        plain.__set__(self, value)
        self.memory = value.memory

    data = property(Tensor.detach, _set_data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), type(self).in_place_of(self, self.why, self.device))  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{list(self.shape)}, {self.dtype}: {self.why}>"


# set on the class, not by __torch_function__: these methods never reach a dispatcher
for _name in _MEMORY:
    setattr(Elsewhere, _name, Elsewhere.refuse)


class Gone:
    """Stands on a model for a value of one call of forward. Each use raises a RunError that says ``why``."""

    def __init__(self, why: str) -> None:
        self._why = why

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RunError(self._why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        self.refuse()

    def __repr__(self) -> str:
        return f"<{self._why}>"

    # no method, against which torch warns
    __torch_function__ = property(lambda self: lambda *args, **kwargs: self.refuse())


_ALSO = {f"__{use}__" for use in ("call", "enter", "eq", "format", "fx_create_arg", "ge", "gt", "le", "lt", "ne")}
for _name in _ALSO | {*dir(int), *dir(list)} - {*dir(object), "__class_getitem__", "__getnewargs__"}:
    setattr(Gone, _name, Gone.refuse)
