"""Replay: one computation run again from the same state, with the same random numbers, or with other rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fxpipe.graph.stage_graph import all_tensors
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import CHECKPOINT_GENERATOR, TorchDispatchMode, pytree
from fxpipe.trace.patching import patched

MOST_DRAWS = 100_000
"""A loop that draws until something comes up would never end on numbers that are always the same."""
_SEED = 2**31 - 1
_ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what operators compute by up to one unit in the last place, at random: how much do the results move?

    Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic", UCLA 1997), at the grain of operators and in every type
    that is computed in. Whole numbers stay as they are: masks and counts are exact.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and not any(returned.alias_info is not None for returned in schema.returns):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.dtype in _ROUNDED and leaf.layout is torch.strided:
                    self._move(leaf)
        return result

    def _move(self, tensor: Tensor) -> None:
        if tensor.device not in self._generators:
            self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        generator = self._generators[tensor.device]
        step = torch.randint(-1, 2, tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
        step.mul_(torch.finfo(tensor.dtype).eps).masked_fill_(tensor == tensor.round(), 0)
        tensor.detach().mul_(step.add_(1))
