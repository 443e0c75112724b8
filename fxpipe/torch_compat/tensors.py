"""Tensors: in containers, their memory, versions, hooks and subclasses. The names are the same in 2.13 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_compat import pytree

plain_results: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for subclasses: results computed from the subclass are plain tensors."""


def recast(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """The tensor, in the same memory, as an instance of ``kind``; a DTensor as a subclass of ``kind`` and DTensor."""
    spec, shard = (getattr(tensor, name, None) for name in ("_spec", "_local_tensor"))
    return tensor.as_subclass(kind) if spec is None else _spread(kind)(shard, spec, requires_grad=False)


@functools.cache
def _spread(kind: type[Tensor]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor if kind is Tensor else type(kind.__name__, (kind, DTensor), {})


def wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: Sequence[int] | None = None,
) -> Any:
    """A tensor of a subclass, without memory; the subclass's ``__torch_dispatch__`` runs the tensor's operators."""
    return Tensor._make_wrapper_subclass(cls, tuple(size), strides, dtype=dtype, device=device)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in containers."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def one_level(value: Any, *leaves: type) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens only the outermost container. Instances of ``leaves`` are leaves."""
    # torch leaves is_leaf in a reference cycle, which would keep a value alive; a number keeps nothing alive
    outermost = id(value)
    return pytree.tree_flatten(value, lambda node: id(node) != outermost or isinstance(node, leaves))


def storage_id(tensor: Tensor) -> int:
    """The id of a tensor's storage, equal for tensors that share memory, also on the meta device."""
    return id_of_storage(tensor.untyped_storage())


id_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
base_of: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor that a view is of; None of another tensor."""
saved_version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""``version_of`` a tensor that autograd saves, which is no inference tensor."""


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to a tensor; 0 for inference tensors, which do not count writes."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient; hooks after accumulation into ``.grad`` do not count."""
    return bool(tensor._backward_hooks)


@contextlib.contextmanager
def gradients_through(hooks: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    """While this context is open, each hook replaces the gradient of its tensor."""
    tables: list[Any] = [
        (tensor, tensor._backward_hooks, tensor.register_hook(hook))  # type: ignore[no-untyped-call]
        for tensor, hook in hooks
    ]
    try:
        yield
    finally:
        for tensor, before, handle in tables:
            handle.remove()
            tensor._backward_hooks = before  # for an empty table autograd would call Python in each backward


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, and those after its accumulation into ``.grad``."""
    return [hook for table in _HOOKS for hook in (getattr(tensor, table) or {}).values()]


def with_hooks(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """The identity and name of each tensor that has ``hooks_of``. Every step asks all parameters, so it is one loop."""
    return {id(t): name for name, t in named if t._backward_hooks or t._post_accumulate_grad_hooks}


def share_hooks(source: Tensor, target: Tensor) -> None:
    """Has ``target`` call the hooks of ``source``, those that are registered or removed later, too."""
    for table in _HOOKS:
        if getattr(source, table) is None:
            setattr(source, table, OrderedDict())
        setattr(target, table, getattr(source, table))


def holders_of(tensor: Tensor) -> tuple[object, object]:
    """Counts C++'s references to a tensor, and those to its memory. Counts of a torch without them equal no others."""
    count = getattr(tensor, "_use_count", object)
    return count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
