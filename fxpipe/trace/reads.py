"""Reads: the attributes, submodules and hooks of a model that a capture has read, and whether they have changed.

Takes: the attributes that were read in captures (``noting``). Gives: ``Reads``, a frozen value with the number of the
model's present state. A capture is valid for one state.

1. During a capture ``noting`` collects (module, name) of each attribute that is read.
2. ``with_capture`` keeps their values, in the present state. Attributes of submodules that stages call are left out:
   these are read anew in every step.
3. Before each call ``at_present`` compares. First a glance, by identity; then all values.
4. If a value has changed, the model may be in an earlier state again; otherwise it is in a new state, and fxpipe
   captures it once more.

For example, after ``model.beta = 0.5`` the next call is in state 1; after ``model.beta = 1.0`` again it is in state 0,
without a capture.

Globals and closures' variables have the form of attributes (``outside``). It does not see class attributes. Writes
into tensors count only for tensors with whose numbers a capture has computed (``computed_with``).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from fxpipe.errors import RunError, TraceError
from fxpipe.graph.program import Program
from fxpipe.patches import replaced
from fxpipe.snapshots.contents import alike, contents
from fxpipe.snapshots.snapshot import Memo
from fxpipe.stage.elsewhere import Gone
from fxpipe.stage.with_loss import plain_model
from fxpipe.torch_compat.tensors import version_of
from fxpipe.trace.outside import Table, outside
from fxpipe.trace.request import Request

MOST = 16
"""The most states of a model: an attribute that changes with every step would need a capture in every step."""

Key = tuple[int, str]
"""(the id of a module's ``__dict__``, the name of an attribute that was read)"""

_GONE = (
    "forward sets {name}, and a pipeline's call keeps no value there; return the value from forward, or keep it in a "
    "buffer (register_buffer) if a later call reads it\n{line}"
)
_OWN = frozenset({"training", "_parameters", "_buffers"})
"""Attributes that a pattern includes already, or whose changes a stage follows."""


class _NotingOfThread(threading.local):
    """The state of this thread: whether ``noting`` ignores its reads."""

    ignores_reads = False


_here = _NotingOfThread()


def ignoring_reads() -> contextlib.AbstractContextManager[None]:
    """While this context is open, ``noting`` notes nothing: model code runs for its results alone, such as an opaque
    region's code during a capture."""
    return replaced([(_here, "ignores_reads", True)])


@contextlib.contextmanager
def noting() -> Iterator[set[Key]]:
    """Collects the attributes that captured code reads of any module while this context is open, except in
    ``ignoring_reads``.

    Yields a set of (the id of a module's ``__dict__``, name), which grows while the context is open. Contexts nest, and
    each collects.
    """
    noted: set[Key] = set()
    original = nn.Module.__getattribute__

    # Python calls nn.Module.__getattr__, which finds parameters and submodules, only after this function
    def note(module: nn.Module, name: str) -> Any:
        if not _here.ignores_reads:
            noted.add((id(object.__getattribute__(module, "__dict__")), name))
        return original(module, name)

    with replaced([(nn.Module, "__getattribute__", note)]):
        yield noted


@dataclass(frozen=True, eq=False)
class Reads:
    """The attributes that captures have read, with their values in each state that the model was captured in."""

    modules: Mapping[int, tuple[str, nn.Module | Table]] = field(default_factory=dict)
    """The id of a module's ``__dict__`` → (the module's path, the module), and owner → (path, table) of variables."""
    states: tuple[Mapping[Key, Any], ...] = (MappingProxyType({}),)
    buffers: Mapping[Key, Any] = field(default_factory=dict)
    """The buffer of a name that captures of all states use; None for a name of no buffer."""
    sets: Mapping[Key, str] = field(default_factory=dict)
    """The attributes that forward sets before it reads them, in the captures of all states: see ``Program.sets``."""
    computed_with: tuple[tuple[str, Tensor, int], ...] = ()
    memos: tuple[Memo, ...] = ()
    """The memos of captures, as in Program, that the model does not have yet."""
    number: int = 0
    """The number of the state in which the last check found the model."""
    glance: _Glance | None = None

    def with_capture(self, noted: Iterable[Key], request: Request, program: Program) -> Reads:
        """These reads and the reads of a capture in the present state.

        Args:
            noted: the attributes that the capture has read.
            request: what was captured: the model and the loss function.
            program: the captured program: the submodules that it calls, and its ``sets``, ``computed_with`` and
                ``memos``.

        Raises:
            TraceError: forward sets an attribute in some captures and reads it in others.
        """
        # 2. a model wrapped with its loss function shares the model's __dict__: the entry must be the model
        modules = dict(self.modules)
        for part in (part for root in request.roots for part in (plain_model(root), root)):
            for path, module in part.named_modules():
                modules.setdefault(id(vars(module)), (path or type(module).__name__, module))
        # A stage runs the Python code of these submodules, which reads their attributes anew in every step.
        called = {str(node.target) for node in program.nodes if node.op == "call_module"} - program.opaque.keys()
        parts = {id(vars(part)): part for path in called for part in program.module.get_submodule(path).modules()}
        wanted = [
            (owner, name)
            for owner, name in noted
            if owner in modules and owner not in parts and (owner, name) not in program.sets
            if name not in _OWN and not name.startswith("__")
        ]
        regions = [region.name for region in request.whole]
        traced = [
            (path, module)
            for root in request.roots
            for path, module in plain_model(root).named_modules()
            if id(vars(module)) not in parts and not f"{path}.".startswith(tuple(f"{name}." for name in regions))
        ]
        for owner, path, table, name in outside(traced, request.loss_fn, regions):
            modules.setdefault(owner, (path, table))
            wanted.append((owner, name))
        more = replace(
            self,
            modules=modules,
            sets={**self.sets, **{key: line for key, line in program.sets.items() if key[0] not in parts}},
            computed_with=(*self.computed_with, *program.computed_with),
            memos=(*self.memos, *program.memos),
            glance=None,
        )
        carried = next((key for key in (*self.states[self.number], *wanted) if key in more.sets), None)
        if carried is not None:
            raise TraceError(_GONE.format(name=more._name(carried), line=more.sets[carried]))
        state = {**self.states[self.number], **{key: more._value(key) for key in wanted}}
        states = (*self.states[: self.number], state, *self.states[self.number + 1 :])
        # a stage's state dict saves the persistent buffers that the submodules had in the capture
        known = [(owner, part) for owner, part in parts.items() if owner in modules]
        saved = [(owner, name) for owner, p in known for name in p._buffers.keys() - p._non_persistent_buffers_set]
        buffers = {key: more._buffer(key) for key in (*wanted, *saved)}
        return replace(more, states=states, buffers={**self.buffers, **buffers})

    def with_memos_set(self) -> Reads:
        """Sets the memos in the model, as its first forward would; the reads with the model's present values."""
        for table, name, value in self.memos:
            table[name] = value
        return replace(self.after_compile(), memos=())

    def after_compile(self) -> Reads:
        """The reads with the model's present values, so that changes by compile itself do not count."""
        state = {key: self._value(key) for key in self.states[self.number]}
        states = (*self.states[: self.number], state, *self.states[self.number + 1 :])
        return replace(self, states=states, buffers={key: self._buffer(key) for key in self.buffers}, glance=None)

    def at_present(self) -> Reads:
        """The reads with the ``number`` of the model's present state; RunError if the model had too many states, has
        other buffers than the captures, or has new values in tensors whose values a capture has used."""
        for name, tensor, version in self.computed_with:
            if version_of(tensor) != version:
                raise RunError(
                    f"{name}, a tensor that is no buffer, was written since the model was captured, and the capture "
                    "has computed with the numbers that it had; register it (register_buffer), set another tensor in "
                    'its place, or pass tracer="record"'
                )
        # 3. the glance
        if self.glance is not None and self.glance.finds_nothing():
            return self
        # This compares attribute by attribute, and so comes after the glance, which ends nearly every call.
        self._check_buffers()
        state = self.states[self.number]
        changed = self._changed(state)
        if changed is None:
            return replace(self, glance=_Glance({*state, *self.buffers}, self.modules))
        # 4. the model may be in an earlier state again, whose captures are valid again
        captured = (number for number, state in enumerate(self.states) if self._changed(state) is None)
        number = next(captured, len(self.states))
        if number == MOST:
            raise RunError(
                f"{self._name(changed)}, which the model reads, has changed {MOST} times since it was compiled, and "
                "with every change it is captured anew; give what changes from step to step to forward as an input, as "
                "a 0-dimensional tensor"
            )
        # each state has the same attributes, with other values
        new = [{key: self._value(key) for key in state}] if number == len(self.states) else []
        return replace(self, states=(*self.states, *new), number=number, glance=None)

    def drop_set(self) -> None:
        """Puts a ``Gone`` where forward sets an attribute: the value belongs to one call."""
        for key, line in self.sets.items():
            vars(self.modules[key[0]][1])[key[1]] = Gone(_GONE.format(name=self._name(key), line=line))

    def changed(self) -> str | None:
        """The name of an attribute that has changed since the last check; None if no attribute has changed."""
        if self.glance is not None and self.glance.finds_nothing():
            return None
        key = self._changed(self.states[self.number])
        return None if key is None else self._name(key)

    def difference(self, number: int) -> str:
        """The name of an attribute that differs between the state of this number and the state that the last check
        found; "" if no attribute is known to differ."""
        if number >= len(self.states):  # another rank numbers its states in its own way
            return ""
        then, now = self.states[number], self.states[self.number]
        return next((self._name(key) for key in then.keys() & now if not alike(then[key], now[key])), "")

    def _changed(self, state: Mapping[Key, Any]) -> Key | None:
        """The first attribute whose value is not the state's; None if all are equal."""
        for key, value in state.items():
            now = self._present(key)
            # most values are leaves, and still the same object
            if now is not value and not alike(value, contents(now)):
                return key
        return None

    def _check_buffers(self) -> None:
        """RunError if a buffer that a capture uses is another tensor than it was."""
        for key, buffer in self.buffers.items():
            if self._buffer(key) is not buffer:
                raise RunError(
                    f"{self._name(key)} is another buffer than when the model was captured, and the pipeline would go "
                    "on with the old one; write values into it, as buffer.copy_() does, and load_state_dict() without "
                    "assign=True, or change the model before fxpipe.compile"
                )

    def _name(self, key: Key) -> str:
        return f"{self.modules[key[0]][0]}.{key[1]}"

    def _buffer(self, key: Key) -> Any:
        return self.modules[key[0]][1]._buffers.get(key[1])

    def _present(self, key: Key) -> Any:
        """A module's own attribute or submodule of a name; None if only its class, or neither, has the name."""
        module = self.modules[key[0]][1]
        return vars(module).get(key[1], module._modules.get(key[1]))

    def _value(self, key: Key) -> Any:
        return contents(self._present(key))


class LatestReads:
    """The reads of the present call. ``run`` sets them; the checks in opaque regions ask them for changes."""

    def __init__(self) -> None:
        self.reads = Reads()

    def changed(self) -> str | None:
        """The name of an attribute that has changed since the call's check; None if none has."""
        return self.reads.changed()


class _Glance:
    """A fast check whether anything has changed since the check was made: a few calls for each module, as every step
    runs the check. A change that it finds may not matter: then ``Reads`` compares all values.
    """

    def __init__(self, keys: Iterable[Key], modules: Mapping[int, tuple[str, nn.Module | Table]]) -> None:
        names: dict[int, tuple[Mapping[str, Any], set[str]]] = {}  # by the table's id
        for owner, name in keys:
            module = modules[owner][1]
            own = vars(module)
            # in torch's order of lookup; if no table has the name, all three tables are watched
            tables: list[Mapping[str, Any]] = [own, module._modules, module._buffers]
            for table in tables:
                names.setdefault(id(table), (table, set()))[1].add(name)
                if name in table:
                    break
            # the tables themselves may be replaced
            names[id(own)][1].update(("_modules", "_buffers"))
        self._entries = []
        values: dict[int, Any] = {}  # by id
        for table, wanted in names.values():
            entries = {name: table.get(name) for name in wanted}
            self._entries.append((table.get, tuple(entries), tuple(entries.values())))
            values |= {id(value): value for name, value in entries.items() if name not in ("_modules", "_buffers")}
        inside = [(value, contents(value)) for value in values.values()]
        mutable = [(value, was) for value, was in inside if was is not value]
        # most tables of hooks are empty: a test for emptiness is cheaper than a comparison of contents
        self._empty = [value for value, _ in mutable if type(value) in (dict, OrderedDict, list) and not value]
        self._filled = [(value, was) for value, was in mutable if type(value) not in (dict, OrderedDict, list) or value]

    def finds_nothing(self) -> bool:
        """Whether nothing has changed, by identity of attributes, emptiness of hooks, and contents of the rest."""
        return (
            all(all(map(is_, map(get, wanted), entries)) for get, wanted, entries in self._entries)
            and not any(self._empty)
            and all(alike(was, contents(value)) for value, was in self._filled)
        )
