"""Reads: the attributes, submodules and hooks of a model that a capture has read, and whether they have changed.

A capture holds them as they were. So every call asks for the number of the state that the model is in. It is another
state where something that was read has changed since, and then the model is captured anew, once for each state.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import RunError, TraceError
from fxpipe.graph.with_loss import plain_model
from fxpipe.torch_compat import version_of
from fxpipe.trace.patching import ASIDE, patched
from fxpipe.trace.state.contents import alike, contents, described_values

MOST = 16
"""States that a model may be in: what changes with every step would be captured with every step."""

Key = tuple[int, str]
"""The identity of a module's ``__dict__``, and a name that was asked for."""

_OWN = frozenset({"training", "_parameters", "_buffers"})
"""What a pattern has by itself, or a stage follows."""


class Reads:
    """What captures have read, for each state that the model was captured in."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        self._states: list[dict[Key, Any]] = [{}]
        self._buffers: dict[Key, Any] = {}
        """What captures of any state hold by a name, where it is a buffer's; None where there was none."""
        self._set: frozenset[Key] = frozenset()
        """What forward sets before it reads it, in captures of any state."""
        self._computed_with: tuple[tuple[str, Tensor, int], ...] = ()
        self._now = 0
        self._glance: _Glance | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[Key]]:
        """While it is open, notes what captured code reads of any module; not what runs ``aside``."""
        noted: set[Key] = set()
        original = nn.Module.__getattribute__

        def note(module: nn.Module, name: str) -> Any:
            if name not in _OWN and not name.startswith("__") and not ASIDE.get():
                noted.add((id(object.__getattribute__(module, "__dict__")), name))
            return original(module, name)

        with patched(nn.Module, "__getattribute__", note):
            yield noted

    def keep(
        self,
        noted: Iterable[Key],
        roots: Iterable[nn.Module],
        live: Iterable[nn.Module],
        sets: frozenset[Key] = frozenset(),
        computed_with: Iterable[tuple[str, Tensor, int]] = (),
    ) -> None:
        """A capture of the present state has read this of ``roots``. ``live``: submodules that stages call whole;
        ``sets``: what forward sets before it reads it; ``computed_with``: as in Program. TraceError for what is set in
        some captures and read in others.
        """
        # a model with its loss function has the table of the model itself, which is the one to look into
        for part in (part for root in roots for part in (plain_model(root), root)):
            for path, module in part.named_modules():
                self._modules.setdefault(id(vars(module)), (path or type(module).__name__, module))
        # A stage calls these submodules for real: they read their attributes anew in every step.
        follows = {id(vars(part)) for module in live for part in module.modules()}
        wanted = [key for key in noted if key[0] in self._modules and key[0] not in follows and key not in sets]
        self._set |= {key for key in sets if key[0] not in follows}
        self._check_not_carried(wanted)
        self._states[self._now] |= {key: self._value(key) for key in wanted}
        self._buffers |= {key: self._buffer(key) for key in (*wanted, *self._saved(live))}
        self._computed_with += tuple(computed_with)
        self._glance = None

    def _check_not_carried(self, wanted: Iterable[Key]) -> None:
        carried = next((key for key in (*self._states[self._now], *wanted) if key in self._set), None)
        if carried is not None:
            raise TraceError(
                f"forward sets {self._name(carried)} in one kind of batch, or mode, and reads in "
                "another what a call before has set, which stages and micro-batches in flight do not see; keep it in a "
                "buffer (register_buffer), and write into it in place"
            )

    def _saved(self, live: Iterable[nn.Module]) -> Iterator[Key]:
        """The buffers of these that a state dict has: a stage saves the tensors that were there."""
        for part in (part for module in live for part in module.modules()):
            if id(vars(part)) in self._modules:
                names = part._buffers.keys() - part._non_persistent_buffers_set
                yield from ((id(vars(part)), name) for name in names)

    @contextlib.contextmanager
    def rolled_back_on_error(self) -> Iterator[None]:
        """If the code inside fails, all that was read in it is forgotten: other ranks may not have come so far."""
        states = [dict(state) for state in self._states]
        before = {**vars(self), "_states": states, "_buffers": dict(self._buffers), "_glance": None}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def begin(self) -> None:
        """The model is as captures shall find it: what compile itself has changed is no change."""
        self._states[self._now] = {key: self._value(key) for key in self._states[self._now]}
        self._buffers = {key: self._buffer(key) for key in self._buffers}
        self._glance = None

    def state(self) -> int:
        """The number of the state that the model is in; RunError where it has been in too many, or has other buffers
        than captures hold, or other numbers than they have computed with."""
        for name, tensor, version in self._computed_with:
            if version_of(tensor) != version:
                raise RunError(
                    f"{name}, a tensor that is no buffer, was written since the model was captured, and the capture "
                    "has computed with the numbers that it had; register it (register_buffer), set another tensor in "
                    'its place, or pass tracer="record"'
                )
        if self._glance is not None and self._glance.finds_nothing():
            return self._now
        # Only behind the glance, which ends nearly every call: this compares attribute by attribute.
        self._check_buffers()
        state = self._states[self._now]
        changed = self._changed(state)
        if changed is None:
            self._glance = _Glance({*state, *self._buffers}, self._modules)
            return self._now
        # back in a state that was captured before, whose captures hold again
        known = (number for number, state in enumerate(self._states) if self._changed(state) is None)
        number = next(known, len(self._states))
        if number == MOST:
            raise RunError(
                f"{self._name(changed)}, which the model reads, has changed {MOST} times since it was compiled, and "
                "with every change it is captured anew; give what changes from step to step to forward as an input, as "
                "a 0-dimensional tensor"
            )
        # the same attributes count in each state, with other values
        if number == len(self._states):
            self._states.append({key: self._value(key) for key in state})
        self._now, self._glance = number, None
        return number

    def changed(self) -> str | None:
        """The name of what has changed since the state was last asked for."""
        if self._glance is not None and self._glance.finds_nothing():
            return None
        key = self._changed(self._states[self._now])
        return None if key is None else self._name(key)

    def described(self) -> dict[str, str]:
        """What captures have read, as it is now: the name of each value → the value."""
        return dict(
            part for key in self._states[self._now] for part in described_values(self._name(key), self._held(key))
        )

    def _changed(self, state: dict[Key, Any]) -> Key | None:
        for key, value in state.items():
            now = self._held(key)
            # most values are leaves, and the same object
            if now is not value and not alike(value, contents(now)):
                return key
        return None

    def _check_buffers(self) -> None:
        for key, held in self._buffers.items():
            if self._buffer(key) is not held:
                raise RunError(
                    f"{self._name(key)} is another buffer than when the model was captured, and the pipeline would go "
                    "on with the old one; write values into it, as buffer.copy_() does, and load_state_dict() without "
                    "assign=True, or change the model before fxpipe.compile"
                )

    def _name(self, key: Key) -> str:
        return f"{self._modules[key[0]][0]}.{key[1]}"

    def _buffer(self, key: Key) -> Any:
        return self._modules[key[0]][1]._buffers.get(key[1])

    def _held(self, key: Key) -> Any:
        """What a module has by a name, itself or as a submodule; None where that is nothing, or its class's."""
        module = self._modules[key[0]][1]
        return vars(module).get(key[1], module._modules.get(key[1]))

    def _value(self, key: Key) -> Any:
        return contents(self._held(key))


class _Glance:
    """A quick look whether anything has changed since it was made: in a few calls for each module, since every step
    asks. It may find a change that does not matter, and then all is compared.
    """

    def __init__(self, keys: Iterable[Key], modules: Mapping[int, tuple[str, nn.Module]]) -> None:
        names: dict[int, tuple[Mapping[str, Any], set[str]]] = {}  # by table
        for place, name in keys:
            module = modules[place][1]
            own = vars(module)
            # in the order in which torch looks for a name; where none has it, all three are watched
            tables: list[Mapping[str, Any]] = [own, module._modules, module._buffers]
            for table in tables:
                names.setdefault(id(table), (table, set()))[1].add(name)
                if name in table:
                    break
            # the tables themselves may be replaced
            names[id(own)][1].update(("_modules", "_buffers"))
        self._held = []
        values: dict[int, Any] = {}  # each once
        for table, wanted in names.values():
            held = {name: table.get(name) for name in wanted}
            self._held.append((table.get, tuple(held), tuple(held.values())))
            values |= {id(value): value for name, value in held.items() if name not in ("_modules", "_buffers")}
        inside = [(value, contents(value)) for value in values.values()]
        mutable = [(value, was) for value, was in inside if was is not value]
        # most tables of hooks are empty, and to ask that is cheaper than for their contents
        self._empty = [value for value, _ in mutable if type(value) in (dict, OrderedDict, list) and not value]
        self._filled = [(value, was) for value, was in mutable if type(value) not in (dict, OrderedDict, list) or value]

    def finds_nothing(self) -> bool:
        return (
            all(all(map(is_, map(get, wanted), held)) for get, wanted, held in self._held)
            and not any(self._empty)
            and all(alike(was, contents(value)) for value, was in self._filled)
        )
