"""Functions that forward calls and that a recorder sees as wholes: autograd functions, checkpointed and vmapped ones.

torch offers no way to see the calls of ``torch.utils.checkpoint.checkpoint`` and of what ``torch.vmap`` returns, which
models bind long before a capture: the functions inside of them that are patched here, and the autograd function of
modules with backward hooks, are torch's own and named nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
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
        if function is checkpointing.CheckpointFunction:
            return _reentrant(recorder, *args)
        if function is BackwardHookFunction:
            return _renamed(recorder, args, apply(function, *args, **kwargs))
        return applied(function, apply, args, kwargs)

    generator = vars(checkpointing)[CHECKPOINT_GENERATOR]

    def non_reentrant(*args: Any, **kwargs: Any) -> Any:
        if not is_ours():
            return generator(*args, **kwargs)
        return _non_reentrant(recorder, checkpoint_options(generator, args, kwargs))

    mapped = vars(vmap_home)["vmap_impl"]

    def vmapped(*args: Any, **kwargs: Any) -> Any:
        with recorder.operators() if is_ours() else contextlib.nullcontext():
            return mapped(*args, **kwargs)

    with (
        patched(vmap_home, "vmap_impl", vmapped),
        patched(torch.autograd.Function, "apply", classmethod(watched)),
        patched(checkpointing, CHECKPOINT_GENERATOR, non_reentrant),
        patched(Tensor, "backward", refuse_backward),
        patched(torch.autograd, "backward", refuse_backward),
        patched(saved_tensors_hooks, "__enter__", _noted(recorder, saved_tensors_hooks.__enter__, is_ours, _PACKED)),
        patched(forward_ad, "enter_dual_level", _noted(recorder, forward_ad.enter_dual_level, is_ours, _DUAL)),
    ):
        yield


_PACKED = "forward changes how tensors are saved for backward, and they would be saved as ever"
_DUAL = "forward enters a level of forward-mode differentiation, which is not recorded"


def _noted(
    recorder: Recorder, original: Callable[..., Any], is_ours: Callable[[], bool], fact: str
) -> Callable[..., Any]:
    """A function which means something only where what is around it is opaque."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_ours():
            recorder.problem(fact, "do it inside a submodule that holds no boundary, which then runs as a whole")
        return original(*args, **kwargs)

    return call


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


def _non_reentrant(recorder: Recorder, options: Mapping[str, Any]) -> Iterator[None]:
    """In place of the generator around a checkpointed function, which runs at its ``yield``."""
    with _inside(recorder, Checkpoint({"use_reentrant": False, **options}, recorder.place())):
        yield


def _renamed(recorder: Recorder, args: tuple[Any, ...], results: Any) -> Any:
    """What a module with backward hooks passes its arguments and results through changes nothing in forward."""
    for before, after in zip(args, results, strict=True):
        if isinstance(before, Tensor):
            recorder.name(after, recorder.value_of(before))
    return results
