"""Which memory operations read and write, and whether they draw random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_compat import TorchDispatchMode, pytree, schema_of
from fxpipe.trace.record.tape import Touched
from fxpipe.trace.state.snapshot import storage_of

_RUNNING_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalisations write although not every schema says so."""


class TouchedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what every operation touches; ``noting()`` gathers it for a part of the run."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = Touched()

    @contextlib.contextmanager
    def noting(self) -> Iterator[Touched]:
        """What is touched while it is open; what surrounds it has then touched it, too."""
        around, self._now = self._now, Touched()
        try:
            yield self._now
        finally:
            around.add(self._now)
            self._now = around

    def note(self, touched: Touched) -> None:
        """Notes what was learnt in another way than by watching operators, for all that is open now."""
        self._now.add(touched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (schema := schema_of(func)) is None:  # a higher-order operator, such as flex_attention
            self._now.reads |= {storage_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)}
            return func(*args, **kwargs)
        given: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments):
            value = given[argument.name] = args[position] if position < len(args) else kwargs.get(argument.name)
            storages = {storage_of(leaf) for leaf in pytree.tree_leaves(value) if _is_tensor(leaf)}
            self._now.reads |= storages
            if argument.is_write or argument.name in _RUNNING_STATISTICS:
                self._now.writes |= storages
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0.0:
            self._now.draws_random = True
        return func(*args, **kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
