"""Opaque modules that a graph calls although they are no submodules of the model.

Takes: an autograd function, or the graph of a checkpointed part. Gives: modules whose calls do what the model's own
code did: ``Applied`` keeps the function's backward, ``Checkpointed`` recomputes activations in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.checkpoint
from torch import nn

from fxpipe.stage.modes import modes_restored


class Applied(nn.Module):
    """The call of a ``torch.autograd.Function``, with the function's own backward."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    """A recorded checkpointed part of forward. Backward recomputes the part's activations.

    ``body`` takes the tensors that the part uses, including parameters that none of its opaque submodules holds.
    ``options``: the keyword arguments of ``torch.utils.checkpoint.checkpoint``. The graph
    enters the modes around a call, and ``body`` enters the modes inside of the part.
    """

    def __init__(self, body: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.body = body
        self.options = dict(options)

    def forward(self, *inputs: Any) -> Any:
        # In place of an argument that needs a gradient and that the part does not use, as torch's reentrant checkpoints
        # need on data.
        is_needed = self.options["use_reentrant"] and not any(getattr(value, "requires_grad", 0) for value in inputs)
        more = [torch.empty(0, requires_grad=True)] if is_needed else []
        return torch.utils.checkpoint.checkpoint(self._run, len(inputs), *inputs, *more, **self.options)

    def _run(self, count: int, *inputs: Any) -> Any:
        with modes_restored():  # recomputation may stop early
            return self.body(*inputs[:count])
