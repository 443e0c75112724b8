"""Opaque modules: what a graph calls as a whole although it is no submodule of the model."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch.utils.checkpoint
from torch import nn

from fxpipe.errors import RunError
from fxpipe.graph.awaiting import ReadsMore
from fxpipe.graph.modes import modes_restored
from fxpipe.trace.user_line import code_of


class Applied(nn.Module):
    """A ``torch.autograd.Function``, with the backward that its author wrote."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return self.function.__qualname__


class Method(ReadsMore):
    """A method of a submodule that cannot be opaque itself, since a boundary lies inside of it, such as transformers'
    ``Idefics3Model.get_image_features``.

    It is called on a stand-in for the submodule, with what attributes that has then, and those of its parts in which no
    cut lies. RunError where it sets one, which the submodule itself would not have.
    """

    def __init__(self, owner: nn.Module, name: str, path: str, cuts: frozenset[str]) -> None:
        super().__init__()
        self._owner, self.name = (owner,), name  # in a tuple: the owner is not a part of this one
        prefix = f"{path}." if path else ""
        self.parts = nn.ModuleDict()
        self.parts._modules.update(
            (child, part)
            for child, part in owner.named_children()
            if not any(f"{cut}.".startswith(f"{prefix}{child}.") for cut in cuts)
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (owner,) = self._owner
        stand_in = object.__new__(type(owner))
        vars(stand_in).update(vars(owner))
        vars(stand_in)["_modules"] = dict(self.parts.items())
        # a table of its own, so that what the method sets is found, and does not reach the owner half way
        before = dict(vars(stand_in))
        result = getattr(stand_in, self.name)(*args, **kwargs)
        changed = next((name for name, value in vars(stand_in).items() if value is not before.get(name, self)), None)
        if changed is not None:
            raise RunError(
                f"{type(owner).__name__}.{self.name} sets {changed}, which would be lost; set it in a submodule that "
                "holds no boundary"
            )
        return result

    def extra_repr(self) -> str:
        return f"{type(self._owner[0]).__name__}.{self.name}"


class Checkpointed(nn.Module):
    """A checkpointed part of forward, recorded: its activations are computed again in backward.

    ``body`` takes the tensors that the part has used, parameters included where no submodule holds them for it.
    """

    def __init__(self, body: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.body = body
        self.options = dict(options)

    def forward(self, *inputs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self._run, *inputs, **self.options)

    def _run(self, *inputs: Any) -> Any:
        with modes_restored():  # what is computed again may stop in the middle
            return self.body(*inputs)


Name = tuple[str, str]
"""(the submodule's path, the method's name)"""


def method_in(error: BaseException, paths: Mapping[int, str]) -> Name | None:
    """The innermost method of a submodule, not its forward, that an error has come through.

    ``paths``: a submodule's path by the identity of its ``__dict__``.
    """
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        path = paths.get(id(vars(owner))) if isinstance(owner, nn.Module) else None
        # the frame runs the code inside of all decorators
        if path is not None and not hasattr(nn.Module, name) and code_of(type(owner), name) is frame.f_code:
            found = path, name
    return found
