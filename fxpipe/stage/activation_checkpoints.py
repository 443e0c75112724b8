"""Activation checkpoints: what runs in place of torch.utils.checkpoint's own functions while a context is open; and the
module of a checkpointed part of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing

from fxpipe.patches import noting, replaced
from fxpipe.stage.modes import modes_restored
from fxpipe.torch_compat.autograd import CHECKPOINT_GENERATOR


def checkpoints_as(generator: Callable[..., Any], apply: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replaces two internal functions of activation checkpointing, as torch has no other hook.

    ``generator``: replaces the generator of non-reentrant checkpoints, which torch runs up to its ``yield`` before the
    function, and to its end after it. ``apply``: replaces ``apply`` of the autograd function of reentrant checkpoints,
    with arguments (function, preserve_rng_state, *inputs).
    """
    non_reentrant = checkpointing, CHECKPOINT_GENERATOR, generator
    return replaced([non_reentrant, (checkpointing.CheckpointFunction, "apply", apply)])


Around = Callable[[], AbstractContextManager[None]]


def run_reentrant(function: Callable[..., Any], preserves: bool, *args: Any, around: Around = nullcontext) -> Any:
    """Runs a reentrant checkpoint's function. As in torch, no result requires a gradient if no argument does."""
    requires = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and requires), around():
        return function(*args)


def checkpoints_that_keep(around: Around = nullcontext) -> AbstractContextManager[None]:
    """While this context is open, all checkpoints run their function without recomputation, as a replay would otherwise
    run the function a third time. ``around``: makes the context of each function's run.
    """

    def only_run(*args: Any, **kwargs: Any) -> Iterator[None]:
        """torch runs this generator up to ``yield`` before a checkpointed function, and the rest after the function."""
        with around():
            yield

    return checkpoints_as(only_run, partial(run_reentrant, around=around))


def checkpoints_noted(note: Callable[[], None]) -> AbstractContextManager[None]:
    """While this context is open, each checkpoint calls ``note`` and then runs as usual."""

    torchs = getattr(checkpointing, CHECKPOINT_GENERATOR), checkpointing.CheckpointFunction.apply
    return checkpoints_as(*(noting(note, run) for run in torchs))


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
        return checkpointing.checkpoint(self._run, len(inputs), *inputs, *more, **self.options)

    def _run(self, count: int, *inputs: Any) -> Any:
        with modes_restored():  # recomputation may stop early
            return self.body(*inputs[:count])
