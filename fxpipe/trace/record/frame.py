"""Frames: running calls of submodules, regions and autograd functions, which may become one operation each.

Takes: the recorder, and a call's arguments. Gives: ``Frame.is_whole``, whether the call can be one operation, and
``Frame.collapse``, which makes it one.

1. A frame begins: it keeps the length of the tape, and the counters of the recorder.
2. The call runs; its operations are added to the tape.
3. ``is_whole`` compares: only arguments and results carry tensors, no boundary was reached, modes are as before.
4. ``collapse`` removes the operations since the beginning, and appends one call in their place.

For example, a call of ``self.mlp``::

    tape before   ..., linear, gelu, linear       →   tape after   ..., call_module mlp

The removed operations remember the call (``hidden_in``): a later use of their tensors is an obstacle.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fxpipe.graph.program import Effects
from fxpipe.seeds import Generators, RandomState
from fxpipe.snapshots.snapshot import Snapshot, storage_of
from fxpipe.stage.opaque_call import PLAIN_LEAF
from fxpipe.trace.fake import is_fake
from fxpipe.trace.record.recorder import Recorder
from fxpipe.trace.record.tape import (
    Args,
    Kwargs,
    NamedSource,
    Operation,
    TapeValue,
    Touched,
    is_plain,
    paths,
    tensors,
)


class PythonState:
    """The state that a call may change without an operation: its submodule's attributes, the containers in them, and
    random generators."""

    def __init__(self, module: nn.Module, own: Generators) -> None:
        self._own, self._random, self._snapshot = own, RandomState(own=own), Snapshot(module, tensors=False)

    def note(self, touched: Touched) -> None:
        """Notes whether an attribute changed, or code drew from or seeded a random generator: of Python, NumPy, torch
        or the model. ``touched``: the call's record, which this changes."""
        moved = self._random.moved()
        touched.generators |= {id(self._own.get(name, name)) for name in moved - {"torch"}}
        touched.is_stateful |= bool(moved) or any(True for _ in self._snapshot.changes())


class Frame:
    """One running call, and the recorder's state at the call's start.

    ``module``: the called submodule; None for a region or an autograd function.
    """

    def __init__(self, recorder: Recorder, path: str, module: nn.Module | None, args: Args, kwargs: Kwargs) -> None:
        recorder.check_random()
        self._recorder, self.path, self.module, self.scope = recorder, path, module, recorder.scope()
        self._fits = is_plain((args, kwargs))  # whether a graph can hold all arguments
        self.tensors = tensors((args, kwargs)) if self._fits else []
        self.argument_ids = {id(tensor) for tensor in self.tensors}
        if self._fits:
            args, kwargs = recorder.as_values(args), recorder.as_values(kwargs)
        self._args, self._kwargs = args, kwargs
        self._serial, self._marks, self._gradients = recorder.serial, recorder.marks, recorder.gradients
        self._sets, self._changed = len(recorder.sets), recorder.changes()
        # 1. taken last: an obstacle due to the arguments belongs to the caller, so collapse() must not drop it
        self.start = len(recorder.tape)

    @property
    def memory(self) -> set[int]:
        """The storages of the submodule's parameters and buffers; empty without a submodule."""
        module = self.module
        return set() if module is None else {storage_of(t) for t in (*module.parameters(), *module.buffers())}

    def collapse(self, target: str, result: Any, touched: Touched, effects: Effects, stays: bool) -> None:
        """Replaces all operations recorded since the frame began by one operation.

        Args:
            target: the name of the submodule or opaque module that the node will call.
            result: the call's fake result. New tensors in it become values of the operation.
            touched: the memory that the call used, for the calls around it.
            effects: the call's effects in a step, for ``Program.effects``.
            stays: whether the node stays if nothing uses its result.
        """
        recorder = self._recorder
        for operation in recorder.tape[self.start :]:
            if isinstance(operation, Operation):
                operation.hidden_in = self.path
        del recorder.tape[self.start :]
        # the call draws numbers and sets attributes in every step, so the caller no longer answers for them
        recorder.random_moved()
        recorder.set_inside |= {change.name for change in recorder.sets[self._sets :]}
        recorder.set_inside |= recorder.changes() - self._changed
        del recorder.sets[self._sets :]
        call = recorder.append("call_module", target, self._args, self._kwargs, result, touched, self.scope, effects)
        call.stays = stays
        for path, leaf in paths(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self.argument_ids:
                recorder.name(leaf, TapeValue(call, path))

    def is_untouched(self) -> bool:
        """Whether the call may still become one operation: so far it has no boundary, region call or set buffer."""
        return self._fits and self._marks == self._recorder.marks

    def is_whole(self, result: Any, touched: Touched) -> bool:
        """Whether the call can be one operation: only its arguments and result carry tensors and plain values.

        False if the call reached a boundary, registered a hook on an argument, or left other modes. False if it uses or
        writes tensors of other parts of the model, returns a number that may change, or lets a gradient pass around it.
        """
        recorder = self._recorder
        reachable = self.memory | {storage_of(tensor) for tensor in self.tensors}
        returned = [leaf for _, leaf in paths(result)]
        has_plain = any(not isinstance(leaf, (Tensor, type(None))) for leaf in returned)
        # A gradient that the call computes must not leave the call. With two arguments the gradient might go from one
        # argument through the other, along operations outside of the call.
        leads_around = recorder.gradients > self._gradients and sum(tensor.requires_grad for tensor in self.tensors) > 1
        return (
            self.is_untouched()
            and not recorder.hooked.keys() & self.argument_ids
            # the graph holds a number or flag as a constant, so it may not change from call to call
            and not (touched.is_stateful and has_plain)
            and self.scope.modes == recorder.scope().modes
            and touched.reads & recorder.storages.keys() <= reachable
            and not self.writes_elsewhere(touched)
            and self._is_closed()
            and not leads_around
            and all(map(self._can_leave, returned))
        )

    def writes_elsewhere(self, touched: Touched) -> bool:
        """Whether the call writes an argument, or a model tensor that its submodule does not hold."""
        storages = {storage_of(tensor) for tensor in self.tensors}
        return bool((touched.writes & self._recorder.storages.keys()) - self.memory or touched.writes & storages)

    def _is_closed(self) -> bool:
        """Whether the call's operations use only its arguments, the model's tensors and the call's own values."""
        keys = {self._recorder.value_of(tensor).key for tensor in self.tensors}
        operations = (entry for entry in self._recorder.tape[self.start :] if isinstance(entry, Operation))
        used = (value for operation in operations for value in operation.values if value.key not in keys)
        return all(value.maker.kind == "get_attr" or self._has_made(value.maker) for value in used)

    def _has_made(self, maker: Operation | NamedSource) -> bool:
        """Whether an operation of this call made the value."""
        return isinstance(maker, Operation) and maker.serial > self._serial

    def _can_leave(self, leaf: Any) -> bool:
        """Whether a leaf may be a part of the call's result."""
        if not isinstance(leaf, Tensor):
            return isinstance(leaf, PLAIN_LEAF)
        value = self._recorder.value_if_any(leaf)
        if id(leaf) in self.argument_ids or value is None:  # None: made by TorchScript, say, and not recorded
            return id(leaf) in self.argument_ids or is_fake(leaf)
        # the call's effects say that a result shares memory with an argument, and not with a tensor of its submodule
        own = self._recorder.storages.keys() - {storage_of(tensor) for tensor in self.tensors}
        return self._has_made(value.maker) and storage_of(leaf) not in own
