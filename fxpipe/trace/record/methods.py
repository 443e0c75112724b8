"""Opaque methods where their submodule cannot be, since a boundary lies inside of it.

A vision-language model's ``get_image_features`` drops the images that are nothing but padding: how many there are is
known only when it runs. Its cuts are in the text model, which the method does not call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from fxpipe.trace.record.opaque import Method

Name = tuple[str, str]
"""(the submodule's path, the method's name)"""
_CALLS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


def method_in(error: BaseException, paths: Mapping[int, str]) -> Name | None:
    """The innermost method of a submodule, not its forward, that an error has come through.

    ``paths``: a submodule's path by the identity of its ``__dict__``.
    """
    found, traceback = None, error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        path = paths.get(id(vars(owner))) if isinstance(owner, nn.Module) else None
        if path is not None and name not in _CALLS:
            function = inspect.unwrap(getattr(type(owner), name, None) or method_in)
            if getattr(function, "__code__", None) is frame.f_code:
                found = path, name
        traceback = traceback.tb_next
    return found


def kept_method(module: nn.Module, name: str, path: str, cuts: frozenset[str]) -> Method:
    """A method, with those parts of its submodule in which no cut lies."""
    prefix = f"{path}." if path else ""
    free = {
        child: part
        for child, part in module.named_children()
        if not any(f"{cut}.".startswith(f"{prefix}{child}.") for cut in cuts)
    }
    return Method(module, name, free)
