"""Which memory operations read and write, and whether they draw random numbers; and what Python changes beside that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.torch_compat import TorchDispatchMode, pytree, schema_of
from fxpipe.trace.contents import alike, contents
from fxpipe.trace.record.tape import Touched
from fxpipe.trace.snapshot import RandomState, generator_state, storage_of

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


class PythonState:
    """What a call may change and no operation shows: attributes of its submodule, containers in them, random state."""

    def __init__(self, module: nn.Module) -> None:
        self._random = RandomState()
        told: dict[int, Any] = {}
        self._attributes = [(vars(part), _contents(vars(part), told)) for part in module.modules()]
        inside = {id(one): one for held in told.values() for one in (held if type(held) is tuple else (held,))}
        self._generators = [(one, stands) for one in inside.values() if (stands := _stands(one)) is not None]

    def drawn(self) -> bool:
        """Whether Python's, NumPy's or torch's real random numbers were drawn or seeded, or those of generators that
        the submodule holds."""
        return RandomState() != self._random or any(_stands(held) != stands for held, stands in self._generators)

    def changes(self) -> set[tuple[int, str]]:
        """The attributes that are no longer as they were: the identity of their owner's ``__dict__``, their name."""
        told: dict[int, Any] = {}
        return {
            (id(table), name)
            for table, before in self._attributes
            for name, now in _contents({**dict.fromkeys(before, _MISSING), **table}, told).items()
            if name not in before or not alike(before[name], now)
        }


_MISSING = object()


def _contents(table: dict[str, Any], told: dict[int, Any]) -> dict[str, Any]:
    """Of each value; ``told``: of those that are known by now, by identity, as one object of settings is in many."""
    for value in table.values():
        if id(value) not in told:
            told[id(value)] = contents(value)
    return {name: told[id(value)] for name, value in table.items()}


def _stands(value: Any) -> Any:
    state = generator_state(value)
    return None if state is None else state[0]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
