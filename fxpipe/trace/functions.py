"""Functions that forward calls and that a recorder sees as wholes: autograd functions, checkpointed and vmapped ones.

torch offers no way to see the calls of ``torch.utils.checkpoint.checkpoint`` and of what ``torch.vmap`` returns, which
models bind long before a capture: the functions inside of them that are patched here, and the autograd function of
modules with backward hooks, are torch's own and named nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis as functorch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint as checkpointing

from fxpipe.trace.guard import patched
from fxpipe.trace.recorder import Recorder
from fxpipe.trace.tape import Checkpoint

Apply = Callable[[type[torch.autograd.Function], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def functions_watched(recorder: Recorder, is_ours: Callable[[], bool], applied: Apply) -> Iterator[None]:
    """While it is open, ``applied(function, apply, args, kwargs)`` is called for each autograd function applied."""
    apply = vars(torch.autograd.Function)["apply"].__func__

    def watched(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return apply(function, *args, **kwargs)
        if function is checkpointing.CheckpointFunction:
            return _reentrant(recorder, *args)
        if function is BackwardHookFunction:
            return _renamed(recorder, args, apply(function, *args, **kwargs))
        return applied(function, apply, args, kwargs)

    generator = checkpointing._checkpoint_without_reentrant_generator

    def non_reentrant(*args: Any, **kwargs: Any) -> Any:
        return _non_reentrant(recorder, *args) if is_ours() else generator(*args, **kwargs)

    mapped = vars(functorch)["vmap_impl"]

    def vmapped(*args: Any, **kwargs: Any) -> Any:
        with recorder.operators() if is_ours() else contextlib.nullcontext():
            return mapped(*args, **kwargs)

    with (
        patched(functorch, "vmap_impl", vmapped),
        patched(torch.autograd.Function, "apply", classmethod(watched)),
        patched(checkpointing, "_checkpoint_without_reentrant_generator", non_reentrant),
    ):
        yield


@contextlib.contextmanager
def _inside(recorder: Recorder, part: Checkpoint) -> Iterator[None]:
    """What is recorded while it is open is a checkpointed part."""
    around = recorder.checkpoints
    recorder.checkpoints = (*around, part)
    try:
        yield
    finally:
        recorder.checkpoints = around


def _reentrant(recorder: Recorder, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """``CheckpointFunction.apply`` on fake tensors: the function, with gradients on, as backward runs it."""
    options = {"use_reentrant": True, "preserve_rng_state": preserve_rng_state}
    with _inside(recorder, Checkpoint(options, recorder.place())):
        return function(*args)


def _non_reentrant(
    recorder: Recorder,
    function: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = checkpointing.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    *args: Any,
) -> Iterator[None]:
    """In place of the generator around a checkpointed function, which runs at its ``yield``."""
    options = {
        "use_reentrant": False,
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
    }
    with _inside(recorder, Checkpoint(options, recorder.place())):
        yield


def _renamed(recorder: Recorder, args: tuple[Any, ...], results: Any) -> Any:
    """What a module with backward hooks passes its arguments and results through changes nothing in forward."""
    for before, after in zip(args, results, strict=True):
        if isinstance(before, Tensor):
            recorder.name(after, recorder.value_of(before))
    return results
