"""Replay: one computation run again from the same state, with the same random numbers; and whether it made the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint as checkpointing

from fxpipe.device import generators_of, is_accelerator
from fxpipe.graph.like import cast_batch
from fxpipe.graph.modes import within
from fxpipe.graph.packing import duplicate
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import CHECKPOINT_GENERATOR, TorchDispatchMode, pytree, tensors_in
from fxpipe.trace.patching import checkpoints_as, noting, patched
from fxpipe.trace.request import Request

Batch = Mapping[str, Any]
MOST_DRAWS = 100_000
"""A loop that draws until something comes up would never end on numbers that are always the same."""
_SEED = 2**31 - 1
CONSTANT = 8.0
"""What an operator is off by, in units in the last place of its largest number: it is itself a sum of many terms."""


def gpus_of(modules: Sequence[nn.Module]) -> list[torch.device]:
    """Those that hold tensors of modules."""
    tensors = [tensor for module in modules for tensor in all_tensors(module).values()]
    return sorted({tensor.device for tensor in tensors if is_accelerator(tensor.device)}, key=str)


Around = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def without_reentrant_checkpoints(around: Around = contextlib.nullcontext) -> Iterator[None]:
    """Functions given to a reentrant checkpoint, through which ``autograd.grad`` cannot go, run once and keep all.

    As in torch, a function that is given no tensor that requires a gradient returns none that does.
    """

    def run(function: Callable[..., Any], preserves: bool, *args: Any) -> Any:
        requires = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and requires), around():
            return function(*args)

    with patched(checkpointing.CheckpointFunction, "apply", run):
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

    # the generator that non-reentrant checkpoints run, and the autograd function of reentrant ones
    with without_reentrant_checkpoints(around), patched(checkpointing, CHECKPOINT_GENERATOR, only_run):
        yield


def checkpoints_noted(note: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """``note`` is called for each checkpoint, which runs as ever."""

    torchs = getattr(checkpointing, CHECKPOINT_GENERATOR), checkpointing.CheckpointFunction.apply
    return checkpoints_as(*(noting(note, run) for run in torchs))


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
        self._generators = generators_of(devices).values()
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
            # anew for each operator: so neither the order of draws nor their number counts
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
        self._unit = max([self._unit, *map(unit, tensors_in(result))])
        return result

    @property
    def tolerance(self) -> float:
        """Of a tensor's largest number: √n · u, by which n operators that round by u are off in all likelihood (Higham
        and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5), 2019), times
        ``CONSTANT``, and at most half of the digits."""
        return min(CONSTANT * math.sqrt(self._operators) * self._unit, math.sqrt(self._unit))


@contextlib.contextmanager
def as_in_a_step(request: Request, devices: Sequence[torch.device] | None) -> Iterator[None]:
    """The surroundings of a training step, or of an evaluation. What torch compiles runs uncompiled, and a reentrant
    checkpoint, through which no gradient can be asked for, runs its function once. ``devices``: whose draws all begin
    from one seed; None: no draws do."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(request.training))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_reentrant_checkpoints())
        # off here; the call of the model or of a stage turns on what the step has on
        stack.enter_context(within([region._replace(enabled=False) for region in request.autocast]))
        if devices is not None:
            stack.enter_context(same_draws(devices))
        # the caller puts .data back, by a State
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


# --- how far two tensors are apart; either may be None for zeros ---

CLOSE = 4.0
"""Units in the last place of a tensor's largest number that two runs may always differ by."""


def in_double(value: Tensor | None, like: Tensor | None) -> Tensor:
    """In double precision; nothing is zeros."""
    if value is None:
        value = torch.zeros(()) if like is None else torch.zeros_like(like)
    # a difference of two close numbers has few digits left in their own type
    value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def differences(first: Tensor, other: Tensor) -> Tensor:
    """Of each pair of numbers; none between two that are equal, or both nan."""
    # inf - inf is nan, and would count as infinite
    same = (first == other) | (first.isnan() & other.isnan())
    return (first - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)


def gap(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference; infinite where only one of them is finite, or shapes differ."""
    if _is_same(got, wanted):
        return 0.0
    first, other = in_double(got, wanted), in_double(wanted, got)
    if first.shape != other.shape:
        return math.inf
    return differences(first, other).max().item() if first.numel() else 0.0


def largest(value: Tensor | None) -> float:
    """The largest of the numbers that are finite, without its sign."""
    if value is None or not value.numel():
        return 0.0
    return in_double(value, None).abs().nan_to_num(0, 0).max().item()


def unit(value: Tensor | None) -> float:
    """A unit in the last place of 1, in its type."""
    kind = torch.float64 if value is None else value.dtype
    return torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0


def is_close(got: Tensor | None, wanted: Tensor | None, tolerance: float | None = None) -> bool:
    """Whether they are the same but for rounding. ``tolerance``: of the largest number."""
    apart = gap(got, wanted)
    tolerance = CLOSE * unit(wanted) if tolerance is None else tolerance
    return apart == 0 or apart <= tolerance * largest(wanted)  # 0 first: a largest of inf times 0 is nan


def is_repeated(again: Tensor, first: Tensor) -> bool:
    """Whether a run has made the same again, to half of the digits: kernels on a GPU may round otherwise each time."""
    return is_close(again, first, math.sqrt(unit(first)))


def _is_same(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether they are of one kind and equal, which is asked first: it takes no memory."""
    if got is None or wanted is None or got.dtype != wanted.dtype:
        return got is wanted
    return got.layout is wanted.layout is torch.strided and torch.equal(got, wanted)
