"""Functions that forward calls and that a recorder sees as wholes: autograd functions, checkpointed and vmapped ones.

And the ``with torch.autocast(...)`` blocks, which it numbers as they are entered.

torch offers no way to see the calls of ``torch.utils.checkpoint.checkpoint`` and of what ``torch.vmap`` returns, which
models bind long before a capture: the functions inside of them that are patched here, and the autograd function of
modules with backward hooks, are torch's own and named nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpointing

from fxpipe.torch_compat import (
    CHECKPOINT_GENERATOR,
    BackwardHookFunction,
    checkpoint_options,
    function_apply,
    vmap_home,
)
from fxpipe.trace.patching import patched, refuse_backward
from fxpipe.trace.record.recorder import Recorder
from fxpipe.trace.record.tape import Checkpoint

Apply = Callable[[type[torch.autograd.Function], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def functions_watched(recorder: Recorder, is_ours: Callable[[], bool], applied: Apply) -> Iterator[None]:
    """While it is open, ``applied(function, apply, args, kwargs)`` is called for each autograd function applied."""
    apply = function_apply()

    def watched(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return apply(function, *args, **kwargs)
        if function is checkpointing.CheckpointFunction:  # with gradients on, as backward runs it
            run, preserve_rng_state, *given = args
            options = {"use_reentrant": True, "preserve_rng_state": preserve_rng_state}
            with _inside(recorder, Checkpoint(options, recorder.place())):
                return run(*given)
        if function is BackwardHookFunction:  # of a module with backward hooks: nothing changes in forward
            results = apply(function, *args, **kwargs)
            for before, after in zip(args, results, strict=True):
                if isinstance(before, Tensor):
                    recorder.name(after, recorder.value_of(before))
            return results
        return applied(function, apply, args, kwargs)

    generator = vars(checkpointing)[CHECKPOINT_GENERATOR]

    def non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:  # in its place; the function runs at its yield
        if is_ours():
            options = {"use_reentrant": False, **checkpoint_options(generator, args, kwargs)}
            with _inside(recorder, Checkpoint(options, recorder.place())):
                yield
        else:
            yield from generator(*args, **kwargs)

    mapped = vars(vmap_home)["vmap_impl"]

    def vmapped(*args: Any, **kwargs: Any) -> Any:
        with recorder.operators() if is_ours() else contextlib.nullcontext():
            return mapped(*args, **kwargs)

    enter, leave, numbers = torch.autocast.__enter__, torch.autocast.__exit__, itertools.count(1)

    def entered(block: torch.autocast) -> Any:
        recorder.autocasts.append(next(numbers))
        return enter(block)  # type: ignore[no-untyped-call]

    def left(block: torch.autocast, *error: Any) -> Any:
        recorder.autocasts.pop()
        return leave(block, *error)

    with (
        patched(torch.autocast, "__enter__", entered),
        patched(torch.autocast, "__exit__", left),
        patched(vmap_home, "vmap_impl", vmapped),
        patched(torch.autograd.Function, "apply", classmethod(watched)),
        patched(checkpointing, CHECKPOINT_GENERATOR, non_reentrant),
        patched(Tensor, "backward", refuse_backward),
        patched(torch.autograd, "backward", refuse_backward),
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
