"""Rehearsal: a submodule that looks at the values of tensors is run for real, once or twice, on made-up inputs.

What is learnt is the shapes and types of what it returns, which memory it touches and whether it draws random numbers.
The model's own tensors are not touched: copies stand in for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.graph.like import TensorLike
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import pytree
from fxpipe.trace.record.tape import Touched
from fxpipe.trace.record.touched import TouchedMode
from fxpipe.trace.state.snapshot import Snapshot, storage_of


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal has shown. ``result``: with a ``TensorLike`` in place of each tensor.

    ``touched``: memory of the model's tensors and of the arguments, by the identity of what stands for them in the
    capture. ``shares``: which leaf of the result may share memory with which tensor argument, by their places.
    """

    result: Any
    touched: Touched
    shares: Mapping[int, int]


def rehearse(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None,
    real_of: Mapping[int, Tensor],
    outside: Callable[[], contextlib.AbstractContextManager[None]],
) -> Rehearsed:
    """Runs ``function`` twice, on different made-up inputs; TraceError where what it returns differs in shape.

    ``real_of``: the model's own tensors by the identity of the fake ones that are in its place now.
    """
    with outside(), torch.random.fork_rng(devices=_cuda_devices(real_of)):
        state = RandomState()
        try:
            call = _Rehearsal(function, args, kwargs, module, real_of)
            first, second = call.run(0), _second(call)
        finally:
            state.restore()
    if first.result != second.result:
        raise TraceError("the shape of what it returns depends on the values of its inputs")
    shares = {**first.shares, **second.shares}
    if shares != {**second.shares, **first.shares}:
        raise TraceError("the values of its inputs decide which of them it returns; return a copy of it")
    first.touched.add(second.touched)  # on other numbers it may go another way
    return replace(first, shares=shares)


def _cuda_devices(real_of: Mapping[int, Tensor]) -> list[int]:
    return sorted({tensor.get_device() for tensor in real_of.values() if tensor.is_cuda})


@dataclass(frozen=True)
class _Rehearsal:
    """What is rehearsed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None
    real_of: Mapping[int, Tensor]

    def run(self, seed: int, highest: int = 0) -> Rehearsed:
        torch.manual_seed(seed)
        copies: dict[int, Tensor] = {}  # by the identity of the fake tensor
        originals: dict[int, Tensor] = {}

        def copy_of(fake: Tensor) -> Tensor:
            originals[id(fake)] = fake
            if id(fake) not in copies:
                copies[id(fake)] = _numbers(self.real_of.get(id(fake)), fake, seed, highest)
            return copies[id(fake)]

        leaves = pytree.tree_leaves((self.args, self.kwargs))
        given = [copy_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        with contextlib.ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(_copies_in(self.module, copy_of))
            args, kwargs = pytree.tree_map_only(Tensor, copy_of, (self.args, self.kwargs))
            mode = TouchedMode()
            with mode, mode.noting() as touched:
                result = self.function(*args, **kwargs)
        places = {storage_of(copies[key]): storage_of(original) for key, original in originals.items()}
        return Rehearsed(
            pytree.tree_map(_described, result),
            Touched(_translated(touched.reads, places), _translated(touched.writes, places), touched.draws_random),
            _shares(result, given),
        )


_HIGHEST = (3, 1)
"""What integers are at most in a second run, as long as it fails: how many rows or classes they count is not known."""


def _second(call: _Rehearsal) -> Rehearsed:
    """A run on other numbers. An index out of range is an error on the CPU; elsewhere it may end the process's use of
    the device, so that there integers are 0 in both runs."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    for highest in _HIGHEST if all(leaf.is_cpu for leaf in leaves if isinstance(leaf, Tensor)) else ():
        with contextlib.suppress(ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
            return call.run(1, highest)
    return call.run(1)


def _translated(storages: set[int], places: Mapping[int, int]) -> set[int]:
    return {places[storage] for storage in storages if storage in places}


def _described(leaf: Any) -> TensorLike | None:
    if leaf is None or isinstance(leaf, Tensor):
        return None if leaf is None else TensorLike.of(leaf)
    raise TraceError(f"it returns a {type(leaf).__name__}, which may depend on the values of its inputs")


def _shares(result: Any, given: list[Tensor]) -> dict[int, int]:
    places = {storage_of(tensor): place for place, tensor in enumerate(given)}
    leaves = enumerate(pytree.tree_leaves(result))
    memory = {number: storage_of(leaf) for number, leaf in leaves if isinstance(leaf, Tensor)}
    return {number: places[storage] for number, storage in memory.items() if storage in places}


def _numbers(real: Tensor | None, fake: Tensor, seed: int, highest: int) -> Tensor:
    """The model's own numbers, in the type of what stands for them; made up where this process has none."""
    if real is None:
        return _made_up(fake, seed, highest)
    is_elsewhere = real.is_meta or hasattr(real, "device_mesh")  # on another rank, or in shards
    numbers = _made_up(fake.detach(), seed, highest) if is_elsewhere else real.detach().to(fake.dtype, copy=True)
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(numbers, requires_grad=fake.requires_grad)
    return numbers.requires_grad_(fake.requires_grad)


def _made_up(fake: Tensor, seed: int, highest: int) -> Tensor:
    """Normal numbers, in the second run larger ones, so that thresholds show (not so large that their exponentials are
    sizes to reckon with); integers up to the ``highest``, all of them; for truth values ones, and then zeros."""
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    if fake.is_floating_point() or fake.is_complex():
        normal = torch.randn(fake.shape, dtype=fake.dtype, device=fake.device)
        return _behind(made.copy_(normal * (3 if seed else 1)), fake.requires_grad)
    if fake.dtype is torch.bool:
        return made.fill_(seed == 0)
    return made.copy_((torch.randperm(fake.numel(), device=fake.device) % (highest + 1)).view(fake.shape))


def _behind(tensor: Tensor, requires_grad: bool) -> Tensor:
    """As the result of an operation: what autograd would let no one write in place is only a leaf."""
    return tensor.requires_grad_().view_as(tensor) if requires_grad else tensor


@contextlib.contextmanager
def _copies_in(module: nn.Module, copy_of: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Copies of the real parameters and buffers in a module; its attributes are put back afterwards."""
    snapshot = Snapshot(module)
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, fake in table.items():
                if fake is not None:
                    table[name] = copy_of(fake)  # type: ignore[assignment]
    try:
        yield
    finally:
        snapshot.restore()
