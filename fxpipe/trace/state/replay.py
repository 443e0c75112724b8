"""Replay: runs a computation again from the same state, with the same random numbers, and compares the results.

Takes: a computation, and a ``snapshot.State`` that the caller restores. Gives: contexts that make two runs comparable,
and functions that compare two tensors.

1. ``as_in_a_step``: the modes of a step; compiled code and reentrant checkpoints run plainly.
2. ``same_draws``: each random operator starts from one seed, so that draws do not depend on the order of operators.
3. ``own``: copies of the inputs, into which a run may write.
4. ``is_close``, ``gap``, ``differences``: compare, in units in the last place of a tensor's largest number. None, the
   gradient of an unused parameter, is equal to zeros.

It restores no state itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint as checkpointing

from fxpipe.device import generators_of, is_accelerator
from fxpipe.graph.packing import duplicate
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.like import cast_batch
from fxpipe.seeds import Generators, RandomState
from fxpipe.stage.modes import within
from fxpipe.torch_compat import CHECKPOINT_GENERATOR, TorchDispatchMode, pytree, tensors_in
from fxpipe.trace.patching import checkpoints_as, noting, replaced
from fxpipe.trace.request import Request

Batch = Mapping[str, Any]
MOST_DRAWS = 100_000
"""The most draws of a run: a loop that draws until a condition holds may never end, as all draws are the same."""
_SEED = 2**31 - 1
CONSTANT = 8.0
"""An operator's error, in units in the last place of its largest number: the operator itself may add many terms."""


def gpus_of(modules: Sequence[nn.Module]) -> list[torch.device]:
    """The GPUs that hold parameters or buffers of the modules."""
    tensors = [tensor for module in modules for tensor in all_tensors(module).values()]
    return sorted({tensor.device for tensor in tensors if is_accelerator(tensor.device)}, key=str)


Around = Callable[[], AbstractContextManager[None]]


def _run_reentrant(function: Callable[..., Any], preserves: bool, *args: Any, around: Around = nullcontext) -> Any:
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

    return checkpoints_as(only_run, partial(_run_reentrant, around=around))


def checkpoints_noted(note: Callable[[], None]) -> AbstractContextManager[None]:
    """While this context is open, each checkpoint calls ``note`` and then runs as usual."""

    torchs = getattr(checkpointing, CHECKPOINT_GENERATOR), checkpointing.CheckpointFunction.apply
    return checkpoints_as(*(noting(note, run) for run in torchs))


@contextlib.contextmanager
def same_draws(devices: Sequence[torch.device], own: Generators) -> Iterator[None]:
    """While this context is open, each random operator starts from one seed, and each module's call resets Python's,
    NumPy's and the ``own`` generators.

    So random numbers do not depend on earlier draws: stages draw in another order than the model. All draws of one
    shape are then equal, which is right for a comparison only.
    """
    draws, start = _Draws(devices), RandomState(own=own)

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
    """Seeds the generators before each random operator."""

    supports_higher_order_operators = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators_of(devices).values()
        self._seen = 0

    def count(self) -> None:
        """RuntimeError after too many draws: a loop that draws until a condition holds would never end."""
        self._seen += 1
        if self._seen > MOST_DRAWS:
            raise RuntimeError(f"it draws random numbers, or calls modules, more than {MOST_DRAWS:,} times")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.count()
            own = kwargs.get("generator")
            # seeded for each operator, so that neither the order nor the number of earlier draws matters
            for generator in self._generators if own is None else [own]:
                generator.manual_seed(_SEED)
        return func(*args, **kwargs)


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and notes the least precise dtype among their results."""

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
        """The tolerance, relative to a tensor's largest number: ``CONSTANT`` · √n · u, the likely error of n operators
        with unit roundoff u (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci.
        Comput. 41(5), 2019), but at most √u, half of the digits."""
        return min(CONSTANT * math.sqrt(self._operators) * self._unit, math.sqrt(self._unit))


@contextlib.contextmanager
def as_in_a_step(request: Request, devices: Sequence[torch.device] | None) -> Iterator[None]:
    """A context with the modes of a training step, or of an evaluation. Compiled code runs uncompiled, and a reentrant
    checkpoint, which ``autograd.grad`` refuses, runs its function once. ``devices``: the devices whose draws all start
    from one seed; None: draws are not seeded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(request.training))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(replaced([(checkpointing.CheckpointFunction, "apply", _run_reentrant)]))
        # autocast is off here; the call of the model or of a stage turns on the step's autocast
        stack.enter_context(within([region._replace(enabled=False) for region in request.autocast]))
        if devices is not None:
            stack.enter_context(same_draws(devices, request.generators))
        yield


@contextlib.contextmanager
def in_compute_dtype(request: Request) -> Iterator[None]:
    """While this context is open, the model's floating-point parameters have the dtype of the step."""
    parameters = request.module.parameters() if request.compute is not None else ()
    originals = [(parameter, parameter.data) for parameter in parameters if parameter.is_floating_point()]
    try:
        for parameter, original in originals:
            parameter.data = original.to(request.compute)
        yield
    finally:
        for parameter, original in originals:
            parameter.data = original


def own(request: Request, batch: Batch) -> dict[str, Any]:
    """Copies of a capture's inputs, into which a run may write."""
    values = {name: batch[name] for name in request.inputs}
    if request.compute is not None:
        values = cast_batch(values, request.compute)
    return pytree.tree_map_only(  # type: ignore[no-any-return]
        Tensor, lambda leaf: duplicate(leaf.detach()).requires_grad_(leaf.requires_grad), values
    )


# --- differences of two tensors; None stands for zeros ---

CLOSE = 4.0
"""The difference that two runs may always have, in units in the last place of a tensor's largest number."""


def in_double(value: Tensor | None, like: Tensor | None) -> Tensor:
    """The value in double precision; zeros for None."""
    if value is None:
        value = torch.zeros(()) if like is None else torch.zeros_like(like)
    # in its own dtype, a difference of two close numbers has few correct digits
    value = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def differences(first: Tensor, other: Tensor) -> Tensor:
    """The absolute difference of each pair of elements; 0 for two equal elements, and for two nans."""
    # inf - inf is nan, which nan_to_num would make infinite
    same = (first == other) | (first.isnan() & other.isnan())
    return (first - other).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)


def gap(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference of two elements; inf if only one of the two is finite, or if the shapes differ."""
    if is_same(got, wanted):
        return 0.0
    first, other = in_double(got, wanted), in_double(wanted, got)
    if first.shape != other.shape:
        return math.inf
    return differences(first, other).max().item() if first.numel() else 0.0


def largest(value: Tensor | None) -> float:
    """The largest absolute value among the finite elements; 0 without elements."""
    if value is None or not value.numel():
        return 0.0
    return in_double(value, None).abs().nan_to_num(0, 0).max().item()


def unit(value: Tensor | None) -> float:
    """A unit in the last place of 1, in the value's dtype; 0 for integers."""
    kind = torch.float64 if value is None else value.dtype
    return torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0


def is_close(got: Tensor | None, wanted: Tensor | None, tolerance: float | None = None) -> bool:
    """Whether both are equal up to rounding. ``tolerance``: relative to the largest element of ``wanted``."""
    apart = gap(got, wanted)
    tolerance = CLOSE * unit(wanted) if tolerance is None else tolerance
    return apart == 0 or apart <= tolerance * largest(wanted)  # 0 first: inf times a tolerance of 0 is nan


def is_repeated(again: Tensor, first: Tensor) -> bool:
    """Whether two runs agree to half of the digits: GPU kernels may round differently in each run."""
    return is_close(again, first, math.sqrt(unit(first)))


def is_same(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether both have the same dtype and layout and are equal. This check comes first, as it allocates nothing."""
    if got is wanted or got is None or wanted is None or got.dtype != wanted.dtype:
        return got is wanted
    return got.layout is wanted.layout is torch.strided and torch.equal(got, wanted)
