"""Rehearsal: a submodule that reads the values of tensors runs on real tensors, twice, with made-up inputs.

Takes: a call with fake arguments, and the model's real tensors. Gives: ``Rehearsed``, with the shapes and dtypes of its
result, the storages that it touches, and whether it draws random numbers.

1. The submodule gets copies of its real parameters and buffers, so the model's own tensors stay unchanged.
2. Each input tensor gets made-up numbers. The second run has others: larger floats, False for bools, on the CPU other
   integers.
3. The call runs twice. Results of other shapes are refused: the code after the call is captured for one shape.
4. Memory is translated from the copies to the fake tensors. What any of the two runs touched counts.

Two runs do not prove that shapes never depend on values. In a step, ``check_shapes`` compares the shapes of each real
call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import TraceError
from fxpipe.seeds import Generators, RandomState
from fxpipe.snapshots.snapshot import Snapshot, storage_of
from fxpipe.specs import TensorSpec
from fxpipe.torch_compat import pytree
from fxpipe.torch_compat.tensors import tensors_in
from fxpipe.trace.fake import outside
from fxpipe.trace.record.frame import PythonState
from fxpipe.trace.record.tape import Args, Kwargs, Touched, TouchedMode


@dataclass(frozen=True)
class Rehearsed:
    """The outcome of a rehearsal. ``result``: the call's result, with a ``TensorSpec`` for each tensor.

    ``touched``: the storages of the model's tensors and of the arguments that the call uses, as ids of their fake
    tensors' storages. ``shares``: the index of a leaf of the result → the index of the tensor argument whose storage
    the leaf may share.
    """

    result: Any
    touched: Touched
    shares: Mapping[int, int]


@dataclass(frozen=True)
class Rehearsal:
    """A call to rehearse. ``module``: the called submodule; None for an autograd function.

    ``real_of``: the id of a fake tensor in the model → the model's real tensor. ``own``: the model's own generators.
    """

    function: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    module: nn.Module | None
    real_of: Mapping[int, Tensor]
    own: Generators

    def outcome(self) -> Rehearsed:
        """Runs the call twice, on different made-up inputs; TraceError if the shapes of the two results differ."""
        inputs = tensors_in((self.args, self.kwargs))
        with outside():
            # 1. to 3. both runs, on copies
            state = RandomState({tensor.device for tensor in self.real_of.values()}, own=self.own)
            try:
                first = self._run(0)
                second: Rehearsed | None = None
                # integers may be indices, whose range is unknown. An index out of range is an error on the CPU, but may
                # make a GPU unusable for the process: so on a GPU the integers are 0 in both runs
                for highest in (3, 1) if all(leaf.is_cpu for leaf in inputs) else ():
                    with contextlib.suppress(ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError):
                        second = second or self._run(1, highest)
                second = second or self._run(1)
            finally:
                state.restore()
        # 3. Shapes and dtypes must be the same for all values, as the code after the call is captured with them.
        if first.result != second.result:
            raise TraceError("the shape of what it returns depends on the values of its inputs")
        shares = {**first.shares, **second.shares}
        if shares != {**second.shares, **first.shares}:
            raise TraceError("the values of its inputs decide which of them it returns; return a copy of it")
        first.touched.add(second.touched)  # other values may take another branch
        return replace(first, shares=shares)

    def _run(self, seed: int, highest: int = 0) -> Rehearsed:
        """One run, with the seed's made-up numbers. ``highest``: the largest made-up integer."""
        torch.manual_seed(seed)
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # the id of a fake tensor → (the fake tensor, its copy)

        def copy_of(fake: Tensor) -> Tensor:
            if id(fake) not in copies:
                copies[id(fake)] = fake, _numbers(self.real_of.get(id(fake)), fake, seed, highest)
            return copies[id(fake)][1]

        inputs = list(map(copy_of, tensors_in((self.args, self.kwargs))))
        with contextlib.nullcontext() if self.module is None else _copies_in(self.module, copy_of):
            args, kwargs = pytree.tree_map_only(Tensor, copy_of, (self.args, self.kwargs))
            python = None if self.module is None else PythonState(self.module, self.own)
            mode = TouchedMode()
            with mode, mode.noting() as touched:
                result = self.function(*args, **kwargs)
            if python is not None:
                python.note(touched)
        # 4. the storage of a copy → the storage of the fake tensor, by which the recorder knows the model's tensors
        fake_of = {storage_of(copy): storage_of(fake) for fake, copy in copies.values()}
        used = touched.reads, touched.writes
        reads, writes = ({fake_of[copy] for copy in memory & fake_of.keys()} for memory in used)
        arguments = {storage_of(tensor): index for index, tensor in enumerate(inputs)}
        leaves = enumerate(pytree.tree_leaves(result))
        memory = {number: storage_of(leaf) for number, leaf in leaves if isinstance(leaf, Tensor)}
        return Rehearsed(
            pytree.tree_map(_described, result),
            replace(touched, reads=reads, writes=writes),
            {number: arguments[storage] for number, storage in memory.items() if storage in arguments},
        )


def _described(leaf: Any) -> TensorSpec | None:
    """The ``TensorSpec`` of a leaf of the result. TraceError for a Python value, which might be another in a step."""
    if leaf is None or isinstance(leaf, Tensor):
        return None if leaf is None else TensorSpec.from_tensor(leaf)
    raise TraceError(f"it returns a {type(leaf).__name__}, which may depend on the values of its inputs")


def _numbers(real: Tensor | None, fake: Tensor, seed: int, highest: int) -> Tensor:
    """A copy of the model's own values, in the fake tensor's dtype; made-up values if this process has none.

    Made-up floats are normal; the second run's are 3 times as large, so that thresholds show but exponentials
    stay moderate. Made-up integers take all values from 0 to ``highest``. Bools are True, and False in the second run.
    """
    if real is not None and not real.is_meta and not hasattr(real, "device_mesh"):  # on this rank, not sharded
        copy = real.detach().to(fake.dtype, copy=True)
    else:
        copy = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
        if fake.is_floating_point() or fake.is_complex():
            copy.copy_(torch.randn(fake.shape, dtype=fake.dtype, device=fake.device) * (3 if seed else 1))
        elif fake.dtype is torch.bool:
            copy.fill_(seed == 0)
        else:
            copy.copy_((torch.randperm(fake.numel(), device=fake.device) % (highest + 1)).view(fake.shape))
    if isinstance(fake, nn.Parameter):
        return nn.Parameter(copy, requires_grad=fake.requires_grad)
    copy.requires_grad_(fake.requires_grad)
    # a view, as autograd forbids in-place writes to a leaf, but not to an operation's result
    return copy.view_as(copy) if real is None and fake.requires_grad else copy


@contextlib.contextmanager
def _copies_in(module: nn.Module, copy_of: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While this context is open, the module holds copies of its real parameters and buffers. Restores attributes."""
    with Snapshot(module):
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, fake in table.items():
                    if fake is not None:
                        table[name] = copy_of(fake)  # type: ignore[assignment]
        yield
