"""Rehearsal: a submodule that looks at the values of tensors is run for real, once or twice, on made-up inputs.

It shows the shapes and types of the results, the memory that the call touches, and whether it draws random numbers.
The model's own tensors are not touched: copies stand in for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.graph.like import TensorLike
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import pytree, tensors_in
from fxpipe.trace.fake import outside
from fxpipe.trace.record.frame import PythonState
from fxpipe.trace.record.tape import Args, Kwargs, Touched, TouchedMode
from fxpipe.trace.state.snapshot import Snapshot, storage_of


@dataclass(frozen=True)
class Rehearsed:
    """The facts that a rehearsal shows. ``result``: the call's result, with a ``TensorLike`` for each tensor.

    ``touched``: the memory that the call uses of the model's tensors and of its arguments, by the identity of the
    memory of their fake tensors. ``shares``: the place of a leaf of the result → the place of the tensor argument whose
    memory it may share.
    """

    result: Any
    touched: Touched
    shares: Mapping[int, int]


def rehearse(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    module: nn.Module | None,
    real_of: Mapping[int, Tensor],
) -> Rehearsed:
    """Runs ``function`` twice, on different made-up inputs; TraceError where what it returns differs in shape.

    ``real_of``: the model's own tensors by the identity of the fake ones that are in its place now.
    """
    given = tensors_in((args, kwargs))
    with outside():
        state = RandomState({tensor.device for tensor in real_of.values()})
        try:
            run = functools.partial(_run, function, args, kwargs, module, real_of)
            first = run(0)
            second: Rehearsed | None = None
            # how many rows or classes integers count is not known, and an index out of range is an error on the CPU;
            # elsewhere it may end the process's use of the device, so that there they are 0 in both runs
            for highest in (3, 1) if all(leaf.is_cpu for leaf in given) else ():
                with contextlib.suppress(ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
                    second = second or run(1, highest)
            second = second or run(1)
        finally:
            state.restore()
    # Shapes and types must hold for all values: the stages behind are captured with them.
    if first.result != second.result:
        raise TraceError("the shape of what it returns depends on the values of its inputs")
    shares = {**first.shares, **second.shares}
    if shares != {**second.shares, **first.shares}:
        raise TraceError("the values of its inputs decide which of them it returns; return a copy of it")
    first.touched.add(second.touched)  # on other numbers it may go another way
    return replace(first, shares=shares)


def _run(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    module: nn.Module | None,
    real_of: Mapping[int, Tensor],
    seed: int,
    highest: int = 0,
) -> Rehearsed:
    torch.manual_seed(seed)
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the fake tensor: it, its copy

    def copy_of(fake: Tensor) -> Tensor:
        if id(fake) not in copies:
            copies[id(fake)] = fake, _numbers(real_of.get(id(fake)), fake, seed, highest)
        return copies[id(fake)][1]

    given = list(map(copy_of, tensors_in((args, kwargs))))
    with contextlib.nullcontext() if module is None else _copies_in(module, copy_of):
        args, kwargs = pytree.tree_map_only(Tensor, copy_of, (args, kwargs))
        python = None if module is None else PythonState(module)
        mode = TouchedMode()
        with mode, mode.noting() as touched:
            result = function(*args, **kwargs)
        is_stateful = python is not None and python.has_changed()
    # from the memory of copies to that of the fake tensors, by which the recorder knows the model
    fake_of = {storage_of(copy): storage_of(fake) for fake, copy in copies.values()}
    reads, writes = ({fake_of[copy] for copy in memory & fake_of.keys()} for memory in (touched.reads, touched.writes))
    arguments = {storage_of(tensor): place for place, tensor in enumerate(given)}
    memory = {
        number: storage_of(leaf) for number, leaf in enumerate(pytree.tree_leaves(result)) if isinstance(leaf, Tensor)
    }
    return Rehearsed(
        pytree.tree_map(_described, result),
        Touched(reads, writes, touched.draws_random, is_stateful),
        {number: arguments[storage] for number, storage in memory.items() if storage in arguments},
    )


def _described(leaf: Any) -> TensorLike | None:
    if leaf is None or isinstance(leaf, Tensor):
        return None if leaf is None else TensorLike.of(leaf)
    raise TraceError(f"it returns a {type(leaf).__name__}, which may depend on the values of its inputs")


def _numbers(real: Tensor | None, fake: Tensor, seed: int, highest: int) -> Tensor:
    """The model's own numbers, in the type of what stands for them; made up where this process has none.

    That is normal numbers, in the second run larger ones, so that thresholds show (not so large that their exponentials
    are sizes to reckon with); integers up to the ``highest``, all of them; for truth values ones, and then zeros.
    """
    if real is not None and not real.is_meta and not hasattr(real, "device_mesh"):  # nor on another rank or in shards
        made = real.detach().to(fake.dtype, copy=True)
    else:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        if fake.is_floating_point() or fake.is_complex():
            made.copy_(torch.randn(fake.shape, dtype=fake.dtype, device=fake.device) * (3 if seed else 1))
        elif fake.dtype is torch.bool:
            made.fill_(seed == 0)
        else:
            made.copy_((torch.randperm(fake.numel(), device=fake.device) % (highest + 1)).view(fake.shape))
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(made, requires_grad=fake.requires_grad)
    made.requires_grad_(fake.requires_grad)
    # as the result of an operation: what autograd would let no one write in place is only a leaf
    return made.view_as(made) if real is None and fake.requires_grad else made


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
