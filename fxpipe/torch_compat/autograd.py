"""Autograd: its engine, functions, checkpoints and profiler, AOTAutograd, and transforms of torch.func.

torch 2.14 renamed the generator of a checkpoint, and changed ``torch.autograd.Function.apply``. The other names are the
same in 2.13 to 2.15.
"""

# ruff: noqa: F401  (other files take what is imported here)

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis as vmap_home  # torch.vmap calls its vmap_impl
from torch.autograd.graph import GradientEdge, Node
from torch.utils import checkpoint as checkpointing

CHECKPOINT_GENERATOR = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # 2.14 and later, which do not call the other
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpointing, name)
)
"""The generator that ``torch.utils.checkpoint.checkpoint`` runs around its function with ``use_reentrant=False``."""


def checkpoint_options(generator: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of ``checkpoint`` among the arguments of its generator: 2.14 has an option more than 2.13."""
    bound = inspect.signature(generator).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("fn", "args", "kwargs")}


def function_apply() -> Callable[..., Any]:
    """``torch.autograd.Function.apply`` with the class as its first argument; since 2.14 apply has no ``__func__``."""
    apply = vars(torch.autograd.Function)["apply"]
    return getattr(apply, "__func__", apply)  # type: ignore[no-any-return]


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without the check for ``torch.func`` and ``torch.vmap``, for calls outside of these."""
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return, misc]


def run_backward(roots: Sequence[GradientEdge], seeds: Sequence[Tensor | None]) -> None:
    """Runs ``torch.autograd.backward``. If no seed is None, calls the engine directly, without the checks in Python:
    the engine compares types and shapes itself."""
    # For a missing seed torch makes a seed of ones, and checks that the root is a scalar.
    for seed in seeds:
        if seed is None:
            torch.autograd.backward(roots, seeds)
            return
    if roots:
        _run_engine(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


_run_engine = torch.autograd.Variable._execution_engine.run_backward


def saved_in(node: Node) -> Iterator[Any]:
    """Yields what a node has saved: tensors, or the values that a hook has packed in their place, and does not unpack
    them; and the inputs of the ``torch.utils.checkpoint`` whose hook that is."""
    for name in _names_of_saved(type(node)):
        with contextlib.suppress(RuntimeError):  # a backward has freed it
            raw = getattr(node, name)
            yield from _contents(raw if isinstance(raw, (tuple, list)) else (raw,))


def _contents(saved: Sequence[Any]) -> Iterator[Any]:
    for each in saved:
        if isinstance(each, torch._C._autograd.SavedTensor):
            yield each.data  # type: ignore[attr-defined]
            for cell in getattr(each.unpack_hook, "__closure__", None) or ():  # type: ignore[attr-defined]
                yield from _contents(getattr(cell.cell_contents, "saved_args", ()))


@cache
def _names_of_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def profiler_runs() -> bool:
    """Whether torch.profiler or a profiler of torch.autograd records now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


is_functorch: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper of ``torch.vmap`` or another transform of torch.func."""


def aot_compiled(
    module: Any,
    inputs: Sequence[Any],
    forward: Callable[[Any, Sequence[Any]], Callable[..., Any]],
    backward: Callable[[Any, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A graph of TorchDynamo, compiled by AOTAutograd; ``forward`` and ``backward`` compile its two graphs.

    Both get a graph and inputs like the graph's own. Imports here, since the modules import TorchDynamo.
    """
    functorch: Any = importlib.import_module("functorch.compile")
    backends: Any = importlib.import_module("torch._dynamo.backends.common")

    def boxed(make: Callable[[Any, Sequence[Any]], Callable[..., Any]]) -> Callable[..., Any]:
        return lambda graph, inputs: functorch.make_boxed_func(make(graph, inputs))

    backend = backends.aot_autograd(
        fw_compiler=boxed(forward),
        bw_compiler=boxed(backward),
        partition_fn=functorch.min_cut_rematerialization_partition,
    )
    return backend(module, inputs)  # type: ignore[no-any-return]
