"""What a symbolic capture would silently get wrong, refused where it happens.

torch.fx records operations on proxies. Whatever the model does to real state while it is traced happens once, at
capture, and never again: a buffer written, an attribute set, a random number drawn. Autocast, which changes how
recorded operations run, leaves no trace in the graph, and an ``autograd.Function`` loses its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fxpipe.seeds import RandomState
from fxpipe.torch_compat import TorchDispatchMode, pytree, schema_of
from fxpipe.trace.attributes import CallAttributes, watching_attributes
from fxpipe.trace.patching import DRAWN, ONCE, devices, no_checkpoints, patched, refuse, refuse_changes
from fxpipe.trace.snapshot import Snapshot, storage_of


class Guard:
    """Watches one capture of ``module``, and of its loss function where that is a module. ``has_regions``: whether a
    part of it runs for real in every step.

    ``check()`` is called as each node is recorded.
    """

    def __init__(self, module: nn.Module, loss: nn.Module | None = None, has_regions: bool = False) -> None:
        watched = [module] if loss is None else [loss, module]  # what is in both is called as in the model
        self._paths = {id(vars(m)): name or type(m).__name__ for root in watched for name, m in root.named_modules()}
        self._has_regions, self.own = has_regions, CallAttributes()
        self._modes = _modes()
        self._random = RandomState()
        self._snapshots = {root: Snapshot(root) for root in watched}
        storages = {place: name for shot in self._snapshots.values() for place, name in shot.storages().items()}
        self._state = _StateMode(storages, _storages([*module.parameters(), *module.buffers()]))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Refuses, while it is open, what a capture gets wrong; leaves the model and random state as they were."""
        grad_mode = torch.is_grad_enabled()
        with self._state:
            # The first operation under any dispatch mode imports torch._dynamo, which then keeps torch's functions
            # as it finds them, for good: so now, before any of them is patched.
            torch.empty(0)
        torch.overrides.get_overridable_functions()  # and so this, or what patches hold would never go: all parameters
        try:
            with (
                self._state,
                watching_attributes(self._paths, self._refuse_attribute, self.own),
                patched(torch.autograd.Function, "apply", classmethod(_refuse_function)),
                patched(torch.autocast, "__enter__", _refuse_autocast),
                no_checkpoints(),
            ):
                yield
                self.check()
            self.own.put_back()
            for root, snapshot in self._snapshots.items():
                refuse_changes(root, snapshot.changes(), _RETURN_IT)
        finally:
            torch.set_grad_enabled(grad_mode)
            for snapshot in self._snapshots.values():
                snapshot.restore()
            self._random.rewind()

    def keep(self, tensor: Tensor) -> None:
        """A tensor has become a constant of the program: from now on it may not be written either."""
        self._state.watch(tensor, "a tensor that the program uses already")

    def check(self) -> None:
        """Refuses a mode that changed, and a draw of random numbers that nothing has recorded."""
        for (name, instead), now in _modes().items():
            if now != self._modes[name, instead]:
                raise refuse(f"{name} is changed inside forward, which a symbolic trace cannot record", instead)
        if RandomState() != self._random:
            raise refuse(
                DRAWN.format(where="while tracing"),
                "draw with torch from a traced tensor (torch.rand_like(x)), or pass the number in as an input",
            )

    def _refuse_attribute(self, module: nn.Module, name: str, value: Any, path: str) -> bool:
        if not self._has_regions and self.own.take(module, name, value, is_constant=isinstance(value, Tensor)):
            return False
        raise refuse(f"forward sets {path}.{name}, {ONCE}", _RETURN_IT)


def _storages(tensors: list[Tensor]) -> frozenset[int]:
    return frozenset(storage_of(tensor) for tensor in tensors) - {0}


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _StateMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on real tensors: refuses random ones, writes to what the model holds, and reads of its
    parameters and buffers."""

    def __init__(self, names: dict[int, str], changing: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._changing = names, changing

    def watch(self, tensor: Tensor, name: str) -> None:
        self._names.setdefault(storage_of(tensor), name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise refuse(
                f"{func} draws random numbers while tracing, and they would be the same ever after",
                "draw from a traced tensor (torch.randn_like(x), x.new_empty(4, 8).normal_())",
            )
        for position, argument in enumerate(schema_of(func).arguments):
            value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._check(func, storage_of(tensor), argument.is_write)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, storage: int, is_write: bool) -> None:
        if is_write and storage in self._names:
            raise refuse(
                f"forward writes {self._names[storage]} while tracing, which would happen once",
                "write it as self.<name>.add_(...), which is recorded, or outside of forward",
            )
        if storage in self._changing and func not in _ALIASES:
            raise refuse(
                f"forward computes with the values that {self._names[storage]} has while tracing, and the result would "
                "be the same ever after",
                "use it as self.<name>, which is recorded",
            )


def _refuse_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    raise refuse(
        f"torch.autograd.Function {function.__name__} is applied in forward, and its backward would be lost",
        "write it with differentiable operations, or give the stages as callables (StageGraph.from_callables)",
    )


def _refuse_autocast(self: Any) -> None:
    """Even where it changes nothing now: ``enabled=False`` means something under the autocast of a later call."""
    raise refuse("autocast is changed inside forward, which a symbolic trace cannot record", _OUTSIDE)


_RETURN_IT = "return the value instead, or write into a buffer in place"
_OUTSIDE = "enter it around the call of forward_backward instead"
_FREEZE = "use .detach(), or requires_grad_(False) on the parameters"


def _modes() -> dict[tuple[str, str], Any]:
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices()]
    return {
        ("inference mode", _FREEZE): torch.is_inference_mode_enabled(),
        ("autocast", _OUTSIDE): autocast,
    }
