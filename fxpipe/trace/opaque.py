"""Opaque modules: what a graph calls as a whole although it is no submodule of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.checkpoint
from torch import nn

from fxpipe.modes import modes_restored


class Applied(nn.Module):
    """A ``torch.autograd.Function``, with the backward that its author wrote."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return self.function.__qualname__


class Method(nn.Module):
    """A method of a submodule that cannot be kept whole itself: called on a stand-in for it, with these of its parts.

    The stand-in has what attributes the submodule has at the time of the call; those that the method sets are lost.
    """

    def __init__(self, owner: nn.Module, name: str, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        self.parts._modules.update(parts)
        self._owner, self.name = (owner,), name  # in a tuple: the owner is not a part of this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.stand_in(), self.name)(*args, **kwargs)

    def stand_in(self) -> nn.Module:
        owner = self._owner[0]
        made = object.__new__(type(owner))
        vars(made).update(vars(owner))
        vars(made)["_modules"] = dict(self.parts.items())
        return made

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
