"""The recorder: watches one run of forward on fake tensors, and writes what it does on a tape.

Operations are seen as torch functions (``F.linear``, ``Tensor.add_``), above autograd and autocast, so that a graph of
them runs as the model does. A submodule that can be called as a whole becomes one operation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.errors import TraceError
from fxpipe.graph.boundary import Gather, boundary, words
from fxpipe.graph.like import TensorLike
from fxpipe.graph.program import Effects
from fxpipe.seeds import RandomState
from fxpipe.torch_compat import CHECKS, DynamicOutputShapeException, TorchDispatchMode, no_function_modes, pytree
from fxpipe.trace.cuts.cutting import crossing
from fxpipe.trace.fake import FakeModel, is_fake, needs_values, outside
from fxpipe.trace.patching import BACKWARD, DRAWN, UNREGISTERED, refuse, refuse_backward
from fxpipe.trace.record.certain import Constants, NotConstant, outcome, passing
from fxpipe.trace.record.modes_now import AutocastBlocks, ModesNow
from fxpipe.trace.record.tape import (
    PLAIN,
    Checkpoint,
    NamedSource,
    Obstacle,
    Operation,
    Surroundings,
    TapeValue,
    Touched,
    leaves,
    mapped,
    paths,
    tensors,
)
from fxpipe.trace.record.targets import getter_of, name_of, setter_of, target_of
from fxpipe.trace.record.touched import TouchedMode
from fxpipe.trace.state.snapshot import storage_of
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
        self.method: tuple[str, str] | None = None
        """The innermost method that it happened in, if any: the path of its submodule, its name."""
        self.tried = False
        """Whether a submodule was run on made-up inputs in vain."""


class Recorder:
    """The tape of one run, and which tensor stands for which value."""

    def __init__(
        self,
        fake: FakeModel,
        real: Mapping[str, Tensor],
        numbers: Mapping[str, Tensor],
        stand_ins: Mapping[str, Tensor],
        changes: Callable[[], Iterable[str]],
    ) -> None:
        self.fake = fake
        self.changes = changes
        """Which attributes of the model are not as they were before the run."""
        self.excused: frozenset[str] = frozenset()
        """Those that were changed inside of opaque calls."""
        self.hooked: dict[int, Tensor] = {}
        """The tensors that gradient hooks were put on."""
        self.differentiated: list[TapeValue] = []
        """What gradients were taken by, in forward."""
        self.tape: list[Operation | Obstacle] = []
        self.constants: dict[str, Tensor] = {}
        self.boundaries = 0
        self.regions = 0
        """How many calls of the user's opaque regions were recorded."""
        self.touched = TouchedMode()
        self.blocks = AutocastBlocks()
        self.stack: dict[str, type] = {}
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self._ended: dict[Checkpoint, str] = {}
        """The checkpointed parts behind whose last operation a boundary lies, and its name."""
        self.mode = _Mode(self)
        self.paused = False
        """Whether what runs now is not to be recorded."""
        self._is_sized = False
        """Whether constants have decided the sizes of what a function has returned last."""
        self.is_running = False
        """Whether a function of torch runs now, which is recorded as a whole."""
        self._real_names = {id(tensor): name for name, tensor in real.items() if name in stand_ins}
        self._stand_ins, self._numbers = stand_ins, Constants(numbers, self.tape)
        self._values: dict[int, tuple[Tensor, TapeValue]] = {}
        self.serial = 0
        self._line: str | None = None
        self._unmapped: NeedsValues | None = None
        """Why ``torch.vmap`` cannot be recorded, as it was found inside of it."""
        self._random = RandomState()
        for name, tensor in stand_ins.items():
            self.name(tensor, TapeValue(NamedSource("get_attr", name, tensor)))

    # tensors and values

    def name(self, tensor: Tensor, value: TapeValue) -> None:
        """From now on the tensor is that value of the program."""
        self._values[id(tensor)] = tensor, value

    def value_of(self, tensor: Tensor) -> TapeValue:
        known = self._values.get(id(tensor))
        if known is None:
            known = tensor, self._constant(tensor)
            self._values[id(tensor)] = known
        maker = known[1].maker
        if isinstance(maker, Operation) and maker.hidden_in is not None:
            self.problem(_ESCAPED.format(path=maker.hidden_in), "", descend=maker.hidden_in)
        return known[1]

    def known(self, tensor: Tensor) -> TapeValue | None:
        """The value that a tensor stands for, if it stands for any."""
        return self._values[id(tensor)][1] if id(tensor) in self._values else None

    def is_constant(self, value: Any) -> bool:
        """Whether a value is a tensor of no inputs, parameters or random numbers: always the same."""
        known = self._values.get(id(value))
        waiting = [known[1].maker] if known is not None else []
        while waiting:
            maker = waiting.pop()
            if isinstance(maker, NamedSource) or maker.kind == "call_module" or maker.touched.draws_random:
                return False
            waiting += [leaf.maker for leaf in leaves((maker.args, maker.kwargs)) if isinstance(leaf, TapeValue)]
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

    # operations

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            certain = passing() if certain is None else certain
            if certain is not None:
                return certain
        if name in _HOOKS:
            self.problem(f"forward calls {name} on a tensor, which is not recorded", _INSIDE)
        if function is BACKWARD:
            refuse_backward()
        if function is torch.autograd.grad:
            self.problem(
                "forward calls grad on a tensor, which is not recorded",
                f"{_INSIDE}, and that computes all that the gradient goes through",
            )
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            self.differentiated += [self.value_of(tensor) for tensor in tensors(inputs)]
        if name.startswith("register_"):
            self.hooked[id(args[0])] = args[0]
        setter = setter_of(function)
        if setter == "requires_grad":
            self.call(Tensor.requires_grad_, args, kwargs)
            return None
        if setter is not None:
            self.problem(f"forward sets .{setter} of a tensor, which is not recorded", "write into it in place")
        if _holds_numpy(args, kwargs):
            return self._with_numpy(function, args, kwargs)
        with self.touched.noting() as touched:
            result = self._run(function, args, kwargs)
        if self._changes_nothing(function, args, kwargs, result, touched):
            return result
        self._record(function, args, kwargs, result, touched, self._is_sized)
        return result

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = mapped(args, self._stand_in), mapped(kwargs, self._stand_in)
        self.is_running, self._is_sized = True, False
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, DynamicOutputShapeException):
                with contextlib.suppress(NotConstant):
                    return self._sized(function, args, kwargs)
            if needs_values(error):
                raise NeedsValues(str(refuse(_ASKS.format(name=_shown(function)), _INSIDE))) from error
            if isinstance(error, (RuntimeError, NotImplementedError)):
                fact = f"the record tracer cannot follow the model: {type(error).__name__}: {error}"
                raise NeedsValues(f"{fact}\n{current_line()}", asked=False) from error
            raise
        finally:
            self.is_running = False

    def _sized(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function whose sizes constants decide; NotConstant where it is none."""
        with outside():
            found = self._numbers.result(function, args, kwargs, self.value_of)
        self._is_sized = True
        needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors((args, kwargs)))

        def made(leaf: Tensor) -> Tensor:
            is_trained = needs and leaf.is_floating_point()
            return self.fake.made(replace(TensorLike.of(leaf), requires_grad=is_trained))

        return pytree.tree_map_only(Tensor, made, found)

    def _stand_in(self, leaf: Any) -> Any:
        name = self._real_names.get(id(leaf))
        return leaf if name is None else self._stand_ins[name]

    def _with_numpy(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is made from NumPy's arrays alone is a constant."""
        if tensors((args, kwargs)):
            self.problem("a NumPy array is given to a function of torch", "make a tensor of it outside of forward")
            return function(*args, **kwargs)
        with outside():
            return function(*args, **kwargs)

    def _changes_nothing(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, touched: Touched
    ) -> bool:
        """Whether a call only asks for a shape and the like, or returns the very tensor that it was given."""
        before = {storage_of(tensor) for tensor in tensors((args, kwargs))}
        if touched.writes & before:
            return False
        if not isinstance(result, Tensor):
            return not tensors(result)
        is_given = any(tensor is result for tensor in tensors((args, kwargs)))
        return is_given and name_of(function) not in _SAME_TENSOR

    def _record(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        touched: Touched,
        is_sized: bool = False,
    ) -> None:
        kind, target, args, kwargs = target_of(function, args, kwargs)
        values, named = self.as_values(args), self.as_values(kwargs)
        effects = Effects(is_rehearsed=True) if is_sized else None  # a constant may be another one later
        operation = self.append(kind, target, values, named, result, touched, effects=effects)
        if touched.writes & {storage_of(constant) for constant in self.constants.values()}:
            self.problem(
                "forward writes a tensor that is no buffer of the model, and all micro-batches would write the same",
                "make it from a traced tensor, as in x.new_zeros(...), or register it as a buffer",
            )
        operation.writes = frozenset(touched.writes & {storage_of(tensor) for tensor in tensors((args, kwargs))})
        for path, leaf in paths(result):
            if isinstance(leaf, Tensor):
                self.name(leaf, TapeValue(operation, path))

    def append(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        touched: Touched,
        place: Surroundings | None = None,
        effects: Effects | None = None,
    ) -> Operation:
        self.check_random()
        self.touched.note(touched)  # the calls around do what is done inside of them
        self.serial += 1
        place = place or self.place()
        ended = next((self._ended[part] for part in place.checkpoints if part in self._ended), None)
        if ended is not None:
            raise refuse(_AMID.format(name=ended), _AT_THE_EDGE)
        result = pytree.tree_map(lambda leaf: leaf, result)  # forward may put other values into what it is given back
        operation = Operation(kind, target, args, kwargs, result, place, touched, self.serial, effects)
        self.tape.append(operation)
        return operation

    @contextlib.contextmanager
    def on_line(self, line: str) -> Iterator[None]:
        """What is recorded while it is open is taken to be on that line of the user's."""
        self._line = line
        try:
            yield
        finally:
            self._line = None

    def place(self) -> Surroundings:
        """Where the model is now."""
        return Surroundings(
            self._line or current_line(), ModesNow.of(self.blocks.current), dict(self.stack), self.checkpoints
        )

    def as_values(self, arguments: Any) -> Any:
        return mapped(arguments, self._as_value)

    def _as_value(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        if isinstance(leaf, _numpy_type("generic")):
            return leaf.item()
        if not isinstance(leaf, PLAIN):
            self.problem(
                f"a function of torch is given a {type(leaf).__name__}, which cannot stand in a graph", _INSIDE
            )
        return leaf

    def check_random(self) -> None:
        """Random numbers that were drawn since the last look, and not by an operation of torch."""
        if self.random_moved():
            self.problem(
                DRAWN.format(where="in forward"),
                f"draw with torch (torch.rand(4)), pass the number in as an input, or {_INSIDE}",
            )

    def random_moved(self) -> bool:
        with outside():
            before, self._random = self._random, RandomState()
            return self._random != before

    # operators

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """While it is open, torch's operators are recorded in place of its functions.

        Inside of ``torch.vmap`` a function is given a stand-in for one row, and its operators all rows: as a mask is
        made of positions. They are below autograd, so that gradients would be lost.
        """
        self.paused = True
        try:
            with _Operators(self):
                yield
        finally:
            self.paused = False
        if self._unmapped is not None:
            raise self._unmapped

    def operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator on fake tensors, and records it."""
        if any(tensor.requires_grad for tensor in tensors((args, kwargs))):
            fact = "forward uses torch.vmap on tensors that need a gradient, between submodules"
            # not raised here: torch.vmap's C++ code lets no exception through, and would end the process
            self._unmapped = self._unmapped or NeedsValues(str(refuse(fact, _INSIDE)), asked=False)
        with self.touched.noting() as touched:
            result = self._run(operator, args, kwargs)
        if not self._changes_nothing(operator, args, kwargs, result, touched):
            self._record(operator, args, kwargs, result, touched)
        return result

    # boundaries

    def record_boundary(self, value: Any, name: str | None, gather: Gather | None) -> Any:
        """The value behind a boundary; one at the very edge of a checkpointed part lies outside of it.

        It is in front of ``checkpoint(layer, x)`` where nothing was computed in it yet, and behind it where nothing
        will be any more, which ``append`` sees to.
        """
        around, self.checkpoints = self.checkpoints, ()
        self._ended |= dict.fromkeys(self._begun(around), name or "an unnamed one")
        try:
            behind = partial(self._behind, words(name, gather), gather is not None)
            return crossing(value, lambda leaf: isinstance(leaf, Tensor), behind)
        finally:
            self.checkpoints = around

    def _begun(self, parts: tuple[Checkpoint, ...]) -> list[Checkpoint]:
        """Those of the checkpointed parts that have computed something."""
        begun = {part for entry in self.tape if isinstance(entry, Operation) for part in entry.place.checkpoints}
        return [part for part in parts if part in begun]

    def _behind(self, options: tuple[Any, ...], gathers: bool, given: list[Tensor]) -> list[Tensor]:
        """Tensors as they are behind a boundary."""
        self.boundaries += 1
        if self.paused:
            return given  # whoever is run for real now may not hold it
        with no_function_modes(), torch.enable_grad():
            behind = [tensor.view_as(tensor) for tensor in given]
        values = [self.value_of(tensor) for tensor in given]
        for tensor, value in zip(given, values, strict=True):
            if gathers and tensor.numel() == 1:
                self._seen_into(value)
        operation = self.append("call_function", boundary, (values, *options), {}, behind, Touched())
        operation.kept = True
        for index, tensor in enumerate(behind):
            self.name(tensor, TapeValue(operation, (index,)))
        return behind

    def _seen_into(self, value: TapeValue) -> None:
        """A number that is gathered may be one of parameters alone, as ``logit_scale.exp()``, which stages compute
        behind the boundary: what is called as a whole does not show it."""
        maker = value.maker
        if isinstance(maker, Operation) and maker.kind == "call_module":
            place = "".join(f"[{key!r}]" for key in value.path)
            fact = f"what {maker.target} returns{place and f' at {place}'} is one number, and is gathered"
            self.problem(fact, "compute it behind the boundary", descend=str(maker.target))


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
_ASKS = (
    "forward looks at the values of a tensor ({name}) between submodules, and which they are is known only when it runs"
)
_AMID = (
    "a boundary ({name}) lies amid a function given to torch.utils.checkpoint, which runs as a whole: it computes both "
    "before and behind it"
)
_AT_THE_EDGE = (
    "cut before the first submodule that such a function calls or after its last, checkpoint the parts before and "
    'behind the boundary, or let fxpipe find the cuts with boundaries="auto"'
)
_ESCAPED = "a tensor made inside of {path} is used elsewhere, and {path} does not return it"


def _shown(function: Any) -> str:
    return getter_of(function) or name_of(function)


def _holds_numpy(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, _numpy_type("ndarray")) for leaf in leaves((args, kwargs)))


def _numpy_type(name: str) -> Any:
    """A type of NumPy's, where it is in use."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else getattr(numpy, name)
