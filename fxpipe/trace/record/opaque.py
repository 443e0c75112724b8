"""``Applied``: the module of an autograd function, which a graph calls although it is no submodule of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Applied(nn.Module):
    """The call of a ``torch.autograd.Function``, with the function's own backward."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
