"""Replay: one computation run again from the same state, with the same random numbers, or with other rounding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.graph.like import cast_batch
from fxpipe.graph.modes import within
from fxpipe.graph.packing import duplicate
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import CHECKPOINT_GENERATOR, TorchDispatchMode, pytree
from fxpipe.trace.patching import patched
from fxpipe.trace.request import Request
from fxpipe.trace.state.closeness import unit

Batch = Mapping[str, Any]
MOST_DRAWS = 100_000
"""A loop that draws until something comes up would never end on numbers that are always the same."""
_SEED = 2**31 - 1
CONSTANT = 8.0
"""What an operator is off by, in units in the last place of its largest number: it is itself a sum of many terms."""


def gpus_of(modules: Sequence[nn.Module]) -> list[torch.device]:
    """Those that hold tensors of modules."""
    tensors = [tensor for module in modules for tensor in all_tensors(module).values()]
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)


Around = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def without_reentrant_checkpoints(around: Around = contextlib.nullcontext) -> Iterator[None]:
    """Functions given to a reentrant checkpoint, through which ``autograd.grad`` cannot go, run once and keep all.

    As there, what is given no tensor that requires a gradient gives none.
    """

    def run(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        requires = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and requires), around():
            return function(*args)

    with patched(torch.utils.checkpoint.CheckpointFunction, "apply", run):
        yield


@contextlib.contextmanager
def checkpoints_that_keep(around: Around = contextlib.nullcontext) -> Iterator[None]:
    """Functions given to any checkpoint run once and keep all: what runs a second time here would run a third.

    ``around``: what each of them runs in.
    """

    def only_run(*args: Any, **kwargs: Any) -> Iterator[None]:
        """What torch runs before a checkpointed function, up to ``yield``, and behind it."""
        with around():
            yield

    with without_reentrant_checkpoints(around), patched(torch.utils.checkpoint, CHECKPOINT_GENERATOR, only_run):
        yield


@contextlib.contextmanager
def checkpoints_noted(note: Callable[[], None]) -> Iterator[None]:
    """``note`` is called for each checkpoint, which runs as ever."""

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            note()
            return run(*args, **kwargs)

        return called

    owner, function = torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction
    with (
        patched(owner, CHECKPOINT_GENERATOR, noted(vars(owner)[CHECKPOINT_GENERATOR])),
        patched(function, "apply", noted(function.apply)),
    ):
        yield


@contextlib.contextmanager
def same_draws(devices: Sequence[torch.device]) -> Iterator[None]:
    """Every operator that draws begins from one seed, and Python's and NumPy's generators anew in each module's call.

    So numbers depend on what is drawn and not on what was drawn before: stages draw in another order than the model.
    """
    draws, start = _Draws(devices), RandomState()

    def begin(module: nn.Module, args: Any) -> None:
        draws.count()
        start.restore()

    hook = register_module_forward_pre_hook(begin)
    try:
        with draws:
            yield
    finally:
        hook.remove()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds every operator that draws."""

    supports_higher_order_operators = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = [
            torch.default_generator,
            *(torch.cuda.default_generators[device.index] for device in devices),
        ]
        self._seen = 0

    def count(self) -> None:
        self._seen += 1
        if self._seen > MOST_DRAWS:
            raise RuntimeError(f"it draws random numbers, or calls modules, more than {MOST_DRAWS:,} times")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.count()
            own = kwargs.get("generator")
            for generator in self._generators if own is None else [own]:
                generator.manual_seed(_SEED)
        return func(*args, **kwargs)


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and notes the coarsest type that they compute in."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._unit = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operators += 1
        self._unit = max([self._unit, *(unit(one) for one in pytree.tree_leaves(result) if isinstance(one, Tensor))])
        return result

    @property
    def tolerance(self) -> float:
        """Of a tensor's largest number: √n · u, by which n operators that round by u are off in all likelihood (Higham
        and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019), times
        ``CONSTANT``, and at most half of the digits."""
        return min(CONSTANT * math.sqrt(self._operators) * self._unit, math.sqrt(self._unit))


@contextlib.contextmanager
def as_in_a_step(request: Request, devices: Sequence[torch.device] | None) -> Iterator[None]:
    """As around a training step, or an evaluation; what torch compiles runs as it is written, and what is checkpointed
    so that no gradient can be asked for runs once. ``devices``: where all draw the same random numbers; None: as they
    come."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(request.training))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_reentrant_checkpoints())
        stack.enter_context(within([region._replace(enabled=False) for region in request.autocast]))
        if devices is not None:
            stack.enter_context(same_draws(devices))
        for parameter in request.module.parameters() if request.compute is not None else ():
            if parameter.is_floating_point():
                parameter.data = parameter.detach().to(request.compute)
        yield


def own(request: Request, batch: Batch) -> dict[str, Any]:
    """The inputs of a capture, for a run that may write into them."""
    values = {name: batch[name] for name in request.inputs}
    if request.compute is not None:
        values = cast_batch(values, request.compute)
    return pytree.tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda leaf: duplicate(leaf.detach()).requires_grad_(leaf.requires_grad), values
    )
