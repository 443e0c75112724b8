"""Activation checkpoints: what runs in place of torch.utils.checkpoint's own functions while a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpointing

from fxpipe.patches import noting, replaced
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
