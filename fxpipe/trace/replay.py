"""Replay: runs a computation again from the same state, with the same random numbers.

Takes: a computation, and a ``snapshot.State`` that the caller restores. Gives: contexts that make two runs comparable.
``fxpipe.tensors.rounding`` compares their results.

1. ``as_in_a_step``: the modes of a step; compiled code and reentrant checkpoints run plainly.
2. ``same_draws``: each random operator starts from one seed, so that draws do not depend on the order of operators.
3. ``own``: copies of the inputs, into which a run may write.
4. ``Rounding``: the difference that rounding alone may make between two such runs.

It restores no state itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import checkpoint as checkpointing

from fxpipe.device import generators_of, is_accelerator
from fxpipe.graph.packing import duplicate
from fxpipe.graph.stage_graph import all_tensors
from fxpipe.patches import replaced
from fxpipe.seeds import Generators, RandomState
from fxpipe.specs import cast_batch
from fxpipe.stage.activation_checkpoints import run_reentrant
from fxpipe.tensors.rounding import unit
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.operators import TorchDispatchMode
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.patching import plain_modes
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

    with register_module_forward_pre_hook(begin), draws:
        yield


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
        # autocast is off here; the call of the model or of a stage turns on the step's autocast
        stack.enter_context(plain_modes(grad=request.training))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(replaced([(checkpointing.CheckpointFunction, "apply", run_reentrant)]))
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
