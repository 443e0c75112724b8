"""The recorder: watches one run of forward on fake tensors, and writes what it does on a tape.

Operations are seen as torch functions (``F.linear``, ``Tensor.add_``), above autograd and autocast, so that a graph of
them runs as the model does. A submodule that can be called as a whole becomes one operation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather, boundary, words
from fxpipe.graph.program import Effects
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import CHECKS, TorchDispatchMode, no_function_modes, pytree
from fxpipe.trace.cuts.cutting import crossing
from fxpipe.trace.fake import FakeModel, is_fake, needs_values, outside
from fxpipe.trace.patching import BACKWARD, DRAWN, UNREGISTERED, patched, refuse, refuse_backward
from fxpipe.trace.record.tape import (
    PLAIN,
    Args,
    Checkpoint,
    Kwargs,
    ModesNow,
    NamedSource,
    Obstacle,
    Operation,
    Surroundings,
    TapeValue,
    Touched,
    TouchedMode,
    accessed,
    mapped,
    name_of,
    paths,
    target_of,
    tensors,
)
from fxpipe.trace.state.snapshot import Snapshot, storage_of
from fxpipe.trace.user_line import current_line

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_SAME_TENSOR = frozenset({"requires_grad_"})
"""Functions that change the very tensor that they return, without an operator that says so."""


class NeedsValues(TraceError):
    """Something that fake tensors cannot do, as they have no numbers: a submodule may be able to do it as a whole.

    ``asked``: Python code has asked a tensor for its numbers. Otherwise an operation failed, maybe by the user's error.
    """

    def __init__(self, message: str, asked: bool = True) -> None:
        super().__init__(message)
        self.asked = asked
        self.tried = False
        """Whether a submodule was run on made-up inputs in vain."""


class SetAttribute(NamedTuple):
    """An attribute that forward has set, by its name in the model, and where. ``is_other``: it is a number, a word, a
    truth value or None, and was another before."""

    name: str
    line: str
    is_other: bool


class Recorder:
    """The tape of one run, and which tensor stands for which value.

    ``real``: the model's own tensors by name; ``stand_ins``: the fake ones that are in their places now. ``before``:
    what the model was, where it is to be watched what calls change.
    """

    def __init__(
        self,
        fake: FakeModel,
        real: Mapping[str, Tensor],
        stand_ins: Mapping[str, Tensor],
        before: Sequence[Snapshot],
    ) -> None:
        self.fake, self._stand_ins, self._before = fake, stand_ins, before
        self.tape: list[Operation | Obstacle] = []
        self.constants: dict[str, Tensor] = {}
        self.boundaries = 0
        self.marks = 0
        """How often something was done that no opaque call may hold: a boundary, a call of a region, a set buffer."""
        self.gradients = 0
        """How often forward has differentiated."""
        self.hooked: dict[int, Tensor] = {}
        """The tensors that gradient hooks were put on."""
        self.sets: list[SetAttribute] = []
        self.set_inside: set[str] = set()
        """The attributes that opaque calls have set, as they do in every step."""
        self.touched = TouchedMode()
        self.autocasts = [0]
        """The numbers of the autocast blocks around; 0 is outside of all."""
        self.stack: dict[str, type] = {}
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self._ended: dict[Checkpoint, str] = {}
        """The checkpointed parts behind whose last operation a boundary lies, and its name."""
        self.mode = _Mode(self)
        self.paused = False
        """Whether what runs now is not to be recorded."""
        self.is_running = False
        """Whether a function of torch runs now, which is recorded as a whole."""
        self.serial = 0
        self._real_names = {id(tensor): name for name, tensor in real.items() if name in stand_ins}
        # the tensor stands beside its value, so that no other one is given its id meanwhile
        self._values: dict[int, tuple[Tensor, TapeValue]] = {}
        self._line: str | None = None
        self._unmapped: NeedsValues | None = None
        """Why ``torch.vmap`` cannot be recorded, as it was found inside of it."""
        self._random = RandomState()
        self.storages: dict[int, tuple[int, str]] = {}
        """The memory of the model's tensors: their places in the model, and their first names."""
        for place, (name, tensor) in enumerate(stand_ins.items()):
            self.storages.setdefault(storage_of(tensor), (place, name))
            self.name(tensor, TapeValue(NamedSource("get_attr", name, tensor)))

    # tensors and values

    def name(self, tensor: Tensor, value: TapeValue) -> None:
        """From now on the tensor is that value of the program."""
        self._values[id(tensor)] = tensor, value

    def value_of(self, tensor: Tensor) -> TapeValue:
        known = self._values.get(id(tensor))
        # a tensor that no recorded operation has made
        if known is None:
            known = self._values[id(tensor)] = tensor, self._constant(tensor)
        # An opaque call holds its operation by now, and does not return it: the next run traces through that call.
        maker = known[1].maker
        if isinstance(maker, Operation) and maker.hidden_in is not None:
            path = maker.hidden_in
            fact = f"a tensor made inside of {path} is used elsewhere, and {path} does not return it"
            self.problem(fact, "", descend=path)
        return known[1]

    def known(self, tensor: Tensor) -> TapeValue | None:
        """The value that a tensor stands for, if it stands for any."""
        return self._values[id(tensor)][1] if id(tensor) in self._values else None

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of no inputs, parameters or random numbers: always the same."""
        known = self.known(tensor)
        waiting = [known.maker] if known is not None else []
        # back along what it was computed from, down to sources
        while waiting:
            maker = waiting.pop()
            if isinstance(maker, NamedSource) or maker.kind == "call_module" or maker.touched.draws_random:
                return False
            waiting += [value.maker for value in maker.values]
        return known is not None

    def _constant(self, tensor: Tensor) -> TapeValue:
        """A tensor that was met for the first time: a parameter by another reference, or a constant."""
        if id(tensor) in self._real_names:
            return self.value_of(self._stand_ins[self._real_names[id(tensor)]])
        name = f"_constant{len(self.constants)}"
        if is_fake(tensor):
            self.problem(
                "a tensor is used that was not made by an operation of torch on known tensors, or in another way that "
                "cannot be recorded",
                "make it with torch's functions inside of forward",
            )
        elif tensor.requires_grad:
            self.problem(*UNREGISTERED)
        else:
            self.constants[name] = tensor
        return TapeValue(NamedSource("get_attr", name, tensor))

    def problem(self, fact: str, instead: str, descend: str | None = None) -> None:
        self.tape.append(Obstacle(str(refuse(fact, instead)), descend))

    def changes(self) -> frozenset[str]:
        """The attributes that are not as they were, where that is watched."""
        return frozenset(name for snapshot in self._before for name in snapshot.changes())

    # operations

    def call(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs one torch function on fake tensors, and records it."""
        if self.paused:
            return function(*args, **kwargs)
        name = name_of(function)
        if name == "__iter__":
            return iter(self.call(Tensor.unbind, (args[0], 0), {}))
        if function in CHECKS and isinstance(args[0], Tensor):
            return None  # an assertion on the values of tensors is not a part of the program
        if function is Tensor.__bool__:
            certain = outcome(self.known(args[0]), self.tape)
            if certain is not None:
                return certain
        if name in _HOOKS:
            self.problem(f"forward calls {name} on a tensor, which is not recorded", _INSIDE)
        if function is BACKWARD:
            refuse_backward()
        if function is torch.autograd.grad:
            self.gradients += 1
            self.problem(
                "forward calls grad on a tensor, which is not recorded",
                f"{_INSIDE}, and that computes all that the gradient goes through",
            )
        if name.startswith("register_"):
            self.hooked[id(args[0])] = args[0]
        setter = accessed(function, "__set__")
        if setter == "requires_grad":
            self.call(Tensor.requires_grad_, args, kwargs)
            return None
        if setter is not None:
            self.problem(f"forward sets .{setter} of a tensor, which is not recorded", "write into it in place")
        return self._recorded(function, args, kwargs)

    def _run(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = mapped(args, self._stand_in), mapped(kwargs, self._stand_in)
        self.is_running = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if needs_values(error):
                name = accessed(function, "__get__") or name_of(function)
                fact = f"forward looks at the values of a tensor ({name}) between submodules, and which they are is"
                raise NeedsValues(str(refuse(f"{fact} known only when it runs", _INSIDE))) from error
            if isinstance(error, RuntimeError):
                fact = f"the record tracer cannot follow the model: {type(error).__name__}: {error}"
                raise NeedsValues(f"{fact}\n{current_line()}", asked=False) from error
            raise
        finally:
            self.is_running = False

    def _stand_in(self, leaf: Any) -> Any:
        name = self._real_names.get(id(leaf))
        return leaf if name is None else self._stand_ins[name]

    def _recorded(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        # The function runs for its shapes; what it touches is seen one level below, by operator.
        with self.touched.noting() as touched:
            result = self._run(function, args, kwargs)
        given = tensors((args, kwargs))
        written = frozenset(touched.writes & {storage_of(tensor) for tensor in given})
        if not written:  # it may ask for a shape and the like, or return the very tensor that it was given
            same = any(tensor is result for tensor in given) and name_of(function) not in _SAME_TENSOR
            if same or not tensors(result):
                return result
        kind, target, args, kwargs = target_of(function, args, kwargs)
        operation = self.append(kind, target, self.as_values(args), self.as_values(kwargs), result, touched)
        if touched.writes & {storage_of(constant) for constant in self.constants.values()}:
            self.problem(
                "forward writes a tensor that is no buffer of the model, and all micro-batches would write the same",
                "make it from a traced tensor, as in x.new_zeros(...), or register it as a buffer",
            )
        operation.writes = written
        for path, leaf in paths(result):
            if isinstance(leaf, Tensor):
                self.name(leaf, TapeValue(operation, path))
        return result

    def append(
        self,
        kind: str,
        target: Any,
        args: Args,
        kwargs: Kwargs,
        result: Any,
        touched: Touched,
        place: Surroundings | None = None,
        effects: Effects | None = None,
    ) -> Operation:
        self.check_random()
        self.touched.note(touched)  # the calls around do what is done inside of them
        self.serial += 1
        place = place or self.place()
        # something is computed in a part behind the boundary that seemed to be its end
        ended = next((self._ended[part] for part in place.checkpoints if part in self._ended), None)
        if ended is not None:
            raise refuse(
                f"a boundary ({ended}) lies amid a function given to torch.utils.checkpoint, which runs as a whole: it "
                "computes both before and behind it",
                _AT_THE_EDGE,
            )
        result = pytree.tree_map(lambda leaf: leaf, result)  # forward may put other values into what it is given back
        operation = Operation(kind, target, args, kwargs, result, place, touched, self.serial, effects)
        self.tape.append(operation)
        return operation

    def on_line(self, line: str) -> AbstractContextManager[None]:
        """While it is open, operations are recorded as if they stood on that line of the user's."""
        return patched(self, "_line", line)

    def place(self) -> Surroundings:
        """Where the model is now."""
        line, modes = self._line or current_line(), ModesNow.of(self.autocasts[-1])
        return Surroundings(line, modes, dict(self.stack), self.checkpoints)

    def as_values(self, arguments: Any) -> Any:
        return mapped(arguments, self._as_value)

    def _as_value(self, leaf: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        if numpy is not None and isinstance(leaf, numpy.generic):
            return leaf.item()
        if not isinstance(leaf, PLAIN):
            fact = f"a function of torch is given a {type(leaf).__name__}, which cannot stand in a graph"
            self.problem(fact, _INSIDE)
        return leaf

    def check_random(self) -> None:
        """Random numbers that were drawn since the last look, and not by an operation of torch."""
        if self.random_moved():
            instead = f"draw with torch (torch.rand(4)), pass the number in as an input, or {_INSIDE}"
            self.problem(DRAWN.format(where="in forward"), instead)

    def random_moved(self) -> bool:
        with outside():
            before, self._random = self._random, RandomState()
            return self._random != before

    # checkpoints, and what is mapped over

    def checkpointed(self, part: Checkpoint) -> AbstractContextManager[None]:
        """What is recorded while it is open belongs to that checkpointed part."""
        return patched(self, "checkpoints", (*self.checkpoints, part))

    @contextmanager
    def operators(self) -> Iterator[None]:
        """While it is open, torch's operators are recorded in place of its functions.

        Inside of ``torch.vmap`` a function is given a stand-in for one row, and its operators all rows: as a mask is
        made of positions. They are below autograd, so that gradients would be lost.
        """
        with patched(self, "paused", True), _Operators(self):
            yield
        if self._unmapped is not None:
            raise self._unmapped

    def operator(self, operator: Any, args: Args, kwargs: Kwargs) -> Any:
        """Runs one operator on fake tensors, and records it."""
        if any(tensor.requires_grad for tensor in tensors((args, kwargs))):
            fact = "forward uses torch.vmap on tensors that need a gradient, between submodules"
            # not raised here: torch.vmap's C++ code lets no exception through, and would end the process
            self._unmapped = self._unmapped or NeedsValues(str(refuse(fact, _INSIDE)), asked=False)
        return self._recorded(operator, args, kwargs)

    # boundaries

    def record_boundary(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """The value behind a boundary; one at the very edge of a checkpointed part lies outside of it.

        It is in front of ``checkpoint(layer, x)`` where nothing was computed in it yet, and behind it where nothing
        will be any more, which ``append`` sees to.
        """
        begun = {part for entry in self.tape if isinstance(entry, Operation) for part in entry.place.checkpoints}
        self._ended |= dict.fromkeys((part for part in self.checkpoints if part in begun), name or "an unnamed one")
        behind = partial(self._behind, words(name, gather), gather is not None)
        # the boundary itself belongs to no part, so that the graph can be cut there
        with patched(self, "checkpoints", ()):
            return crossing(value, lambda leaf: isinstance(leaf, Tensor), behind)

    def _behind(self, options: tuple[Any, ...], gathers: bool, given: list[Tensor]) -> list[Tensor]:
        """Tensors as they are behind a boundary."""
        self.boundaries += 1
        self.marks += 1
        if self.paused:
            return given  # whoever is run for real now may not hold it
        # a new tensor for each value: the old one stays a value of the stage before
        with no_function_modes(), torch.enable_grad():
            behind = [tensor.view_as(tensor) for tensor in given]
        values = [self.value_of(tensor) for tensor in given]
        for tensor, value in zip(given, values, strict=True):
            # a number that is gathered may be one of parameters alone, as ``logit_scale.exp()``, which stages compute
            # behind the boundary: what is called as a whole does not show it
            maker = value.maker
            if gathers and tensor.numel() == 1 and isinstance(maker, Operation) and maker.kind == "call_module":
                fact = f"what {maker.target} returns is one number, and is gathered"
                self.problem(fact, "compute it behind the boundary", descend=str(maker.target))
        operation = self.append("call_function", boundary, (values, *options), {}, behind, Touched())
        operation.kept = True
        for index, tensor in enumerate(behind):
            self.name(tensor, TapeValue(operation, (index,)))
        return behind


class _Mode(TorchFunctionMode):
    """Hands every torch function to the recorder; not those that run inside of one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.call(function, tuple(args), kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operator(func, tuple(args), kwargs or {})


_INSIDE = "do it inside a submodule that holds no boundary, which then runs as a whole"
_AT_THE_EDGE = (
    "cut before the first submodule that such a function calls or after its last, checkpoint the parts before and "
    'behind the boundary, or let fxpipe find the cuts with boundaries="auto"'
)


# --- Branches that go one way in every step ---


def outcome(value: TapeValue | None, tape: Sequence[Operation | Obstacle]) -> bool | None:
    """The truth of ``torch.rand([]) < bound`` where every number in [0, 1) gives the same; else None.

    transformers' speech models and BART ask so with their ``layerdrop``, which is 0 where it is off.
    """
    compared = value.maker if value is not None else None
    if not isinstance(compared, Operation) or len(compared.args) != 2:
        return None
    drawn, bound = compared.args
    is_less = str(getattr(compared.target, "__name__", compared.target)) == "lt"
    maker = drawn.maker if isinstance(drawn, TapeValue) else None
    if not is_less or type(bound) not in (int, float) or not isinstance(maker, Operation):
        return None
    # what was drawn must still be there: nothing has written it since
    memory = storage_of(maker.result) if maker.target in (torch.rand, torch.rand_like) else None
    if memory is None or any(memory in entry.touched.writes for entry in tape if isinstance(entry, Operation)):
        return None
    return None if 0 < bound < 1 else bound >= 1
